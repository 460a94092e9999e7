"""The probe of `vssm.sampling.parallel` on a GPU: one kernel, which writes to memory of the host.

A recording of kernels alone, one after the other, is launched in less time than one with a copy between them,
and the host can read the number while the device goes on.
"""

# Kernels are written in the part of Python that Triton compiles.
# ruff: noqa: ANN001, ANN202
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["show"]


@triton.jit
def _show_kernel(words, place, size: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for i in tl.static_range(len(words)):
        total += tl.load(words[i] + at, mask=at < size, other=0)
    tl.store(place, tl.sum(total, 0))


def show(weights: tuple[Tensor, ...], place: Tensor) -> None:
    """Writes the sum of all 64-bit words of some weights, of one shape, to a pinned int64 of the host."""
    words = tuple(weight.detach().contiguous().view(torch.int64) for weight in weights)
    size = words[0].numel()
    _show_kernel[(1,)](words, place, size, triton.next_power_of_2(size))
