"""The comparison of forecasters: scores of every model, runs that continue, and mistakes."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conftest import small_config
from vssm.config import TrainConfig
from vssm.data import SeriesConfig
from vssm.lab import compare_forecasts
from vssm.lab.compare_forecasts import (
    Comparison,
    RollingWindows,
    best_temperature,
    compare,
    naive_paths,
)
from vssm.runs.folder import RunFolder, read_config
from vssm.training.loop import train
from vssm.training.progress import Progress


@pytest.fixture
def options(tmp_path):
    """A small comparison of models on two waves."""
    path = tmp_path / "waves.csv"
    rows = [f"{np.sin(t / 3):.4f},{100 * np.cos(t / 5):.4f}" for t in range(240)]
    path.write_text("\n".join(["a,b", *rows]) + "\n")
    return Comparison(
        series=SeriesConfig(path=str(path), context=12, horizon=6, separate=True),
        model=small_config("vssm", head="auto", width=8, layers=1),
        train=TrainConfig(max_steps=2, batch=16, samples=0, num_valid=8, device="cpu"),
        models=("naive", "vssm", "rnn"),
        samples=7,
        season=6,
        chunk=2,
        shapes=("2x3x9",),
        runs=tmp_path / "runs",
        out=tmp_path / "results" / "waves.json",
    )


class StopAtValidation(Progress):
    """Stops a training once it has weights."""

    def line(self, line):
        if line["split"] == "valid":
            raise KeyboardInterrupt


def test_stopped_run_is_continued(options, tmp_path, monkeypatch):
    steps = replace(options.train, max_steps=4, validate_every=0.1)
    options = replace(options, models=("rnn",), train=steps, calibrate=False, shapes=())
    whole = compare(replace(options, runs=tmp_path / "whole"))["metrics"]
    folder = options.runs / "waves-rnn"
    with monkeypatch.context() as patch:
        patch.setattr(
            compare_forecasts, "train", lambda *a, **k: train(*a, **k, progress=StopAtValidation())
        )
        with pytest.raises(KeyboardInterrupt):
            compare(options)
    assert (folder / "weights.safetensors").exists() and not RunFolder(folder).has_ended()
    made = compare(options)["metrics"]
    assert RunFolder(folder).has_ended() and made["rnn_crps"] == whole["rnn_crps"]
    monkeypatch.setattr(compare_forecasts, "train", lambda *_, **__: pytest.fail("it has ended"))
    assert compare(options)["metrics"]["rnn_crps"] == whole["rnn_crps"]


def test_runs_of_other_settings_are_refused(options, monkeypatch):
    options = replace(options, models=("rnn",), calibrate=False, shapes=())
    compare(options)
    written = options.out.read_text()
    monkeypatch.setattr(compare_forecasts, "train", lambda *_, **__: pytest.fail("too early"))
    width, steps = replace(options.model, width=16), replace(options.train, max_steps=3)
    for change, message in (
        ({"model": width}, "model.width=16 differs from 8 of the run in .*rnn"),
        ({"train": steps}, "train.max_steps=3 differs from 2 of the run"),
        (
            {"series": replace(options.series, horizon=5)},
            "data.series.horizon=5 differs from 6 of the run",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            compare(replace(options, models=("vssm", "rnn"), **change))
    assert options.out.read_text() == written


def test_metrics_of_every_model_are_written(options):
    options, lines = replace(options, model=replace(options.model, latents=4, levels=2)), []
    compare(options, lines.append)
    metrics = json.loads(options.out.read_text())["metrics"]
    assert metrics["vssm_temperature"] >= 1 and metrics["rnn_temperature"] >= 1
    assert len(lines) == 4 + sum(f"{kind}_t1_crps" in metrics for kind in ("vssm", "rnn"))
    assert metrics["windows"] == 8 and metrics["columns"] == 2
    for name in ("naive", "vssm", "vssm_w2", "rnn"):
        assert metrics[f"{name}_crps"] > 0 and 0 <= metrics[f"{name}_coverage80"] <= 1
        assert {f"{name}_{key}" for key in ("wql", "mase", "energy", "mae")} <= set(metrics)
    assert metrics["vssm_ms_2x3x9"] > 0 and metrics["rnn_parameters"] > 0
    levels = {
        kind: read_config(options.runs / f"waves-{kind}").model.levels for kind in ("vssm", "rnn")
    }
    assert levels == {"vssm": 2, "rnn": 1}, "levels apply to vssm only"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ("deeper",)}, "models='deeper' is unknown; .*did you mean 'deepar'"),
        ({"season": 13}, "season=13 is not allowed; allowed: 1 to 12"),
        ({"shapes": ("3x3",)}, "shapes='3x3' is not allowed"),
        ({"part": "train"}, "part='train' is unknown; allowed: 'test', 'valid'"),
        ({"series": SeriesConfig()}, "series.path is needed"),
        *(
            ({key: 0}, f"{key}=0 is not allowed; allowed: a whole number >= 1")
            for key in ("windows", "stride", "samples", "chunk", "deepar_epochs", "deepar_context")
        ),
    ],
)
def test_mistakes_are_named(options, change, message):
    with pytest.raises(ValueError, match=message):
        compare(replace(options, **change))


def test_naive_forecast_repeats_the_season():
    values = np.tile([[1.0], [2.0], [4.0]], (20, 1))
    options = Comparison(series=SeriesConfig(context=6, horizon=4), season=3, samples=5)
    windows = RollingWindows(options, None, values)
    assert torch.equal(naive_paths(windows), windows.future[:, None].expand(-1, 5, -1, -1))


def test_noise_of_the_naive_forecast_grows_with_the_seasons_ahead():
    series = SeriesConfig(context=6, horizon=7)
    options = Comparison(series=series, season=3, samples=4000, windows=1)
    windows = RollingWindows(options, None, np.random.default_rng(0).normal(size=(60, 1)))
    change = windows.history[0, 3:] - windows.history[0, :-3]
    expected = np.sqrt(np.square(change).mean() * np.array([1, 1, 1, 2, 2, 2, 3]))
    np.testing.assert_allclose(naive_paths(windows)[0, :, :, 0].std(0), expected, rtol=0.05)


def test_scores_are_in_the_units_of_the_training_rows():
    options = Comparison(series=SeriesConfig(context=6, horizon=4), season=3)
    values = np.random.default_rng(0).normal(size=(100, 2)) * [1, 5]
    changed, rows = values.copy(), values[:70]
    changed[70:] *= 9
    for windows in (RollingWindows(options, None, v) for v in (values, changed)):
        np.testing.assert_allclose(windows.mean, rows.mean(0))
        np.testing.assert_allclose(windows.std, rows.std(0))
        naive = np.abs(rows[3:] - rows[:-3]).mean(0) / rows.std(0)
        np.testing.assert_allclose(windows.naive, naive)


def test_temperature_is_the_best_on_validation(monkeypatch):
    def score(windows, temperature):
        assert windows.options.part == "valid"
        assert windows.starts.min() >= 70 and windows.starts.max() <= 76
        return {"crps": abs(temperature - 2.0)}

    monkeypatch.setattr(RollingWindows, "forecast", lambda self, model, temperature: temperature)
    monkeypatch.setattr(RollingWindows, "score", score)
    options = Comparison(series=SeriesConfig(context=6, horizon=4), season=3)
    values = np.random.default_rng(0).normal(size=(100, 2))
    assert best_temperature(None, RollingWindows(options, None, values)) == 2.0


def test_module_runs_as_a_command():
    command = [sys.executable, "-m", "vssm.lab.compare_forecasts", "--season", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("vssm: season=0 is not allowed")
