"""`vssm fill`: tables, pictures, texts and arrays keep what is known; mistakes are one line."""

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

import vssm
from tests.cli.test_cli import fails
from tests.conftest import small_model
from tests.data.test_series import OPTIONS, series_meta, wave_table
from vssm.cli import main
from vssm.data import Meta

SIZES = {"known": "any", "window": 4, "levels": 2, "latents": 4}


def save_run(folder, meta, head="gaussian", **options):
    """Writes an untrained run of a model that fills gaps."""
    vssm.save(small_model("vssm", head, features=meta.features, **SIZES, **options), folder)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "data_meta": meta.to_json()}))


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = wave_table()
    whole.to_csv("whole.csv", index=False)
    gaps = whole.copy()
    gaps.loc[[3, 4, 20], "a"] = np.nan
    gaps.loc[39, "b"] = np.nan
    gaps.to_csv("gaps.csv", index=False)
    return whole, gaps


@pytest.mark.parametrize("options", OPTIONS)
def test_a_table_keeps_what_is_known(table, options):
    whole, gaps = table
    save_run("run", series_meta("whole.csv", **options)[0], "gaussian-learned")
    main(["fill", "run", "--input", "gaps.csv", "--out", "one.csv", "--passes", "2"])
    made = pandas.read_csv("one.csv")
    assert list(made) == ["date", "a", "place", "b"]
    for column in made:
        there = gaps[column].notna()
        same = made[column][there] == pandas.read_csv("gaps.csv")[column][there]
        assert same.all() and made[column].notna().all()
    assert (made["a"] - whole["a"]).abs().max() < 200, "in the units of the column"


def test_samples_of_a_table_give_medians_and_quantiles(table):
    save_run("run", series_meta("whole.csv")[0], "gaussian-learned")
    run = ["fill", "run", "--input", "gaps.csv", "--num", "20", "--seed", "3"]
    main([*run, "--out", "many.csv"])
    made = pandas.read_csv("many.csv")
    low, high = made["a q0.1"], made["a q0.9"]
    assert list(made)[-4:] == ["a q0.1", "b q0.1", "a q0.9", "b q0.9"]
    assert (low <= made["a"]).all() and (made["a"] <= high).all()
    assert (low[[3, 4, 20]] < high[[3, 4, 20]]).all() and low[5] == high[5] == made["a"][5]
    main([*run, "--out", "many.npy"])
    samples = np.load("many.npy")
    assert samples.shape == (20, 40, 2)
    np.testing.assert_allclose(np.median(samples[:, 3, 0]), made["a"][3], rtol=1e-6)
    main([*run, "--out", "many.parquet"])
    np.testing.assert_allclose(pandas.read_parquet("many.parquet")["a"], made["a"], rtol=1e-12)


def test_a_picture_is_filled_where_it_is_transparent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    meta = Meta(
        name="squares", features=6, length=4, suggested_head="gaussian", image_shape=(4, 2, 3)
    )
    save_run("run", meta)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 2, 4), np.uint8)
    pixels[..., 3] = 255
    pixels[1:3, 0, 3] = 0
    Image.fromarray(pixels).save("hole.png")
    main(["fill", "run", "--input", "hole.png", "--out", "whole.png"])
    made = np.asarray(Image.open("whole.png"))
    known = pixels[..., 3] == 255
    assert made.shape == (4, 2, 3) and (made[known] == pixels[known][:, :3]).all()
    assert (made[~known] != pixels[~known][:, :3]).any()
    mask = np.where(known, 0, 255).astype(np.uint8)
    Image.fromarray(mask).save("mask.png")
    Image.fromarray(pixels[..., :3]).save("opaque.png")
    main(["fill", "run", "--input", "opaque.png", "--mask", "mask.png", "--out", "masked.png"])
    assert (np.asarray(Image.open("masked.png")) == made).all()
    main(["fill", "run", "--input", "hole.png", "--num", "3", "--out", "three.npy"])
    assert np.load("three.npy").shape == (3, 4, 6)
    main(["fill", "run", "--input", "hole.png", "--num", "3", "--out", "three.png"])


def test_a_picture_of_a_class(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    meta = Meta(
        name="squares", features=2, length=4, suggested_head="gaussian", image_shape=(4, 2, 1)
    )
    save_run("run", meta)
    vssm.save(small_model("vssm", features=5, given=3, **SIZES), "run")  # two pixels, three classes
    values = json.loads(Path("run/config.json").read_text())
    Path("run/config.json").write_text(json.dumps({**values, "data_meta": meta.to_json()}))
    Image.fromarray(np.zeros((4, 2, 4), np.uint8)).save("hole.png")
    made = []
    for label in ("0", "2"):
        main(["fill", "run", "--input", "hole.png", "--label", label, "--out", "a.npy"])
        made.append(np.load("a.npy"))
    assert made[0].shape == (1, 4, 2) and not np.array_equal(*made)
    run = ["fill", "run", "--input", "hole.png", "--out", "a.png"]
    assert "trained with labels; give --label 0 to 2" in fails(capsys, *run)
    assert "label=3 is not allowed; use 0 to 2" in fails(capsys, *run, "--label", "3")


def test_a_text_is_filled_at_its_underscores(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    meta = Meta(name="text", features=5, length=8, suggested_head="categorical", vocabulary="abcd ")
    save_run("run", meta, "categorical")
    Path("gaps.txt").write_text("ab __d a_\n")
    main(["fill", "run", "--input", "gaps.txt", "--num", "3", "--out", "whole.txt"])
    texts = Path("whole.txt").read_text().removesuffix("\n").split("\n---\n")
    assert len(texts) == 3
    assert all(len(text) == 9 and text[:3] + text[5:8] == "ab d a" for text in texts)
    assert "_" not in Path("whole.txt").read_text()
    capsys.readouterr()
    Path("gaps.txt").write_text("xy__")
    run = ["fill", "run", "--input", "gaps.txt", "--out", "whole.txt"]
    assert "characters outside the vocabulary: ['x', 'y']" in fails(capsys, *run)
    Path("gaps.txt").write_text("abcd")
    assert "input='gaps.txt' has no gaps; mark them" in fails(capsys, *run)
    assert "use .txt or .npy" in fails(capsys, *run[:-1], "a.csv")


def test_an_array_is_filled_where_it_is_nan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = small_model("vssm", **SIZES).eval()
    vssm.save(model, "model")
    x = torch.rand(3, 6, 3)
    x[0, 2:4] = torch.nan
    x[2, :, 1] = torch.nan
    np.save("gaps.npy", x)
    main(["fill", "model", "--input", "gaps.npy", "--out", "whole.npy", "--device", "cpu"])
    expected = vssm.fill(model, x[[0, 2]], num=1, rows=[0, 2])[:, 0]
    made = torch.from_numpy(np.load("whole.npy"))
    torch.testing.assert_close(made[[0, 2]], expected)
    assert torch.equal(made[1], x[1])
    np.save("one.npy", x[0])
    main(["fill", "model", "--input", "one.npy", "--num", "2", "--out", "two.npy"])
    assert np.load("two.npy").shape == (2, 6, 3)


def test_mistakes_give_one_line(table, capsys):
    meta, _ = series_meta("whole.csv")
    save_run("run", meta, "gaussian-learned")
    vssm.save(small_model("vssm"), "prefix")
    run = ["fill", "run", "--out", "out.csv", "--input"]
    prefix = fails(capsys, "fill", "prefix", "--out", "out.csv", "--input", "gaps.csv")
    assert "'prefix' continues sequences and cannot fill gaps; train a vssm with" in prefix
    assert "as the shipped 'mnist-any-small' was" in prefix
    assert "input='lost.csv' is not a file" in fails(capsys, *run, "lost.csv")
    assert "input='whole.csv' has no gaps; mark them" in fails(capsys, *run, "whole.csv")
    huge = wave_table()
    huge.loc[3, "b"] = 1e308
    huge.to_csv("huge.csv", index=False)
    assert "huge.csv: row 3, column 'b' is 1e+308" in fails(capsys, *run, "huge.csv")
    wave_table(5).to_csv("short.csv", index=False)
    assert "short.csv has 5 rows; a window of training has 8" in fails(capsys, *run, "short.csv")
    wave_table()[["date", "a"]].to_csv("narrow.csv", index=False)
    assert "has no column of numbers 'b'" in fails(capsys, *run, "narrow.csv")
    assert "num is 0" in fails(capsys, *run, "gaps.csv", "--num", "0")
    assert "passes is 0" in fails(capsys, *run, "gaps.csv", "--passes", "0")
    same = fails(capsys, "fill", "run", "--input", "gaps.csv", "--out", "gaps.csv")
    assert "are the same file" in same
    assert "use .csv or .parquet or .npy" in fails(
        capsys, "fill", "run", "--input", "gaps.csv", "--out", "a.png"
    )
    square = Meta(
        name="squares", features=3, length=4, suggested_head="gaussian", image_shape=(4, 3, 1)
    )
    save_run("images", square)
    Image.fromarray(np.zeros((4, 4, 4), np.uint8)).save("large.png")
    images = ["fill", "images", "--out", "out.png", "--input"]
    wrong = fails(capsys, *images, "large.png")
    assert "input='large.png' has 4 x 4 pixels; this run needs 4 x 3" in wrong
    Path("broken.png").write_bytes(b"nothing")
    assert "input='broken.png' is not a picture, or is damaged" in fails(
        capsys, *images, "broken.png"
    )
    assert not Path("out.csv").exists() and not Path("out.png").exists()
