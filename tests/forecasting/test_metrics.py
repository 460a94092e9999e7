"""Scores of sample paths equal their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vssm.forecasting.metrics import crps, scores


def test_crps_is_the_integral_of_the_squared_difference_of_distributions():
    """With the pairs of equal paths left out, the score of a normal distribution is unbiased."""
    draw = torch.Generator().manual_seed(0)
    y = torch.linspace(-2, 2, 9, dtype=torch.float64)
    paths = torch.randn(9, 4000, dtype=torch.float64, generator=draw)
    normal = torch.distributions.Normal(0.0, 1.0)
    exact = y * (2 * normal.cdf(y) - 1) + 2 * normal.log_prob(y).exp() - 1 / np.sqrt(np.pi)
    torch.testing.assert_close(crps(paths, y), exact, rtol=0, atol=0.03)
    few = torch.randn(20_000, 3, dtype=torch.float64, generator=draw)
    expected = 2 * normal.log_prob(torch.tensor(0.0)).exp() - 1 / np.sqrt(np.pi)
    assert abs(float(crps(few, torch.zeros(20_000)).mean()) - float(expected)) < 0.01


@given(st.integers(1, 6))
def test_crps_equals_its_definition_over_pairs(num):
    paths = torch.randn(2, num, 3, 1, dtype=torch.float64)
    y = torch.randn(2, 3, 1, dtype=torch.float64)
    pairs = (paths[:, :, None] - paths[:, None]).abs().sum((1, 2)) / max(1, num * (num - 1))
    torch.testing.assert_close(crps(paths, y), (paths - y[:, None]).abs().mean(1) - pairs / 2)


def test_scores_of_exact_and_wide_forecasts():
    draw, unit = torch.Generator().manual_seed(0), torch.ones(50, dtype=torch.float64)
    y = torch.randn(50, 7, dtype=torch.float64, generator=draw) + 3
    exact = scores(y[:, None].repeat(1, 4, 1), y, unit, unit)
    assert exact["coverage80"] == 1
    assert all(abs(exact[key]) < 1e-12 for key in ("crps", "wql", "mase"))
    paths = torch.randn(50, 400, 7, dtype=torch.float64, generator=draw) + 3
    good = scores(paths, y, unit, unit)
    assert 0.72 < good["coverage80"] < 0.88 and abs(good["crps"] - 1 / np.sqrt(np.pi)) < 0.06
    wide = scores((paths - 3) * 3 + 3, y, unit, unit)
    assert wide["coverage80"] > 0.97 and wide["crps"] > good["crps"]


def test_scores_equal_their_definitions():
    paths, y = torch.randn(3, 6, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    spread, naive = torch.tensor([[0.5, 3.0, 1.0], [2.0, 0.2, 1.0]], dtype=torch.float64)
    found = scores(paths, y, spread, naive)
    pinball = 0.0
    for level in np.arange(1, 10) / 10:
        gap = y - paths.quantile(level, 1)
        pinball += float(torch.where(gap > 0, level * gap, (level - 1) * gap).sum())
    assert found["wql"] == pytest.approx(2 * pinball / 9 / float(y.abs().sum()))
    error = (paths.quantile(0.5, 1) - y).abs()
    assert found["mase"] == pytest.approx(float((error.mean(1) / naive).mean()))
    assert found["crps"] == pytest.approx(float((crps(paths, y).mean(1) / spread).mean()))
    inside = (y >= paths.quantile(0.1, 1)) & (y <= paths.quantile(0.9, 1))
    assert found["coverage80"] == pytest.approx(float(inside.double().mean()))


def test_scores_leave_out_what_is_not_known():
    paths, y, one = torch.randn(4, 20, 5), torch.randn(4, 5), torch.ones(4)
    y[0] = torch.nan
    rest = scores(paths[1:], y[1:], one[1:], one[1:])
    assert scores(paths, y, one, one) == pytest.approx(rest)
