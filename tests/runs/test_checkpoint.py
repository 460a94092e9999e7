"""A folder holds a model; what does not fit is named."""

import errno
import json
import os
import resource
import stat
import threading
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.conftest import KINDS, sequences, small_model
from vssm import State, generate, load, log_likelihood, observe, save
from vssm.data.storage import write_atomically


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind, tmp_path):
    model = small_model(kind)
    save(model, tmp_path / "new" / "folder")
    copy = load(tmp_path / "new" / "folder")
    assert copy.config == model.config
    x = sequences(model, 2, 5)
    assert torch.equal(log_likelihood(copy, x, 3), log_likelihood(model, x, 3))
    assert all(parameter.requires_grad for parameter in copy.parameters())
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "weights.safetensors",
    ]


def test_missing_device_is_named(tmp_path):
    model = small_model("ssm")
    save(model, tmp_path)
    observe(model, sequences(model, 1, 2)).save(tmp_path / "state.safetensors")
    for device in ("gpu", "", "cuda:99", "meta", None, 3.5):
        for read in (
            lambda d: load(tmp_path, d),
            lambda d: State.load(tmp_path / "state.safetensors", d),
        ):
            with pytest.raises(
                ValueError, match=rf"^device='{device}' is not available here; choose from 'cpu'"
            ):
                read(device)
    assert next(load(tmp_path, "cpu:0").parameters()).device == torch.device("cpu")


def edit_config(folder, **changes):
    """Changes config.json, and removes the config from the weights, as a training leaves them."""
    edit_weights(folder, lambda tensors: None)
    values = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        (values if name == "format" else values["model"])[name] = value
    (folder / "config.json").write_text(json.dumps(values))


def edit_weights(folder, change):
    tensors = load_file(folder / "weights.safetensors")
    change(tensors)
    save_file(tensors, folder / "weights.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: edit_config(f, depth=3), r"config.json': config has no field 'depth'"),
        (lambda f: edit_config(f, format=99), "has format 99, but this version reads 1"),
        (lambda f: edit_config(f, kind="lstm"), "kind='lstm' is unknown"),
        (
            lambda f: edit_config(f, latents=4),
            "does not fit its config: .*size mismatch for",
        ),
        (lambda f: edit_config(f, layers=3), "does not fit its config: .*Missing key"),
        (
            lambda f: edit_config(f, layers=1),
            "does not fit its config: .*Unexpected key",
        ),
        (
            lambda f: edit_config(f, width=10**15),
            "config.json': width is 1000000000000000; it must be",
        ),
        (
            lambda f: edit_config(f, width=10**7 - 1, expand=10**7 - 1),
            "does not fit its config: ",
        ),
        (
            lambda f: edit_config(f, head="auto"),
            "does not fit its config: head is 'auto'; choose",
        ),
        (lambda f: (f / "config.json").write_text("{"), "config.json' is damaged"),
        (lambda f: (f / "config.json").write_text("[" * 10**5), "config.json' is damaged"),
        (lambda f: (f / "config.json").write_bytes(b"\x80\x04\x95"), "config.json' is damaged"),
        (lambda f: (f / "config.json").write_text("[]"), "damaged: it is not a JSON object"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (
            lambda f: (f / "weights.safetensors").unlink(),
            "has no weights.*; use a run folder once it has",
        ),
        (
            lambda f: (f / "weights.safetensors").write_bytes(b"\x80\x04\x95pickle"),
            "weights.safetensors' is damaged",
        ),
        (
            lambda f: (f / "weights.safetensors").write_bytes(
                (f / "weights.safetensors").read_bytes()[:-9]
            ),
            "weights.safetensors' is damaged",
        ),
        (
            lambda f: edit_weights(f, lambda t: t.pop("partial.blank")),
            'Missing key.* "partial.blank"',
        ),
    ],
)
def test_what_does_not_fit_is_named(damage, message, tmp_path):
    save(small_model("vssm"), tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("place", [-1, -1000, -100_000])
def test_flipped_bit_is_found(place, tmp_path):
    model = small_model("vssm")
    weights, state = tmp_path / "weights.safetensors", tmp_path / "state"
    save(model, tmp_path)
    with safe_open(weights, "pt") as file:
        text = file.metadata()["vssm"]
    generate(model, num=20, length=3).state.save(state)
    for file, read in ((weights, lambda: load(tmp_path)), (state, lambda: State.load(state))):
        whole = file.read_bytes()
        flip(file, max(place, -len(whole) // 2))
        with pytest.raises(
            ValueError, match=f"{file.name}' is damaged: it differs from its checksum"
        ):
            read()
        file.write_bytes(whole)
        read()
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    with pytest.raises(ValueError, match=r"^state is damaged: it differs from its checksum"):
        State.from_bytes(bytes(content))
    # What was written before there were checksums is read as it is.
    save_file(load_file(weights), weights, {"vssm": text})
    flip(weights, -1)
    load(tmp_path)


def save_killed_between_the_files(model, folder):
    def killed(config):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vssm.runs.config.SavedConfig.write", killed)
        with pytest.raises(KeyboardInterrupt):
            save(model, folder)


@pytest.mark.parametrize(
    "options", [{"sigma": 0.7}, {"width": 32, "layers": 1}, {"head": "bernoulli"}]
)
def test_save_killed_between_its_files_leaves_the_new_model(options, tmp_path):
    old, new = small_model("vssm"), small_model("vssm", **options)
    save(old, tmp_path)
    save_killed_between_the_files(new, tmp_path)
    with pytest.warns(
        UserWarning, match=r"config.json' describes another model .* with their own "
    ) as notes:
        copy = load(tmp_path)
    assert all(f"{name}={value!r}" in str(notes[0].message) for name, value in options.items())
    assert "\n" not in str(notes[0].message)
    assert copy.config == new.config
    x = sequences(new, 2, 5)
    assert torch.equal(log_likelihood(copy, x, 3), log_likelihood(new, x, 3))
    save(copy, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path).config == new.config


@pytest.mark.parametrize("key", ["data", "train"])
def test_model_is_never_saved_over_a_run(key, tmp_path):
    save(small_model("vssm"), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, key: {}}))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"is a run or .*; use a new folder, or one .* vssm.save$"):
        save(small_model("ssm"), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_model_is_not_saved_to_a_file(tmp_path):
    (tmp_path / "note").write_text("mine")
    for place in ("note", "note/below/it"):
        with pytest.raises(
            ValueError, match=r"^folder=.*note.* is a file or lies below one; use a folder"
        ):
            save(small_model("ssm"), tmp_path / place)
    assert (tmp_path / "note").read_text() == "mine"


def test_weights_without_a_config_use_config_json(tmp_path):
    save(small_model("vssm"), tmp_path)
    edit_config(tmp_path, sigma=0.7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path).config.sigma == 0.7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "weights.safetensors' is damaged"),
        ("[" * 10**5, "weights.safetensors' is damaged"),
        ("[]", "weights.safetensors' is damaged: it is not a JSON object"),
        ("{}", "weights.safetensors' has no key 'model'"),
        (
            '{"format": 99, "model": {}}',
            "weights.safetensors' has format 99, but this",
        ),
        (
            '{"format": 1, "model": {"features": 3, "width": 0}}',
            "weights.safetensors': width is 0; it must be",
        ),
    ],
)
def test_damaged_config_in_the_weights_is_named(text, message, tmp_path):
    save(small_model("ssm"), tmp_path)
    path = tmp_path / "weights.safetensors"
    save_file(load_file(path), path, {"vssm": text})
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_full_disk_is_named(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1024, limits[1])
    )  # Python turns the signal into an error
    try:
        with pytest.raises(
            OSError, match=r"weights.safetensors' could not be written: .*too large"
        ):
            save(small_model("ssm"), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_failed_save_leaves_the_old_model(tmp_path, monkeypatch):
    model = small_model("ssm")
    save(model, tmp_path)
    before = (tmp_path / "weights.safetensors").read_bytes()

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(small_model("ssm", width=32), tmp_path)
    assert (tmp_path / "weights.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
    assert load(tmp_path).config == model.config


@pytest.mark.parametrize("name", ["a" * 255, "ä" * 127, "a" * 237, "a" * 238, "b" * 250 + ".png"])
def test_name_may_be_as_long_as_the_system_allows(name, tmp_path):
    left = []
    for text in ("old", "new"):

        def write(file, text=text):
            left.append(file)
            file.write_text(text)

        write_atomically(tmp_path / name, write)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "new"


@pytest.mark.parametrize("how", ["device", "pipe"])
def test_devices_and_pipes_are_written_to_and_stay(how, tmp_path):
    """As root, /dev/null would become a file."""
    path = tmp_path / "null"
    if how == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
            path.write_bytes(b"")
        except OSError:
            pytest.skip("making devices is not allowed here")
        write_atomically(path, lambda file: file.write_text("lost"))
        assert stat.S_ISCHR(path.stat().st_mode)
        return
    os.mkfifo(path)
    read = []
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write_atomically(path, lambda file: file.write_text("read"))
    reader.join(10)
    assert stat.S_ISFIFO(path.stat().st_mode) and read == ["read"]
    assert [file.name for file in tmp_path.iterdir()] == ["null"]


def test_read_only_disk_names_the_file_of_the_user(tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    for name in ("touch", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(OSError, match="Read-only file system") as error:
        write_atomically(tmp_path / "note.txt", lambda file: file.write_text("new"))
    assert error.value.filename == str(tmp_path / "note.txt")


def test_file_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    """The power may fail at any moment; the name itself is on the disk when the call returns."""
    events, sync, replace = [], os.fsync, Path.replace

    def synced(handle):
        status = os.fstat(handle)
        events.append("folder" if stat.S_ISDIR(status.st_mode) else status.st_size)
        sync(handle)

    def replaced(path, target):
        events.append("rename")
        return replace(path, target)

    monkeypatch.setattr("vssm.data.storage.os.fsync", synced)
    monkeypatch.setattr("vssm.data.storage.Path.replace", replaced)
    write_atomically(tmp_path / "a.txt", lambda file: file.write_text("whole"))
    assert events == [5, "rename", "folder"]


def test_written_files_have_the_usual_permissions(tmp_path):
    """Some libraries put a file in the place of the temporary one that only its owner can read."""

    def private(file):
        file.unlink()
        file.touch(mode=0o600)

    (tmp_path / "usual.txt").touch()
    write_atomically(tmp_path / "a.txt", private)
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "usual.txt").stat().st_mode


def test_a_folder_that_can_not_be_written_is_named_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("vssm.data.storage.why_read_only", lambda place: "read-only file system")
    model = small_model("ssm")
    with pytest.raises(ValueError, match="own' cannot be written: read-only file system"):
        save(model, tmp_path / "own")
    assert not (tmp_path / "own").exists()
