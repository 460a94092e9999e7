"""The kernels of `vssm.ops.linear.triton`, which says what they compute, and which is for what.

Rows and columns that a last tile has beyond the end read others in their place, and are not stored.
"""

import triton
import triton.language as tl

__all__ = [
    "add_parts",
    "halves",
    "halves_kernel",
    "rows_kernel",
    "split_kernel",
    "sum_kernel",
    "tile_kernel",
    "turned_kernel",
]


@triton.jit
def halves(tile):
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
def _corner(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Returns the first row and column of a program: those that run together share GROUP tiles of
    rows.
    """
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = pid % (GROUP * columns)
    return (first + within % height) * BM, within // height * BN


# fmt: off
@triton.jit(do_not_specialize=["M", "eps"])
def tile_kernel(
    x, weight, bias, add, scale, squares, y, M, N, K, depth, stride, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    # fmt: on
    first, left = _corner(M, N, BM, BN, GROUP)
    row, column = first + tl.arange(0, BM), left + tl.arange(0, BN)
    part = tl.program_id(1)
    k = tl.arange(0, BK)
    # Rows after the end are the first again: they are not stored.
    rows = x + (row % M).to(tl.int64)[:, None] * stride + k[None, :]
    columns = weight + (column % N).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    square = tl.zeros((BM,), tl.float32)
    for at in tl.range(part * depth, (part + 1) * depth, BK):
        a = tl.load(rows + at)
        b = tl.load(columns + at)
        if scale is not None:
            square += tl.sum(a * a, 1)
            a *= tl.load(scale + at + k)[None, :]
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
def turned_kernel(
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
def split_kernel(
    x, scale, high, low, down, rows, stride, eps,
    K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    k = tl.arange(0, BK)
    mask = (row < rows)[:, None] & (k < K)[None, :]
    tile = tl.load(x + row[:, None] * stride + k[None, :], mask=mask, other=0.0)
    if scale is not None:
        tile *= tl.rsqrt(tl.sum(tile * tile, 1) / K + eps)[:, None]
        tile *= tl.load(scale + k, mask=k < K, other=0.0)[None, :]
    large, small, factor = halves(tile)
    at = row[:, None] * K + k[None, :]
    tl.store(high + at, large, mask=mask)
    tl.store(low + at, small, mask=mask)
    tl.store(down + row, factor, mask=row < rows)


# fmt: off
@triton.jit(do_not_specialize=["M"])
def halves_kernel(
    high, low, down, high_w, low_w, down_w, bias, add, y, M, N, K, depth,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    # fmt: on
    """Halves come as descriptors of their tensors: what is beyond the end is zero."""
    first, left = _corner(M, N, BM, BN, GROUP)
    part = tl.program_id(1)
    acc = tl.zeros((BM, BN), tl.float32)
    for at in tl.range(part * depth, (part + 1) * depth, BK):
        a, b = high.load([first, at]), high_w.load([left, at])
        total = tl.dot(low.load([first, at]), tl.trans(b))
        total = tl.dot(a, tl.trans(low_w.load([left, at])), total)
        acc += tl.dot(a, tl.trans(b), total)
    row, column = first + tl.arange(0, BM), left + tl.arange(0, BN)
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
def sum_kernel(
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
@triton.jit(do_not_specialize=["M", "eps"])
def rows_kernel(
    x, weight, bias, add, scale, y, M, N, K, stride, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """One row or a few: every program reads BM rows of x and BN of the weight, and nothing else."""
    first = tl.program_id(1) * BM
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    last = tl.minimum(column, N - 1)
    k = tl.arange(0, BK)
    right = weight + last.to(tl.int64)[:, None] * K + k[None, :]
    sums, squares = (), ()
    for _ in tl.static_range(BM):
        sums = sums + (tl.zeros((BN, BK), tl.float32),)
        squares = squares + (tl.zeros((BK,), tl.float32),)
    for at in tl.range(0, K, BK, num_stages=STAGES):  # else the loads wait
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
