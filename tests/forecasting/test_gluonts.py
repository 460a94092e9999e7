"""A forecaster where a GluonTS predictor was."""

import sys
import warnings

import numpy as np
import pandas
import pytest

import vssm
from vssm.forecasting.gluonts import predictor

HOURS = pandas.date_range("2024-01-01", periods=120, freq="h")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecaster")
    table = pandas.DataFrame({"a": np.arange(120) % 24.0}, index=HOURS)
    own = vssm.Forecaster(horizon=6, max_steps=3, width=16, batch=8, context=24)
    own.fit(table).save(folder)
    return folder


def make_entries(values):
    start = pandas.Period("2024-03-01", freq="h")
    return [{"start": start, "target": y, "item_id": f"s{k}"} for k, y in enumerate(values.T)]


def test_predictor_works_with_gluonts_evaluation(folder):
    pytest.importorskip("gluonts")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from gluonts.dataset.common import ListDataset
        from gluonts.evaluation import make_evaluation_predictions

        made = predictor(folder, num_samples=5)
        assert made.prediction_length == 6
        series = np.random.default_rng(0).normal(size=(60, 3)).cumsum(0) * [1, 100, 1e-3]
        dataset = ListDataset(make_entries(series), freq="h")
        forecasts, actual = make_evaluation_predictions(dataset, made, num_samples=8)
        forecasts, actual = list(forecasts), list(actual)
        assert [f.item_id for f in forecasts] == ["s0", "s1", "s2"]
        for forecast, whole in zip(forecasts, actual, strict=True):
            assert forecast.samples.shape == (8, 6)
            assert forecast.start_date == whole.index[-6]
            away = np.abs(forecast.samples - whole.to_numpy()[-7]).mean()
            assert away < 5 * whole.to_numpy()[:-6].std(), "in the units of the series"
        ragged = [{**one, "target": one["target"][: 30 + k]} for k, one in enumerate(dataset)]
        assert [f.samples.shape for f in made.predict(ragged)] == [(5, 6)] * 3
        with pytest.raises(ValueError, match=r"target of entry 0 has shape \(2, 9\)"):
            list(made.predict([{**ragged[0], "target": np.zeros((2, 9))}]))
        equal = make_entries(np.repeat(series[:, :1], 70, 1))
        paths = {f.samples.tobytes() for f in made.predict(equal)}
        assert len(paths) == 70, "equal series get different paths"


def test_predictor_names_its_extra(folder, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "gluonts"] + ["gluonts"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pip install 'vssm\[forecast\]'"):
        predictor(folder)
