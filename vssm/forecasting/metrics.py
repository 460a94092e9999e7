"""Scores of sample paths as forecasts.

    crps        E|X - y| - E|X - X'| / 2                  a value, X and X' independent paths
    wql         2 sum_q sum rho_q(y, x_q) / (9 sum |y|)   rho_q the pinball loss, q = 0.1 ... 0.9
    coverage80  share of the values between the quantiles 0.1 and 0.9
    mase        mean |median - y| / mean |y_t - y_{t-m}| over the training rows, m the season

E|X - X'| is the mean over all pairs of different paths, so that the expected crps does not depend
on S. crps is in deviations of the series before the windows.

Legend: paths (W, S, H) of W windows; y (W, H), the true values.
"""

import torch
from torch import Tensor


def crps(paths: Tensor, y: Tensor) -> Tensor:
    """Returns the continuous ranked probability score of every value, (W, ...).

    The paths are (W, S, ...).

    Example:
        >>> paths = torch.tensor([[0.0, 1.0]])
        >>> crps(paths, torch.zeros(1)).item()  # (0 + 1) / 2 - 1 / 2
        0.0
    """
    num = paths.shape[1]
    error = (paths - y[:, None]).abs().mean(1)
    if num == 1:
        return error
    # sum_{i<j} (x_(j) - x_(i)) = sum_k (2 k - S + 1) x_(k) over order statistics k = 0 ... S - 1
    weight = 2 * torch.arange(num, dtype=paths.dtype) - num + 1
    return error - torch.einsum("ws...,s->w...", paths.sort(1).values, weight) / (num * (num - 1))


def scores(paths: Tensor, y: Tensor, spread: Tensor, naive: Tensor) -> dict[str, float]:
    """Returns crps, wql, mase and coverage80, averaged over all values that are not NaN.

    The series of each window has a deviation, `spread` (W,), and a mean error of the seasonal naive
    forecast, `naive` (W,).
    """
    levels = torch.arange(1, 10, dtype=paths.dtype) / 10
    quantiles = torch.quantile(paths, levels, dim=1)  # (9, W, H)
    there, gap, share = y.isfinite(), y - quantiles, levels.view(-1, 1, 1)
    pinball = torch.maximum(share * gap, (share - 1) * gap)
    inside = (y >= quantiles[0]) & (y <= quantiles[-1])
    error = crps(paths, y) / spread[:, None]
    off = (quantiles[4] - y).abs() / naive[:, None]
    return {
        "crps": float(error[there].mean()),
        "wql": float(2 * pinball[:, there].sum() / (len(levels) * y[there].abs().sum())),
        "mase": float(off[there].mean()),
        "coverage80": float(inside[there].double().mean()),
    }
