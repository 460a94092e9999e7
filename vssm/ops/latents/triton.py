"""Categorical latents on a GPU: the Triton kernels of `vssm.ops.latents`.

With s = v - max v, e = exp(s), S = sum_n e, q = e / S and the Gumbel softmax r of v - log(-log u):

    z = one_hot(argmax_n e_n / -log u_n)              r_n ~ e_n / -log u_n
    KL = sum_n q_n s_n - log(S / N)                   dv = J(r) dz + dKL q (s - sum_n q_n s_n)

where J(r) dz = r (dz - sum_n r_n dz_n). With s^p = v_p - max v_p instead of the uniform prior:

    KL = sum_n q_n (s_n - s^p_n) - log(S / S^p)       dv likewise, of s - s^p;  dv_p = dKL (p - q)
    E_q log p = sum_n q_n s^p_n - log S^p             dv_p = dE (q - p)

One exp serves the KL and the draw, and no log-probability is formed. The quotient is
exp(w - max v). A class whose e is 0 in float32 lies 87 nats below the largest, and g spans 22 nats,
so it is never the argmax.

Shapes: v, u, z (steps, Z, N); KL, E (steps,). A program does one step, BZ components at a time,
with the BN >= N classes of a component in neighbouring threads. It alone adds up its step, so
results repeat bit for bit. Padded components read v = u = 0 and are left out of the sums. Addresses
are 64-bit.

`inverse_cdf` has softmax, cumulative sum and search of a row in registers. A run of rows of the
logits is repeated over a span of noise. A program does BR rows. Padded classes have no probability
and lie above every target.

`embed_sum` adds rows of a table, in float32. A class out of range gives NaN instead of a read out
of bounds.

| steps | columns | a program takes                                                             |
| ----- | ------- | --------------------------------------------------------------------------- |
| few   | any     | one step, and reads all of its rows at once                                 |
| more  | many    | many steps and a slice of columns, whose part of the table stays in its own |
|       |         | cache when several steps select the same row                                |
| many  | few     | several steps, because starting a program takes longer than its sums        |
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vssm.ops.latents import repeats
from vssm.ops.launch_triton import ceil_div, launch, next_power

__all__ = [
    "embed_sum",
    "expected_backward",
    "expected_forward",
    "inverse_cdf",
    "sample_backward",
    "sample_forward",
]

TILE = 1024  # elements that a program holds at a time
EMBED_TILE = 4096  # elements of a program of one step
TOTAL = 2048  # sums of a program of several narrow steps
MANY = 4096  # steps from which a program takes several, if they are narrow:
NARROW = 256  # columns, at most
MORE = 768  # steps from which a program takes a slice of the columns, if they are not narrow
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


# fmt: off
@triton.jit
def _expected_kernel(
    v, q, out, Z: tl.constexpr, N: tl.constexpr, BZ: tl.constexpr, BN: tl.constexpr
):
    # fmt: on
    step = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BZ,), tl.float32)
    for first in tl.range(0, Z, BZ):
        index, row, column = _tile(step, first, Z, N, BZ, BN)
        live = row[:, None] & column
        s, e = _exponential(_load(v, index, live), column)
        _, f = _exponential(_load(q, index, live), column)
        total += tl.where(row, tl.sum(f * s, 1) / tl.sum(f, 1) - tl.log(tl.sum(e, 1)), 0.0)
    tl.store(out + step, tl.sum(total, 0))


# fmt: off
@triton.jit
def _expected_backward_kernel(
    grad, v, q, dv, Z: tl.constexpr, N: tl.constexpr, BZ: tl.constexpr, BN: tl.constexpr
):
    # fmt: on
    step = tl.program_id(0).to(tl.int64)
    slope = tl.load(grad + step)
    for first in tl.range(0, Z, BZ):
        index, row, column = _tile(step, first, Z, N, BZ, BN)
        live = row[:, None] & column
        _, e = _exponential(_load(v, index, live), column)
        _, f = _exponential(_load(q, index, live), column)
        difference = f * (1.0 / tl.sum(f, 1))[:, None] - e * (1.0 / tl.sum(e, 1))[:, None]
        tl.store(dv + index, (slope * difference).to(dv.dtype.element_ty), mask=live)


def _launch(kernel: Any, shape: torch.Size, *inputs: Tensor | None, **options: bool) -> None:
    """Runs a kernel on all steps of tensors that belong to logits of a shape (..., Z, N)."""
    Z, N = shape[-2:]
    BN = next_power(N)
    BZ = min(next_power(Z), max(1, TILE // BN))
    if shape.numel():
        warps = max(1, min(4, BZ * BN // 256))
        sizes = {"Z": Z, "N": N, "BZ": BZ, "BN": BN, "num_warps": warps}
        launch(kernel, (shape[:-2].numel(),), *inputs, **options, **sizes)


def sample_forward(
    logits: Tensor, noise: Tensor, prior: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns z (..., Z, N) in the given dtype and the KL (...) in float32."""
    z = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    kl = _steps(logits)
    inputs = (None if tensor is None else tensor.contiguous() for tensor in (logits, noise, prior))
    _launch(_sample_kernel, logits.shape, *inputs, z, kl)
    return z, kl


def sample_backward(
    dz: Tensor, dkl: Tensor, logits: Tensor, noise: Tensor, prior: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the logits and of the prior's, (..., Z, N); empty for no prior."""
    dv = logits.new_empty(logits.shape)
    dp = logits.new_empty(0) if prior is None else prior.new_empty(prior.shape)
    inputs = (None if t is None else t.contiguous() for t in (dz, dkl, logits, noise, prior))
    outputs = (dv, None if prior is None else dp)
    _launch(_sample_backward_kernel, logits.shape, *inputs, *outputs)
    return dv, dp


def expected_forward(logits: Tensor, q: Tensor) -> Tensor:
    """Returns E_q log p, (...), in float32."""
    out = _steps(logits)
    _launch(_expected_kernel, logits.shape, logits.contiguous(), q.contiguous(), out)
    return out


def expected_backward(grad: Tensor, logits: Tensor, q: Tensor) -> Tensor:
    """Returns the gradient of the logits of p, (..., Z, N)."""
    dv = logits.new_empty(logits.shape)
    inputs = (tensor.contiguous() for tensor in (grad, logits, q))
    _launch(_expected_backward_kernel, logits.shape, *inputs, dv)
    return dv


def _steps(logits: Tensor) -> Tensor:
    """Returns room for one number per step: zeros if steps have no components."""
    make = torch.empty if logits.numel() else torch.zeros
    return make(logits.shape[:-2], dtype=torch.float32, device=logits.device)


# fmt: off
@triton.jit(do_not_specialize=["rows", "span", "run", "temperature"])
def _inverse_cdf_kernel(
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
    BN = next_power(N)
    BR = max(1, TILE // BN)
    if rows:
        shared = repeats(logits, noise)
        assert shared is not None
        times, run = shared
        inputs = (logits.contiguous(), noise.contiguous())
        wide = max(rows + BR, logits.numel()) >= 2**31  # 64-bit divisions are slow
        sizes = (rows, times * run, run, float(temperature))
        blocks = {"N": N, "BR": BR, "BN": BN, "WIDE": wide}
        launch(_inverse_cdf_kernel, (ceil_div(rows, BR),), *inputs, z, *sizes, **blocks)
    return z


class EmbedPlan(NamedTuple):
    """How the sums are cut up."""

    BR: int  # steps of a program
    BD: int  # columns of a program
    together: int = 1  # latents that a program of several steps reads at a time; divides Z
    warps: int = 4


@triton.jit
def _embed_rows(weight, latent, classes, live, d, N, D):
    """Returns columns d of the rows of some classes of their latents; NaN if out of range."""
    known = (classes >= 0) & (classes < N)
    at = (latent * N + classes)[:, None] * D + d[None, :]
    mask = (live & known)[:, None] & (d < D)[None, :]
    rows = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(known[:, None], rows, float("nan"))


# fmt: off
@triton.jit(do_not_specialize=["steps"])
def _embed_kernel(
    z, weight, y, steps, N, D, Z: tl.constexpr, BR: tl.constexpr, BZ: tl.constexpr,
    BD: tl.constexpr, TOGETHER: tl.constexpr,
):
    # fmt: on
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    if BR == 1:
        step = tl.program_id(0).to(tl.int64)
        i = tl.arange(0, BZ)
        classes = tl.load(z + step * Z + i, mask=i < Z, other=0).to(tl.int64)
        rows = _embed_rows(weight, i, classes, i < Z, d, N, D)
        tl.store(y + step * D + d, tl.sum(rows, 0).to(y.dtype.element_ty), mask=d < D)
    else:
        each = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
        live = each < steps
        total = tl.zeros((BR, BD), tl.float32)
        unknown = tl.zeros((BR,), tl.int32)
        for first in range(0, Z, TOGETHER):
            for j in tl.static_range(TOGETHER):
                chosen = tl.load(z + each * Z + first + j, mask=live, other=0)
                known = (chosen >= 0) & (chosen < N)
                unknown += tl.where(known, 0, 1)
                # Reads the first class instead of one out of range; this sum is replaced by NaN.
                row = (first + j) * N + tl.where(known, chosen, 0).to(tl.int32)
                at = row.to(tl.int64)[:, None] * D + d[None, :]
                total += tl.load(weight + at, mask=(d < D)[None, :]).to(tl.float32)
        total = tl.where((unknown > 0)[:, None], float("nan"), total)
        mask = live[:, None] & (d < D)[None, :]
        tl.store(y + each[:, None] * D + d[None, :], total.to(y.dtype.element_ty), mask=mask)


def plan_embed(steps: int, Z: int, D: int) -> EmbedPlan:
    """Returns how the sums of some steps are cut up."""
    if D > NARROW and steps >= MORE:
        # As many threads as steps, so that a row is looked up once.
        together = Z & -Z
        if steps >= MANY:
            return EmbedPlan(64, 64, min(4, together), 2)
        return EmbedPlan(128, 32, min(8, together), 4)
    BD = min(128, EMBED_TILE // next_power(Z), next_power(D))
    return EmbedPlan(max(2, TOTAL // BD) if steps >= MANY and D <= NARROW else 1, BD)


def embed_sum(z: Tensor, weight: Tensor, how: EmbedPlan | None = None) -> Tensor:
    """Returns y (..., D) in the dtype of the weight."""
    Z, D = z.shape[-1], weight.shape[1]
    y = torch.empty((*z.shape[:-1], D), dtype=weight.dtype, device=weight.device)
    steps = z.numel() // Z
    how = how or plan_embed(steps, Z, D)
    if y.numel():
        inputs = (z.contiguous(), weight.contiguous())
        grid = (ceil_div(steps, how.BR), ceil_div(D, how.BD))
        launch(
            _embed_kernel, grid, *inputs, y, steps, len(weight) // Z, D, Z=Z, BR=how.BR,
            BZ=next_power(Z), BD=how.BD, TOGETHER=how.together, num_warps=how.warps,
        )  # fmt: skip
    return y
