"""The products of `vssm.ops.linear` on a GPU: float32 results from tensor cores of fewer bits.

    y = rate (x scale) weight^T + bias + add      rate = (mean_k x_k^2 + eps)^(-1/2), for each row

Tensor cores multiply float16 and tf32 exactly. So each operand is split into two numbers of 11
bits, and three of their four products are added up:

    x = high + low                          x w = low high' + high low' + high high'

which leaves out 2^-22 of the product. Tensor cores add up one tile; tiles are added in float32,
because tensor cores cut off where float32 rounds.

| `Plan.method` | for                     | how                                                    |
| ------------- | ----------------------- | ------------------------------------------------------ |
| "float32"     | one row, small products | sums of single numbers, without tensor cores           |
| "tf32"        | all others              | y^T = weight x^T, so that columns of y fill the tensor |
|               |                         | cores when rows are few; operands split in registers   |
| "float16"     | many rows and columns   | a kernel of its own norms and splits into 2^e (high +  |
|               |                         | low), e one for each row so that its largest number is |
|               |                         | in [2^14, 2^15); a `PackedWeight` keeps the halves     |

Few rows read weights as fast as memory allows. To let all processors read, K is cut into SPLIT
parts, whose sums are added in order by a second kernel. How a product is cut depends on its sizes
only, and there are no atomics: results repeat bit for bit.

Shapes: x (M, K), weight (N, K), bias (N,), add and y (M, N), scale (K,), partial (SPLIT, M, N),
squares (SPLIT, M), high and low (M, K) or (N, K), down = 2^e (M,) or (N,). Rows and columns that a
last tile has beyond the end read others in their place, and are not stored.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from vssm.ops.launch_triton import ceil_div, contiguous, next_power
from vssm.ops.linear import Halves, PackedWeight

FEW = 64  # rows up to which a product waits for its weights
MANY = 384  # rows from which it pays to split operands in a kernel of its own
SMALL = 6 << 20  # products of numbers up to which few rows are summed without tensor cores
PROCESSORS = 132  # multiprocessors of a device, for which products are cut up
SHARED = 227 * 1024  # bytes of shared memory of the largest devices
LONGEST = 8192  # the kernel that splits holds a row in registers
SHORT = 128  # columns of x up to which many rows are normed once for each tile of columns of y


class Plan(NamedTuple):
    """How a product is cut up."""

    BM: int  # rows of a tile
    BN: int  # columns of a tile
    BK: int  # how much of K a tile takes at a time
    SPLIT: int  # parts of K that different programs sum
    warps: int
    stages: int  # tiles on their way from memory
    method: str


def plan(M: int, N: int, K: int, shared: int = SHARED) -> Plan:
    """Returns how a product is cut up on a device with that much shared memory."""
    if M == 1:
        BK = min(1024, K & -K)
        warps = 8 if N <= 1024 and BK == 1024 else 4
        return Plan(1, max(2, min(16, 256 // BK)), BK, 1, warps, 3, "float32")
    if M <= FEW and M * N * K <= SMALL and (N < 1024 or K < 256):
        how = Plan(4, 8, 256, 1, 4, 9, "float32")
        if N <= 64 and K % 1024 == 0:
            how = Plan(1, 4, 1024, 1, 8, 1, "float32")
        if K % how.BK == 0:
            room = shared // (4 * how.BK * (how.BM + how.BN))
            return how._replace(stages=min(how.stages, K // how.BK + 1, room))
    if M >= MANY and N >= 512 and 512 <= K <= LONGEST:
        how = Plan(128, 128, 64, 1, 8, 3, "float16")
    elif M > FEW:
        BN, warps = (128, 8) if N > 64 else (64, 4)
        how = Plan(64, BN, 32, 1, warps, 4, "tf32")
    else:
        BN, BK, warps = (128, 64, 8) if N >= 2048 else (64, 64, 4)
        if N < 1024 or K < 256:  # narrow tiles, so that there are enough
            BN, BK, warps = 16, 128, 4
        how = Plan(max(16, next_power(M)), BN, BK, 1, warps, 4, "tf32")
    tiles, split = ceil_div(M, how.BM) * ceil_div(N, how.BN), 1
    while split < 16 and 2 * split * tiles <= PROCESSORS and K % (2 * split * 128) == 0:
        split *= 2
    BK, row = how.BK, 4 * (how.BM + how.BN)
    while K // split % BK or 3 * BK * row > shared:
        BK //= 2
    stages = min(how.stages, shared // (BK * row))
    if how.method == "tf32":
        # A loop cannot load further ahead than it goes; room that it does not take is for other
        # programs.
        stages = min(stages, K // split // BK + 1)
    return how._replace(BK=BK, SPLIT=split, stages=stages)


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    norm: nn.RMSNorm | None = None,
    how: Plan | None = None,
) -> Tensor:
    """Returns y (..., N) in float32, for K that 32 divides."""
    packed = weight if isinstance(weight, PackedWeight) else None
    weight = weight.contiguous() if isinstance(weight, Tensor) else weight.weight
    (N, K), y = weight.shape, x.new_empty((*x.shape[:-1], len(weight)))
    x = x.reshape(-1, K)
    x = x if x.stride(1) == 1 else x.contiguous()
    scale, eps = (None, 0.0) if norm is None else (norm.weight.contiguous(), norm.eps or 0.0)
    bias, add, M = contiguous(bias), contiguous(add), len(x)
    if M * N == 0:
        return y
    how = how or plan(M, N, K, _shared(x.device))
    sizes = {"BM": how.BM, "BN": how.BN, "BK": how.BK}
    options = {"num_warps": how.warps, "num_stages": how.stages}
    rows, columns, whole = ceil_div(M, how.BM), ceil_div(N, how.BN), how.SPLIT == 1
    if how.method == "float32":
        inputs = x, weight, bias, add, scale, y, M, N, K, x.stride(0), eps
        _float32_kernel[columns, rows](*inputs, **sizes, STAGES=how.stages, **options)
        return y
    result, ends, squares = y, (bias, add), None
    if not whole:
        result, ends = x.new_empty((how.SPLIT, M, N)), (None, None)
    if how.method == "float16":
        left = _split(x, scale, eps)
        right = _split(weight) if packed is None else packed.halves(_split)
        # Tiles that are described once are copied by a unit of their own, which computes no
        # addresses.
        tiles = [
            TensorDescriptor.from_tensor(half, [size, how.BK])
            for halves, size in ((left, how.BM), (right, how.BN))
            for half in halves[:2]
        ]
        inputs = *tiles, left[2], right[2], *ends, result, M, N, K // how.SPLIT
        group = 8 if M <= 2048 else 4
        _float16_kernel[rows * columns, how.SPLIT](*inputs, **sizes, GROUP=group, **options)
    else:
        if scale is not None and M > FEW and K > SHORT:  # else once for each tile of columns
            x, scale = F.rms_norm(x, (K,), scale, eps), None
        if scale is not None and not whole:
            squares = x.new_empty((how.SPLIT, M))
        inputs = x, weight, *ends, scale, squares, result, M, N, K, K // how.SPLIT, x.stride(0), eps
        _tf32_kernel[columns, how.SPLIT, rows](*inputs, **sizes, **options)
    if not whole:
        inputs = result, squares, bias, add, y, M * N, N, K, eps
        _sum_kernel[(ceil_div(M * N, 256),)](*inputs, SPLIT=how.SPLIT, BLOCK=256, num_warps=2)
    return y


def _split(x: Tensor, scale: Tensor | None = None, eps: float = 0.0) -> Halves:
    """Returns high, low and down of the rows of x, normed before if there is a scale."""
    M, K = x.shape
    high, low = torch.empty((2, M, K), dtype=torch.float16, device=x.device)
    halves = high, low, x.new_empty(M)
    BK = next_power(K)
    BR = max(1, 2048 // BK)
    _split_kernel[(ceil_div(M, BR),)](x, scale, *halves, M, x.stride(0), eps, K, BR, BK)
    return halves


def _shared(device: torch.device) -> int:
    if device.type != "cuda":
        return SHARED
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@triton.jit
def _store(y, result, bias, add, at, column, mask):
    if bias is not None:
        result += tl.load(bias + column)
    if add is not None:
        result += tl.load(add + at, mask=mask, other=0.0)
    tl.store(y + at, result, mask=mask)


# fmt: off
@triton.jit(do_not_specialize=["M", "eps"])
def _float32_kernel(
    x, weight, bias, add, scale, y, M, N, K, stride, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Every program reads BM rows of x and BN of the weight, and nothing else."""
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
        _store(y, result, bias, add, at, last, column < tl.where(first + i < M, N, 0))


@triton.jit
def _tf32_halves(tile):
    """Splits numbers into two of 11 bits, the first rounded; neither needs an exponent."""
    high = ((tile.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, tile - high


# fmt: off
@triton.jit(do_not_specialize=["M", "eps"])
def _tf32_kernel(
    x, weight, bias, add, scale, squares, y, M, N, K, depth, stride, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    # fmt: on
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    k = tl.arange(0, BK)
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
        high, low = _tf32_halves(a)
        high_b, low_b = _tf32_halves(b)
        total = tl.dot(low, tl.trans(high_b), input_precision="tf32")
        total = tl.dot(high, tl.trans(low_b), total, input_precision="tf32")
        acc += tl.dot(high, tl.trans(high_b), total, input_precision="tf32")
    if squares is not None:  # parts of K do not know the rate: it is for those who add them
        once = tl.where(tl.program_id(0) == 0, M, 0)
        tl.store(squares + part * M + row, square, mask=row < once)
    elif scale is not None:
        acc *= tl.rsqrt(square / K + eps)[None, :]
    at = (part * M + row).to(tl.int64)[None, :] * N + column[:, None]
    mask = (row < M)[None, :] & (column < N)[:, None]
    _store(y, acc, bias, add, at, tl.minimum(column, N - 1)[:, None], mask)


# fmt: off
@triton.jit(do_not_specialize=["rows", "eps"])
def _split_kernel(
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
    largest = tl.max(tl.abs(tile), 1).to(tl.int32, bitcast=True)
    exponent = tl.maximum(largest >> 23, 16)  # with its bias of 127
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    tile *= up[:, None]
    large = tile.to(tl.float16)
    at = row[:, None] * K + k[None, :]
    tl.store(high + at, large, mask=mask)
    tl.store(low + at, (tile - large.to(tl.float32)).to(tl.float16), mask=mask)
    factor = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    tl.store(down + row, factor, mask=row < rows)


# fmt: off
@triton.jit(do_not_specialize=["M"])
def _float16_kernel(
    high, low, high_w, low_w, down, down_w, bias, add, y, M, N, depth,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    # fmt: on
    """Halves come as descriptors of their tensors: what is beyond the end is zero."""
    # Programs that run together share GROUP tiles of rows.
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = tl.program_id(0) // (GROUP * columns) * GROUP
    height = tl.minimum(rows - group, GROUP)
    within = tl.program_id(0) % (GROUP * columns)
    first, left = (group + within % height) * BM, within // height * BN
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
    _store(y, acc, bias, add, at, (column % N)[None, :], mask)


@triton.jit
def _add_parts(partial, at, mask, total, SPLIT: tl.constexpr):
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
    result = _add_parts(partial, at, mask, total, SPLIT)
    if squares is not None:
        result *= tl.rsqrt(_add_parts(squares, at // N, mask, total // N, SPLIT) / K + eps)
    _store(y, result, bias, add, at, at % N, mask)
