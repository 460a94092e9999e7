"""RMSNorm on a GPU: Triton kernels of `vssm.ops.norm`.

    y  = x r weight,   r = (mean_d x_d^2 + eps)^(-1/2)
    dx = r (g - x r^2 mean_d(g_d x_d)),  g = dy weight             dweight = sum_rows dy x r

Shapes: x, y, dy, dx (rows, D); weight (D,). All is float32 inside; addresses are 64-bit.

A program holds BR whole rows in registers. Backward reads x anyway and so computes r again. Each of
its P programs takes every P-th group of rows and adds up its part of dweight; PyTorch adds the P
parts. No atomics: results repeat bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vssm.ops.launch_triton import ceil_div, launch, next_power, processors

__all__ = ["backward", "forward"]

TILE = 1024
"""Elements that a program holds at least, if the rows are short."""
PROGRAMS = 8
"""Programs of backward on a multiprocessor: enough of them to keep its loads in flight."""


@triton.jit
def _rows(first, rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Returns the offsets and the mask of BR rows from the first on."""
    row = first + tl.arange(0, BR)
    d = tl.arange(0, BD)
    return row[:, None].to(tl.int64) * D + d[None, :], (row < rows)[:, None] & (d < D)[None, :]


@triton.jit
def _load(pointer, index, mask):
    return tl.load(pointer + index, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rate(x, eps, D: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]


# fmt: off
@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(x, weight, y, rows, eps, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    # fmt: on
    index, mask = _rows(tl.program_id(0) * BR, rows, D, BR, BD)
    d = tl.arange(0, BD)
    scale = _load(weight, d, d < D)[None, :]
    values = _load(x, index, mask)
    tl.store(y + index, (values * _rate(values, eps, D) * scale).to(y.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit(do_not_specialize=["rows"])
def _norm_backward_kernel(
    dy, x, weight, dx, parts, rows, eps, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):
    # fmt: on
    d = tl.arange(0, BD)
    scale = _load(weight, d, d < D)[None, :]
    total = tl.zeros((BR, BD), tl.float32)
    for first in tl.range(tl.program_id(0) * BR, rows, tl.num_programs(0) * BR):
        index, mask = _rows(first, rows, D, BR, BD)
        values = _load(x, index, mask)
        grad = _load(dy, index, mask)
        rate = _rate(values, eps, D)
        g = grad * scale
        along = rate * rate * (tl.sum(g * values, 1) / D)[:, None]
        tl.store(dx + index, (rate * (g - values * along)).to(dx.dtype.element_ty), mask=mask)
        total += grad * (values * rate)
    tl.store(parts + tl.program_id(0) * D + d, tl.sum(total, 0), mask=d < D)


def _blocks(width: int) -> dict[str, int]:
    BD = next_power(width)
    BR = max(1, TILE // BD)
    return {"D": width, "BR": BR, "BD": BD, "num_warps": min(16, BR * BD // 256)}


def forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Returns y (..., D) in the given dtype."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        blocks = _blocks(x.shape[-1])
        rows = x.numel() // x.shape[-1]
        grid = (ceil_div(rows, blocks["BR"]),)
        launch(_norm_kernel, grid, x.contiguous(), weight.contiguous(), y, rows, eps, **blocks)
    return y


def backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x (..., D) and weight (D,), in their dtypes."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return dx, torch.zeros_like(weight)
    blocks = _blocks(x.shape[-1])
    rows = x.numel() // x.shape[-1]
    programs = min(ceil_div(rows, blocks["BR"]), PROGRAMS * processors(x.device))
    parts = torch.empty((programs, x.shape[-1]), dtype=torch.float32, device=x.device)
    inputs = (tensor.contiguous() for tensor in (dy, x, weight))
    launch(_norm_backward_kernel, (programs,), *inputs, dx, parts, rows, eps, **blocks)
    return dx, parts.sum(0).to(weight.dtype)
