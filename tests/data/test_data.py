"""Data sets: files are found, checked and split; bad files are named in one line."""

import csv
import dataclasses
import gc
import gzip
import hashlib
import http.server
import io
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import tarfile
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import small_model
from vssm.config import RunConfig
from vssm.data import (
    NAMES,
    ArraysConfig,
    DataConfig,
    ImagesConfig,
    Meta,
    SeriesConfig,
    Split,
    SyntheticConfig,
    TextConfig,
    describe,
    draw,
    files,
    images,
    open_data,
    picture,
)
from vssm.data.dataset import ARRAYS, hold_out, random_bits
from vssm.data.series import phases
from vssm.data.table import read_table

REAL = os.environ.get("VSSM_DATA")


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """Every test has its own empty cache, and no data folder but the one it names."""
    monkeypatch.delenv("VSSM_DATA", raising=False)
    monkeypatch.setattr(files, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path


def refused(config, *parts):
    """Opens a data set, checks that one line names all `parts`, and returns the line."""
    with pytest.raises(ValueError) as caught:
        data = open_data(config() if callable(config) else config)
        _ = data.train, data.test()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message
    return message


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def series(path, **options):
    return DataConfig(name="series", series=SeriesConfig(path=str(path), **options))


def text(path, **options):
    return DataConfig(name="text", text=TextConfig(path=str(path), **options))


def arrays(path, **options):
    return DataConfig(name="arrays", arrays=ArraysConfig(path=str(path)), **options)


def write_csv(path, rows, header=None):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header] * (header is not None) + list(rows))
    return path


def test_config_survives_json_and_the_command_line():
    config = DataConfig(
        name="series", seed=3, series=SeriesConfig(path="a.csv", columns=("x", "1"), fill="zero")
    )
    fields = json.loads(json.dumps(dataclasses.asdict(config)))
    nested = {
        key: cls(**fields.pop(key))
        for key, cls in (
            ("series", SeriesConfig),
            ("text", TextConfig),
            ("images", ImagesConfig),
            ("arrays", ArraysConfig),
            ("synthetic", SyntheticConfig),
        )
    }
    assert DataConfig(**fields, **nested) == config
    arguments = "--name series --seed 3 --series.path a.csv --series.columns x 1 --series.fill zero"
    assert tyro.cli(DataConfig, args=arguments.split()) == config


@pytest.mark.parametrize(
    "cls", [DataConfig, SeriesConfig, TextConfig, ImagesConfig, ArraysConfig, SyntheticConfig]
)
def test_config_fields_are_documented(cls, capsys):
    with pytest.raises(SystemExit):
        tyro.cli(cls, args=["--help"])
    shown = capsys.readouterr().out
    source = Path(sys.modules[cls.__module__].__file__).read_text()
    for field in dataclasses.fields(cls):
        assert re.search(rf"    {field.name}: .*\n    \"\"\"", source), field.name
        assert field.name.replace("_", "-") in shown


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (
            lambda: DataConfig(name="mnits"),
            ("data set='mnits'", "did you mean 'mnist'?", *NAMES),
        ),
        (
            lambda: DataConfig(seed=-1),
            ("seed (--split-seed) is -1; it must be a whole number >= 0",),
        ),
        (lambda: DataConfig(name="text", binarize=True), ("binarize", "'text'", "mnist")),
        (
            lambda: SeriesConfig(fill="nearest"),
            ("series.fill='nearest'", "'zero', 'previous', 'linear'"),
        ),
        (lambda: SeriesConfig(horizon=0), ("series.horizon", "0", "1")),
        (
            lambda: SeriesConfig(scale="robust"),
            ("series.scale='robust'", "'window', 'last', 'column', 'none'"),
        ),
        (
            lambda: SeriesConfig(time="none", time_features=True),
            ("series.time_features", "series.time"),
        ),
        (lambda: TextConfig(unit="word"), ("text.unit='word'", "'char', 'byte'")),
        (lambda: SyntheticConfig(num=3), ("synthetic.num", "3", "10")),
    ],
)
def test_bad_options_are_named(make, parts):
    refused(make, *parts)


def test_import_needs_nothing_optional():
    slow = {"sklearn", "matplotlib", "pooch", "pandas", "pyarrow"}
    code = f"import sys, vssm.data; print({slow} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_random_bits_are_pinned():
    # These words must never change, or the splits of old runs would.
    assert random_bits(0, 0, 2).tolist() == [0x2F4BA6408E4D89B, 0x3DD62B0B9CA8C5B2]
    assert not np.array_equal(random_bits(0, 0, 8), random_bits(0, 1, 8))


@pytest.mark.parametrize("num", [1, 10, 63, 1437])
def test_hold_out_is_a_disjoint_tenth(num):
    kept, held = hold_out(num, seed=5)
    assert len(held) == round(0.1 * num)
    assert sorted([*kept, *held]) == list(range(num))
    assert all(
        np.array_equal(a, b) for a, b in zip((kept, held), hold_out(num, seed=5), strict=True)
    )


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_splits_are_disjoint_deterministic_and_follow_the_seed(name):
    def rows(split):
        return [sequence.numpy().tobytes() for sequence in split.x]

    data, again, other = (open_data(DataConfig(name=name, seed=seed)) for seed in (1, 1, 2))
    train, valid, test = rows(data.train), rows(data.valid), rows(data.test())
    total = len(train) + len(valid) + len(test)
    assert (
        len(set(train) | set(valid) | set(test))
        == total
        == {"digits": 1797, "synthetic": 1200}[name]
    )
    assert len(valid) == round(0.1 * (len(train) + len(valid)))
    assert (train, valid, test) == (rows(again.train), rows(again.valid), rows(again.test()))
    assert valid != rows(other.valid)
    if name == "digits":  # the test set does not move with the seed
        assert test == rows(other.test())


def test_digits_match_scikit_learn():
    from sklearn.datasets import load_digits

    data = open_data(DataConfig(name="digits"))
    facts = describe(data)
    assert (
        np.sum(list(facts["classes"].values()), 0).tolist()
        == np.bincount(load_digits().target).tolist()
    )
    x = data.train.batch(torch.tensor([7, 3]))
    assert x.dtype == torch.float32 and x.shape == (2, 8, 8) and 0 <= x.min() < x.max() <= 1
    assert torch.equal(x * 16, data.train.x[[7, 3]].float())
    source = {
        (image / 16).astype(np.float32).tobytes(): label
        for image, label in zip(*load_digits(return_X_y=True), strict=True)
    }
    assert all(
        source[image.numpy().tobytes()] == label
        for image, label in zip(data.test().batch(slice(None)), data.test().labels, strict=True)
    )


def test_training_does_not_read_the_test_split(mnist):
    (mnist / "t10k-images-idx3-ubyte").write_bytes(b"damaged")
    data = open_data(DataConfig(name="mnist", dir=str(mnist)))
    assert len(data.train) == 45 and len(data.valid) == 5
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte has content with sha256"):
        data.test()


def test_split_batches_tokens_as_int64_and_windows_stay_shared(tmp_path):
    tokens = Split(torch.arange(12, dtype=torch.int16).reshape(3, 4))
    assert tokens.batch([2]).dtype == torch.int64 and tokens.batch([2]).tolist() == [[8, 9, 10, 11]]
    rows = torch.arange(40.0).reshape(20, 2)
    split = Split(rows.unfold(0, 5, 2).transpose(1, 2))
    assert split.nbytes == (7 * 2 + 5) * 2 * 4  # eight windows cover 19 rows
    moved = split.to("meta")
    assert moved.x.shape == (8, 5, 2) and moved.x.stride() == split.x.stride()
    assert torch.equal(split.batch(torch.tensor([1, 7])), torch.stack([rows[2:7], rows[14:19]]))


@pytest.mark.gpu
def test_split_on_the_device_gives_the_same_batches():
    for split in (
        open_data(DataConfig()).train,
        Split(torch.rand(50, 3).unfold(0, 7, 3).transpose(1, 2)),
    ):
        index = torch.tensor([4, 0, 9])
        moved = split.to("cuda")
        assert torch.equal(moved.batch(index.cuda()).cpu(), split.batch(index))
        assert torch.equal(split.batch(index, "cuda").cpu(), split.batch(index))


def test_meta_survives_json_and_refuses_newer_fields(tmp_path):
    write_csv(tmp_path / "a.csv", np.random.default_rng(0).normal(3, 2, (50, 2)))
    for config in (DataConfig(), series(tmp_path / "a.csv", context=3, horizon=2)):
        meta = open_data(config).meta
        assert Meta.from_json(json.loads(json.dumps(meta.to_json()))) == meta
    with pytest.raises(ValueError, match="unknown fields: colour"):
        Meta.from_json(meta.to_json() | {"colour": 1})


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("context", "x", "int >= 1 | None"),
        ("context", -1, "int >= 1 | None"),
        ("patch", 0, "int >= 1"),
        ("season", True, "int >= 1"),
        ("length", 2.5, "int >= 1"),
        ("name", None, "str"),
        ("windowed", "first", "window"),
        ("separate", "no", "bool"),
        ("image_shape", [2, 2], "tuple"),
        ("cycles", None, "tuple"),
        ("columns", "ab", "tuple"),
        ("mean", [0.0, "x"], "tuple"),
        ("std", [1.0, float("nan")], "tuple"),
    ],
)
def test_impossible_metadata_is_named(field, value, allowed):
    meta = Meta(
        name="series",
        features=2,
        length=6,
        suggested_head="gaussian",
        columns=("a", "b"),
        mean=(0.0, 1.0),
        std=(1.0, 2.0),
        context=4,
        horizon=2,
    )
    with pytest.raises(ValueError, match=rf"^data_meta\.{field}=.* is damaged; ") as caught:
        Meta.from_json(meta.to_json() | {field: value})
    assert allowed in str(caught.value) and "\n" not in str(caught.value)


def test_missing_metadata_is_named():
    fields = Meta(name="a", features=2, length=6, suggested_head="gaussian").to_json()
    for lost in ("name", "features", "length", "suggested_head"):
        with pytest.raises(ValueError, match=f"^metadata of data has no {lost}$"):
            Meta.from_json({name: value for name, value in fields.items() if name != lost})
    with pytest.raises(ValueError, match=r"^data_meta=\[\] is damaged"):
        Meta.from_json([])


def test_meta_maps_rows_to_images():
    meta = Meta(
        name="cifar10", features=6, length=2, suggested_head="gaussian", image_shape=(2, 2, 3)
    )
    x = torch.linspace(-0.1, 1.1, 36).reshape(2, 3, 6)
    image = meta.to_image(x)
    assert image.shape == (2, 3, 2, 3) and image.min() == 0 and image.max() == 1
    assert torch.equal(image[1, 2, 0], x[1, 2, :3].clamp(0, 1))
    with pytest.raises(ValueError, match="'text' has no images"):
        Meta(name="text", features=2, length=2, suggested_head="categorical").to_image(x)


@pytest.fixture
def server(tmp_path):
    """Serves tmp_path/site on this machine and gives its address."""
    (tmp_path / "site").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path / "site"))

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


def test_download_is_checked_cached_and_not_repeated(server, tmp_path):
    (tmp_path / "site" / "a.txt").write_bytes(b"hello")
    remote = files.Remote(f"{server}/a.txt", sha256(b"hello"), "text/a.txt")
    path = files.locate(["a.txt"], ["text"], None, remote)
    assert path == tmp_path / "cache" / "text" / "a.txt" and path.read_bytes() == b"hello"
    (tmp_path / "site" / "a.txt").unlink()
    assert files.locate(["a.txt"], ["text"], None, remote) == path


def test_download_with_another_checksum_names_both_and_leaves_nothing(server, tmp_path):
    (tmp_path / "site" / "a.txt").write_bytes(b"other")
    with pytest.raises(ValueError) as caught:
        files.locate(
            ["a.txt"], ["text"], None, files.Remote(f"{server}/a.txt", sha256(b"hello"), "a.txt")
        )
    message = str(caught.value)
    assert sha256(b"hello") in message and sha256(b"other") in message and "\n" not in message
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # pooch leaves a socket open
@pytest.mark.parametrize("reason", ["not there", "no server"])
def test_failed_download_says_what_was_looked_for_and_how_to_give_it(server, tmp_path, reason):
    url = "http://127.0.0.1:9/a.txt" if reason == "no server" else f"{server}/a.txt"
    with pytest.raises(ValueError) as caught:
        files.locate(
            ["a.txt"], ["text"], str(tmp_path), files.Remote(url, sha256(b"hello"), "a.txt")
        )
    message = str(caught.value)
    for part in (
        "a.txt",
        "text",
        {"not there": "404", "no server": "refused"}[reason],
        str(tmp_path),
        str(tmp_path / "cache"),
        url,
        "--data-dir",
        "$VSSM_DATA",
    ):
        assert part in message
    assert "\n" not in message
    del caught
    gc.collect()


def test_damaged_file_is_never_replaced(server, mnist, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MNIST_URL", f"{server}/")
    for name in images.MNIST:
        (tmp_path / "site" / f"{name}.gz").write_bytes(
            gzip.compress((mnist / name).read_bytes(), mtime=0)
        )
    data = open_data(DataConfig(name="mnist"))
    assert len(data.train) == 45 and data.files[0].is_relative_to(tmp_path / "cache")
    broken = bytearray((mnist / "train-images-idx3-ubyte").read_bytes())
    broken[500] ^= 1
    damaged = gzip.compress(bytes(broken), mtime=0)
    data.files[0].write_bytes(damaged)
    refused(
        DataConfig(name="mnist"),
        data.files[0],
        sha256(broken),
        images.MNIST["train-images-idx3-ubyte"][2],
    )
    assert data.files[0].read_bytes() == damaged


def test_data_folder_must_exist(tmp_path, monkeypatch):
    refused(
        DataConfig(name="mnist", dir=str(tmp_path / "nowhere")), "data-dir", tmp_path / "nowhere"
    )
    monkeypatch.setenv("VSSM_DATA", str(tmp_path / "neither"))
    refused(DataConfig(name="mnist"), "$VSSM_DATA", tmp_path / "neither")


def test_dir_comes_before_the_environment(tmp_path, monkeypatch):
    for folder, letter in (("given", "a"), ("environment", "b")):
        (tmp_path / folder / "text").mkdir(parents=True)
        (tmp_path / folder / "text" / "t.txt").write_text(letter * 100)
    monkeypatch.setenv("VSSM_DATA", str(tmp_path / "environment"))
    options = TextConfig(path="t.txt", length=5)
    assert open_data(DataConfig(name="text", text=options)).meta.vocabulary == "b"
    config = DataConfig(name="text", text=options, dir=str(tmp_path / "given"))
    assert open_data(config).meta.vocabulary == "a"


def idx(array):
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """Writes four small IDX files and publishes their checksums; gives their folder."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    rng = np.random.default_rng(0)
    published = {}
    for name in images.MNIST:
        num = 50 if name.startswith("train") else 20
        array = rng.integers(
            0, 256 if "images" in name else 10, (num, 28, 28)[: 3 if "images" in name else 1]
        )
        content = idx(array.astype(np.uint8))
        (folder / name).write_bytes(content)
        published[name] = (array.shape, sha256(gzip.compress(content, mtime=0)), sha256(content))
    monkeypatch.setattr(images, "MNIST", published)
    return folder


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_mnist_loads_packed_or_not(mnist, packed, inside):
    expected = np.frombuffer((mnist / "train-images-idx3-ubyte").read_bytes(), np.uint8, offset=16)
    if packed:
        for path in list(mnist.iterdir()):
            (mnist / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    data = open_data(DataConfig(name="mnist", dir=str(mnist if inside else mnist.parent)))
    train, _ = hold_out(50, seed=0)
    assert np.array_equal(data.train.x, expected.reshape(50, 28, 28)[train])
    assert data.meta.image_shape == (28, 28, 1) and data.meta.levels == 256
    assert data.meta.suggested_head == "gaussian" and len(data.test().labels) == 20


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c[:-1],
        lambda c: c + b"\0",
        lambda c: b"",
        lambda c: c[:100] + bytes((c[100] ^ 1,)) + c[101:],
    ],
)
def test_damaged_idx_is_named(mnist, damage):
    path = mnist / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    refused(DataConfig(name="mnist", dir=str(mnist)), path, "the published one is")


@pytest.mark.parametrize(
    "damage", [lambda c: c[: len(c) // 2], lambda c: b"junk" + c, lambda c: c[:40] + b"x" * 99]
)
def test_damaged_gzip_is_named(mnist, damage):
    path = mnist / "train-labels-idx1-ubyte"
    packed = mnist / "train-labels-idx1-ubyte.gz"
    packed.write_bytes(damage(gzip.compress(path.read_bytes())))
    path.unlink()
    refused(DataConfig(name="mnist", dir=str(mnist)), packed)


def test_binarisation_is_fixed_by_the_seed_and_follows_the_pixels():
    grey = np.tile(np.array([0, 1, 100, 254, 255], np.uint8), (40000, 1))
    bits = images.binarized(grey, 255, seed=3, stream=1)
    p = grey[0] / 255
    # five standard deviations of a mean of 40,000 draws
    assert np.all(np.abs(bits.mean(0) - p) <= 5 * np.sqrt(p * (1 - p) / 40000))
    assert np.array_equal(bits, images.binarized(grey, 255, seed=3, stream=1))
    assert not np.array_equal(bits, images.binarized(grey, 255, seed=4, stream=1))
    assert images.binarized(grey[:1, :3], 255, seed=3, stream=1).shape == (1, 3)


def test_binarised_data_is_bernoulli():
    data = open_data(DataConfig(name="digits", binarize=True))
    assert data.meta.suggested_head == "bernoulli" and data.meta.levels == 2
    assert set(data.train.batch(slice(None)).unique().tolist()) == {0.0, 1.0}


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Writes six batches of 20 records and publishes their checksums; gives the folder above."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.default_rng(0)
    published = {}
    for name in images.CIFAR10:
        records = rng.integers(0, 256, (20, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())
        published[name] = sha256(records.tobytes())
    monkeypatch.setattr(images, "CIFAR10", published)
    return tmp_path


def pack_cifar10(folder, extra=()):
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for member, content in extra:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for path in sorted((folder / "cifar-10-batches-bin").iterdir()):
            tar.add(path, f"cifar-10-batches-bin/{path.name}")
            path.unlink()


def test_cifar10_rows_keep_the_channels_of_a_pixel_together(cifar10):
    data = open_data(DataConfig(name="cifar10", dir=str(cifar10)))
    record = np.frombuffer(
        (cifar10 / "cifar-10-batches-bin" / "test_batch.bin").read_bytes(), np.uint8
    )[:3073]
    image = record[1:].reshape(3, 32, 32)
    test = data.test()
    assert test.labels[0] == record[0] and test.x.shape == (20, 32, 96)
    for row, column, channel in ((0, 0, 0), (5, 7, 1), (31, 30, 2)):
        assert test.x[0, row, 3 * column + channel] == image[channel, row, column]
        assert (
            data.meta.to_image(test.batch([0]))[0, row, column, channel] * 255
            == image[channel, row, column]
        )
    assert len(data.train) == 90 and len(data.valid) == 10


def test_cifar10_is_read_from_the_archive_without_extracting(cifar10):
    config = DataConfig(name="cifar10", dir=str(cifar10))
    plain = open_data(config)
    train, test = plain.train.x, plain.test().x
    link = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    pack_cifar10(cifar10, extra=[(tarfile.TarInfo("../escaped.bin"), b"x"), (link, b"")])
    before = sorted(cifar10.parent.rglob("*"))
    packed = open_data(config)
    assert torch.equal(packed.train.x, train) and torch.equal(packed.test().x, test)
    assert packed.files == (cifar10 / "cifar-10-binary.tar.gz",)
    assert sorted(cifar10.parent.rglob("*")) == before


def test_damaged_cifar10_is_named(cifar10):
    config = DataConfig(name="cifar10", dir=str(cifar10))
    path = cifar10 / "cifar-10-batches-bin" / "data_batch_3.bin"
    content = path.read_bytes()
    for damaged in (content[:-1], content[:-1] + bytes((content[-1] ^ 1,))):
        path.write_bytes(damaged)
        refused(config, path, sha256(content), sha256(damaged))
    path.unlink()
    refused(config, "missing", path)
    pack_cifar10(cifar10)
    refused(config, "cifar-10-binary.tar.gz", "data_batch_3.bin")
    archive = cifar10 / "cifar-10-binary.tar.gz"
    archive.write_bytes(archive.read_bytes()[:3000])
    refused(config, archive, "cannot be read")


def test_text_is_split_by_position_into_windows(tmp_path):
    content = "".join(chr(97 + k % 26) for k in range(1003))
    (tmp_path / "a.txt").write_text(content)
    data = open_data(text(tmp_path / "a.txt", length=7))
    assert data.meta.features == 26 and data.meta.vocabulary == "abcdefghijklmnopqrstuvwxyz"
    assert data.train.x.dtype == torch.uint8
    starts = {"train": 0, "valid": 813, "test": 903}
    for split, start in (
        (data.train, 0),
        (data.valid, starts["valid"]),
        (data.test(), starts["test"]),
    ):
        joined = "".join(data.meta.decode(tokens) for tokens in split.batch(slice(None)))
        assert joined == content[start : start + len(joined)]
    assert (len(data.train), len(data.valid), len(data.test())) == (813 // 7, 90 // 7, 100 // 7)


@pytest.mark.parametrize("unit", ["char", "byte"])
def test_text_decodes_what_it_encodes(tmp_path, unit):
    content = "héllo ∅ — 統計 🙂\r\n" * 40
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content.encode()))
    meta = open_data(text(tmp_path / "a.txt.gz", unit=unit, length=8)).meta
    assert meta.decode(meta.encode("統計 ∅🙂")) == "統計 ∅🙂"
    assert meta.features == (256 if unit == "byte" else len(set(content)))
    if unit == "char":
        with pytest.raises(ValueError, match="'z'"):
            meta.encode("zello")


def test_large_vocabulary_is_stored_in_two_bytes(tmp_path):
    content = "".join(map(chr, range(0x4E00, 0x4E00 + 1000))) * 3
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    data = open_data(text(tmp_path / "a.txt", length=100))
    assert data.train.x.dtype == torch.int16
    assert data.meta.decode(data.train.batch([3])[0]) == content[300:400]


def test_bad_text_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good " * 20 + b"\xff bad " * 20)
    refused(text(path, length=2), path, "byte 100", "0xff", "--text.unit byte")
    assert open_data(text(path, length=2, unit="byte")).meta.features == 256
    path.write_bytes(b"")
    refused(text(path), path, "0 tokens", "256")
    path.write_text("short " * 40)
    refused(text(path), path, "240 tokens", "text.length = 256")
    refused(text("nowhere.txt"), "nowhere.txt")


def test_series_horizons_are_disjoint_in_time_and_windows_are_slices(tmp_path):
    values = np.arange(200.0)[:, None] * [1, -1]
    path = write_csv(tmp_path / "a.csv", values, header=["up", "down"])
    data = open_data(series(path, context=10, horizon=5, stride=3, scale="none"))
    bounds = {"train": (0, 140), "valid": (140, 160), "test": (160, 200)}
    for name, split in (("train", data.train), ("valid", data.valid), ("test", data.test())):
        x = split.batch(slice(None))
        assert x.shape[1:] == (15, 2) and x.dtype == torch.float32
        starts = x[:, 0, 0].long()
        assert torch.equal(starts.diff(), torch.full((len(x) - 1,), 3))
        assert torch.equal(x[..., 0], (starts[:, None] + torch.arange(15)).float())
        low, high = bounds[name]
        assert x[:, 10:, 0].min() >= low and x[:, 10:, 0].max() < high
    assert data.meta.columns == ("up", "down") and data.meta.mean is None
    assert (data.meta.context, data.meta.horizon, data.meta.length) == (10, 5, 15)


def test_series_is_scaled_by_the_training_part_only(tmp_path):
    values = np.random.default_rng(0).normal(5, 2, (100, 3))
    values[:, 2] = 0.1
    changed = values.copy()
    changed[70:] *= 1000
    one, two = (
        open_data(series(write_csv(tmp_path / name, v), context=5, horizon=5))
        for name, v in (("a.csv", values), ("b.csv", changed))
    )
    assert one.meta.mean == two.meta.mean and one.meta.std == two.meta.std
    assert torch.equal(one.train.x, two.train.x)
    np.testing.assert_allclose(one.meta.mean, values[:70].mean(0), rtol=1e-12)
    np.testing.assert_allclose(one.meta.std, [*values[:70, :2].std(0), 1], rtol=1e-12)
    assert one.train.x[..., 2].abs().max() < 1e-6


def test_windows_are_scaled_by_their_context(tmp_path):
    values = np.random.default_rng(0).normal(5, 2, (60, 2))
    values[:, 1] = 3.0
    data = open_data(series(write_csv(tmp_path / "a.csv", values), context=4, horizon=3))
    last = open_data(
        series(write_csv(tmp_path / "a.csv", values), context=4, horizon=3, scale="last")
    )
    walk = last.train.batch([0, 5])
    assert walk[:, 3].abs().max() == 0
    steps = np.hypot(np.sqrt(np.square(np.diff(values[5:9, 0])).sum()), 0.1 * values[:42, 0].std())
    np.testing.assert_allclose(
        walk[1, :, 0], (values[5:12, 0] - values[8, 0]) / steps, rtol=1e-4, atol=1e-5
    )
    assert data.meta.windowed == "window" and SeriesConfig(scale=True).scale == "column"
    x = data.train.batch([0, 5])
    torch.testing.assert_close(x[:, :4, 0].mean(1), torch.zeros(2), rtol=0, atol=1e-5)
    own = (values[5:12, 0] - values[5:9, 0].mean()) / np.hypot(
        values[5:9, 0].std(), 0.1 * values[:42, 0].std()
    )
    np.testing.assert_allclose(x[1, :, 0], own, rtol=1e-4, atol=1e-5)
    assert x[..., 1].abs().max() < 1e-5, "a constant series stays finite"


def test_windows_are_centred_by_season(tmp_path):
    values = np.random.default_rng(0).normal(5, 2, (60, 2))
    path = write_csv(tmp_path / "a.csv", values)
    mean, std = values[:42].mean(0), values[:42].std(0)
    window = (
        values[5:17] - mean
    ) / std  # 7 known, of which the last 6 are two seasons, and 5 to forecast
    seasons, at = window[1:7].reshape(2, 3, 2), np.arange(-7, 5) % 3
    for scale, centre, variance in (
        ("window", seasons.mean(0), seasons.var(0).mean(0)),
        ("last", seasons[1], np.square(seasons[1] - seasons[0]).mean(0)),
    ):
        options = series(path, context=7, horizon=5, scale=scale, season=3)
        data = open_data(options)
        expected = (window - centre[at]) / np.sqrt(variance + 0.01)
        np.testing.assert_allclose(data.train.batch([5])[0], expected, rtol=1e-4, atol=1e-5)
        assert data.meta.season == 3
    with pytest.raises(ValueError, match=r"series\.season 8 is longer than series\.context 7"):
        SeriesConfig(context=7, season=8)
    with pytest.raises(ValueError, match=r"series\.season 2 needs series\.scale window or last"):
        SeriesConfig(season=2, scale="column")


@pytest.mark.parametrize("stride", [1, 4])
def test_separate_columns_are_series_of_their_own(tmp_path, stride):
    values = np.arange(60)[:, None] + [0.0, 1000.0, 2000.0]
    path = write_csv(tmp_path / "a.csv", values)
    data = open_data(series(path, context=3, horizon=2, stride=stride, scale="none", separate=True))
    assert data.meta.features == 1 and data.meta.separate and len(data.meta.columns) == 3
    x = data.train.batch(slice(None))
    starts = range(0, 42 - 4, stride)
    assert x.shape == (3 * len(starts), 5, 1) and len(data.train) == len(x)
    expected = [[c * 1000 + s + t for t in range(5)] for c in range(3) for s in starts]
    assert x[..., 0].tolist() == expected
    moved = data.train.to("cpu")
    assert torch.equal(moved.batch(torch.tensor([7, 2])), x[[7, 2]])


def test_patches_join_rows_to_steps(tmp_path):
    path = write_csv(tmp_path / "a.csv", np.arange(60)[:, None] + [0.0, 1000.0])
    options = {"context": 4, "horizon": 2, "scale": "none"}
    data = open_data(series(path, patch=2, **options))
    assert (data.meta.features, data.meta.length, data.meta.context) == (4, 3, 4)
    x = data.train.batch([0, 5])
    assert x[1].tolist() == [[5, 1005, 6, 1006], [7, 1007, 8, 1008], [9, 1009, 10, 1010]]
    assert torch.equal(data.meta.to_rows(x), open_data(series(path, **options)).train.batch([0, 5]))
    refused(
        lambda: SeriesConfig(context=4, horizon=3, patch=2), "series.horizon 3", "series.patch 2"
    )


def test_windows_that_are_mostly_missing_are_left_out(tmp_path):
    values = np.arange(100.0)[:, None] * [1, -1]
    cells = [
        ["" if 20 <= k < 30 and c == 0 else v for c, v in enumerate(row)]
        for k, row in enumerate(values)
    ]
    path = write_csv(tmp_path / "a.csv", cells)
    options = {"context": 4, "horizon": 2, "scale": "none", "fill": "previous"}
    starts = open_data(series(path, **options)).train.batch(slice(None))[:, 0, 1].neg().tolist()
    dropped = set(range(65)) - set(map(int, starts))
    assert dropped == {s for s in range(65) if sum(20 <= s + k < 30 for k in range(6)) > 3}
    apart = open_data(series(path, separate=True, **options)).train
    assert len(apart) == 2 * 65 - len(dropped)
    path = write_csv(
        tmp_path / "b.csv", [[v if k % 3 == 0 else "", 1] for k, v in enumerate(range(90))]
    )
    with pytest.raises(
        ValueError, match=r"no window for training .* = 6 rows has half .* every column"
    ):
        _ = open_data(series(path, **options)).train


DATES = [f"2020-01-{1 + k // 24:02} {k % 24:02}:00" for k in range(24 * 28)]


def test_dates_give_the_phases_of_the_calendar(tmp_path):
    path = write_csv(
        tmp_path / "a.csv", [[d, k] for k, d in enumerate(DATES)], header=["date", "a"]
    )
    data = open_data(series(path, context=24, horizon=24, time_features=True, scale="none"))
    assert (
        data.meta.cycles == ("day", "week") and data.meta.features == 5 and data.meta.time == "date"
    )
    x = data.train.batch([0])[0]
    assert torch.equal(x[:, 0], torch.arange(48.0))
    torch.testing.assert_close(x[:24, 1:3], x[24:, 1:3], rtol=0, atol=1e-6)
    torch.testing.assert_close(x[:, 1].square() + x[:, 2].square(), torch.full((48,), 0.25))
    plain = write_csv(tmp_path / "b.csv", [[k] for k in range(600)], header=["a"])
    refused(
        series(plain, context=4, horizon=2, time_features=True),
        "series.time_features",
        "no column of dates",
    )
    yearly = write_csv(
        tmp_path / "c.csv", [[f"{y}-01-01", y] for y in range(1700, 2000)], header=["date", "a"]
    )
    refused(
        series(yearly, context=2, horizon=1, time_features=True),
        "series.time_features",
        "day, week, year",
    )


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            (5, "2020-13-01 05:00"),
            ("row 6", "'date'", "'2020-13-01 05:00' is no date", "ISO 8601"),
        ),
        ((5, "01/02/2020"), ("row 6", "is no date")),
        ((5, ""), ("row 6", "'' is no date")),
        ((0, "0001-01-01T00:00+05:00"), ("row 1", "'0001-01-01T00:00+05:00' is no date")),
        ((5, "9999-12-31T20:00-05:00"), ("row 6", "'9999-12-31T20:00-05:00' is no date")),
        ((5, DATES[4]), ("row 6", "2020-01-01T04:00:00 is there twice", "--series.time none")),
        ((5, DATES[2]), ("row 6", "2020-01-01T02:00:00 comes after 2020-01-01T04:00:00")),
    ],
)
def test_bad_dates_are_named(tmp_path, change, parts):
    rows = [[d, k] for k, d in enumerate(DATES)]
    rows[change[0]][0] = change[1]
    path = write_csv(tmp_path / "a.csv", rows, header=["date", "a"])
    refused(series(path, context=4, horizon=2), path, *parts)
    assert open_data(series(path, context=4, horizon=2, time="none")).meta.time == "none"
    refused(series(path, time="when"), "series.time", "'when'", "'date'")


@pytest.mark.filterwarnings("ignore:.* left out")
@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (DATES, "when"),
        ([*DATES[:5], "soon", *DATES[6:]], None),
        ([*DATES[:5], DATES[4], *DATES[6:]], None),
        (["word"] * len(DATES), None),
    ],
)
def test_dates_under_another_name_are_found_if_all_are_in_order(tmp_path, cells, found):
    rows = [
        [word, cell, k]
        for k, (word, cell) in enumerate(zip("ab" * len(DATES), cells, strict=False))
    ]
    path = write_csv(tmp_path / "a.csv", rows, header=["word", "when", "a"])
    meta = open_data(series(path, context=4, horizon=2)).meta
    assert (meta.time, meta.columns) == (found, ("a",))


@pytest.mark.parametrize("kind", ["csv", "us.parquet", "ns.parquet"])
def test_dates_between_seconds_are_kept(tmp_path, kind):
    dates = np.datetime64("2024-01-01", "ms") + 100 * np.arange(90)
    path = tmp_path / f"a.{kind}"
    if kind == "csv":
        write_csv(path, [[d, k] for k, d in enumerate(dates.astype(str))], header=["date", "a"])
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        own = dates.astype(f"datetime64[{kind[:2]}]")
        parquet.write_table(pyarrow.table({"date": own, "a": np.arange(90.0)}), path)
    times = read_table(path).times
    assert times.dtype == "datetime64[us]" and (times == dates).all()
    assert open_data(series(path, context=4, horizon=2)).meta.time == "date"
    if kind == "csv":
        write_csv(
            path, [[d, k] for k, d in enumerate(dates[[0, 1, 1]].astype(str))], header=["date", "a"]
        )
        refused(
            series(path),
            "row 3",
            "2024-01-01T00:00:00.100000 is there twice",
            "a microsecond or more",
        )


def test_phases_resolve_fractions_of_seconds():
    noon = np.datetime64("2024-01-01T12", "ms") + np.array([0, 250, 1000])
    found = phases(noon, ["day"])
    angles = 2 * np.pi * (43_200 + np.array([0, 0.25, 1])) / 86_400
    np.testing.assert_allclose(
        found, np.stack([np.sin(angles), np.cos(angles)], 1) / 2, rtol=0, atol=1e-12
    )
    assert (
        phases(noon[[0, 2]], ["day"]) == phases(noon[[0, 2]].astype("datetime64[s]"), ["day"])
    ).all()


def test_duplicate_column_names_are_refused(tmp_path):
    path = write_csv(tmp_path / "a.csv", [[k, -k] for k in range(40)], header=["a", "a"])
    refused(series(path, context=4, horizon=2), path, "two columns called 'a'")


@pytest.mark.filterwarnings("ignore:.* dates are uneven")
def test_dates_with_offsets_are_compared_in_utc(tmp_path):
    rows = [
        ["2020-01-01T00:00:00+02:00", 1],
        ["2019-12-31T23:00:00Z", 2],
        *[[f"2020-02-{d:02}", d] for d in range(1, 29)],
    ]
    path = write_csv(tmp_path / "a.csv", rows, header=["time", "a"])
    assert open_data(series(path, context=2, horizon=1)).meta.time == "time"


TABLES = {
    "plain.csv": "a,b\n1,2\n3,4\n",
    "headerless.csv": "1,2\n3,4\n",
    "dates.csv": "date,a,b\n2016-07-01 00:00:00,1,2\n2016-07-01 01:00:00,3,4\n",
    "headerless_dates.csv": "2016-07-01,1,2\n2016-07-02,3,4\n",
    "numeric_time.csv": "timestamp,a,b\n20160701,1,2\n20160702,3,4\n",
    "excel.csv": "\ufeffa;b\r\n1;2\r\n\r\n3;4\r\n",
    "tabs.tsv": "a\tb\n1\t2\n3\t4\n",
    "names.csv": 'place,"a, quoted",b,empty\nx,1,2,\ny,3,4,\n',
    "spaces.txt": " a , b \n 1 , 2 \n 3 , 4 \n",
}


@pytest.mark.filterwarnings("ignore:.* left out")
@pytest.mark.parametrize("name", TABLES)
def test_csv_dialects(tmp_path, name):
    (tmp_path / name).write_text(
        TABLES[name] + TABLES[name].splitlines(keepends=True)[-1] * 20, newline=""
    )
    data = open_data(series(tmp_path / name, context=1, horizon=1, scale="none", time="none"))
    assert data.train.x[0].tolist() == [[1, 2], [3, 4]]
    expected = {
        "headerless.csv": ("0", "1"),
        "headerless_dates.csv": ("1", "2"),
        "names.csv": ("a, quoted", "b"),
    }
    assert data.meta.columns == expected.get(name, ("a", "b"))


@pytest.mark.parametrize(
    ("header", "row", "left_out"),
    [
        ("t;v", "{k};0,{k}", "'v'"),
        ("t,v", '{k},"1,{k}"', "'v'"),
        ("t,place,v", "{k},x,{k}%", "'place', 'v'"),
        ("t,v", "{k},", "'v'"),
        ("t,v", "{k},inf", "'v'"),
    ],
)
def test_columns_that_are_left_out_are_noted(tmp_path, header, row, left_out):
    path = tmp_path / "a.csv"
    path.write_text("\n".join([header, *(row.format(k=k) for k in range(30))]))
    note = f"a.csv: columns without numbers are left out: {left_out}; numbers need a decimal point"
    with pytest.warns(UserWarning, match=note):
        data = open_data(series(path, context=2, horizon=1))
    assert data.meta.columns == ("t",)
    open_data(
        series(path, context=2, horizon=1, columns=("t",))
    )  # others are not wanted, and no news


def test_dates_give_no_note(tmp_path):
    rows = [[f"2020-01-{k:02}", k] for k in range(1, 29)]
    for name in ("date", "when"):
        path = write_csv(tmp_path / "a.csv", rows, header=[name, "a"])
        for time in (None, name, "none"):
            open_data(series(path, context=2, horizon=1, time=time))


def test_uneven_dates_are_noted(tmp_path):
    days = [f"2020-0{m}-{d:02}" for m in (1, 2) for d in range(1, 29) if d % 7]
    path = write_csv(tmp_path / "a.csv", [[d, k] for k, d in enumerate(days)], header=["date", "a"])
    with pytest.warns(
        UserWarning, match=r"a.csv: dates are uneven: 2020-01-08\S* comes right after 2020-01-06"
    ):
        open_data(series(path, context=2, horizon=1))
    months = [f"{y}-{m:02}-01" for y in range(2010, 2014) for m in range(1, 13)]
    even = [[d, k] for k, d in enumerate(months)]
    open_data(series(write_csv(path, even, header=["date", "a"]), context=2, horizon=1))
    write_csv(path, even[:7] + even[8:], header=["date", "a"])
    with pytest.warns(UserWarning, match=r"2010-09-01\S* comes right after 2010-07-01"):
        open_data(series(path, context=2, horizon=1))


def test_csv_in_another_encoding_is_read_or_refused(tmp_path):
    path = write_csv(tmp_path / "a.csv", [[k, -k] for k in range(200)], header=["a", "b"])
    text = path.read_text().replace("b", "température", 1)
    path.write_bytes(text.encode("latin-1"))
    columns = open_data(series(path, context=4, horizon=2)).meta.columns
    assert columns == ("a", "temp\ufffdrature")
    path.write_bytes(text.encode("utf-16"))
    refused(series(path), path, "has zero bytes, as UTF-16 has; save the file as UTF-8")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_csv_gives_back_every_number(tmp_path_factory, data):
    width = data.draw(st.integers(1, 4))
    number = st.floats(-1e6, 1e6, width=32)
    values = np.array(
        data.draw(
            st.lists(st.lists(number, min_size=width, max_size=width), min_size=20, max_size=30)
        )
    )
    path = write_csv(tmp_path_factory.mktemp("csv") / "a.csv", values.tolist())
    opened = open_data(series(path, context=1, horizon=1, scale="none"))
    assert np.array_equal(
        opened.train.x[:, 0], values[: int(0.7 * len(values)) - 1].astype(np.float32)
    )


def test_columns_are_chosen_by_name(tmp_path):
    rows = [[f"2020-01-{k:02}", k, 10 * k, 100 * k] for k in range(1, 29)]
    path = write_csv(tmp_path / "a.csv", rows, header=["date", "HUFL", "HULL", "OT"])
    data = open_data(series(path, columns=("OT", "HUFL"), context=2, horizon=1, scale="none"))
    assert data.meta.columns == ("OT", "HUFL") and data.train.x[0, 0].tolist() == [100, 1]
    refused(
        series(path, columns=("HUFLL",)),
        path,
        "'HUFLL'",
        "HUFL, HULL, OT",
        "did you mean",
    )
    refused(series(path, columns=("OT", "OT")), "series.columns", "has 'OT' twice")
    refused(series(path, columns=("date",)), "'date'", "HUFL, HULL, OT")


def test_columns_without_names_are_numbered(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(90.0).reshape(30, 3) * [np.nan, 1, 1])
    data = open_data(series(tmp_path / "a.npy", columns=("1",), context=2, horizon=1, scale="none"))
    assert data.train.x[0, 0].tolist() == [1]
    refused(
        series(tmp_path / "a.npy", columns=("0",)), "no column of numbers '0'", "available: 1, 2"
    )


@pytest.mark.filterwarnings("ignore:.* left out")
def test_missing_values_are_placed_and_filled(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("name,a,b\nx,,1\nx,2,2\nx,NA,3\nx,nan,inf\nx,8,5\n" + "x,9,9\n" * 20)
    refused(
        series(path, context=1, horizon=1),
        path,
        "row 1",
        "'a'",
        "4 such values",
        "--series.fill",
        "linear",
    )
    expected = {
        "zero": [[0, 1], [2, 2], [0, 3], [0, 0], [8, 5]],
        "previous": [[2, 1], [2, 2], [2, 3], [2, 3], [8, 5]],
        "linear": [[2, 1], [2, 2], [4, 3], [6, 4], [8, 5]],
    }
    for fill, rows in expected.items():
        data = open_data(series(path, context=4, horizon=1, scale="none", fill=fill))
        assert data.train.x[0].tolist() == rows


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ("is no table",)),
        ("\n\n", ("is no table",)),
        ("a,b\n", ("no rows",)),
        ("a,b\nx,y\n", ("no column of numbers",)),
        ("date\n1\n2\n", ("besides date", "--series.columns")),
        ("a,b\n1,2\n3\n", ("row 2", "'b'", "missing")),
        ("a,b\n1,2\n3,4,5\n", ("is no table", "line 3")),
        ("a,b\n1,2,3\n3,4,5\n", ("is no table", "header")),
        ("a,b\n1,2\n3,oops\n", ("row 2", "'b'", "'oops' is not a number")),
        ("a,b\n1,2\n3,1e300\n", ("'b'", "1e+300")),
        ("a\n" + "1\n" * 150, ("150 rows", "105", "96 + 96 = 192")),
        ("a\n" + "x" * 200000, ("no column of numbers",)),
    ],
)
def test_bad_csv_is_named(tmp_path, content, parts):
    path = tmp_path / "a.csv"
    path.write_text(content)
    refused(series(path), path, *parts)


@pytest.mark.parametrize(
    ("closed", "part"), [("none", "EOF inside string"), ('6"', "is not a number")]
)
def test_an_unclosed_quote_is_refused(tmp_path, closed, part):
    notes = {100: '"5 in', 250: closed}
    lines = [f"{k},{notes.get(k, '1')},{-k}" for k in range(300)]
    (tmp_path / "a.csv").write_text("\n".join(["a,note,b", *lines]))
    refused(series(tmp_path / "a.csv", context=4, horizon=2), "a.csv", part)


@pytest.mark.filterwarnings("ignore:.* left out")
def test_cells_in_quotes_hold_commas_and_quotes(tmp_path):
    notes = ['5" pipe', "a, b", '"', 'say ""x"", "y"', ""] * 8
    rows = [[k, note, str(-k)] for k, note in enumerate(notes)]
    path = write_csv(tmp_path / "a.csv", rows, header=["a", 'note, "quoted"', "b"])
    path.write_text(path.read_text().replace(",-3\n", ', "-3"\n'))  # spaces may come before a quote
    data = open_data(series(path, context=1, horizon=1, scale="none"))
    assert data.meta.columns == ("a", "b") and data.train.x[3].tolist() == [[3, -3], [4, -4]]


def test_series_needs_a_path():
    refused(DataConfig(name="series"), "series.path")
    refused(
        series("nowhere.csv"), "found no nowhere.csv in the place given", "timeseries", "--data-dir"
    )


@pytest.mark.parametrize("packed", [False, True])
def test_npy_series(tmp_path, packed):
    values = np.arange(90, dtype=np.int32).reshape(30, 3)
    buffer = io.BytesIO()
    np.save(buffer, values)
    path = tmp_path / ("a.npy.gz" if packed else "a.npy")
    path.write_bytes(gzip.compress(buffer.getvalue()) if packed else buffer.getvalue())
    data = open_data(series(path, context=2, horizon=1, scale="none", columns=("2",)))
    assert data.train.x[1, :, 0].tolist() == [5, 8, 11]
    np.save(tmp_path / "b.npy", np.zeros((3, 3, 3)))
    refused(series(tmp_path / "b.npy"), "b.npy", "(3, 3, 3)")
    np.save(tmp_path / "b.npy", np.zeros((0, 3)))
    refused(series(tmp_path / "b.npy"), "b.npy has no rows")
    path.write_bytes(path.read_bytes()[:100])
    refused(series(path), path)


@pytest.mark.parametrize("end", [b")", b"}"])
def test_a_damaged_header_of_npy_is_named(tmp_path, end):
    np.save(tmp_path / "a.npy", np.zeros((30, 3)))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes().replace(end, b" ", 1))
    refused(series(tmp_path / "a.npy"), "a.npy is no plain .npy array, or it is damaged")


def test_parquet_needs_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    refused(series(tmp_path / "a.parquet"), "pyarrow", "pip install 'vssm[forecast]'")


@pytest.mark.filterwarnings("ignore:.* left out")
def test_parquet_series(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    stamps = np.arange(30).astype("datetime64[s]")
    columns = {"when": stamps, "a": np.arange(30), "b": [None, *range(1, 30)], "c": ["x"] * 30}
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    refused(series(path), "row 1", "'b'", "--series.fill")
    data = open_data(series(path, fill="zero", context=2, horizon=1, scale="none"))
    assert data.meta.columns == ("a", "b") and data.train.x[1].tolist() == [[1, 1], [2, 2], [3, 3]]
    path.write_bytes(path.read_bytes()[:-9])
    refused(series(path), path, "cannot be read")


@pytest.mark.parametrize("name", ["a.csv", "headerless.csv", "a.parquet"])
def test_columns_of_true_and_false_are_ones_and_zeros(tmp_path, name):
    path, open_flags = tmp_path / name, [k % 3 == 0 for k in range(30)]
    if path.suffix == ".csv":
        rows = [
            [k, str(flag), "" if k == 1 else str(flag).lower()] for k, flag in enumerate(open_flags)
        ]
        write_csv(path, rows, header=["a", "open", "gap"] if name == "a.csv" else None)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        gap = [None if k == 1 else flag for k, flag in enumerate(open_flags)]
        parquet.write_table(pyarrow.table({"a": range(30), "open": open_flags, "gap": gap}), path)
    data = open_data(series(path, fill="previous", context=2, horizon=2, scale="none"))
    assert data.meta.columns == (
        ("0", "1", "2") if name == "headerless.csv" else ("a", "open", "gap")
    )
    assert data.train.x[0].tolist() == [[0, 1, 1], [1, 0, 1], [2, 0, 0], [3, 1, 1]]


def test_a_first_line_of_true_and_false_is_no_header(tmp_path):
    path = write_csv(tmp_path / "a.csv", [["true", "false"], ["false", "false"]] * 15)
    data = open_data(series(path, context=1, horizon=1, scale="none"))
    assert data.train.x[0].tolist() == [[1, 0], [0, 0]]


def test_true_and_false_beside_words_are_text(tmp_path):
    rows = [[k, "maybe" if k == 7 else "true"] for k in range(30)]
    path = write_csv(tmp_path / "a.csv", rows, header=["a", "b"])
    with pytest.warns(UserWarning, match=r"are left out: 'b'"):
        assert open_data(series(path, context=2, horizon=1)).meta.columns == ("a",)


def test_categories_of_parquet_are_noted(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"a": range(30), "place": pyarrow.array(["x", "y"] * 15).dictionary_encode()}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.warns(UserWarning, match=r"are left out: 'place'"):
        assert open_data(series(tmp_path / "a.parquet", context=2, horizon=1)).meta.columns == (
            "a",
        )


def test_columns_of_parquet_that_are_no_plain_numbers(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    columns = {"id": [2**60 + 1] * 30, "a": range(30), "parts": [[1, 2]] * 30}
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.warns(UserWarning, match=r"are left out: 'parts'"):
        data = open_data(series(path, context=2, horizon=1, scale="none"))
    assert data.meta.columns == ("id", "a") and data.train.x[0, 0].tolist() == [2.0**60, 0]
    days = pyarrow.array([f"2024-05-{day:02}" for day in range(1, 31)], pyarrow.string_view())
    parquet.write_table(pyarrow.table({"date": days, "a": range(30)}), path)
    assert open_data(series(path, context=2, horizon=1)).meta.time == "date"


def test_missing_columns_of_parquet_are_noted(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for kind, cell in (("float64", None), ("string", None), ("string", "x")):
        columns = {"a": range(30), "b": pyarrow.array([cell] * 30, kind)}
        parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
        with pytest.warns(UserWarning, match="are left out: 'b'"):
            assert open_data(series(tmp_path / "a.parquet", context=2, horizon=1)).meta.columns == (
                "a",
            )


def test_synthetic_has_any_size_and_is_not_independent_in_time():
    config = DataConfig(name="synthetic", synthetic=SyntheticConfig(length=257, features=3, num=51))
    data = open_data(config)
    x = data.train.batch(slice(None))
    assert (
        x.shape == (46, 257, 3) and data.test().x.shape == (10, 257, 3) and x.dtype == torch.float32
    )
    assert x.min() >= 0 and x.max() <= 1
    centred = x - x.mean(1, keepdim=True)
    correlation = (centred[:, 1:] * centred[:, :-1]).mean() / centred.square().mean()
    assert correlation > 0.8  # independent steps would give 0 ± 0.01
    assert x.mean(1).std() < x.std()


class Payload:
    """Leaves a mark when unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.mkdir, (self.mark,))


def test_pickle_payloads_are_refused(tmp_path, mnist, cifar10):
    mark = tmp_path / "unpickled"
    payload = pickle.dumps(Payload(mark))
    pickle.loads(payload)
    assert mark.is_dir()  # the trap works
    mark.rmdir()

    objects = io.BytesIO()
    np.save(objects, np.array([Payload(mark)] * 300, dtype=object), allow_pickle=True)
    for name, content in (
        ("object.npy", objects.getvalue()),
        ("raw.npy", payload),
        ("raw.npy.gz", gzip.compress(payload)),
        ("raw.csv", payload),
        ("raw.parquet", payload),
    ):
        (tmp_path / name).write_bytes(content)
        refused(series(tmp_path / name), name)
    (tmp_path / "raw.txt").write_bytes(payload)
    refused(text(tmp_path / "raw.txt"), "raw.txt")
    for name in ("train-labels-idx1-ubyte", "train-images-idx3-ubyte"):  # images are read first
        (mnist / name).write_bytes(payload)
        refused(DataConfig(name="mnist", dir=str(mnist)), name)
    for path in (cifar10 / "cifar-10-batches-bin").iterdir():
        path.write_bytes(payload)
    refused(DataConfig(name="cifar10", dir=str(cifar10)), "data_batch_1.bin")
    assert not mark.exists()


def test_describe_and_picture(tmp_path):
    from matplotlib.image import imread

    write_csv(tmp_path / "a.csv", np.random.default_rng(0).normal(size=(200, 12)))
    (tmp_path / "a.txt").write_text("$x^ and 統計\x00\n" * 100)
    configs = (
        DataConfig(),
        DataConfig(name="synthetic", synthetic=SyntheticConfig(num=10)),
        series(tmp_path / "a.csv", context=9, horizon=4),
        text(tmp_path / "a.txt", length=20),
    )
    for config in configs:
        data = open_data(config)
        facts = describe(data)
        assert json.loads(json.dumps(facts)) == facts
        assert facts["splits"]["train"] == len(data.train) and facts["shape"][0] == data.meta.length
        assert [file["sha256"] for file in facts["files"]] == [
            sha256(path.read_bytes()) for path in data.files
        ]
        shown = imread(picture(data, tmp_path / f"{config.name}.png"))
        assert shown.std() > 0.01 and shown.shape[1] > 300
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )


def test_drawn_images_are_exact_pixels(tmp_path):
    from matplotlib.image import imread

    meta = Meta(
        name="digits", features=8, length=8, suggested_head="gaussian", image_shape=(8, 8, 1)
    )
    x = torch.arange(3 * 64).reshape(3, 8, 8) / 255
    shown = imread(draw(meta, x, tmp_path / "a.png"))
    zoom = shown.shape[0] // 10
    pixels = shown[zoom // 2 :: zoom, zoom // 2 :: zoom, 0]
    np.testing.assert_allclose(pixels[1:9, 11:19], x[1], atol=1e-6)


def real(*names):
    found = [Path(REAL, name) for name in names if REAL and Path(REAL, name).exists()]
    return pytest.mark.skipif(not found, reason=f"needs $VSSM_DATA with {' or '.join(names)}")


@real("mnist", "train-images-idx3-ubyte.gz", "train-images-idx3-ubyte")
def test_mnist_has_the_published_counts():
    data = open_data(DataConfig(name="mnist", dir=REAL))
    counts = torch.bincount(torch.cat([data.train.labels, data.valid.labels])).tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    test = data.test()
    assert torch.bincount(test.labels).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    assert len(data.valid) == 6000 and data.train.x.shape == (54000, 28, 28)
    assert data.checksum == "compared with the published sha256"


@real(
    "cifar-10-batches-bin",
    "cifar10/data_batch_1.bin",
    "cifar10/cifar-10-batches-bin",
    "cifar-10-binary.tar.gz",
)
def test_cifar10_has_the_published_counts_and_pixels():
    data = open_data(DataConfig(name="cifar10", dir=REAL))
    assert torch.bincount(torch.cat([data.train.labels, data.valid.labels])).tolist() == [5000] * 10
    test = data.test()
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    pixels = test.x.reshape(10000, 32, 32, 3).numpy()
    assert sha256(pixels) == "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"
    assert len(data.valid) == 5000


@real("text/tinyshakespeare.txt", "tinyshakespeare.txt")
def test_tinyshakespeare_has_65_characters():
    data = open_data(DataConfig(name="text", dir=REAL))
    assert data.meta.features == 65
    assert data.meta.decode(data.train.batch([0])[0]).startswith(
        "First Citizen:\nBefore we proceed any further"
    )


@real("timeseries")
@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("ETTh1.csv.gz", 17420, 7),
        ("exchange_rate.txt.gz", 7588, 8),
        ("national_illness.csv.gz", 966, 7),
    ],
)
def test_real_series_load(name, rows, columns):
    config = dataclasses.replace(series(name, context=24, horizon=12), dir=REAL)
    data = open_data(config)
    assert data.meta.features == columns and len(data.train) == int(0.7 * rows) - 35
    assert data.train.x.isfinite().all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": 0.5}, r"seed \(--split-seed\) is 0.5; it must be"),
        ({"seed": True}, r"seed \(--split-seed\) is True; it must be"),
        ({"dir": 5}, "dir is a int; it must be a path"),
        ({"binarize": "no"}, "binarize is a str; it must be True or False"),
        (
            {"synthetic": {"num": 1e3}},
            r"synthetic.num is 1000.0; it must be a whole number >= 10",
        ),
        (
            {"synthetic": {"length": float("nan")}},
            "synthetic.length is nan; it must be a whole",
        ),
        (
            {"text": {"length": True}},
            "text.length is True; it must be a whole number >= 1",
        ),
        ({"arrays": {"path": 5}}, "arrays.path is a int; it must be a path"),
        ({"series": {"path": ["x"]}}, "series.path is a list; it must be a path"),
        ({"series": {"separate": 1}}, "series.separate is a int; it must be True or False"),
        (
            {"series": {"season": 2.0}},
            "series.season is 2.0; it must be a whole number >= 1",
        ),
    ],
)
def test_wrong_values_in_a_config_file_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.from_dict({"data": values})


def test_every_row_of_a_part_is_forecast(tmp_path):
    """Validation and test take the context of their first window from the part before."""
    path = write_csv(tmp_path / "a.csv", np.arange(200.0)[:, None] * [1, -1])
    data = open_data(series(path, context=10, horizon=5, scale="none"))
    for split, low, high in (
        (data.train, 10, 140),
        (data.valid, 140, 160),
        (data.test(), 160, 200),
    ):
        ahead = split.batch(slice(None))[:, 10:, 0]
        assert ahead.unique().tolist() == list(range(low, high))


@pytest.mark.parametrize(("days", "cycles"), [(16, ("day",)), (21, ("day", "week"))])
def test_a_cycle_counts_when_training_goes_through_it_twice(days, cycles, tmp_path):
    """Seven tenths of the rows are for training: 11 days and 14.7."""
    rows = [[d, k] for k, d in enumerate(DATES[: 24 * days])]
    path = write_csv(tmp_path / "a.csv", rows, header=["date", "a"])
    assert open_data(series(path, context=4, horizon=2, time_features=True)).meta.cycles == cycles


def test_splits_and_bits_of_digits_are_pinned():
    """They must never change, or results of old runs would not compare."""
    data = open_data(DataConfig(name="digits"))
    assert data.test().labels[:8].tolist() == [3, 5, 0, 1, 4, 5, 9, 6]
    assert data.valid.labels[:8].tolist() == [0, 7, 0, 8, 6, 1, 6, 1]
    data = open_data(DataConfig(name="digits", binarize=True))
    assert [int(split.x.sum()) for split in (data.train, data.valid, data.test())] == [
        25316,
        2825,
        7017,
    ]


def test_digest_tells_apart_values_with_equal_means():
    flat, peak = (
        Split(torch.tensor(values).view(1, 3, 1)) for values in ([1.0, 1, 1], [0.0, 3, 0])
    )
    assert flat.digest() == [1.0, 1.0, 0.5]
    assert peak.digest() == [1.0, 3.0, 0.5]


@pytest.mark.parametrize(
    ("first", "rows", "names"),
    [
        ("date,2019,2020", "2024-01-{:02d},{},{}", ("2019", "2020")),
        ("date,0,OT", "2024-01-{:02d},{},{}", ("0", "OT")),
        (",0,1", "{},{},{}", ("0", "1")),
        ('date,"load; MW",b', "2024-01-{:02d},{},{}", ("load; MW", "b")),
        ("1,2,3", "{},{},{}", ("0", "1", "2")),
        ("2024/01/01,1,2", "2024-01-{:02d},{},{}", ("1", "2")),  # another date, no word
    ],
)
def test_a_header_may_have_numbers(first, rows, names, tmp_path):
    lines = [rows.format(k, k, k * k) for k in range(1, 29)]
    (tmp_path / "a.csv").write_text("\n".join([first, *lines]))
    options = series(tmp_path / "a.csv", context=3, horizon=2, fill="zero")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert open_data(options).meta.columns == names


def test_columns_that_are_left_out_by_their_name_are_noted(tmp_path):
    values = np.random.default_rng(0).normal(size=(60, 2))
    (tmp_path / "a.csv").write_text("\n".join(["index,vol", *(f"{a},{b}" for a, b in values)]))
    with pytest.warns(
        UserWarning, match="column 'index' of numbers is left out because of its name"
    ):
        open_data(series(tmp_path / "a.csv", context=3, horizon=2))


def test_a_byte_order_mark_is_no_character(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 40, encoding="utf-8-sig")
    config = DataConfig(name="text", text=TextConfig(path=str(tmp_path / "a.txt"), length=8))
    assert "\ufeff" not in open_data(config).meta.vocabulary


def test_large_splits_are_read_in_parts(monkeypatch):
    from vssm.training.setup import check_values

    split = Split(torch.randn(50, 7, 3))
    digest = split.digest()
    x = split.x.reshape(-1).double()
    assert digest == pytest.approx(
        [float(v.mean()) for v in (x, x * x, x * torch.linspace(0, 1, len(x)))]
    )
    monkeypatch.setattr("vssm.data.split.PART", 100)  # four sequences
    assert split.digest() == pytest.approx(digest, rel=1e-12)
    assert [len(part) for part in split.parts()] == [*12 * [4], 2]
    split.x[41, 2, 1] = torch.nan
    with pytest.raises(ValueError, match="the set from row 40 "):
        check_values(small_model("ssm").head, split, "the set")


def test_images_are_moved_by_a_pixel_as_often_as_asked():
    from vssm.data import moved

    x = torch.rand(2000, 5, 4 * 3)
    made = moved(x, 0.6, 3, torch.Generator().manual_seed(0))
    # What comes to a pixel off the edges is one of its neighbours, with all of its channels.
    image, given = made.view(2000, 5, 4, 3), x.view(2000, 5, 4, 3)
    steps = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    found = torch.stack([(image[:, 2, 1] == given[:, 2 + i, 1 + j]).all(-1) for i, j in steps])
    assert (found.sum(0) == 1).all()
    counts = dict(zip(steps, found.sum(1).tolist(), strict=True))
    assert abs(counts.pop((0, 0)) - 2000 * (0.4 + 0.6 / 9)) < 120
    assert all(abs(count - 2000 * 0.6 / 9) < 60 for count in counts.values())
    up = found[steps.index((-1, 0))]
    assert torch.equal(made[up][:, 1:], x[up][:, :-1]) and torch.equal(made[up][:, 0], x[up][:, 0])
    # Parts of a batch are moved as the whole is.
    parts = [
        moved(x[i * 500 :][:500], 0.6, 3, torch.Generator().manual_seed(0), (i, 4))
        for i in range(4)
    ]
    assert torch.equal(torch.cat(parts), made)
    assert torch.equal(moved(x, 0.0, 3), x)


def folder_of_images(folder, num=12, size=(6, 4), mode="RGB", name="{:02d}.png"):
    """Writes random images and returns their pixels, (num, height, width[, 3])."""
    folder.mkdir(exist_ok=True)
    width, height = size
    shape = (num, height, width, 3) if mode == "RGB" else (num, height, width)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    for k, image in enumerate(pixels):
        Image.fromarray(image).save(folder / name.format(k))
    return pixels


def images_in(folder, **options):
    return DataConfig(name="images", images=ImagesConfig(path=str(folder)), **options)


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_a_folder_of_images_is_read_in_the_order_of_names(tmp_path, mode, channels):
    pixels = folder_of_images(tmp_path / "a", mode=mode)
    data = open_data(images_in(tmp_path / "a"))
    assert data.meta.image_shape == (4, 6, channels) and data.meta.levels == 256
    assert (data.meta.features, data.meta.length, data.meta.suggested_head) == (
        6 * channels,
        4,
        "gaussian",
    )
    splits = (data.train, data.valid, data.test())
    assert [len(split) for split in splits] == [10, 1, 1] and data.train.x.dtype == torch.uint8
    rest, test = hold_out(12, 0, stream=ARRAYS)
    kept, _ = hold_out(11, 0)
    expected = torch.from_numpy(pixels[rest[kept]]).reshape(10, 4, 6 * channels).float() / 255
    assert torch.equal(data.train.batch(slice(None)), expected)
    assert torch.equal(data.test().x, torch.from_numpy(pixels[test]).reshape(1, 4, 6 * channels))
    assert [path.name for path in data.files] == [f"{k:02d}.png" for k in range(12)]


def test_grey_transparent_and_turned_images_are_read(tmp_path):
    folder = tmp_path / "a"
    folder_of_images(folder, mode="L", size=(4, 4))
    grey = Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4))
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    clear.putpixel((1, 0), (255, 0, 0, 255))
    palette = Image.new("P", (4, 4))
    palette.putpalette([1, 2, 3])
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn clockwise
    grey.save(folder / "20_turned.png", exif=turned)
    clear.save(folder / "21_clear.PNG")
    palette.save(folder / "22_palette.gif")
    Image.new("1", (4, 4), 1).save(folder / "23_black_and_white.png")
    Image.new("L", (4, 4), 200).save(folder / "24.jpg", quality=95)
    (folder / ".hidden.png").write_text("no image")
    (folder / "more").mkdir()
    (folder / "notes.txt").write_text("no image")
    with pytest.warns(UserWarning, match=r"1 files are left out, such as notes\.txt"):
        data = open_data(images_in(folder))
    assert data.meta.image_shape == (4, 4, 3) and len(data.files) == 17
    x = torch.cat([data.train.x, data.valid.x, data.test().x])
    found = {image.numpy().tobytes() for image in x}
    white = np.full((4, 4, 3), 255, np.uint8)
    dot = white.copy()
    dot[0, 1] = [255, 0, 0]
    rotated = np.rot90(np.asarray(grey), -1)[..., None].repeat(3, -1)
    others = [
        white,
        dot,
        rotated,
        np.zeros_like(white) + np.array([1, 2, 3], np.uint8),
        white // 255 * 200,
    ]
    assert all(np.ascontiguousarray(image).tobytes() in found for image in others)


def test_bad_folders_of_images_are_named(tmp_path):
    folder = tmp_path / "a"
    refused(DataConfig(name="images"), "images.path is needed: a folder of images")
    refused(images_in(folder), "found no a in the place given", "--data-dir")
    folder_of_images(folder, num=9)
    refused(
        images_in(folder), f"{folder} has 9 images directly in it; put 10 or more there", ".png"
    )
    refused(images_in(folder / "00.png"), "00.png' is a file; use a folder")
    folder_of_images(folder, num=12)
    odd = folder / "05.png"
    whole = odd.read_bytes()
    Image.new("RGB", (8, 4)).save(odd)
    refused(
        images_in(folder),
        f"{odd} has 8 x 4 pixels, but 00.png has 6 x 4; all images must have one size",
    )
    Image.fromarray(np.zeros((4, 6), np.uint16)).save(odd)
    refused(images_in(folder), odd, "more than 8 bits")
    for content in (b"", b"words", whole[: len(whole) // 2], whole[:60] + b"\0" * 20 + whole[80:]):
        odd.write_bytes(content)
        refused(images_in(folder), f"{odd} is damaged or no image: ")
    odd.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 4\n")  # would start a program
    refused(images_in(folder), f"{odd} is damaged or no image: ")


def test_a_folder_of_images_is_found_in_the_data_folder(tmp_path):
    (tmp_path / "data" / "images").mkdir(parents=True)
    folder_of_images(tmp_path / "data" / "images" / "a")
    found = open_data(images_in("a", dir=str(tmp_path / "data")))
    assert found.files[0].parent == tmp_path / "data" / "images" / "a"
    # The absolute path of another machine: its name is looked for.
    moved = open_data(images_in("/nowhere/else/a", dir=str(tmp_path / "data")))
    assert moved.files == found.files
