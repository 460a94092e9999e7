"""A number of the host for a recording: one kernel, which reads it from memory of the host.

To fill a tensor before every replay would take a launch, which the device waits for.
"""

# Kernels are written in the part of Python that Triton compiles.
# ruff: noqa: ANN001, ANN202
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["tell"]

_BLOCK = 1024


@triton.jit(do_not_specialize=["size"])
def _tell_kernel(number, target, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        target + at, tl.load(number, volatile=True) + tl.zeros((BLOCK,), tl.int64), mask=at < size
    )


def tell(number: Tensor, target: Tensor) -> None:
    """Fills a dense int64 tensor with a pinned int64 of the host, as it is when the device gets there."""
    size = target.numel()
    _tell_kernel[(triton.cdiv(size, _BLOCK),)](number, target, size, _BLOCK)
