"""Draws of a normal distribution, a function of uniform noise.

    x = m + s temperature sqrt(2) erfinv(2 u - 1)          w = m, or w = (m, r) with a learned s
    log s = middle + reach softsign(r / reach),  middle +- reach = the logarithms of the bounds of s

Shapes: w (..., D) or (..., 2 D); u, x (..., D).

In PyTorch that is more than a dozen passes over memory. On a GPU one kernel of `vssm.ops.normal.triton` does
it when no gradient is asked for.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.ops.dispatch import choose_fused, needs_operator

__all__ = ["bounded_scale", "normal_draw"]


def bounded_scale(raw: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Maps outputs to scales between bounds: log scale has slope 1 at 0 and tails that never get flat.

    Example:
        >>> bounded_scale(torch.tensor([0.0, 1e9]), (0.5, 2.0))
        tensor([1., 2.])
    """
    middle, reach = centre_and_reach(bounds)
    # softsign, since the gradient of tanh or sigmoid is exactly 0 in float32 once they saturate
    return torch.exp(middle + reach * F.softsign(raw / reach))


def normal_draw(
    w: Tensor,
    noise: Tensor,
    temperature: float = 1.0,
    scale: float | None = None,
    bounds: tuple[float, float] = (1e-3, 20.0),
    backend: str = "auto",
) -> Tensor:
    """Returns the x that the noise selects.

    Arguments:
        w: The centres, (..., D), or with learned scales the centres and raw scales, (..., 2 D).
        noise: Uniform numbers inside (0, 1), (..., D).
        temperature: Multiplies the scale.
        scale: The scale of all; learned if not given.
        bounds: Of a learned scale.
        backend: "auto", "reference" or "triton"; "auto" takes the kernel on CUDA without a gradient.

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
        from vssm.ops.normal import triton as normal_triton

        if scale is not None:
            return normal_triton.draw(w, noise, scale * temperature, None)
        return normal_triton.draw(w, noise, temperature, centre_and_reach(bounds))
    if scale is None:
        loc, raw = w.chunk(2, dim=-1)
        spread = bounded_scale(raw, bounds)
    else:
        loc, spread = w, w.new_full((), scale)
    normal = math.sqrt(2) * torch.erfinv(2 * noise.to(w.dtype) - 1)
    return loc + spread * temperature * normal


def centre_and_reach(bounds: tuple[float, float]) -> tuple[float, float]:
    """Returns the middle of the logarithms of two bounds, and how far they are from it."""
    least, most = bounds
    return math.log(least * most) / 2, math.log(most / least) / 2
