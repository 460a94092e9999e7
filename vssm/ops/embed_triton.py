"""The sum of `vssm.ops.embed` on a GPU: a program reads BD columns of the Z rows that its steps select.

Shapes: z (steps, Z), weight (Z N, D), y (steps, D). Sums are float32. A class that is not there gives NaN
rather than a read out of bounds, and a row that is not selected has no part in a sum, whatever is in it.
Addresses are 64-bit.

| steps | columns | a program                                                                               |
| ----- | ------- | --------------------------------------------------------------------------------------- |
| few   | any     | takes one step, and reads all of its rows at once                                       |
| more  | many    | takes a slice of columns and many steps, and multiplies their one-hot vectors by the    |
|       |         | slice on tensor cores, if classes are few and the weight is float32; else it looks up   |
|       |         | some latents at a time: rows that several steps select are then read from its own       |
|       |         | cache, where all of them would share the next                                           |
| many  | few     | takes several, since to start one for each takes longer than its sums                   |

Tensor cores multiply numbers of 8 bits (bfloat16) exactly. A float32 is the sum of three, and has no exponent
that these lack, so a product is as exact as a row that was looked up.
"""

# Kernels are written in the part of Python that Triton compiles.
# ruff: noqa: ANN001, ANN202
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Plan", "embed_sum", "plan"]

TILE = 4096
"""Elements that a program of one step holds."""
TOTAL = 2048
"""Sums that a program of several narrow steps holds."""
MANY = 4096
"""Steps from which a program takes several,"""
NARROW = 256
"""if they have no more columns than this;"""
MORE = 768
"""Steps from which a program takes a slice of wider ones, whose part of the table then stays in its cache."""
CLASSES = 32
"""Classes up to which it multiplies the slice: it reads all of them, where a step selects one."""


class Plan(NamedTuple):
    """How the sums are cut up."""

    BR: int
    """Steps of a program."""
    BD: int
    """Columns of a program."""
    together: int = 1
    """Latents that a program of several steps reads at a time; divides Z."""
    warps: int = 4
    BK: int = 0
    """Rows of the weight that are multiplied at a time on tensor cores; 0 where rows are looked up.

    N divides it, or it divides N, and it divides Z N."""
    stages: int = 3
    """Tiles of the weight on their way from memory, where it is multiplied."""


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
    z, weight, y, steps, N, D, Z: tl.constexpr, BR: tl.constexpr, BZ: tl.constexpr, BD: tl.constexpr,
    TOGETHER: tl.constexpr,
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
                # The first class instead: its row is there to be read, and the sum is not kept.
                row = (first + j) * N + tl.where(known, chosen, 0).to(tl.int32)
                at = row.to(tl.int64)[:, None] * D + d[None, :]
                total += tl.load(weight + at, mask=(d < D)[None, :]).to(tl.float32)
        total = tl.where((unknown > 0)[:, None], float("nan"), total)
        mask = live[:, None] & (d < D)[None, :]
        tl.store(y + each[:, None] * D + d[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _parts(tile):
    """Cuts numbers into three bfloat16 each, whose sum they are; what is not finite gives a NaN."""
    high = (tile.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    rest = tile - high
    middle = (rest.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


# fmt: off
@triton.jit(do_not_specialize=["steps"])
def _product_kernel(
    z, weight, y, steps, D, N: tl.constexpr, Z: tl.constexpr, BR: tl.constexpr, BZ: tl.constexpr,
    BD: tl.constexpr, BK: tl.constexpr,
):
    # fmt: on
    """Multiplies y^T = weight^T one_hot^T: parts of the weight, on the left, then stay in registers."""
    step = tl.program_id(0) * BR + tl.arange(0, BR)
    # Steps after the end are the last again: they are not stored.
    classes = z + tl.minimum(step, steps - 1).to(tl.int64) * Z
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    k = tl.arange(0, BK)
    unknown = tl.zeros((BR,), tl.int32)
    for i in range(0, Z, BZ):
        some = i + tl.arange(0, BZ)
        all_chosen = tl.load(classes[:, None] + some[None, :], mask=(some < Z)[None, :], other=0)
        unknown |= tl.max(((all_chosen < 0) | (all_chosen >= N)).to(tl.int32), 1)
    total = tl.zeros((BD, BR), tl.float32)
    for first in tl.range(0, Z * N, BK):
        selected = k[:, None] == (tl.load(classes + first // N).to(tl.int32) - first % N)[None, :]
        for j in tl.static_range(1, BK // N):
            selected |= k[:, None] == (tl.load(classes + first // N + j).to(tl.int32) + j * N)[None, :]
        one_hot = tl.where(selected, 1.0, 0.0).to(tl.bfloat16)
        at = (first + k).to(tl.int64)[None, :] * D + d[:, None]
        high, middle, low = _parts(tl.load(weight + at, mask=(d < D)[:, None], other=0.0))
        # Small ones first, and of one tile only: tensor cores cut off where float32 rounds.
        part = tl.dot(low, one_hot)
        part = tl.dot(middle, one_hot, part)
        total += tl.dot(high, one_hot, part)
    if tl.min(tl.min((tl.abs(total) < float("inf")).to(tl.int32), 1), 0) == 0:
        # Zero times what is not finite is a NaN: steps must not know of rows that they do not select.
        total = tl.zeros((BD, BR), tl.float32)
        for i in range(Z):
            chosen = tl.load(classes + i)
            row = (i * N + tl.where((chosen >= 0) & (chosen < N), chosen, 0)).to(tl.int64)
            total += tl.load(weight + row[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0.0)
    total = tl.where((unknown > 0)[None, :], float("nan"), total)
    mask = (step < steps)[None, :] & (d < D)[:, None]
    tl.store(y + step.to(tl.int64)[None, :] * D + d[:, None], total, mask=mask)


def plan(steps: int, Z: int, N: int, D: int, multiplies: bool = True) -> Plan:
    """Returns how the sums of some steps are cut up, on a device that multiplies or looks up."""
    if D > NARROW and steps >= MORE:
        BK = 32
        whole = BK % N == 0 and Z * N % BK == 0
        if steps < MANY and N <= CLASSES and whole and multiplies:
            return Plan(64, 64, BK=BK, stages=4)
        # As many threads as steps: a row is then looked up once, not by each thread that reads some of it.
        together = Z & -Z
        return Plan(64, 64, min(4, together), 2) if steps >= MANY else Plan(128, 32, min(8, together), 4)
    BD = min(128, TILE // triton.next_power_of_2(Z), triton.next_power_of_2(D))
    return Plan(max(2, TOTAL // BD) if steps >= MANY and D <= NARROW else 1, BD)


def embed_sum(z: Tensor, weight: Tensor, how: Plan | None = None) -> Tensor:
    """Returns y (..., D) in the dtype of the weight."""
    Z, D = z.shape[-1], weight.shape[1]
    y = torch.empty((*z.shape[:-1], D), dtype=weight.dtype, device=weight.device)
    steps = z.numel() // Z
    N = len(weight) // Z
    how = how or plan(steps, Z, N, D, weight.dtype == torch.float32 and _has_bfloat16(weight.device))
    if y.numel():
        inputs = (z.contiguous(), weight.contiguous())
        grid = (triton.cdiv(steps, how.BR), triton.cdiv(D, how.BD))
        BZ = triton.next_power_of_2(Z)
        if how.BK:
            sizes = (D, N, Z, how.BR, min(32, BZ), how.BD, how.BK)
            options = {"num_warps": how.warps, "num_stages": how.stages}
            _product_kernel[grid](*inputs, y, steps, *sizes, **options)
        else:
            sizes = (N, D, Z, how.BR, BZ, how.BD, how.together)
            _kernel[grid](*inputs, y, steps, *sizes, num_warps=how.warps)
    return y


def _has_bfloat16(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
