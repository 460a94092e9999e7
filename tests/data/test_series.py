"""Series are cut into windows, each scaled by its context; gaps and dates count."""

import dataclasses

import numpy as np
import pandas
import pytest
import torch

from tests.data.opening import REAL, real, refused, series, write_csv
from vssm.data import DataConfig, SeriesConfig, open_data
from vssm.data.series import TableWindows
from vssm.data.table import read_table

DATES = [f"2020-01-{1 + k // 24:02} {k % 24:02}:00" for k in range(24 * 28)]


def test_series_horizons_are_disjoint_in_time_and_windows_are_slices(tmp_path):
    values = np.arange(200.0)[:, None] * [1, -1]
    path = write_csv(tmp_path / "a.csv", values, header=["up", "down"])
    data = open_data(series(path, context=10, horizon=5, scale="none"))
    bounds = {"train": (0, 140), "valid": (140, 160), "test": (160, 200)}
    for name, split in (("train", data.train), ("valid", data.valid), ("test", data.test())):
        x = split.batch(slice(None))
        assert x.shape[1:] == (15, 2) and x.dtype == torch.float32
        starts = x[:, 0, 0].long()
        assert torch.equal(starts.diff(), torch.ones(len(x) - 1, dtype=torch.long))
        assert torch.equal(x[..., 0], (starts[:, None] + torch.arange(15)).float())
        low, high = bounds[name]
        first = 10 if name == "train" else low  # every row of validation and test is forecast
        assert x[:, 10:, 0].unique().tolist() == list(range(first, high))
    assert data.meta.columns == ("up", "down") and data.meta.mean is None
    assert (data.meta.context, data.meta.length) == (10, 15)


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
    assert data.meta.windowed == "window"
    x = data.train.batch([0, 5])
    torch.testing.assert_close(x[:, :4, 0].mean(1), torch.zeros(2), rtol=0, atol=1e-5)
    own = (values[5:12, 0] - values[5:9, 0].mean()) / np.hypot(
        values[5:9, 0].std(), 0.1 * values[:42, 0].std()
    )
    np.testing.assert_allclose(x[1, :, 0], own, rtol=1e-4, atol=1e-5)
    assert x[..., 1].abs().max() < 1e-5, "a constant series stays finite"


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
    path = write_csv(
        tmp_path / "b.csv", [[v if k % 3 == 0 else "", 1] for k, v in enumerate(range(90))]
    )
    with pytest.raises(
        ValueError, match=r"no window for training .* = 6 rows has half .* every column"
    ):
        _ = open_data(series(path, **options)).train


@pytest.mark.filterwarnings("ignore:.* left out")
def test_missing_values_are_placed_and_filled(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("name,a,b\nx,,1\nx,2,2\nx,NA,3\nx,nan,inf\nx,8,5\n" + "x,9,9\n" * 20)
    refused(
        series(path, context=1, horizon=1),
        path,
        "row 0",
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
        assert data.train.x[:5].tolist() == rows


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


OPTIONS = [
    {},
    {"scale": "column"},
    {"scale": "none"},
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
    whole = TableWindows(read_table(path), meta)
    expected = data.train.batch(torch.tensor([0]))
    torch.testing.assert_close(whole.x[:1], expected, rtol=1e-4, atol=1e-5)
    assert whole.known.all()
    values = table[["a", "b"]].to_numpy(copy=True)
    table.loc[[5, 20, 39], "a"] = np.nan
    table.to_csv(holed, index=False)
    gaps = TableWindows(read_table(holed), meta)
    assert int((~gaps.known).sum()) == 3
    placed = gaps.place(gaps.x[:, None].numpy())[0]
    np.testing.assert_array_equal(placed[6:20], values[6:20])
    assert np.isfinite(placed).all()
    # Rows 5 and 39 lie in a horizon, so the scale of their windows is that of the whole table.
    placed = gaps.place(whole.x[:, None].numpy())[0]
    np.testing.assert_allclose(placed[21:], values[21:], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(placed[:20], values[:20], rtol=1e-4, atol=1e-4)
