"""The convolution of very many short sequences and the product of its result, in one kernel.

    y_t = silu(bias + sum_k taps_k x_{t - K + 1 + k})          product_t = y_t weight^T

Both wait for memory: apart, the product would read again what the convolution has just written. Programs go
over tiles of rows, (b, t) in their order, and keep the weight, split into two float16 as in
`vssm.ops.linear_triton`. Inputs of earlier steps are read again, from the cache; those before a sequence are
rows of the state, of which each serves `share` neighbouring sequences.

Shapes: x, y (B, T, D); taps (D, K); bias (D,); state (B / share, K - 1, D); weight (N, D); product (B, T, N).
"""

# Kernels are written in the part of Python that Triton compiles.
# ruff: noqa: ANN001, ANN202
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from vssm.ops.linear_triton import PROCESSORS, TALL
from vssm.ops.linear_triton_kernels import halves

__all__ = ["forward", "takes"]

_BM = 64  # rows of a tile
_RESIDENT = 3  # programs of a multiprocessor at a time


# fmt: off
@triton.jit(do_not_specialize=["rows", "T", "share"])
def _kernel(
    x, taps, bias, state, weight, y, product, rows, T, stride, share, N,
    D: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    # fmt: on
    d = tl.arange(0, D)
    n = tl.arange(0, BN)
    shift = tl.load(bias + d)[None, :]
    columns = tl.load(weight + n[:, None] * D + d[None, :], mask=(n < N)[:, None], other=0.0)
    high_w, low_w, down_w = halves(columns)
    high_w, low_w = tl.trans(high_w), tl.trans(low_w)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BM), tl.num_programs(0)):
        row = tile * BM + tl.arange(0, BM)
        live = row < rows
        b, t = row // T, row % T
        s = tl.zeros((BM, D), tl.float32) + shift
        for k in tl.static_range(K):
            before = t + k < K - 1  # the input is of the state
            place = x + (row - (K - 1) + k).to(tl.int64)[:, None] * stride + d[None, :]
            if state is not None:
                kept = (b // share).to(tl.int64) * (K - 1) + t + k
                place = tl.where(before[:, None], state + kept[:, None] * D + d[None, :], place)
                value = tl.load(place, mask=live[:, None], other=0.0)
            else:
                value = tl.load(place, mask=(live & (t + k >= K - 1))[:, None], other=0.0)
            s += tl.load(taps + d * K + k)[None, :] * value
        s *= tl.sigmoid(s)
        at = row.to(tl.int64)[:, None]
        tl.store(y + at * D + d[None, :], s, mask=live[:, None])
        high, low, down = halves(s)
        total = tl.dot(low, high_w)
        total = tl.dot(high, low_w, total)
        total = tl.dot(high, high_w, total)
        total *= down[:, None] * down_w[None, :]
        tl.store(product + at * N + n[None, :], total, mask=live[:, None] & (n < N)[None, :])


def takes(x: Tensor, weight: Tensor) -> bool:
    """Says whether `forward` is for this input."""
    batch, length, channels = x.shape
    whole = x.stride(2) == 1 and (batch <= 1 or x.stride(0) == length * x.stride(1))
    return batch * length >= TALL and channels in (64, 128) and len(weight) <= 64 and whole


def forward(
    x: Tensor, taps: Tensor, bias: Tensor, state: Tensor | None, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns y and the product, in float32."""
    batch, length, channels = x.shape
    rows, N = batch * length, len(weight)
    y = torch.empty((batch, length, channels), dtype=torch.float32, device=x.device)
    product = torch.empty((batch, length, N), dtype=torch.float32, device=x.device)
    stride = x.stride(1) if length > 1 else x.stride(0)
    _kernel[(min(triton.cdiv(rows, _BM), _RESIDENT * PROCESSORS),)](
        x, taps.contiguous(), bias, None if state is None else state.contiguous(), weight.contiguous(), y,
        product, rows, length, stride, 1 if state is None else batch // len(state), N,
        D=channels, K=taps.shape[1], BM=_BM, BN=max(16, triton.next_power_of_2(N)), num_warps=4, num_stages=1,
    )  # fmt: skip
    return y, product
