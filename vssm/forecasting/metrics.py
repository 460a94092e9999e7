"""Scores of sample paths as forecasts.

    crps        E|X - y| - E|X - X'| / 2                  a value, X and X' independent paths
    energy      E‖X - y‖ - E‖X - X'‖ / 2                  a whole path of H steps of one column
    wql         2 sum_q sum rho_q(y, x_q) / (9 sum |y|)   rho_q the pinball loss, q = 0.1 ... 0.9
    coverage80  share of the values between the quantiles 0.1 and 0.9
    mase        mean |median - y| / mean |y_t - y_{t-m}| over the training rows, m the season

E|X - X'| is the mean over pairs of different paths, so that the expected crps and energy do not
depend on S: over all S (S - 1) pairs for crps, over S pairs, each path with the next one, for
energy. All scores but wql are in deviations of the column over the training rows.

Legend: paths (W, S, H, D) of W windows; y (W, H, D), what came.
"""

import torch
from torch import Tensor

__all__ = ["crps", "energy_score", "panel_scores", "scores"]


def crps(paths: Tensor, y: Tensor) -> Tensor:
    """Returns the continuous ranked probability score of every value, (W, H, D).

    Example:
        >>> paths = torch.tensor([0.0, 1.0])[None, :, None, None]
        >>> crps(paths, torch.zeros(1, 1, 1)).item()  # (0 + 1) / 2 - 1 / 2
        0.0
    """
    num = paths.shape[1]
    error = (paths - y[:, None]).abs().mean(1)
    if num == 1:
        return error
    # sum_{i<j} (x_(j) - x_(i)) = sum_k (2 k - S + 1) x_(k) over order statistics k = 0 ... S - 1
    weight = 2 * torch.arange(num, dtype=paths.dtype) - num + 1
    return error - torch.einsum("wshd,s->whd", paths.sort(1).values, weight) / (num * (num - 1))


def energy_score(paths: Tensor, y: Tensor) -> Tensor:
    """Returns the energy score of every column, (W, D), divided by the root of its steps."""
    error = (paths - y[:, None]).norm(dim=2).mean(1)
    between = (paths - paths.roll(1, 1)).norm(dim=2).mean(1)
    return (error - between / 2) / paths.shape[2] ** 0.5


def scores(paths: Tensor, y: Tensor, mean: Tensor, std: Tensor, naive: Tensor) -> dict[str, float]:
    """Returns all scores of forecasts, averaged over windows, steps and columns.

    Arguments:
        paths: (W, S, H, D) in the units of the data.
        y: What came, (W, H, D).
        mean: The mean of the columns over the training rows, (D,).
        std: Their deviation, (D,).
        naive: The mean error of the seasonal naive forecast over the training rows, (D,), in
            deviations.
    """
    rows = paths.movedim(3, 1).flatten(0, 1), y.movedim(2, 1).flatten(0, 1)
    spread, size = std.repeat(len(y)), (naive * std).repeat(len(y))
    error = (paths.quantile(0.5, dim=1) - y) / std
    return {
        **panel_scores(*rows, spread, size),
        "energy": float(energy_score((paths - mean) / std, (y - mean) / std).mean()),
        "mae": float(error.abs().mean()),
    }


def panel_scores(paths: Tensor, y: Tensor, spread: Tensor, naive: Tensor) -> dict[str, float]:
    """Returns crps, wql, mase and coverage80, averaged over all values that are known.

    Arguments:
        paths: (W, S, H) in the units of the data.
        y: What came, (W, H); NaN where it is not known.
        spread: The deviation of the series of each window, (W,).
        naive: The mean error of the seasonal naive forecast of the series of each window, (W,).
    """
    levels = torch.arange(1, 10, dtype=paths.dtype) / 10
    quantiles = torch.quantile(paths, levels, dim=1)  # (9, W, H)
    there, gap = y.isfinite(), y - quantiles
    pinball = torch.maximum(levels.view(-1, 1, 1) * gap, (levels.view(-1, 1, 1) - 1) * gap)
    inside = (y >= quantiles[0]) & (y <= quantiles[-1])
    error = crps(paths[..., None], y[..., None])[..., 0] / spread[:, None]
    off = (quantiles[4] - y).abs() / naive[:, None]
    return {
        "crps": float(error[there].mean()),
        "wql": float(2 * pinball[:, there].sum() / (len(levels) * y[there].abs().sum())),
        "mase": float(off[there].mean()),
        "coverage80": float(inside[there].double().mean()),
    }
