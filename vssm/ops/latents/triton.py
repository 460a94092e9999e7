"""Categorical latents on a GPU: the Triton kernels of `vssm.ops.latents`.

With s = v - max v, e = exp(s), S = sum_n e, q = e / S and the Gumbel softmax r of v - log(-log u):

    z = one_hot(argmax_n e_n / -log u_n)              r_n ~ e_n / -log u_n
    KL = sum_n q_n s_n - log(S / N)                   dv = J(r) dz + dKL q (s - sum_n q_n s_n)

where J(r) dz = r (dz - sum_n r_n dz_n). With s^p = v_p - max v_p instead of the uniform prior:

    KL = sum_n q_n (s_n - s^p_n) - log(S / S^p)       dv likewise, of s - s^p;  dv_p = dKL (p - q)

One exp serves the KL and the draw, and no log-probability is formed. The quotient is
exp(w - max v). A class whose e is 0 in float32 lies 87 nats below the largest, and g spans 22 nats,
so it is never the argmax.

Shapes: v, u, z (steps, Z, N); KL (steps,). A program does one step, BZ components at a time,
with the BN >= N classes of a component in neighbouring threads. It alone adds up its step, so
results repeat bit for bit. Padded components read v = u = 0 and are left out of the sums. Addresses
are 64-bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vssm.ops.launch_triton import contiguous, launch, next_power

TILE = 1024  # elements that a program holds at a time
LOG2E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest number that is not flushed to 0


@triton.jit
def _tile(step, first, Z: tl.constexpr, N: tl.constexpr, BZ: tl.constexpr, BN: tl.constexpr):
    """Returns the offsets of BZ components, and which of the components and classes exist."""
    z = first + tl.arange(0, BZ)
    n = tl.arange(0, BN)
    return (step * Z + z[:, None]) * N + n[None, :], z < Z, (n < N)[None, :]


@triton.jit
def _load(pointer, index, live):
    return tl.load(pointer + index, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _exponential(v, column):
    """Returns s = v - max v and e = exp(s), both 0 in columns that do not exist."""
    s = tl.where(column, v - tl.max(tl.where(column, v, float("-inf")), 1)[:, None], 0.0)
    return s, tl.where(column, tl.exp2(s * LOG2E), 0.0)


@triton.jit
def _gumbel(e, u):
    """Returns e / -log u, which is exp(v + g - max v)."""
    return e / -tl.log(tl.maximum(u, TINY))


@triton.jit
def _through_softmax(p, g):
    """Returns J(p) g: turns a gradient of probabilities p into one of their logits."""
    return p * (g - tl.sum(p * g, 1)[:, None])


# fmt: off
@triton.jit
def _sample_kernel(
    v, u, p, z, kl, Z: tl.constexpr, N: tl.constexpr, BZ: tl.constexpr, BN: tl.constexpr
):
    # fmt: on
    step = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BZ,), tl.float32)
    for first in tl.range(0, Z, BZ):
        index, row, column = _tile(step, first, Z, N, BZ, BN)
        live = row[:, None] & column
        s, e = _exponential(_load(v, index, live), column)
        best = tl.argmax(_gumbel(e, _load(u, index, live)), 1)
        hot = tl.where(tl.arange(0, BN)[None, :] == best[:, None], 1.0, 0.0)
        tl.store(z + index, hot.to(z.dtype.element_ty), mask=live)
        mass = tl.sum(e, 1)
        other = mass * 0 + N
        if p is not None:
            t, f = _exponential(_load(p, index, live), column)
            s -= t
            other = tl.sum(f, 1)
        total += tl.where(row, tl.sum(e * s, 1) / mass - tl.log(mass / other), 0.0)
    tl.store(kl + step, tl.sum(total, 0))


# fmt: off
@triton.jit
def _sample_backward_kernel(
    dz, dkl, v, u, p, dv, dp, Z: tl.constexpr, N: tl.constexpr, BZ: tl.constexpr, BN: tl.constexpr,
):
    # fmt: on
    step = tl.program_id(0).to(tl.int64)
    slope = tl.load(dkl + step)
    for first in tl.range(0, Z, BZ):
        index, row, column = _tile(step, first, Z, N, BZ, BN)
        live = row[:, None] & column
        s, e = _exponential(_load(v, index, live), column)
        r = _gumbel(e, _load(u, index, live))
        g = _load(dz, index, live)
        q = e * (1.0 / tl.sum(e, 1))[:, None]
        grad = _through_softmax(r * (1.0 / tl.sum(r, 1))[:, None], g)
        if p is not None:
            t, f = _exponential(_load(p, index, live), column)
            s -= t
            grad_p = slope * (f * (1.0 / tl.sum(f, 1))[:, None] - q)
            tl.store(dp + index, grad_p.to(dp.dtype.element_ty), mask=live)
        grad += slope * _through_softmax(q, s)
        tl.store(dv + index, grad.to(dv.dtype.element_ty), mask=live)


def _launch(kernel: Any, shape: torch.Size, *inputs: Tensor | None) -> None:
    """Runs a kernel on all steps of tensors that belong to logits of a shape (..., Z, N)."""
    Z, N = shape[-2:]
    BN = next_power(N)
    BZ = min(next_power(Z), max(1, TILE // BN))
    if shape.numel():
        warps = max(1, min(4, BZ * BN // 256))
        sizes = {"Z": Z, "N": N, "BZ": BZ, "BN": BN, "num_warps": warps}
        launch(kernel, (shape[:-2].numel(),), *inputs, **sizes)


def sample_forward(
    logits: Tensor, noise: Tensor, prior: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns z (..., Z, N) in the given dtype and the KL (...) in float32."""
    z = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    make = torch.empty if logits.numel() else torch.zeros  # steps without components have no KL
    kl = make(logits.shape[:-2], dtype=torch.float32, device=logits.device)
    inputs = map(contiguous, (logits, noise, prior))
    _launch(_sample_kernel, logits.shape, *inputs, z, kl)
    return z, kl


def sample_backward(
    dz: Tensor, dkl: Tensor, logits: Tensor, noise: Tensor, prior: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the logits and of the prior's, (..., Z, N); empty for no prior."""
    dv = logits.new_empty(logits.shape)
    dp = logits.new_empty(0) if prior is None else prior.new_empty(prior.shape)
    inputs = map(contiguous, (dz, dkl, logits, noise, prior))
    outputs = (dv, None if prior is None else dp)
    _launch(_sample_backward_kernel, logits.shape, *inputs, *outputs)
    return dv, dp
