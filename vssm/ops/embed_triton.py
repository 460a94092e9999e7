"""The sum of `vssm.ops.embed` on a GPU: a program reads BD columns of the Z rows that one step selects.

Shapes: z (steps, Z), weight (Z N, D), y (steps, D). Sums are float32. A class that is not there gives NaN
rather than a read out of bounds. Addresses are 64-bit.
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
"""Elements that a program holds."""


# fmt: off
@triton.jit
def _kernel(z, weight, y, N, D, Z: tl.constexpr, BZ: tl.constexpr, BD: tl.constexpr):
    # fmt: on
    step = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BZ)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    there = (i < Z)[:, None] & (d < D)[None, :]
    classes = tl.load(z + step * Z + i, mask=i < Z, other=0).to(tl.int64)
    known = (classes >= 0) & (classes < N)
    at = (i * N + classes)[:, None] * D + d[None, :]
    rows = tl.load(weight + at, mask=there & known[:, None], other=0.0).to(tl.float32)
    rows = tl.where(known[:, None], rows, float("nan"))
    tl.store(y + step * D + d, tl.sum(rows, 0).to(y.dtype.element_ty), mask=d < D)


def embed_sum(z: Tensor, weight: Tensor) -> Tensor:
    """Returns y (..., D) in the dtype of the weight."""
    Z, D = z.shape[-1], weight.shape[1]
    y = torch.empty((*z.shape[:-1], D), dtype=weight.dtype, device=weight.device)
    BZ = triton.next_power_of_2(Z)
    BD = min(128, TILE // BZ)
    if y.numel():
        inputs = (z.contiguous(), weight.contiguous())
        _kernel[(z.numel() // Z, triton.cdiv(D, BD))](*inputs, y, len(weight) // Z, D, Z, BZ, BD)
    return y
