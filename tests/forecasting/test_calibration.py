"""Intervals hold what they promise, by what came before each window."""

import pandas
import pytest
import torch

import vssm
from tests.forecasting.test_forecaster import SMALL, weeks
from vssm.forecasting.calibration import Calibration


def make_windows(num=400, horizon=4, width=1.0, shift=0.0, seed=0):
    """Paths of a wrong width around a wrong median, what came, and when."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randn(num, horizon, generator=draw)
    paths = width * torch.randn(num, 100, horizon, generator=draw) + shift
    dates = 10 * torch.arange(num)[:, None] + torch.arange(horizon)
    return paths, y, dates


def coverage(paths, y):
    low, high = paths.quantile(torch.tensor([0.1, 0.9]), dim=1)
    return float(((y > low) & (y < high)).double().mean())


@pytest.mark.parametrize("width", [0.6, 1.0, 1.5])
def test_intervals_are_widened_and_narrowed(width):
    paths, y, dates = make_windows(width=width)
    there = torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.8
    known = y.where(there, torch.nan)
    own = Calibration.of(paths, known, dates, series=1, apart=400)
    now = torch.full((400,), 10_000)
    made = own.apply(paths, now)
    assert 0.77 < coverage(made, y) < 0.83
    rank = paths.argsort(1)
    assert torch.equal(made.gather(1, rank), made.sort(1).values), "paths keep their order"


def test_few_windows_widen_intervals_and_count_less():
    paths, y, dates = make_windows(num=60, width=0.5)
    many = Calibration.of(paths, y, dates, series=1, apart=60)
    few = many._replace(dates=dates // 100)  # that overlap
    assert (few.factors(10_000) == 1).all(), "all of it is too long ago"
    now = int(few.dates.max()) + 1
    assert (few.factors(now) != many.factors(int(dates.max()) + 1)).all()
    none = many._replace(scores=torch.full_like(many.scores, torch.nan))
    assert (none.factors(int(dates.max()) + 1) == 1).all()


def test_a_median_that_misleads_is_drawn_back():
    paths, y, dates = make_windows(shift=0.5)
    assert Calibration.of(paths, y, dates, 1, apart=400).shift == 0
    away = 0.5 * torch.randn(400, 1, 4, generator=torch.Generator().manual_seed(1))
    paths, y, dates = make_windows()
    own = Calibration.of(paths + 4 * away, y + 4 * away[:, 0], dates, 1, apart=400)
    assert own.shift == 1


def test_only_the_recent_past_counts():
    paths, y, dates = make_windows()
    own = Calibration.of(paths, y, dates, series=1, apart=400)
    assert own.memory == pytest.approx(0.75 * float(dates.max() - dates.min()))
    later = own.with_windows(paths / 4, y, dates + 5000)
    assert torch.equal(later.factors(5000), own.factors(5000)), "what comes later is not seen"
    assert (later.factors(9000) > 1.5 * own.factors(4000)).all()


def test_new_points_calibrate_what_comes_then(tmp_path):
    table = weeks(140)
    table.iloc[70:] += 6 * (weeks(70, seed=5) - 10).to_numpy()  # it becomes wilder
    own = vssm.Forecaster(**{**SMALL, "max_steps": 60}).fit(table.iloc[:70])
    before = own.calibration_.factors(own.calibration_.dates.max() + 1)
    own.update(table.iloc[70:])
    after = own.calibration_.factors(own.calibration_.dates.max() + 1)
    assert after.mean() > 1.1 * before.mean()
    own.save(tmp_path)
    again = vssm.Forecaster.load(tmp_path)
    pandas.testing.assert_frame_equal(again.predict(), own.predict())
