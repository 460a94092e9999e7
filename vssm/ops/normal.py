"""Draws of a normal distribution, a function of uniform noise.

    x = m + s temperature sqrt(2) erfinv(2 u - 1)          w = m, or w = (m, r) with a learned s
    log s = middle + reach softsign(r / reach)             middle +- reach = log of the bounds of s

Shapes: w (..., D) or (..., 2 D); u, x (..., D).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["bounded_scale", "normal_draw"]


def bounded_scale(raw: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Maps outputs to scales between bounds; the log scale has slope 1 at 0 and no flat tails.

    Example:
        >>> bounded_scale(torch.tensor([0.0, 1e9]), (0.5, 2.0))
        tensor([1., 2.])
    """
    least, most = bounds
    middle, reach = math.log(least * most) / 2, math.log(most / least) / 2
    # softsign, because gradients of tanh and sigmoid are exactly 0 in float32 once they saturate.
    return torch.exp(middle + reach * F.softsign(raw / reach))


def normal_draw(
    w: Tensor,
    noise: Tensor,
    temperature: float = 1.0,
    scale: float | None = None,
    bounds: tuple[float, float] = (1e-3, 20.0),
) -> Tensor:
    """Returns a draw x, (..., D) in the dtype of w, with the noise as its quantile.

    The scale of all draws is given, or w has learned scales between the bounds.

    Example:
        >>> normal_draw(torch.tensor([3.0]), torch.tensor([0.5]), scale=2.0)
        tensor([3.])
    """
    if scale is None:
        loc, raw = w.chunk(2, dim=-1)
        spread = bounded_scale(raw, bounds)
    else:
        loc, spread = w, w.new_full((), scale)
    normal = math.sqrt(2) * torch.erfinv(2 * noise.to(w.dtype) - 1)
    return loc + spread * temperature * normal
