"""The products of `vssm.ops.linear` on a GPU: float32 results from tensor cores of fewer bits.

    y = rate (x scale) weight^T + bias + add          rate = (mean_k x_k^2 + eps)^(-1/2), one for each row

Either operand is split into two numbers of 11 bits, and three of the four products are added up:

    x = 2^e (high + low),   e one exponent for each row, so that its largest is in [2^14, 2^15)
    x w = 2^(e + e') (low high' + high low' + high high')          what is left out is 2^-22 of the product

| rows | `Plan.split` | the split                                                                        |
| ---- | ------------ | -------------------------------------------------------------------------------- |
| 1    |              | none: products are float32 throughout                                            |
| few  | "none"       | none either, where x and the weight are small                                    |
|      | "turned"     | into tf32, in the kernel, where the weight is large: y^T = weight x^T, so that   |
|      |              | columns of y fill the tensor cores and a weight is split once                    |
|      | "tile"       | into float16, in the kernel; one exponent for a row of a tile, BK columns        |
| more | "tf32"       | into tf32, by Triton, which needs no exponent                                    |
| many | "before"     | into float16, by a kernel of its own, which does the norm too; recordings keep   |
|      |              | what it makes of weights (`vssm.ops.linear_weights`)                             |
| tall | "once"       | into float16, in the kernel: a program keeps its columns of the weight, with the |
|      |              | norm's scale in them, and goes over tiles of rows, of which it loads the next    |

A product of fewer than 32 columns of x is float32 throughout as well: it waits for memory alone.

Tensor cores multiply float16 and tf32 exactly and add up one tile; tiles are added in float32, since tensor
cores cut off where float32 rounds.

Few rows read weights as fast as memory gives them: so that all processors read, K is cut into SPLIT parts,
whose sums a second kernel adds in their order, or whoever reads them (`vssm.ops.conv_triton`). How a product
is cut depends on its sizes only, and there are no atomics: results repeat bit for bit.

Shapes: x (M, K), weight (N, K), bias (N,), add and y (M, N), scale (K,), partial (SPLIT, M, N), squares
(SPLIT, M), high and low (M, K) or (N, K), down = 2^e (M,) or (N,).
"""

# Kernels are written in the part of Python that Triton compiles.
# ruff: noqa: ANN001, ANN202, RUF005
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vssm.ops.linear_weights import halves_of

__all__ = ["Parts", "Plan", "forward", "multiply", "plan"]

FEW = 64
"""Rows up to which a product waits for its weights."""
MANY = 384
"""Rows from which it pays to split the weights before."""
SMALL = 6 << 20
"""Products of numbers up to which few rows are multiplied without parts of K, that is in one kernel."""
PROCESSORS = 132
"""Multiprocessors of a device, for which products are cut up."""
SHARED = 227 * 1024
"""Bytes of shared memory of the largest devices."""
LONGEST = 8192
"""The kernel that splits holds a row in registers."""
SHORT = 128
"""Columns of x up to which products of many rows norm them on the way, once for each tile of columns of y."""


TALL = 100_000
"""Rows from which a product of few columns waits for x and y alone."""
THIN = 32
"""Columns of x from which tensor cores pay."""


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
    split: str = "tile"
    """Where numbers are split."""


class Parts(NamedTuple):
    """A product whose parts of K are still to be added."""

    partial: Tensor
    """The parts, (SPLIT, M, N)."""
    squares: Tensor | None
    """The parts of sum_k x_k^2, (SPLIT, M): rows are to be normed."""
    K: int
    eps: float


ROWS = (
    (64, Plan(1, 4, 1024, 1, 8, 1, "none")),
    (2**31, Plan(4, 8, 256, 1, 4, 9, "none")),
)
"""How small products of few rows are cut up, by the largest number of columns."""
TURNED = (
    (2048, Plan(32, 128, 64, PROCESSORS, 8, 4, "turned")),
    (1024, Plan(32, 64, 64, PROCESSORS, 4, 4, "turned")),
)
"""How large ones are, by the least number of columns: here SPLIT is the most programs, and BM for 32 rows."""


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
def _tf32_parts(tile):
    """Splits numbers into two of 11 bits, the first rounded; neither needs an exponent."""
    high = ((tile.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, tile - high


@triton.jit
def _finish(y, result, bias, add, at, column, mask):
    if bias is not None:
        result += tl.load(bias + column)
    if add is not None:
        result += tl.load(add + at, mask=mask, other=0.0)
    tl.store(y + at, result, mask=mask)


@triton.jit
def _place(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Returns the rows and columns of a program: those that run together share GROUP tiles of rows."""
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = pid % (GROUP * columns)
    row = (first + within % height) * BM + tl.arange(0, BM)
    return row, (within // height) * BN + tl.arange(0, BN)


# fmt: off
@triton.jit(do_not_specialize=["M", "eps"])
def _tile_kernel(
    x, weight, bias, add, scale, squares, y, M, N, K, depth, stride, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
):
    # fmt: on
    row, column = _place(M, N, BM, BN, GROUP)
    part = tl.program_id(1)
    k = tl.arange(0, BK)
    # Rows after the end are the first again: they are not stored.
    left = x + (row % M).to(tl.int64)[:, None] * stride + k[None, :]
    right = weight + (column % N).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    square = tl.zeros((BM,), tl.float32)
    for at in tl.range(part * depth, (part + 1) * depth, BK):
        a = tl.load(left + at)
        b = tl.load(right + at)
        if scale is not None:
            square += tl.sum(a * a, 1)
            a *= tl.load(scale + at + k)[None, :]
        if HALF:
            high, low, down = _halves(a)
            high_b, low_b, down_b = _halves(b)
            total = tl.dot(low, tl.trans(high_b))
            total = tl.dot(high, tl.trans(low_b), total)
            total = tl.dot(high, tl.trans(high_b), total)
            acc += total * down[:, None] * down_b[None, :]
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="tf32x3")
    if squares is not None:  # parts of K do not know the rate: it is for those who add them
        once = tl.where(tl.min(column, 0) == 0, M, 0)
        tl.store(squares + part * M + row, square, mask=row < once)
    elif scale is not None:
        acc *= tl.rsqrt(square / K + eps)[:, None]
    at = (part * M + row).to(tl.int64)[:, None] * N + column[None, :]
    mask = (row < M)[:, None] & (column < N)[None, :]
    _finish(y, acc, bias, add, at, (column % N)[None, :], mask)


# fmt: off
@triton.jit(do_not_specialize=["M", "eps"])
def _turned_kernel(
    x, weight, bias, add, scale, squares, y, M, N, K, depth, stride, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    # fmt: on
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    k = tl.arange(0, BK)
    # What is after the end is the last again: it is not stored.
    left = weight + tl.minimum(column, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    right = x + tl.minimum(row, M - 1).to(tl.int64)[:, None] * stride + k[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    square = tl.zeros((BM,), tl.float32)
    for at in tl.range(part * depth, (part + 1) * depth, BK):
        a = tl.load(left + at)
        b = tl.load(right + at)
        if scale is not None:
            square += tl.sum(b * b, 1)
            b *= tl.load(scale + at + k)[None, :]
        high, low = _tf32_parts(a)
        high_b, low_b = _tf32_parts(b)
        total = tl.dot(low, tl.trans(high_b), input_precision="tf32")
        total = tl.dot(high, tl.trans(low_b), total, input_precision="tf32")
        acc += tl.dot(high, tl.trans(high_b), total, input_precision="tf32")
    if squares is not None:  # as in the kernel above
        once = tl.where(tl.program_id(0) == 0, M, 0)
        tl.store(squares + part * M + row, square, mask=row < once)
    elif scale is not None:
        acc *= tl.rsqrt(square / K + eps)[None, :]
    at = (part * M + row).to(tl.int64)[None, :] * N + column[:, None]
    mask = (row < M)[None, :] & (column < N)[:, None]
    _finish(y, acc, bias, add, at, tl.minimum(column, N - 1)[:, None], mask)


# fmt: off
@triton.jit(do_not_specialize=["rows", "eps"])
def _split_kernel(
    x, scale, high, low, down, rows, stride, eps, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    k = tl.arange(0, BK)
    mask = (row < rows)[:, None] & (k < K)[None, :]
    tile = tl.load(x + row[:, None] * stride + k[None, :], mask=mask, other=0.0)
    if scale is not None:
        tile *= tl.rsqrt(tl.sum(tile * tile, 1) / K + eps)[:, None]
        tile *= tl.load(scale + k, mask=k < K, other=0.0)[None, :]
    large, small, factor = _halves(tile)
    at = row[:, None] * K + k[None, :]
    tl.store(high + at, large, mask=mask)
    tl.store(low + at, small, mask=mask)
    tl.store(down + row, factor, mask=row < rows)


# fmt: off
@triton.jit(do_not_specialize=["M"])
def _halves_kernel(
    high, low, down, high_w, low_w, down_w, bias, add, y, M, N, K, depth,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    # fmt: on
    row, column = _place(M, N, BM, BN, GROUP)
    part = tl.program_id(1)
    k = tl.arange(0, BK)
    left = (row % M).to(tl.int64)[:, None] * K + k[None, :]
    right = (column % N).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for at in tl.range(part * depth, (part + 1) * depth, BK):
        a, b = tl.load(high + left + at), tl.load(high_w + right + at)
        total = tl.dot(tl.load(low + left + at), tl.trans(b))
        total = tl.dot(a, tl.trans(tl.load(low_w + right + at)), total)
        acc += tl.dot(a, tl.trans(b), total)
    acc *= tl.load(down + row % M)[:, None]
    acc *= tl.load(down_w + column % N)[None, :]
    at = (part * M + row).to(tl.int64)[:, None] * N + column[None, :]
    mask = (row < M)[:, None] & (column < N)[None, :]
    _finish(y, acc, bias, add, at, (column % N)[None, :], mask)


@triton.jit
def add_parts(partial, at, mask, total, SPLIT: tl.constexpr):
    """Adds what SPLIT parts, of `total` numbers each, have at a place."""
    result = tl.load(partial + at, mask=mask, other=0.0)
    for part in tl.static_range(1, SPLIT):
        result += tl.load(partial + part * total + at, mask=mask, other=0.0)
    return result


# fmt: off
@triton.jit(do_not_specialize=["total", "eps"])
def _sum_kernel(
    partial, squares, bias, add, y, total, N, K, eps, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):
    # fmt: on
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < total
    result = add_parts(partial, at, mask, total, SPLIT)
    if squares is not None:
        result *= tl.rsqrt(add_parts(squares, at // N, mask, total // N, SPLIT) / K + eps)
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


# fmt: off
@triton.jit(do_not_specialize=["M", "eps"])
def _once_kernel(
    x, weight, bias, add, scale, y, M, stride, eps, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    b = _columns(weight + (column % N)[:, None] * K, k[None, :], K, BK)
    if scale is not None:
        b *= _columns(scale, k, K, BK)[None, :]
    high_b, low_b, down_b = _halves(b)
    high_b, low_b = tl.trans(high_b), tl.trans(low_b)  # here, else they would go to shared memory every time
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM), tl.num_programs(0), num_stages=STAGES):
        row = tile * BM + tl.arange(0, BM)
        # Rows after the end are the last again: they are not stored.
        a = _columns(x + tl.minimum(row, M - 1).to(tl.int64)[:, None] * stride, k[None, :], K, BK)
        high, low, down = _halves(a)
        total = tl.dot(low, high_b)
        total = tl.dot(high, low_b, total)
        total = tl.dot(high, high_b, total)
        if scale is not None:
            down *= tl.rsqrt(tl.sum(a * a, 1) / K + eps)
        at = row.to(tl.int64)[:, None] * N + column[None, :]
        mask = (row < M)[:, None] & (column < N)[None, :]
        _finish(y, total * down[:, None] * down_b[None, :], bias, add, at, (column % N)[None, :], mask)


@triton.jit
def _columns(rows, k, K: tl.constexpr, BK: tl.constexpr):
    """Loads K columns of rows, and zeros after them."""
    if K == BK:
        values = tl.load(rows + k)
    else:
        values = tl.load(rows + k, mask=k < K, other=0.0)
    return values


# fmt: off
@triton.jit(do_not_specialize=["M"])
def _thin_kernel(
    x, weight, bias, add, y, M, N, stride, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    # fmt: on
    """Few columns of x: products and sums of single numbers, in their order."""
    row, column = _place(M, N, BM, BN, 1)
    left = x + (row % M).to(tl.int64) * stride
    right = weight + (column % N) * K
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.static_range(K):
        acc += tl.load(left + k)[:, None] * tl.load(right + k)[None, :]
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    mask = (row < M)[:, None] & (column < N)[None, :]
    _finish(y, acc, bias, add, at, (column % N)[None, :], mask)


# fmt: off
@triton.jit(do_not_specialize=["M", "eps"])
def _rows_kernel(
    x, weight, bias, add, scale, y, M, N, K, stride, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """A few rows: every program reads BM rows of x and BN of the weight, and needs nothing of the others."""
    first = tl.program_id(1) * BM
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    last = tl.minimum(column, N - 1)
    k = tl.arange(0, BK)
    right = weight + last.to(tl.int64)[:, None] * K + k[None, :]
    sums, squares = (), ()
    for _ in tl.static_range(BM):
        sums = sums + (tl.zeros((BN, BK), tl.float32),)
        squares = squares + (tl.zeros((BK,), tl.float32),)
    for at in tl.range(0, K, BK, num_stages=STAGES):  # without products of tiles, loads wait unless told
        b = tl.load(right + at)
        if scale is not None:
            factor = tl.load(scale + at + k)
        new_sums, new_squares = (), ()
        for i in tl.static_range(BM):
            a = tl.load(x + tl.minimum(first + i, M - 1).to(tl.int64) * stride + at + k)
            if scale is not None:
                new_squares = new_squares + (squares[i] + a * a,)
                a *= factor
            new_sums = new_sums + (sums[i] + a[None, :] * b,)
        sums = new_sums
        if scale is not None:
            squares = new_squares
    for i in tl.static_range(BM):
        result = tl.sum(sums[i], 1)
        if scale is not None:
            result *= tl.rsqrt(tl.sum(squares[i], 0) / K + eps)
        at = (first + i).to(tl.int64) * N + column
        _finish(y, result, bias, add, at, last, column < tl.where(first + i < M, N, 0))


def plan_row(N: int, K: int) -> Plan:
    """Returns how a product of one row is cut up."""
    BK = min(1024, K & -K)
    return Plan(1, max(2, min(16, 256 // BK)), BK, 1, 8 if N <= 1024 and BK == 1024 else 4, 1)


def plan_tall(N: int, K: int) -> Plan | None:
    """Returns how a product of TALL rows is cut up, if not as others."""
    return Plan(64, 64, K, 1, 4, 2, "once") if (N > 64 and K <= 64) or (N == 64 and K == 128) else None


def plan(M: int, N: int, K: int, shared: int = SHARED) -> Plan:
    """Returns how a product of more than one row is cut up, on a device with that much shared memory."""
    tall = plan_tall(N, K) if M >= TALL else None
    if tall is not None and tall.split == "once":
        return tall
    if M >= MANY and N >= 512 and 512 <= K <= LONGEST:
        how = Plan(128, 128, 64, 1, 8, 3, "before")
    elif tall is not None:
        how = tall
    elif M > FEW:
        BM = 128 if triton.cdiv(M, 128) * triton.cdiv(N, 64) * K >= 128 * 128 else 64
        how = Plan(BM, 64, 32, 1, 4, 4, "tf32")
    else:
        BM = max(16, triton.next_power_of_2(M))
        large = [how for least, how in TURNED if least <= N and K >= 256]
        small = [how for most, how in ROWS if most >= N and K % how.BK == 0]
        if not large and small and M * N * K <= SMALL:
            how = small[0]
            room = shared // (4 * how.BK * (how.BM + how.BN))
            return how._replace(stages=min(how.stages, K // how.BK + 1, room))
        how = large[0]._replace(BM=BM) if large else Plan(BM, 16, 128, 1, 4, 4)
    tiles, split = triton.cdiv(M, how.BM) * triton.cdiv(N, how.BN), 1
    programs = how.SPLIT if how.split == "turned" else (1 if how.split == "before" else 2) * PROCESSORS
    least = 64 if how.split == "tf32" else 128
    while split < 16 and 2 * split * tiles <= programs and K % (2 * split * least) == 0:
        split *= 2
    BK, row = how.BK, 4 * (how.BM + how.BN)
    while K // split % BK or 3 * BK * row > shared:
        BK //= 2
    # What is split in the kernel takes the room of one more tile, but a turned product splits in registers.
    stages = min(how.stages, shared // (BK * row) - (how.split in ("tile", "tf32")))
    if how.split == "turned" or (how.split == "tf32" and split == 1):
        # A loop can not load further ahead than it goes; room that it does not take is for other programs.
        stages = min(stages, K // split // BK + 1)
    return how._replace(BK=BK, SPLIT=split, stages=stages)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 0.0,
    how: Plan | None = None,
) -> Tensor:
    """Returns y (..., N) in float32, for K that 32 divides, or of two rows and more for K below THIN."""
    made = multiply(x, weight, bias, add, scale, eps, how)
    if isinstance(made, Tensor):
        return made
    (split, M, N), device = made.partial.shape, x.device
    y = torch.empty((*x.shape[:-1], N), dtype=torch.float32, device=device)
    bias, add = (None if t is None else t.contiguous() for t in (bias, add))
    blocks = {"SPLIT": split, "BLOCK": 256, "num_warps": 2}
    operands = made.partial, made.squares, bias, add, y, M * N, N, made.K, eps
    _sum_kernel[(triton.cdiv(M * N, 256),)](*operands, **blocks)
    return y


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 0.0,
    how: Plan | None = None,
) -> Tensor | Parts:
    """Does `forward` but for the parts of K, if there are any: neither are they added, nor bias and add."""
    (N, K), shape = weight.shape, (*x.shape[:-1], len(weight))
    x = x.reshape(-1, K)
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight.contiguous()
    bias, add, scale = (None if t is None else t.contiguous() for t in (bias, add, scale))
    M = len(x)
    if K < THIN and M > 1 and N:
        return _thin(x, weight, bias, add, scale, eps, x.new_empty(shape))
    how = how or (plan(M, N, K, _shared(x.device)) if M > 1 else plan_row(N, K))
    whole = how.SPLIT == 1 or M <= 1 or N == 0
    y = torch.empty(shape if whole else (how.SPLIT, M, N), dtype=torch.float32, device=x.device)
    if M * N == 0:
        return y
    if M == 1:
        _row_kernel[(triton.cdiv(N, how.BN),)](
            x, weight, bias, add, scale, y, N, K, eps, BN=how.BN, BK=how.BK, num_warps=how.warps
        )
        return y
    if how.split == "once":
        return _once(x, weight, bias, add, scale, eps, y, how)
    sizes = {"BM": how.BM, "BN": how.BN, "BK": how.BK, "num_warps": how.warps, "num_stages": how.stages}
    if how.split == "none":
        grid = triton.cdiv(N, how.BN), triton.cdiv(M, how.BM)
        inputs = x, weight, bias, add, scale, y, M, N, K, x.stride(0), eps
        _rows_kernel[grid](*inputs, STAGES=how.stages, **sizes)
        return y
    if scale is not None and how.split == "tf32" and K > SHORT:
        x, scale = torch.nn.functional.rms_norm(x, (K,), scale, eps), None
    squares = None
    ends = (bias, add) if whole else (None, None)
    grid = (triton.cdiv(M, how.BM) * triton.cdiv(N, how.BN), how.SPLIT)
    if how.split == "before":
        operands = *_split(x, scale, eps), *halves_of(weight, _split)
        _halves_kernel[grid](*operands, *ends, y, M, N, K, K // how.SPLIT, GROUP=8, **sizes)
    else:
        if scale is not None and not whole:
            squares = torch.empty((how.SPLIT, M), dtype=torch.float32, device=x.device)
        inputs = (x, weight, *ends, scale, squares, y, M, N, K, K // how.SPLIT, x.stride(0), eps)
        if how.split == "turned":
            _turned_kernel[(triton.cdiv(N, how.BN), how.SPLIT, triton.cdiv(M, how.BM))](*inputs, **sizes)
        else:
            _tile_kernel[grid](*inputs, HALF=how.split == "tile", GROUP=8, **sizes)
    return y if whole else Parts(y, squares, K, eps)


def _thin(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    scale: Tensor | None,
    eps: float,
    y: Tensor,
) -> Tensor:
    """Writes a product of fewer than THIN columns of x."""
    (N, K), M = weight.shape, len(x)
    x = x if scale is None else torch.nn.functional.rms_norm(x, (K,), scale, eps)
    BM, BN = 64, min(128, triton.next_power_of_2(N))
    grid = (triton.cdiv(M, BM) * triton.cdiv(N, BN),)
    _thin_kernel[grid](x, weight, bias, add, y, M, N, x.stride(0), K, BM, BN, num_warps=8)
    return y


def _once(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    scale: Tensor | None,
    eps: float,
    y: Tensor,
    how: Plan,
) -> Tensor:
    """Writes a product whose programs go over tiles of rows."""
    (N, K), M = weight.shape, len(x)
    columns = triton.cdiv(N, how.BN)
    # As many programs as run at a time: what each does first is then done once.
    at_a_time = PROCESSORS * _resident(how, K, add is not None, _shared(x.device))
    programs = min(triton.cdiv(M, how.BM), max(1, at_a_time // columns))
    inputs = (x, weight, bias, add, scale, y, M, x.stride(0), eps, N, K)
    sizes = (how.BM, how.BN, triton.next_power_of_2(K), how.stages)
    _once_kernel[(programs, columns)](*inputs, *sizes, num_warps=how.warps)
    return y


def _split(x: Tensor, scale: Tensor | None = None, eps: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns high, low and down of the rows of x, normed before if there is a scale."""
    M, K = x.shape
    high, low = torch.empty((2, M, K), dtype=torch.float16, device=x.device)
    down = torch.empty(M, dtype=torch.float32, device=x.device)
    BK = triton.next_power_of_2(K)
    BR = max(1, 2048 // BK)
    _split_kernel[(triton.cdiv(M, BR),)](x, scale, high, low, down, M, x.stride(0), eps, K, BR, BK)
    return high, low, down


def _resident(how: Plan, K: int, add: bool, shared: int) -> int:
    """Returns how many programs that go over rows run at a time on a multiprocessor."""
    BK, tile = triton.next_power_of_2(K), 4 * how.BM * how.BN
    ahead = (how.stages - 1) * (4 * how.BM * BK + tile * add)
    # Beside what is loaded ahead: halves of the rows, or the result on its way out, and halves of the weight.
    room = ahead + max(4 * how.BM * BK, tile) + 4 * how.BN * BK
    return max(1, min(16 // how.warps, shared // (room + 1024)))


def _shared(device: torch.device) -> int:
    if device.type != "cuda":
        return SHARED
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED)
