"""The draws of `vssm.ops.normal` on a GPU, in one pass.

Shapes: w (rows, D) or (rows, 2 D), u and x (rows, D). A program does BLOCK numbers of x.

erfinv is the polynomial of Giles (2012) in t = -log((1 - a) (1 + a)) of a = 2 u - 1. Computed as
4 u (1 - u), the product is exact to one rounding even if u is next to 0 or 1. The relative error is
about 3e-7.

References:
    Approximating the erfinv function (Giles, 2012), single precision
    https://people.maths.ox.ac.uk/gilesm/files/gems_erfinv.pdf
"""

# Kernels are written in the subset of Python that Triton compiles.
# ruff: noqa: ANN001, ANN202
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["draw"]

BLOCK = 1024
LOG2E = tl.constexpr(1.4426950408889634)
ROOT2 = tl.constexpr(1.4142135623730951)


@triton.jit
def _erfinv(u):
    """Returns erfinv(2 u - 1)."""
    t = -tl.log(4.0 * u * (1.0 - u))
    near = t - 2.5
    p = 2.81022636e-08
    p = 3.43273939e-07 + p * near
    p = -3.5233877e-06 + p * near
    p = -4.39150654e-06 + p * near
    p = 0.00021858087 + p * near
    p = -0.00125372503 + p * near
    p = -0.00417768164 + p * near
    p = 0.246640727 + p * near
    p = 1.50140941 + p * near
    far = tl.sqrt(tl.maximum(t, 5.0)) - 3.0
    q = -0.000200214257
    q = 0.000100950558 + q * far
    q = 0.00134934322 + q * far
    q = -0.00367342844 + q * far
    q = 0.00573950773 + q * far
    q = -0.0076224613 + q * far
    q = 0.00943887047 + q * far
    q = 1.00167406 + q * far
    q = 2.83297682 + q * far
    return (2.0 * u - 1.0) * tl.where(t < 5.0, p, q)


# fmt: off
@triton.jit(do_not_specialize=["total", "factor", "middle", "reach"])
def _kernel(
    w, u, x, total, factor, middle, reach,
    D: tl.constexpr, LEARNED: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < total
    step = _erfinv(tl.load(u + at, mask=live, other=0.5)) * (ROOT2 * factor)
    if LEARNED:
        place = at + at // D * D
        raw = tl.load(w + place + D, mask=live, other=0.0) / reach
        step *= tl.exp2((middle + reach * (raw / (1.0 + tl.abs(raw)))) * LOG2E)
    else:
        place = at
    tl.store(x + at, tl.load(w + place, mask=live, other=0.0) + step, mask=live)


def draw(w: Tensor, noise: Tensor, factor: float, learned: tuple[float, float] | None) -> Tensor:
    """Returns x (..., D).

    `factor` is the scale or, given `learned` (middle and reach), a factor of the learned scale.
    """
    x = torch.empty(noise.shape, dtype=torch.float32, device=w.device)
    total = x.numel()
    middle, reach = learned or (0.0, 1.0)
    if total:
        wide = 2 * (total + BLOCK) >= 2**31
        _kernel[(triton.cdiv(total, BLOCK),)](
            w.contiguous(), noise.contiguous(), x, total, float(factor), middle, reach,
            noise.shape[-1], learned is not None, BLOCK, wide,
        )  # fmt: skip
    return x
