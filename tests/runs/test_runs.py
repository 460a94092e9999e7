"""The run folder: nothing that is killed, damaged or full loses what was saved."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vssm
from tests.conftest import small_config
from tests.tiny_runs import StopAt, log, newest, result, run, stopped, tiny
from vssm.data import ArraysConfig, DataConfig, Meta, steps_left
from vssm.data.storage import write_tensors
from vssm.evaluation.result import validations
from vssm.runs.config import SavedConfig, read_config
from vssm.runs.folder import RunFolder, claim
from vssm.training.loop import TrainingStopped, train


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run(tiny(), tmp_path_factory.mktemp("runs") / "unbroken")


@pytest.fixture(scope="module")
def stopped_at_7(tmp_path_factory):
    return stopped(tiny(), tmp_path_factory.mktemp("runs") / "stopped", 7)


@pytest.fixture
def half(stopped_at_7, tmp_path):
    """A copy of a run that was stopped after 7 of 12 steps."""
    return shutil.copytree(stopped_at_7, tmp_path / "half")


def signed(record):
    """The text of a progress.json with its checksum."""
    record = {key: value for key, value in record.items() if key != "checksum"}
    checksum = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return json.dumps({**record, "checksum": checksum})


def test_data_meta_is_read_and_damage_is_named(unbroken, tmp_path):
    assert SavedConfig.read(str(unbroken)).meta() == Meta(
        name="synthetic", features=3, length=5, suggested_head="gaussian"
    )
    vssm.save(vssm.load(unbroken), tmp_path / "alone")
    assert SavedConfig.read(tmp_path / "alone").meta() is None
    for text, message in (
        ("{", "config.json' is damaged: "),
        ("[" * 10**5, "config.json' is damaged: "),
        ("[]", "config.json' is damaged: it is not a JSON object; restore it from a copy$"),
        ('{"format": 1, "model": {}, "data_meta": [3]}', "^data_meta does not fit this version"),
        ('{"format": 1, "model": {}, "data_meta": {}}', "^data_meta does not fit .*: .*'name'"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message) as caught:
            SavedConfig.read(tmp_path).meta()
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"nowhere' does not exist; use a run folder, or"):
        SavedConfig.read(tmp_path / "nowhere").meta()


def test_steps_left_of_a_sequence():
    meta = Meta(name="synthetic", features=3, length=5, suggested_head="gaussian")
    assert [steps_left(meta, known) for known in (0, 4)] == [5, 1]
    assert steps_left(None, 99) == 28
    for known in (5, 6):
        message = (
            f"^{known} steps are known, and training sequences have 5; give --length, 1 or more$"
        )
        with pytest.raises(ValueError, match=message):
            steps_left(meta, known, "--length")


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "truncated":
        del content[len(content) // 2 :]
    elif how == "flipped":
        content[len(content) // 2] ^= 1
    elif how == "pickle":
        content = bytearray(pickle.dumps({"weights": os.system}))
    elif how == "nested":
        content = bytearray(b"[" * 10**5)
    path.unlink()
    if how != "missing":
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "how"),
    [
        *(("weights.safetensors", how) for how in ("truncated", "flipped", "pickle", "missing")),
        ("optimizer.safetensors", "flipped"),
        *(
            ("progress.json", how)
            for how in ("truncated", "flipped", "pickle", "nested", "missing")
        ),
    ],
)
def test_damaged_checkpoint_is_named_and_the_one_before_is_used(file, how, unbroken, half):
    broken = newest(half)
    assert broken.name == "step-00000006"
    damage(broken / file, how)
    shown = StopAt(99)
    assert result(run(None, half, resume=True, progress=shown)) == result(unbroken)
    assert shown.messages[0].startswith(f"{str(broken / file)!r} is damaged: ")
    assert shown.messages[0].endswith("; going on from step-00000005")
    assert "\n" not in shown.messages[0]


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing"])
def test_lost_best_weights_are_replaced_by_the_last_weights(how, unbroken, tmp_path):
    folder, shown = shutil.copytree(unbroken, tmp_path / "run"), StopAt(99)
    damage(folder / "weights.safetensors", how)
    run(None, folder, resume=True, progress=shown)
    assert any("best weights" in text and "are damaged or gone" in text for text in shown.messages)
    last = load_file(newest(folder) / "weights.safetensors")
    assert all(
        torch.equal(tensor, last[name]) for name, tensor in vssm.load(folder).state_dict().items()
    )


def test_best_validation_belongs_to_the_saved_weights(tmp_path):
    """Even if better weights were lost and the loss goes up in the end."""
    config = tiny("rnn", epochs=8, learning_rate=0.5, seed=3)
    folder = stopped(config, tmp_path / "run", 20)
    (folder / "weights.safetensors").unlink()
    run(None, folder, resume=True)
    losses = [line["loss"] for line in log(folder, "valid")]
    assert validations(folder)[0]["validation_loss"] == losses[-1] > min(losses)


def test_resuming_a_finished_run_changes_nothing(unbroken, tmp_path):
    folder = shutil.copytree(unbroken, tmp_path / "run")
    facts = {
        **json.loads((folder / "meta.json").read_text()),
        "commit": "another",
        "device": "cuda:7",
    }
    (folder / "meta.json").write_text(json.dumps(facts))
    run(None, folder, resume=True)
    assert json.loads((folder / "meta.json").read_text()) == facts and log(folder) == log(unbroken)


def test_infinite_last_validation_is_not_repeated_on_resume(tmp_path):
    shown = StopAt(99)
    folder = run(
        tiny("rnn", learning_rate=1e25, epochs=1, warmup=0.0), tmp_path / "run", progress=shown
    )
    assert shown.messages[-1].startswith("note: validation is not finite")
    (folder / "eval.json").write_text("{}")
    for _ in range(2):
        run(None, folder, resume=True)
    assert [line["loss"] for line in log(folder, "valid")] == [None] and (
        folder / "eval.json"
    ).exists()


def test_a_step_that_was_saved_is_not_saved_again(unbroken, tmp_path):
    folder, config = RunFolder(shutil.copytree(unbroken, tmp_path / "run")), read_config(unbroken)
    folder.save_checkpoint(config, 12, {"weights": {"a": torch.ones(2)}}, {})
    assert result(folder.path) == result(unbroken)


def test_temporary_files_of_an_evaluation_stay(unbroken, tmp_path):
    folder = shutil.copytree(unbroken, tmp_path / "run")
    for name in (".eval.json.1a2b.tmp", ".meta.json.1a2b.tmp"):
        (folder / name).write_text("{")
    run(None, folder, resume=True)
    assert [path.name for path in folder.glob(".*.tmp")] == [".eval.json.1a2b.tmp"]


def test_without_a_good_checkpoint_nothing_is_loaded(half):
    folder = half
    for path in (folder / "checkpoint").iterdir():
        damage(path / "optimizer.safetensors", "flipped")
    before = sorted(folder.rglob("*"))
    with pytest.raises(
        ValueError,
        match=r"no checkpoint can be used: .*step-00000006.*step-00000005.*use a new",
    ):
        run(None, folder, resume=True)
    assert sorted(folder.rglob("*")) == before


def state_of(folder):
    """All files of a run folder but the lock and the times of meta.json."""
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".lock", "meta.json")
    ]
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("broken", [False, True])
def test_checkpoint_of_another_run_is_refused(broken, unbroken, half, tmp_path):
    folder = half
    other = stopped(tiny(seed=1), tmp_path / "other", 9)
    foreign = shutil.copytree(newest(other), folder / "checkpoint" / newest(other).name)
    if broken:  # a newer one of this run that is damaged comes first
        own = shutil.copytree(newest(folder), folder / "checkpoint" / "step-00000009")
        damage(own / "progress.json", "truncated")
    before = state_of(folder)
    message = rf"'{foreign}' is a checkpoint of another run, with train.seed=1 instead of 0; move"
    with pytest.raises(ValueError, match=message) as error:
        run(None, folder, resume=True)
    assert "\n" not in str(error.value) and state_of(folder) == before
    shutil.rmtree(foreign)
    if broken:
        shutil.rmtree(own)
    assert result(run(None, folder, resume=True)) == result(unbroken)


def test_options_that_do_not_change_the_result_may_change_on_resume(unbroken, half):
    assert result(run(tiny(checkpoint_minutes=9), half, resume=True)) == result(unbroken)


def test_pickle_with_a_right_checksum_is_refused(tmp_path):
    flag = tmp_path / "unpickled"
    folder = RunFolder(tmp_path / "run")

    class Payload:
        def __reduce__(self):
            return flag.touch, ()

    def plant(tensors, path, metadata):
        path.write_bytes(pickle.dumps(Payload()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", plant)
        folder.save_checkpoint(tiny(), 3, {"weights": {}}, {})
    with pytest.raises(ValueError, match=r"weights\.safetensors"):
        folder.read_checkpoint(tiny(), print)
    pickle.loads(pickle.dumps(Payload()))
    assert flag.exists()  # the payload works where something unpickles it


@pytest.mark.parametrize("file", ["config.json", "log.jsonl", "meta.json", "weights.safetensors"])
def test_pickles_in_the_run_folder_are_not_read(file, unbroken, half):
    folder = half
    damage(folder / file, "pickle")
    if file == "config.json":
        with pytest.raises(ValueError, match=r"config.json' is damaged: "):
            run(None, folder, resume=True)
        with pytest.raises(ValueError, match=r"config.json' is damaged: "):
            vssm.load(folder)
        return
    if file == "weights.safetensors":
        with pytest.raises(ValueError, match=r"weights\.safetensors' is damaged"):
            vssm.load(folder)
    expected, given = result(unbroken), result(run(None, folder, resume=True))
    if file == "log.jsonl":
        assert given.pop("log") == [line for line in expected.pop("log") if line["step"] > 6]
    assert given == expected


def test_damaged_lines_of_the_log_are_named(unbroken, half):
    path = half / "log.jsonl"
    whole = path.read_bytes()
    first, *rest = whole.splitlines()
    for line in (b"7", b"{}", b"[" * 10**5, b'{"step": 1, "epoci": 0.3}'):
        path.write_bytes(b"\n".join([first, line, *rest]) + b"\n")
        with pytest.raises(ValueError, match=r"log\.jsonl' line 2 is damaged; remove that line"):
            run(None, half, resume=True)
    path.write_bytes(whole + b'{"step": 7, "ep')
    run(None, half, resume=True)
    assert log(half) == log(unbroken)


def test_evaluations_of_other_weights_are_set_aside(tmp_path):
    folder = stopped(tiny(), tmp_path / "run", 4)
    for name in ("eval.json", "eval_valid.json"):
        (folder / name).write_text("of the weights at step 3")
    run(None, folder, resume=True)
    assert not (folder / "eval.json").exists() and not (folder / "eval_valid.json").exists()
    assert (folder / "eval.json.old").read_text() == "of the weights at step 3"
    (folder / "eval.json").write_text("of the last")
    run(None, folder, resume=True)  # has ended: the weights stay as they are
    assert (folder / "eval.json").read_text() == "of the last"


def test_steps_of_nine_digits_come_after_those_of_eight(tmp_path):
    folder, steps = RunFolder(tmp_path / "run"), (99_999_998, 99_999_999, 100_000_000)
    for step in steps:
        folder.save_checkpoint(tiny(), step, {"weights": {}}, {})
    left = {path.name for path in (tmp_path / "run" / "checkpoint").iterdir()}
    assert left == {"step-99999999", "step-100000000"}
    damage(tmp_path / "run" / "checkpoint" / "step-100000000" / "progress.json", "truncated")
    checkpoint = folder.read_checkpoint(tiny(), lambda text: None)
    assert checkpoint is not None and checkpoint.path.name == "step-99999999"
    assert (tmp_path / "run" / "checkpoint" / "step-100000000.damaged").is_dir()


def test_run_that_another_process_made_meanwhile_is_not_overwritten(
    unbroken, tmp_path, monkeypatch
):
    folder = tmp_path / "run"

    def late(path, what):
        shutil.copytree(unbroken, folder, dirs_exist_ok=True)
        return claim(path, what)

    monkeypatch.setattr("vssm.runs.folder.claim", late)
    with pytest.raises(ValueError, match="is not empty; use --resume"):
        run(tiny(seed=1), folder)
    assert result(folder) == result(unbroken)


def test_half_written_folders_resume_or_start_again(unbroken, tmp_path):
    config, folder = tiny(), tmp_path / "run"
    folder.mkdir()
    (folder / ".config.json.abc.tmp").write_text("{")  # killed while the first file was written
    with pytest.raises(ValueError, match=r"has no config\.json"):
        run(None, folder, resume=True)
    assert result(run(config, folder)) == result(unbroken)
    assert not list(folder.glob(".*.tmp"))

    begun = stopped(
        replace(config, train=replace(config.train, checkpoint_minutes=9)), tmp_path / "begun", 2
    )
    with (begun / "log.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # a torn line
    (begun / "checkpoint").mkdir()
    shutil.copytree(newest(unbroken), begun / "checkpoint" / ".step-00000001.tmp")
    (begun / ".weights.safetensors.xyz.tmp").write_bytes(b"half")
    assert result(run(None, begun, resume=True)) == result(unbroken)
    assert not list(begun.rglob(".*.tmp"))


def test_two_checkpoints_are_kept(unbroken):
    assert sorted(path.name for path in (unbroken / "checkpoint").iterdir()) == [
        "step-00000011",
        "step-00000012",
    ]
    assert sorted(path.name for path in newest(unbroken).iterdir()) == [
        "optimizer.safetensors",
        "progress.json",
        "weights.safetensors",
    ]


def test_config_of_a_newer_version_is_refused(unbroken, tmp_path):
    folder = shutil.copytree(unbroken, tmp_path / "run")
    values = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"format": 2}, r"config.json' has format 2, but this version reads 1"),
        (
            {"train": {**values["train"], "epoch": 3}},
            r"train has no field 'epoch'.*did you mean 'epochs'",
        ),
        ({"trainer": {}}, r"config has no field 'trainer'.*did you mean 'train'"),
        ({"data": 3}, r"data is 3; it must be a dictionary"),
        ({"train": {**values["train"], "batch": "x"}}, r"batch is 'x'; it must be"),
    ):
        (folder / "config.json").write_text(json.dumps({**values, **change}))
        with pytest.raises(ValueError, match=message):
            run(None, folder, resume=True)


def test_existing_folder_is_never_overwritten(unbroken, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in unbroken.rglob("*")}
    name = str(unbroken)
    with pytest.raises(
        ValueError, match=f"run folder '{name}' is not empty; use --resume {name}, or another"
    ):
        run(tiny(), unbroken)
    with pytest.raises(
        ValueError, match=r"train.epochs=5 differs from 4 of the run in .* use the same"
    ):
        run(tiny(epochs=5), unbroken, resume=True)
    with pytest.raises(ValueError, match="config=None goes with resume=True only"):
        run(None, tmp_path / "new")
    assert {path: path.stat().st_mtime_ns for path in unbroken.rglob("*")} == before
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; use a new name"):
        run(tiny(), tmp_path / "file")


def test_resuming_never_trains_over_finished_weights(unbroken, tmp_path, monkeypatch):
    monkeypatch.delattr("vssm.training.loop.open_data")  # data could be a long download
    vssm.save(vssm.build(small_config("rnn")), tmp_path / "saved")
    ended = shutil.copytree(
        unbroken, tmp_path / "ended", ignore=shutil.ignore_patterns("checkpoint")
    )
    kept = ("config.json", "weights.safetensors")
    (tmp_path / "copy").mkdir()
    for name in kept:
        shutil.copy(unbroken / name, tmp_path / "copy" / name)
    for folder, message in (
        (tmp_path / "saved", r"has no key 'data'; use a run folder"),
        (ended, "has weights but no checkpoint to go on from"),
        (tmp_path / "copy", "has weights but no checkpoint to go on from"),
    ):
        before = {name: (folder / name).read_bytes() for name in kept}
        with pytest.raises(ValueError, match=message):
            run(None, folder, resume=True)
        assert {name: (folder / name).read_bytes() for name in kept} == before


@pytest.mark.parametrize(
    ("place", "failing"),
    [
        ("safetensors.torch.save_file", 3),
        ("vssm.runs.folder.write_tensors", 1),
        ("vssm.runs.folder.RunFolder.log", 3),
    ],
)
def test_full_disk_keeps_the_last_checkpoint(place, failing, unbroken, half, monkeypatch):
    """A write fails after half of it is on the disk."""
    folder, held, calls = half, newest(half), 0

    def full(*arguments):
        nonlocal calls
        calls += 1
        if calls < failing:
            return original(*arguments)
        if place == "safetensors.torch.save_file":
            arguments[1].write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner, name = place.rsplit(".", 1)
    owner = RunFolder if owner.endswith("RunFolder") else sys.modules[owner]
    original = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(
            TrainingStopped, match=r"could not be written \(.*No space left.*\); last good"
        ) as error:
            run(None, folder, resume=True)
    assert "\n" not in str(error.value)
    assert newest(folder) >= held
    assert not list(folder.rglob(".*.tmp"))
    assert result(run(None, folder, resume=True)) == result(unbroken)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_full_tmpfs_keeps_the_last_checkpoint(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        config = replace(tiny(), model=small_config("rnn", width=48, layers=1))
        folder = stopped(config, disk / "run", 4)
        held = newest(folder)
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 60_000))
        with pytest.raises(TrainingStopped, match="could not be written") as error:
            run(None, folder, resume=True)
        assert str(held) in str(error.value)
        assert [
            path.name for path in (folder / "checkpoint").iterdir() if path.name > held.name
        ] == []
        (disk / "filler").unlink()
        whole = run(config, tmp_path / "whole")
        assert result(run(None, folder, resume=True)) == result(whole)
    finally:
        subprocess.run(["umount", disk], check=True)


KILLED = """
import os, random, signal, sys, time
import torch._dynamo  # every optimizer imports it, which would take longest in the children
from pathlib import Path
from tests.tiny_runs import tiny
from vssm.training.progress import Progress
from vssm.training.loop import train

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
rng, config = random.Random(7), tiny(epochs=60, validate_every=2 / 3)

def wait_until(reached, seconds):
    while not reached():
        assert os.waitpid(child, os.WNOHANG)[0] == 0, "the run ended before it was killed"
        time.sleep(seconds)

for kill in range(kills + 1):
    child = os.fork()  # this process never runs torch, so it may
    if child == 0:
        torch.set_num_threads(1)
        train(config, folder, resume=True, progress=Progress())
        os._exit(0)
    if kill == kills:
        break
    known = set(folder.glob("checkpoint/step-*"))
    if kill % 4:  # it got as far as to save something
        wait_until(lambda: set(folder.glob("checkpoint/step-*")) != known, 0.001)
    time.sleep(rng.uniform(0, 0.05))
    if kill % 2:  # in the middle of a checkpoint
        wait_until(lambda: list(folder.glob("checkpoint/.step-*")), 0.0005)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the run ended before it was killed"
assert os.waitpid(child, 0)[1] == 0
"""


def test_killed_at_three_moments_equals_unbroken(tmp_path):
    """kill -9, every other time while a checkpoint is being written."""
    killed = tmp_path / "killed"
    subprocess.run([sys.executable, "-c", KILLED, str(killed), "3"], check=True, timeout=300)
    config = read_config(killed)
    config = replace(config, train=replace(config.train, checkpoint_minutes=9))
    whole = run(config, tmp_path / "whole")
    assert result(killed) == result(whole)
    assert not list(killed.rglob(".*.tmp"))


def test_one_process_at_a_time(tmp_path):
    folder = tmp_path / "run"
    run(tiny("rnn", max_steps=2), folder)
    first = RunFolder(folder)
    first.reopen(read_config(folder))
    with pytest.raises(ValueError, match="is in use by another process; wait until it has ended"):
        train(None, folder, resume=True)
    first.close()
    train(None, folder, resume=True)


def test_data_that_changed_are_refused_and_nothing_is_lost(tmp_path):
    values = np.random.default_rng(0).normal(size=(40, 6, 2)).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    data = DataConfig(name="arrays", arrays=ArraysConfig(path=str(tmp_path / "x.npy")))
    config, folder = tiny(data=data), tmp_path / "run"
    stopped(config, folder, step=4)
    before = newest(folder)
    np.save(tmp_path / "x.npy", values[:, ::-1])
    with pytest.raises(
        ValueError, match=r"training set of 'arrays' differs from .*; use the same data, or a"
    ):
        run(config, folder, resume=True)
    assert newest(folder) == before
    np.save(tmp_path / "x.npy", values)
    run(config, folder, resume=True)
    assert newest(folder) > before


def test_checkpoint_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    events, rename = [], Path.rename

    def renamed(path, target):
        events.append(f"{target.name}!")
        return rename(path, target)

    def written(path, tensors):  # and flushed, as all files of vssm.data.storage
        events.append(path.name)
        write_tensors(path, tensors)

    monkeypatch.setattr("vssm.runs.folder.write_tensors", written)
    monkeypatch.setattr("vssm.runs.folder.flush", lambda path: events.append(path.name))
    monkeypatch.setattr("vssm.runs.folder.Path.rename", renamed)
    folder = RunFolder(tmp_path)
    folder.log({"step": 3})
    folder.save_checkpoint(
        tiny(), 3, {part: {"a": torch.zeros(2)} for part in ("weights", "ema")}, {}
    )
    files = [
        "log.jsonl",
        "weights.safetensors",
        "ema.safetensors",
        "progress.json",
        ".step-00000003.tmp",
    ]
    assert events == [*files, "step-00000003!", "checkpoint"]


def test_resumed_run_keeps_the_date_of_its_start(half):
    path, started = newest(half) / "progress.json", "2001-02-03T04:05:06+00:00"
    path.write_text(signed(json.loads(path.read_text()) | {"started": started}))
    meta = json.loads((run(None, half, resume=True) / "meta.json").read_text())
    assert meta["started"] == started < meta["ended"]
