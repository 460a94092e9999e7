"""The sum of `vssm.ops.embed` on a GPU: a program reads BD columns of the rows of its steps.

Shapes: z (steps, Z), weight (Z N, D), y (steps, D). Sums are float32. A class out of range gives
NaN instead of a read out of bounds. Addresses are 64-bit.

| steps | columns | a program takes                                                             |
| ----- | ------- | --------------------------------------------------------------------------- |
| few   | any     | one step, and reads all of its rows at once                                 |
| more  | many    | many steps and a slice of columns, whose part of the table stays in its own |
|       |         | cache when several steps select the same row                                |
| many  | few     | several steps, because starting a program takes longer than its sums        |
"""

# Kernels are written in the subset of Python that Triton compiles.
# ruff: noqa: ANN001, ANN202
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Plan", "embed_sum", "plan"]

TILE = 4096  # elements of a program of one step
TOTAL = 2048  # sums of a program of several narrow steps
MANY = 4096  # steps from which a program takes several, if they are narrow:
NARROW = 256  # columns, at most
MORE = 768  # steps from which a program takes a slice of the columns, if they are not narrow


class Plan(NamedTuple):
    """How the sums are cut up."""

    BR: int  # steps of a program
    BD: int  # columns of a program
    together: int = 1  # latents that a program of several steps reads at a time; divides Z
    warps: int = 4


@triton.jit
def _rows(weight, latent, classes, live, d, N, D):
    """Returns columns d of the rows of some classes of their latents; NaN if out of range."""
    known = (classes >= 0) & (classes < N)
    at = (latent * N + classes)[:, None] * D + d[None, :]
    mask = (live & known)[:, None] & (d < D)[None, :]
    rows = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(known[:, None], rows, float("nan"))


# fmt: off
@triton.jit(do_not_specialize=["steps"])
def _kernel(
    z, weight, y, steps, N, D, Z: tl.constexpr, BR: tl.constexpr, BZ: tl.constexpr,
    BD: tl.constexpr, TOGETHER: tl.constexpr,
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
        unknown = tl.zeros((BR,), tl.int32)
        for first in range(0, Z, TOGETHER):
            for j in tl.static_range(TOGETHER):
                chosen = tl.load(z + each * Z + first + j, mask=live, other=0)
                known = (chosen >= 0) & (chosen < N)
                unknown += tl.where(known, 0, 1)
                # Reads the first class instead of one out of range; this sum is replaced by NaN.
                row = (first + j) * N + tl.where(known, chosen, 0).to(tl.int32)
                at = row.to(tl.int64)[:, None] * D + d[None, :]
                total += tl.load(weight + at, mask=(d < D)[None, :]).to(tl.float32)
        total = tl.where((unknown > 0)[:, None], float("nan"), total)
        mask = live[:, None] & (d < D)[None, :]
        tl.store(y + each[:, None] * D + d[None, :], total.to(y.dtype.element_ty), mask=mask)


def plan(steps: int, Z: int, D: int) -> Plan:
    """Returns how the sums of some steps are cut up."""
    if D > NARROW and steps >= MORE:
        # As many threads as steps, so that a row is looked up once.
        together = Z & -Z
        if steps >= MANY:
            return Plan(64, 64, min(4, together), 2)
        return Plan(128, 32, min(8, together), 4)
    BD = min(128, TILE // triton.next_power_of_2(Z), triton.next_power_of_2(D))
    return Plan(max(2, TOTAL // BD) if steps >= MANY and D <= NARROW else 1, BD)


def embed_sum(z: Tensor, weight: Tensor, how: Plan | None = None) -> Tensor:
    """Returns y (..., D) in the dtype of the weight."""
    Z, D = z.shape[-1], weight.shape[1]
    y = torch.empty((*z.shape[:-1], D), dtype=weight.dtype, device=weight.device)
    steps = z.numel() // Z
    how = how or plan(steps, Z, D)
    if y.numel():
        inputs = (z.contiguous(), weight.contiguous())
        grid = (triton.cdiv(steps, how.BR), triton.cdiv(D, how.BD))
        sizes = (len(weight) // Z, D, Z, how.BR, triton.next_power_of_2(Z), how.BD, how.together)
        _kernel[grid](*inputs, y, steps, *sizes, num_warps=how.warps)
    return y
