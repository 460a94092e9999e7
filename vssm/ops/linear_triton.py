"""The products of `vssm.ops.linear` on a GPU: float32 results from half-precision tensor cores.

    y = rate (x scale) weight^T + bias + add          rate = (mean_k x_k^2 + eps)^(-1/2), one for each row

A tile of either operand, BK columns of it, is split into two float16 numbers that hold 22 bits together:

    x = 2^e (high + low),   e one exponent for each row of the tile, so that its largest is in [2^14, 2^15)
    x w = 2^(e + e') (low high' + high low' + high high')          what is left out is 2^-22 of the product

Tensor cores multiply float16 exactly and add up one tile; tiles are added in float32, since tensor cores cut
off where float32 rounds. One row needs no tensor cores: its products are float32 throughout.

Few rows read weights as fast as memory gives them: so that all processors read, K is cut into SPLIT parts,
whose sums a second kernel adds in their order. How a product is cut depends on its sizes only, and there are
no atomics: results repeat bit for bit.

Shapes: x (M, K), weight (N, K), bias (N,), add and y (M, N), scale (K,), partial (SPLIT, M, N).
"""

# Kernels are written in the part of Python that Triton compiles.
# ruff: noqa: ANN001, ANN202
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Plan", "forward", "plan"]

FEW = 64
"""Rows up to which a product waits for its weights."""
PROGRAMS = 128
"""Programs that fill a device."""
LARGE = 160 * 1024
"""Bytes of shared memory, as the larger devices of a generation have."""


class Plan(NamedTuple):
    """How a product is cut up."""

    BM: int
    """Rows of a tile."""
    BN: int
    """Columns of a tile."""
    BK: int
    """How much of K a tile takes at a time."""
    SPLIT: int
    """Parts of K that different programs sum."""
    warps: int
    stages: int
    """Tiles on their way from memory."""


@triton.jit
def _halves(tile):
    """Splits each row of a tile into high, low and 2^e."""
    largest = tl.max(tl.abs(tile), 1).to(tl.int32, bitcast=True)
    exponent = tl.maximum(largest >> 23, 16)  # with its bias of 127
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    tile *= up[:, None]
    high = tile.to(tl.float16)
    return high, (tile - high.to(tl.float32)).to(tl.float16), down


@triton.jit
def _finish(y, result, bias, add, at, column, mask):
    if bias is not None:
        result += tl.load(bias + column)
    if add is not None:
        result += tl.load(add + at, mask=mask, other=0.0)
    tl.store(y + at, result, mask=mask)


# fmt: off
@triton.jit(do_not_specialize=["M", "eps"])
def _tile_kernel(
    x, weight, bias, add, scale, y, M, N, K, depth, stride, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    # fmt: on
    # Programs that run at the same time share rows and columns: GROUP tiles of rows, all columns.
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = pid % (GROUP * columns)
    row = (first + within % height) * BM + tl.arange(0, BM)
    column = (within // height) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    k = tl.arange(0, BK)
    # Rows after the end are the first again: they are not stored.
    left = x + (row % M).to(tl.int64)[:, None] * stride + k[None, :]
    right = weight + (column % N).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for at in tl.range(part * depth, (part + 1) * depth, BK):
        a = tl.load(left + at)
        b = tl.load(right + at)
        if scale is not None:
            squares += tl.sum(a * a, 1)
            a *= tl.load(scale + at + k)[None, :]
        high, low, down = _halves(a)
        high_b, low_b, down_b = _halves(b)
        total = tl.dot(low, tl.trans(high_b))
        total = tl.dot(high, tl.trans(low_b), total)
        total = tl.dot(high, tl.trans(high_b), total)
        acc += total * down[:, None] * down_b[None, :]
    if scale is not None:
        acc *= tl.rsqrt(squares / K + eps)[:, None]
    at = (part * M + row).to(tl.int64)[:, None] * N + column[None, :]
    mask = (row < M)[:, None] & (column < N)[None, :]
    _finish(y, acc, bias, add, at, (column % N)[None, :], mask)


# fmt: off
@triton.jit(do_not_specialize=["total"])
def _sum_kernel(partial, bias, add, y, total, N, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    # fmt: on
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < total
    result = tl.load(partial + at, mask=mask, other=0.0)
    for part in tl.static_range(1, SPLIT):
        result += tl.load(partial + part * total + at, mask=mask, other=0.0)
    _finish(y, result, bias, add, at, at % N, mask)


# fmt: off
@triton.jit(do_not_specialize=["eps"])
def _row_kernel(
    x, weight, bias, add, scale, y, N, K, eps, BN: tl.constexpr, BK: tl.constexpr
):
    # fmt: on
    """One row: every program reads BN rows of the weight."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    right = weight + (column % N).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for at in tl.range(0, K, BK):
        b = tl.load(right + at)
        a = tl.load(x + at + k)
        if scale is not None:
            squares += a * a
            a *= tl.load(scale + at + k)
        acc += a[None, :] * b
    result = tl.sum(acc, 1)
    if scale is not None:
        result *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    _finish(y, result, bias, add, column, column % N, column < N)


def plan_row(N: int, K: int) -> Plan:
    """Returns how a product of one row is cut up."""
    return Plan(1, min(16, max(1, triton.next_power_of_2(N) // 512)), min(1024, K & -K), 1, 4, 1)


def plan(M: int, N: int, K: int, large: bool = True) -> Plan:
    """Returns how a product of more than one row is cut up, on a device with a large shared memory or not."""
    if M <= FEW:
        BM = max(16, triton.next_power_of_2(M))
        BN, BK, warps, stages = min(BM, 32), 64, 4, 5
    elif triton.cdiv(M, 128) * triton.cdiv(N, 128) >= PROGRAMS:
        BM, BN, BK, warps, stages = (128, 128, 64, 8, 2) if large else (128, 128, 32, 8, 3)
    else:
        BM, BN, BK, warps, stages = 64, 64 if N > 64 else 32, 64, 4, 3
    tiles, split = triton.cdiv(M, BM) * triton.cdiv(N, BN), 1
    while 2 * split * tiles <= PROGRAMS and K % (256 * split) == 0:
        split *= 2
    while K // split % BK:
        BK //= 2
    return Plan(BM, BN, BK, split, warps, stages)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 0.0,
    how: Plan | None = None,
) -> Tensor:
    """Returns y (..., N) in float32, for K that 32 divides."""
    N, K = weight.shape
    y = torch.empty((*x.shape[:-1], N), dtype=torch.float32, device=x.device)
    if not y.numel():
        return y
    if scale is not None and x.numel() // K > FEW:
        x, scale = torch.nn.functional.rms_norm(x, (K,), scale, eps), None
    x = x.reshape(-1, K)
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight.contiguous()
    add = None if add is None else add.contiguous()
    M = len(x)
    if M == 1:
        how = how or plan_row(N, K)
        _row_kernel[(triton.cdiv(N, how.BN),)](
            x, weight, bias, add, scale, y, N, K, eps, BN=how.BN, BK=how.BK, num_warps=how.warps
        )
        return y
    how = how or plan(M, N, K, _is_large(x.device))
    if scale is not None and how.SPLIT > 1:
        x, scale = torch.nn.functional.rms_norm(x, (K,), scale, eps), None
    tiles = triton.cdiv(M, how.BM) * triton.cdiv(N, how.BN)
    whole = how.SPLIT == 1
    out = y if whole else torch.empty((how.SPLIT, M, N), dtype=torch.float32, device=x.device)
    _tile_kernel[(tiles, how.SPLIT)](
        x, weight, bias if whole else None, add if whole else None, scale, out, M, N, K, K // how.SPLIT,
        x.stride(0), eps, BM=how.BM, BN=how.BN, BK=how.BK, GROUP=8,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    if not whole:
        _sum_kernel[(triton.cdiv(M * N, 256),)](
            out, bias, add, y, M * N, N, SPLIT=how.SPLIT, BLOCK=256, num_warps=2
        )  # fmt: skip
    return y


def _is_large(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= LARGE
