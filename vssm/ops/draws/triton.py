"""Draws of latents and their embedding on a GPU: the Triton kernels of `vssm.ops.draws`.

`inverse_cdf` has softmax, cumulative sum and search of a row in registers. A run of rows of the
logits serves several runs of noise. A program does BR rows. Padded classes have no probability and
lie above every target.

`embed_sum` adds rows of a table, in float32. A class out of range gives NaN instead of a read out
of bounds. A program does one step, and reads all of its rows at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vssm.ops.launch_triton import ceil_div, launch, next_power

TILE = 1024  # elements that a program of `inverse_cdf` holds at a time
EMBED_TILE = 4096  # elements of a program of `embed_sum`
LOG2E = tl.constexpr(1.4426950408889634)


# fmt: off
@triton.jit(do_not_specialize=["run", "times", "temperature"])
def _inverse_cdf_kernel(
    v, u, z, run, times, temperature, N: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):
    # fmt: on
    blocks = tl.cdiv(run, BR)
    turn = (tl.program_id(0) // blocks).to(tl.int64)  # which run of the noise
    row = tl.program_id(0) % blocks * BR + tl.arange(0, BR)
    n = tl.arange(0, BN)
    live, there = row < run, (n < N)[None, :]
    own = (turn // times * run + row)[:, None] * N + n[None, :]
    logits = tl.load(v + own, mask=live[:, None] & there, other=0.0)
    s = tl.where(there, logits.to(tl.float32) / temperature, float("-inf"))
    e = tl.exp2((s - tl.max(s, 1)[:, None]) * LOG2E)
    parts = (e / tl.sum(e, 1)[:, None] * 1073741824.0).to(tl.int32)
    total = tl.sum(parts, 1)
    noise = tl.load(u + turn * run + row, mask=live, other=0.5)
    target = tl.minimum((noise * total.to(tl.float32)).to(tl.int32), total - 1)
    below = tl.cumsum(parts, 1) <= target[:, None]
    # If logits are not finite, all classes may be below.
    chosen = tl.minimum(tl.sum(below.to(tl.int32), 1), N - 1)
    tl.store(z + turn * run + row, chosen.to(tl.int64), mask=live)


def inverse_cdf(
    logits: Tensor, noise: Tensor, temperature: float, times: int, run: int
) -> Tensor:
    """Returns the classes, int64, of noise that reads runs of the logits several times each."""
    z = torch.empty(noise.shape, dtype=torch.int64, device=noise.device)
    N = logits.shape[-1]
    BN = next_power(N)
    BR = max(1, TILE // BN)
    if z.numel():
        launch(
            _inverse_cdf_kernel, (noise.numel() // run * ceil_div(run, BR),),
            logits.contiguous(), noise.contiguous(), z, run, times, float(temperature),
            N=N, BR=BR, BN=BN,
        )  # fmt: skip
    return z


@triton.jit
def _embed_kernel(z, weight, y, N, D, Z: tl.constexpr, BZ: tl.constexpr, BD: tl.constexpr):
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    step = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BZ)
    chosen = tl.load(z + step * Z + i, mask=i < Z, other=0).to(tl.int64)
    known = (chosen >= 0) & (chosen < N)
    at = (i * N + chosen)[:, None] * D + d[None, :]
    mask = (known & (i < Z))[:, None] & (d < D)[None, :]
    rows = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    rows = tl.where(known[:, None], rows, float("nan"))
    tl.store(y + step * D + d, tl.sum(rows, 0).to(y.dtype.element_ty), mask=d < D)


def embed_sum(z: Tensor, weight: Tensor) -> Tensor:
    """Returns y (..., D) in the dtype of the weight."""
    Z, D = z.shape[-1], weight.shape[1]
    y = torch.empty((*z.shape[:-1], D), dtype=weight.dtype, device=weight.device)
    BZ = next_power(Z)
    BD = min(128, EMBED_TILE // BZ, next_power(D))
    if y.numel():
        launch(
            _embed_kernel, (z.numel() // Z, ceil_div(D, BD)), z.contiguous(), weight.contiguous(),
            y, len(weight) // Z, D, Z=Z, BZ=BZ, BD=BD,
        )  # fmt: skip
    return y
