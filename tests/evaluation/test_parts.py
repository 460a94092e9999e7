"""How well unknown entries are made, by the name of what is known."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import vssm
from tests.tiny_runs import any_part, gaps, run, tiny
from vssm.cli import main
from vssm.data import DataConfig, Meta, open_data
from vssm.evaluation.parts import known_entries
from vssm.evaluation.quality import Work, make_sequences
from vssm.evaluation.scores import fill_scores
from vssm.models import build
from vssm.training.setup import resolve

CPU = torch.device("cpu")


def work_on(config, batch=16):
    data = open_data(config.data, missing=True)
    torch.manual_seed(0)
    model = build(resolve(config, data.meta).model).eval()
    return Work(model, data, data.test(), CPU, batch)


def test_pixels_are_known_as_a_whole_and_given_features_always():
    meta = Meta(name="x", features=16, length=4, suggested_head="gaussian", image_shape=(4, 4, 3))
    meta = Meta.from_json({**meta.to_json(), "classes": 4})
    numbers = torch.arange(2)
    known = known_entries(meta, "hole:2", numbers)
    assert known.shape == (2, 4, 16) and known[..., 12:].all()
    pixels = known[..., :12].unflatten(-1, (4, 3))
    assert torch.equal(pixels.any(-1), pixels.all(-1))
    assert (~pixels[:, 1:3, 1:3]).all() and pixels.sum() == 2 * (16 - 4) * 3
    assert not known_entries(meta, None, numbers)[..., :12].any()


def test_masks_do_not_depend_on_the_batch():
    meta = Meta(name="x", features=3, length=8, suggested_head="gaussian")
    whole = known_entries(meta, "random:0.5", torch.arange(6))
    assert torch.equal(whole[4:], known_entries(meta, "random:0.5", torch.arange(4, 6)))
    assert 0.3 < whole.double().mean() < 0.7


def test_nats_are_those_of_log_likelihood():
    work = work_on(any_part(DataConfig(labels=True)), batch=5)
    index = np.arange(12)
    found = fill_scores(work, index, "hole:4", passes=2, num_samples=3)
    x = work.split.batch(index)
    known = known_entries(work.data.meta, "hole:4", torch.arange(12))
    nats = vssm.log_likelihood(work.model, x, 3, known=known, passes=2)
    assert found == pytest.approx({"nats_hole4_s2": -float(nats.mean()) / 16}, rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"given": ("price",)}])
def test_scores_of_a_series_are_in_deviations_of_its_columns(tmp_path, options):
    config = any_part(gaps(tmp_path, scale="window", **options))
    work, other = work_on(config, batch=7), work_on(config)
    index = np.arange(10)
    found = fill_scores(work, index, "block:1", passes=1, num_samples=4)
    assert found == pytest.approx(fill_scores(other, index, "block:1", 1, 4), rel=1e-4)
    known = known_entries(work.data.meta, "block:1", torch.arange(10))
    x, (_, unit) = (part(index, CPU, known) for part in (work.split.batch, work.split.scale))
    gap = torch.where(known, x, torch.nan)
    copies = vssm.fill(work.model, gap, num=4, observe="sample")
    there = ~known & ~x.isnan()
    error = ((copies.mean(1) - x) * unit)[there]
    assert found["rmse_block1"] == pytest.approx(float(error.square().mean().sqrt()), rel=1e-4)
    assert 0 < found["crps_block1"] < found["rmse_block1"] * 2


def test_windows_are_scaled_by_known_values_alone(tmp_path):
    work = work_on(any_part(gaps(tmp_path, scale="window")))
    known = known_entries(work.data.meta, "random:0.5", torch.arange(6))
    index = np.arange(6)
    before = work.split.batch(index, CPU, known)
    split = work.split
    raw = torch.stack([split.x[start:][: split.length] for start in split.starts[index]])
    raw = torch.where(known, raw, raw + 100)
    starts = split.length * torch.arange(6)  # so that windows have no rows in common
    changed = replace(split, x=raw.flatten(0, 1), starts=starts)
    after = changed.batch(index, CPU, known)
    assert torch.equal(before[known].nan_to_num(7), after[known].nan_to_num(7))


def test_known_entries_come_back(tmp_path):
    work = work_on(any_part(DataConfig(labels=True)))
    x, numbers = work.split.batch(slice(0, 4)), torch.arange(4)
    made = make_sequences(work, x, range(4), "block:3", passes=2)
    known = known_entries(work.data.meta, "block:3", numbers)
    assert torch.equal(made[known], x[known]) and not torch.equal(made, x)


def test_evaluate_measures_what_is_unknown_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(any_part(DataConfig(labels=True)), tmp_path / "images")
    names = ["--known", "random:0.5", "hole:4", "--passes", "2"]
    main(["evaluate", "images", "--quick", "--max-sequences", "8", *names])
    result = json.loads((tmp_path / "images" / "eval.json").read_text())
    metrics = result["metrics"]
    for name in ("nats_random50_s2", "nats_hole4_s2", "fd_random50_s2", "fd_hole4_s2"):
        assert np.isfinite(metrics[name])
    assert 0 <= metrics["label_accuracy"] <= 1 and metrics["fd_prompted"] > 0
    assert result["command"].endswith("--known random:0.5 hole:4 --passes 2")
    assert "a hole of 4, 2 passes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["evaluate", "images", "--quick", "--known", "half"])
    assert "known='half' is unknown; use prefix" in capsys.readouterr().err


def test_evaluate_measures_a_series_with_gaps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(any_part(gaps(tmp_path, given=("price",))), tmp_path / "series")
    main(["evaluate", "series", "--quick", "--max-sequences", "4", "--known", "block:2"])
    metrics = json.loads((tmp_path / "series" / "eval.json").read_text())["metrics"]
    for name in ("nats_block2", "crps_block2", "rmse_block2", "log_likelihood", "elbo", "mse"):
        assert np.isfinite(metrics[name])
    main(["report", "series"])
    assert "CRPS of 2 steps" in (tmp_path / "report.html").read_text()


def test_names_are_for_models_with_any_part_known(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(tiny("ssm", max_steps=1), tmp_path / "plain")
    with pytest.raises(SystemExit):
        main(["evaluate", "plain", "--quick", "--known", "prefix"])
    assert "train with --model.known any" in capsys.readouterr().err
