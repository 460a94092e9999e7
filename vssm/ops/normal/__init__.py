"""Draws of a normal distribution, a function of uniform noise.

    x = m + s temperature sqrt(2) erfinv(2 u - 1)          w = m, or w = (m, r) with a learned s
    log s = middle + reach softsign(r / reach)             middle +- reach = log of the bounds of s

Shapes: w (..., D) or (..., 2 D); u, x (..., D).

PyTorch passes over memory more than a dozen times for this. On a GPU one kernel
(`vssm.ops.normal.triton`) does it if no gradient is needed.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.ops.dispatch import choose_fused, kernels, needs_operator


def bounded_scale(raw: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Maps outputs to scales between bounds; the log scale has slope 1 at 0 and no flat tails.

    Example:
        >>> bounded_scale(torch.tensor([0.0, 1e9]), (0.5, 2.0))
        tensor([1., 2.])
    """
    middle, reach = centre_and_reach(bounds)
    # softsign, because gradients of tanh and sigmoid are exactly 0 in float32 once they saturate.
    return torch.exp(middle + reach * F.softsign(raw / reach))


def normal_draw(
    w: Tensor,
    noise: Tensor,
    temperature: float = 1.0,
    scale: float | None = None,
    bounds: tuple[float, float] = (1e-3, 20.0),
    backend: str = "auto",
) -> Tensor:
    """Returns a draw of a normal distribution, with the noise as its quantile.

    Arguments:
        w: The means, (..., D), or, with learned scales, the means and raw scales, (..., 2 D).
        noise: Uniform numbers inside (0, 1), (..., D).
        temperature: Multiplies the scale.
        scale: The scale of all draws; learned if not given.
        bounds: The smallest and the largest learned scale.
        backend: "auto", "reference" or "triton"; "auto" takes the kernel on CUDA if no gradient is
            needed.

    Returns:
        x, (..., D) in the dtype of w.

    Example:
        >>> normal_draw(torch.tensor([3.0]), torch.tensor([0.5]), scale=2.0)
        tensor([3.])
    """
    refusal = None
    if needs_operator(w, noise):
        refusal = "it has no gradient and is unknown to torch.compile"
    elif w.dtype != torch.float32 or noise.dtype != torch.float32 or noise.device != w.device:
        refusal = (
            f"w is {w.dtype} on {w.device}, noise {noise.dtype} on {noise.device}, not all float32"
        )
    elif w.shape != (*noise.shape[:-1], noise.shape[-1] * (2 if scale is None else 1)):
        refusal = f"noise has shape {tuple(noise.shape)}, w has {tuple(w.shape)}"
    if choose_fused(backend, w.device, w.dtype, refusal):
        draw = kernels("normal", "triton").draw
        if scale is not None:
            return draw(w, noise, scale * temperature, None)
        return draw(w, noise, temperature, centre_and_reach(bounds))
    if scale is None:
        loc, raw = w.chunk(2, dim=-1)
        spread = bounded_scale(raw, bounds)
    else:
        loc, spread = w, w.new_full((), scale)
    normal = math.sqrt(2) * torch.erfinv(2 * noise.to(w.dtype) - 1)
    return loc + spread * temperature * normal


def centre_and_reach(bounds: tuple[float, float]) -> tuple[float, float]:
    """Returns the middle of the logarithms of two bounds, and their distance from it."""
    least, most = bounds
    return math.log(least * most) / 2, math.log(most / least) / 2
