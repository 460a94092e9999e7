"""A table with gaps is cut into the windows of training, and put together again."""

import numpy as np
import pandas
import pytest
import torch

from vssm.data import DataConfig, SeriesConfig, open_data
from vssm.data.table import read_table
from vssm.data.windows import TableWindows

OPTIONS = [
    {},
    {"scale": "column"},
    {"scale": "none"},
    {"scale": "last"},
    {"scale": "window", "season": 2, "patch": 2},
    {"separate": True, "patch": 2},
    {"time_features": True, "patch": 2},
]


def wave_table(rows=40):
    dates = pandas.date_range("2026-01-01", periods=rows, freq="6h")
    wave = np.sin(np.arange(rows) / 3)
    return pandas.DataFrame(
        {"date": dates, "a": 100 + 5 * wave, "place": ["x"] * rows, "b": wave.cumsum()}
    )


def series_meta(path, **options):
    options = {"context": 4, "horizon": 4, "columns": ("a", "b"), **options}
    data = open_data(DataConfig(name="series", series=SeriesConfig(path=str(path), **options)))
    return data.meta, data


@pytest.mark.parametrize("options", OPTIONS)
def test_windows_are_those_of_training_and_come_back(tmp_path, options):
    path, holed = tmp_path / "whole.csv", tmp_path / "gaps.csv"
    table = wave_table()
    table.to_csv(path, index=False)
    meta, data = series_meta(path, **options)
    whole = TableWindows(read_table(path), meta, 0, path)
    expected = data.train.batch(torch.tensor([0]))
    torch.testing.assert_close(whole.x[:1], expected, rtol=1e-4, atol=1e-5)
    assert whole.known.all()
    values = table[["a", "b"]].to_numpy()
    table.loc[[3, 20, 39], "a"] = np.nan
    table.to_csv(holed, index=False)
    gaps = TableWindows(read_table(holed), meta, 0, holed)
    assert int((~gaps.known).sum()) == 3
    placed = gaps.place(gaps.x[:, None].numpy())[0]
    np.testing.assert_array_equal(placed[5:20], values[5:20])
    assert np.isfinite(placed).all()
    gaps._centre, gaps._deviation = whole._centre, whole._deviation
    placed = gaps.place(whole.x[:, None].numpy())[0]
    np.testing.assert_allclose(placed, values, rtol=1e-4, atol=1e-4)
