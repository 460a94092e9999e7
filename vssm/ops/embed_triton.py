"""The sum of `vssm.ops.embed` on a GPU: a program reads BD columns of the Z rows that its steps select.

Shapes: z (steps, Z), weight (Z N, D), y (steps, D). Sums are float32. A class that is not there gives NaN
rather than a read out of bounds. Addresses are 64-bit.

Few steps have a program each, which reads all of their rows at once. Of many, a program takes several, one
latent after the other: to start a program for each would take longer than its sums where rows are narrow.
"""

# Kernels are written in the part of Python that Triton compiles.
# ruff: noqa: ANN001, ANN202
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["embed_sum"]

TILE = 4096
"""Elements that a program of one step holds."""
TOTAL = 2048
"""Sums that a program of several steps holds."""
MANY = 4096
"""Steps from which a program takes several,"""
NARROW = 256
"""if they have no more columns than this."""


@triton.jit
def _rows(weight, latent, classes, live, d, N, D):
    """Returns columns d of the rows of some classes, each of its latent; NaN where there is no such class."""
    known = (classes >= 0) & (classes < N)
    at = (latent * N + classes)[:, None] * D + d[None, :]
    rows = tl.load(weight + at, mask=(live & known)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    return tl.where(known[:, None], rows, float("nan"))


# fmt: off
@triton.jit(do_not_specialize=["steps"])
def _kernel(
    z, weight, y, steps, N, D, Z: tl.constexpr, BR: tl.constexpr, BZ: tl.constexpr, BD: tl.constexpr
):
    # fmt: on
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    if BR == 1:
        step = tl.program_id(0).to(tl.int64)
        i = tl.arange(0, BZ)
        classes = tl.load(z + step * Z + i, mask=i < Z, other=0).to(tl.int64)
        rows = _rows(weight, i, classes, i < Z, d, N, D)
        tl.store(y + step * D + d, tl.sum(rows, 0).to(y.dtype.element_ty), mask=d < D)
    else:
        each = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
        live = each < steps
        total = tl.zeros((BR, BD), tl.float32)
        for k in range(Z):
            chosen = tl.load(z + each * Z + k, mask=live, other=0).to(tl.int64)
            total += _rows(weight, k, chosen, live, d, N, D)
        mask = live[:, None] & (d < D)[None, :]
        tl.store(y + each[:, None] * D + d[None, :], total.to(y.dtype.element_ty), mask=mask)


def embed_sum(z: Tensor, weight: Tensor) -> Tensor:
    """Returns y (..., D) in the dtype of the weight."""
    Z, D = z.shape[-1], weight.shape[1]
    y = torch.empty((*z.shape[:-1], D), dtype=weight.dtype, device=weight.device)
    BZ = triton.next_power_of_2(Z)
    BD = min(128, TILE // BZ, triton.next_power_of_2(D))
    steps = z.numel() // Z
    BR = max(2, TOTAL // BD) if steps >= MANY and D <= NARROW else 1
    if y.numel():
        inputs = (z.contiguous(), weight.contiguous())
        grid = (triton.cdiv(steps, BR), triton.cdiv(D, BD))
        _kernel[grid](*inputs, y, steps, len(weight) // Z, D, Z, BR, BZ, BD)
    return y
