"""Data sets are found, checked, split and shown; bad options and files are named in one line."""

import dataclasses
import gc
import gzip
import io
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro

from tests.conftest import small_model
from tests.data.opening import refused, series, sha256, text, write_csv
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
from vssm.data.dataset import digest, hold_out, in_parts, random_bits
from vssm.data.series import Windows


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
            ("series.scale='robust'", "'window', 'column', 'none'"),
        ),
        (lambda: TextConfig(unit="word"), ("text.unit='word'", "'char', 'byte'")),
        (lambda: SyntheticConfig(num=3), ("synthetic.num", "3", "10")),
    ],
)
def test_bad_options_are_named(make, parts):
    refused(make, *parts)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": True}, r"seed \(--split-seed\) is True; it must be"),
        ({"synthetic": {"num": 1e3}}, r"synthetic.num is 1000.0; it must be a whole number >= 10"),
        ({"text": {"length": True}}, "text.length is True; it must be a whole number >= 1"),
        ({"series": {"context": 2.0}}, "series.context is 2.0; it must be a whole number >= 1"),
        ({"series": {"season": 24}}, "series has no field 'season'; choose from 'path', "),
    ],
)
def test_wrong_values_in_a_config_file_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.from_dict({"data": values})


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


def test_training_does_not_read_the_test_split(mnist):
    (mnist / "t10k-images-idx3-ubyte.gz").write_bytes(b"damaged")
    data = open_data(DataConfig(name="mnist", dir=str(mnist)))
    assert len(data.train) == 45 and len(data.valid) == 5
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte\.gz has content with sha256"):
        data.test()


def windows(rows, starts, length):
    return Windows(rows, starts=torch.tensor(starts), length=length)


def test_split_batches_tokens_as_int64_and_windows_share_their_rows():
    tokens = Split(torch.arange(12, dtype=torch.int16).reshape(3, 4))
    assert tokens.batch([2]).dtype == torch.int64 and tokens.batch([2]).tolist() == [[8, 9, 10, 11]]
    rows = torch.arange(40.0).reshape(20, 2)
    split = windows(rows, [*range(0, 16, 2)], 5)
    assert len(split) == 8 and split.shape == (5, 2)
    moved = split.to("meta")
    assert moved.x.shape == (20, 2) and moved.batch(slice(0, 3)).shape == (3, 5, 2)
    assert torch.equal(split.batch(torch.tensor([1, 7])), torch.stack([rows[2:7], rows[14:19]]))


@pytest.mark.gpu
def test_split_on_the_device_gives_the_same_batches():
    for split in (
        open_data(DataConfig()).train,
        windows(torch.rand(50, 3), [*range(0, 43, 3)], 7),
    ):
        index = torch.tensor([4, 0, 9])
        moved = split.to("cuda")
        assert torch.equal(moved.batch(index.cuda()).cpu(), split.batch(index))
        assert torch.equal(split.batch(index, "cuda").cpu(), split.batch(index))


def test_digest_tells_apart_values_with_equal_means():
    flat, peak = (
        Split(torch.tensor(values).view(1, 3, 1)) for values in ([1.0, 1, 1], [0.0, 3, 0])
    )
    assert digest(flat) == [1.0, 1.0, 0.5]
    assert digest(peak) == [1.0, 3.0, 0.5]


def test_large_splits_are_read_in_parts(monkeypatch):
    from vssm.training.setup import check_values

    split = Split(torch.randn(50, 7, 3))
    numbers = digest(split)
    x = split.x.reshape(-1).double()
    assert numbers == pytest.approx(
        [float(v.mean()) for v in (x, x * x, x * torch.linspace(0, 1, len(x)))]
    )
    monkeypatch.setattr("vssm.data.dataset.PART", 100)  # four sequences
    assert digest(split) == pytest.approx(numbers, rel=1e-12)
    assert [len(part) for part in in_parts(split)] == [*12 * [4], 2]
    split.x[41, 2, 1] = torch.nan
    with pytest.raises(ValueError, match="the set from row 40 "):
        check_values(small_model("ssm").head, split, "the set")


def test_meta_survives_json_and_refuses_newer_fields(tmp_path):
    write_csv(tmp_path / "a.csv", np.random.default_rng(0).normal(3, 2, (50, 2)))
    for config in (DataConfig(), series(tmp_path / "a.csv", context=3, horizon=2)):
        meta = open_data(config).meta
        assert Meta.from_json(json.loads(json.dumps(meta.to_json()))) == meta
    fields = meta.to_json()
    earlier = {"cycles": [], "fill": "previous", "horizon": 24, "time": "date"}
    earlier |= {"patch": 1, "season": 1, "separate": False, "given_std": None}
    assert Meta.from_json(fields | earlier) == meta
    assert Meta.from_json(fields | {"mean": [1.0], "given_mean": [2.0, 3.0]}).mean == (1, 2, 3)
    for wrong in (fields | {"patch": 2}, fields | {"colour": 1}, {"name": "series"}, [], None):
        with pytest.raises(ValueError, match=r"^data_meta does not fit this version: .*"):
            Meta.from_json(wrong)


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


def test_download_is_checked_cached_and_not_repeated(server, tmp_path):
    (tmp_path / "site" / "a.txt").write_bytes(b"hello")
    remote = files.Remote(f"{server}/a.txt", sha256(b"hello"), "text/a.txt")
    path = files.locate("a.txt", ["text"], None, remote)
    assert path == tmp_path / "cache" / "text" / "a.txt" and path.read_bytes() == b"hello"
    (tmp_path / "site" / "a.txt").unlink()
    assert files.locate("a.txt", ["text"], None, remote) == path


def test_download_with_another_checksum_names_both_and_leaves_nothing(server, tmp_path):
    (tmp_path / "site" / "a.txt").write_bytes(b"other")
    with pytest.raises(ValueError) as caught:
        files.locate(
            "a.txt", ["text"], None, files.Remote(f"{server}/a.txt", sha256(b"hello"), "a.txt")
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
        files.locate("a.txt", ["text"], str(tmp_path), files.Remote(url, sha256(b"hello"), "a.txt"))
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
        content = (mnist / f"{name}.gz").read_bytes()
        (tmp_path / "site" / f"{name}.gz").write_bytes(content)
    data = open_data(DataConfig(name="mnist"))
    path = data.files[0]
    assert len(data.train) == 45 and path.is_relative_to(tmp_path / "cache")
    damaged = bytearray(path.read_bytes())
    damaged[500] ^= 1
    path.write_bytes(damaged)
    refused(DataConfig(name="mnist"), path, sha256(damaged), images.MNIST[path.stem])
    assert path.read_bytes() == damaged


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
        (mnist / f"{name}.gz").write_bytes(payload)
        refused(DataConfig(name="mnist", dir=str(mnist)), name)
    for path in (cifar10 / "cifar-10-batches-bin").iterdir():
        path.write_bytes(payload)
    refused(DataConfig(name="cifar10", dir=str(cifar10)), "data_batch_1.bin")
    assert not mark.exists()


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
