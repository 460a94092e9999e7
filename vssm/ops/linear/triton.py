"""The products of `vssm.ops.linear` on a GPU: float32 results from tensor cores of fewer bits.

    y = rate (x scale) weight^T + bias + add      rate = (mean_k x_k^2 + eps)^(-1/2), for each row

Each operand is split into two numbers of 11 bits, and three of their four products are added up:

    x = 2^e (high + low),   e one exponent for each row, so that its largest is in [2^14, 2^15)
    x w = 2^(e + e') (low high' + high low' + high high')      leaves out 2^-22 of the product

| rows | `Plan.split` | how operands are split                                                     |
| ---- | ------------ | -------------------------------------------------------------------------- |
| few  | "none"       | not at all, for one row or where x and the weight are small                |
|      | "turned"     | into tf32, in the kernel, where the weight is large: y^T = weight x^T, so  |
|      |              | that columns of y fill the tensor cores and a weight is split once         |
| more | "turned"     | as above, up to SOME rows, where there are columns enough                  |
| any  | "tf32"       | into tf32, by Triton, where no other way fits                              |
| many | "before"     | into float16, by a kernel of its own that also norms; a `PackedWeight`     |
|      |              | keeps the halves of a weight                                               |

Tensor cores multiply float16 and tf32 exactly and add up one tile. Tiles are added in float32,
because tensor cores cut off where float32 rounds.

Few rows read weights as fast as memory allows. To let all processors read, K is cut into SPLIT
parts, whose sums are added in order by a second kernel or by the reader (`vssm.ops.conv.triton`).
How a product is cut depends on its sizes only, and there are no atomics: results repeat bit for
bit.

Shapes: x (M, K), weight (N, K), bias (N,), add and y (M, N), scale (K,), partial (SPLIT, M, N),
squares (SPLIT, M), high and low (M, K) or (N, K), down = 2^e (M,) or (N,).
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vssm.ops.linear import triton_kernels as kernels
from vssm.ops.linear.fused import Halves, PackedWeight

__all__ = ["Parts", "Plan", "forward", "multiply", "plan"]

FEW = 64  # rows up to which a product waits for its weights
SOME = 2048  # rows up to which a turned product splits often enough to pay
MANY = 384  # rows from which it pays to split the weights before
SMALL = 6 << 20  # products of numbers up to which few rows are multiplied without parts of K
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
    split: str = "tf32"  # where numbers are split


class Parts(NamedTuple):
    """A product whose parts of K are still to be added."""

    partial: Tensor  # the parts, (SPLIT, M, N)
    squares: Tensor | None  # the parts of sum_k x_k^2, (SPLIT, M): rows are to be normed
    K: int
    eps: float


# How small products of few rows are cut up, by the largest number of columns.
ROWS = (
    (64, Plan(1, 4, 1024, 1, 8, 1, "none")),
    (2**31, Plan(4, 8, 256, 1, 4, 9, "none")),
)
# How large ones are, by the least number of columns: SPLIT is the most programs, BM is for 32 rows.
TURNED = (
    (2048, Plan(32, 128, 64, PROCESSORS, 8, 4, "turned")),
    (1024, Plan(32, 64, 64, PROCESSORS, 4, 4, "turned")),
)


def plan(M: int, N: int, K: int, shared: int = SHARED) -> Plan:
    """Returns how a product is cut up on a device with that much shared memory."""
    if M == 1:
        BK = min(1024, K & -K)
        warps = 8 if N <= 1024 and BK == 1024 else 4
        return Plan(1, max(2, min(16, 256 // BK)), BK, 1, warps, 3, "none")
    if M >= MANY and N >= 512 and 512 <= K <= LONGEST:
        how = Plan(128, 128, 64, 1, 8, 3, "before")
    elif FEW < M <= SOME and N >= 96:
        how = Plan(64, 128, 32, PROCESSORS, 8, 4, "turned")
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
        how = large[0]._replace(BM=BM) if large else Plan(BM, 16, 128, 1, 4, 4, "tf32")
    tiles, split = triton.cdiv(M, how.BM) * triton.cdiv(N, how.BN), 1
    programs = (
        how.SPLIT if how.split == "turned" else (1 if how.split == "before" else 2) * PROCESSORS
    )
    least = 64 if how.split == "tf32" else 128
    while split < 16 and 2 * split * tiles <= programs and K % (2 * split * least) == 0:
        split *= 2
    BK, row = how.BK, 4 * (how.BM + how.BN)
    while K // split % BK or 3 * BK * row > shared:
        BK //= 2
    # What is split in the kernel takes the room of one more tile, but a turned product splits in
    # registers.
    stages = min(how.stages, shared // (BK * row) - (how.split == "tf32"))
    if how.split == "turned" or (how.split == "tf32" and split == 1):
        # A loop can not load further ahead than it goes; room that it does not take is for other
        # programs.
        stages = min(stages, K // split // BK + 1)
    return how._replace(BK=BK, SPLIT=split, stages=stages)


def forward(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 0.0,
    how: Plan | None = None,
) -> Tensor:
    """Returns y (..., N) in float32, for K that 32 divides."""
    made = multiply(x, weight, bias, add, scale, eps, how)
    return made if isinstance(made, Tensor) else _added(made, x.shape[:-1], bias, add)


def _normed_before(M: int, K: int, how: Plan) -> bool:
    """Says whether rows are normed by a kernel of its own: on the way it would be once for each
    tile.
    """
    return M > FEW and how.split in ("tf32", "turned") and K > SHORT


def _added(made: Parts, shape: torch.Size, bias: Tensor | None, add: Tensor | None) -> Tensor:
    """Adds parts of K, bias and add."""
    split, M, N = made.partial.shape
    y = torch.empty((*shape, N), dtype=torch.float32, device=made.partial.device)
    bias, add = (None if t is None else t.contiguous() for t in (bias, add))
    blocks = {"SPLIT": split, "BLOCK": 256, "num_warps": 2}
    operands = made.partial, made.squares, bias, add, y, M * N, N, made.K, made.eps
    kernels.sum_kernel[(triton.cdiv(M * N, 256),)](*operands, **blocks)
    return y


def multiply(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 0.0,
    how: Plan | None = None,
) -> Tensor | Parts:
    """Does `forward` but for the parts of K, if there are any: neither are they added, nor bias and
    add.
    """
    packed = weight if isinstance(weight, PackedWeight) else None
    weight = weight.contiguous() if isinstance(weight, Tensor) else weight.weight
    (N, K), shape = weight.shape, (*x.shape[:-1], len(weight))
    x = x.reshape(-1, K)
    x = x if x.stride(1) == 1 else x.contiguous()
    bias, add, scale = (None if t is None else t.contiguous() for t in (bias, add, scale))
    M = len(x)
    how = how or plan(M, N, K, _shared(x.device))
    whole = how.SPLIT == 1 or M <= 1 or N == 0
    y = torch.empty(shape if whole else (how.SPLIT, M, N), dtype=torch.float32, device=x.device)
    if M * N == 0:
        return y
    sizes = {
        "BM": how.BM,
        "BN": how.BN,
        "BK": how.BK,
        "num_warps": how.warps,
        "num_stages": how.stages,
    }
    if how.split == "none":
        grid = triton.cdiv(N, how.BN), triton.cdiv(M, how.BM)
        inputs = x, weight, bias, add, scale, y, M, N, K, x.stride(0), eps
        kernels.rows_kernel[grid](*inputs, STAGES=how.stages, **sizes)
        return y
    if scale is not None and _normed_before(M, K, how):
        x, scale = torch.nn.functional.rms_norm(x, (K,), scale, eps), None
    squares = None
    ends = (bias, add) if whole else (None, None)
    grid = (triton.cdiv(M, how.BM) * triton.cdiv(N, how.BN), how.SPLIT)
    if how.split == "before":
        from triton.tools.tensor_descriptor import (
            TensorDescriptor,  # since Triton 3.4, as `linear` knows
        )

        high, low, down = _split(x, scale, eps)
        high_w, low_w, down_w = _split(weight) if packed is None else packed.halves(_split)
        # Tiles that are described once are copied by a unit of their own, which computes no
        # addresses.
        rows, columns = [how.BM, how.BK], [how.BN, how.BK]
        left = (*(TensorDescriptor.from_tensor(half, rows) for half in (high, low)), down)
        right = (*(TensorDescriptor.from_tensor(half, columns) for half in (high_w, low_w)), down_w)
        group = 8 if M <= 2048 else 4
        kernels.halves_kernel[grid](
            *left, *right, *ends, y, M, N, K, K // how.SPLIT, GROUP=group, **sizes
        )
    else:
        if scale is not None and not whole:
            squares = torch.empty((how.SPLIT, M), dtype=torch.float32, device=x.device)
        inputs = (x, weight, *ends, scale, squares, y, M, N, K, K // how.SPLIT, x.stride(0), eps)
        if how.split == "turned":
            kernels.turned_kernel[(triton.cdiv(N, how.BN), how.SPLIT, triton.cdiv(M, how.BM))](
                *inputs, **sizes
            )
        else:
            kernels.tile_kernel[grid](*inputs, GROUP=8, **sizes)
    return y if whole else Parts(y, squares, K, eps)


def _split(x: Tensor, scale: Tensor | None = None, eps: float = 0.0) -> Halves:
    """Returns high, low and down of the rows of x, normed before if there is a scale."""
    M, K = x.shape
    high, low = torch.empty((2, M, K), dtype=torch.float16, device=x.device)
    halves = high, low, torch.empty(M, dtype=torch.float32, device=x.device)
    BK = triton.next_power_of_2(K)
    BR = max(1, 2048 // BK)
    kernels.split_kernel[(triton.cdiv(M, BR),)](x, scale, *halves, M, x.stride(0), eps, K, BR, BK)
    return halves


def _shared(device: torch.device) -> int:
    if device.type != "cuda":
        return SHARED
    return getattr(
        torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED
    )
