"""The draws of `vssm.ops.draw` on a GPU: softmax, cumulative sum and search of a row in registers.

Shapes: v (runs x run, N), u and z (runs x span,): a run of rows of the logits is repeated over a
span of noise. A program does BR rows, with the BN >= N classes of a row in neighbouring threads.
Padded classes have no probability and lie above every target. Addresses are 64-bit where needed.
"""

# Kernels are written in the subset of Python that Triton compiles.
# ruff: noqa: ANN001, ANN202
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from vssm.ops.draw import repeats

__all__ = ["inverse_cdf"]

TILE = 1024  # elements that a program holds
LOG2E = tl.constexpr(1.4426950408889634)


# fmt: off
@triton.jit(do_not_specialize=["rows", "span", "run", "temperature"])
def _kernel(
    v, u, z, rows, span, run, temperature,
    N: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    own = row // span * run + row % run
    n = tl.arange(0, BN)
    live, there = row < rows, (n < N)[None, :]
    logits = tl.load(v + own[:, None] * N + n[None, :], mask=live[:, None] & there, other=0.0)
    s = tl.where(there, logits.to(tl.float32) / temperature, float("-inf"))
    e = tl.exp2((s - tl.max(s, 1)[:, None]) * LOG2E)
    parts = (e / tl.sum(e, 1)[:, None] * 1073741824.0).to(tl.int32)
    total = tl.sum(parts, 1)
    noise = tl.load(u + row, mask=live, other=0.5)
    target = tl.minimum((noise * total.to(tl.float32)).to(tl.int32), total - 1)
    below = tl.cumsum(parts, 1) <= target[:, None]
    # If logits are not finite, all classes may be below.
    tl.store(z + row, tl.minimum(tl.sum(below.to(tl.int32), 1), N - 1).to(tl.int64), mask=live)


def inverse_cdf(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Returns the classes, of the shape of the noise, int64."""
    z = torch.empty(noise.shape, dtype=torch.int64, device=noise.device)
    N, rows = logits.shape[-1], noise.numel()
    BN = triton.next_power_of_2(N)
    BR = max(1, TILE // BN)
    if rows:
        shared = repeats(logits, noise)
        assert shared is not None
        times, run = shared
        inputs = (logits.contiguous(), noise.contiguous())
        wide = max(rows + BR, logits.numel()) >= 2**31  # 64-bit divisions are slow
        sizes = (rows, times * run, run, float(temperature))
        _kernel[(triton.cdiv(rows, BR),)](*inputs, z, *sizes, N, BR, BN, wide)
    return z
