"""Draws and expectations of categorical latents on a CPU in float32, compiled by numba.

    e_n = exp(v_n - max v)     S = sum_n e_n     q_n = e_n / S     log q_n = v_n - max v - log S
    w_n = v_n - log(-log u_n)                    z = one_hot(argmax w)               s = softmax(w)
    KL = sum_n q_n (log q_n - log p_n)
    dKL/dv_n = q_n (log q_n - log p_n - KL)      dKL/dv_p = p - q      dE_q log p / dv_p = q - p
    dz -> v: J(s) dz                          J(p) dz = p_n (dz_n - p dz)

A tile is LANES components that go through their classes together, one row per class, so no sum
goes across a register. `vssm.ops.vectors` explains tables and tasks. Here its words mean:

| word                | operand                                                      |
| ------------------- | ------------------------------------------------------------ |
| `CHANNELS`, `COUNT` | the numbers of components (of all steps) and of classes      |
| `FLAG`              | what to compute: SAMPLE, SAMPLE_BACKWARD, ...                         |
| `A_`, `H0`, `H`     | v, u and v_p (none: a uniform prior), (components, classes)  |
| `DB`, `DC`, `DA`    | z or dz, dv and dv_p, (components, classes)                  |
| `Y`                 | KL or E_q log p, or its gradient, (1, 1, components)         |

For E_q log p, v are the logits of q and v_p the logits of p.
"""
# ruff: noqa: ANN001, ANN202 (numba infers the types of kernels)

import math

import torch
from torch import Tensor

from vssm.ops.launch_numba import room, run

from vssm.ops.vectors import (  # isort: skip
    A_, COUNT, DA, DB, DC, FLAG, FLUSH, H, H0, LANES, ROW, Y, compiled, copy, draw_task, exp,
    if_equal, if_less, kernel, load_row, load_word, log, maximum, muladd, place, read_states,
    set_float_mode, store, width_of, write_states, zero_row,
)  # fmt: skip

__all__ = ["expected_backward", "expected_forward", "sample_backward", "sample_forward"]

SAMPLE, SAMPLE_BACKWARD, EXPECTED, EXPECTED_BACKWARD = range(4)


@compiled
def softmax(v, count, q):
    """Fills q and returns max v + log S, which v_n exceeds by log q_n."""
    peak = load_row(v)
    for n in range(1, count):
        peak = maximum(peak, load_row(v + ROW * n))
    total = zero_row()
    for n in range(count):
        e = exp(load_row(v + ROW * n) - peak)
        total = total + e
        store(q + ROW * n, e)
    share = 1.0 / total
    for n in range(count):
        store(q + ROW * n, load_row(q + ROW * n) * share)
    return peak + log(total)


@compiled
def perturb(v, u, count, w):
    """Fills w with v - log(-log u)."""
    for n in range(count):
        store(w + ROW * n, load_row(v + ROW * n) - log(0.0 - log(load_row(u + ROW * n))))


@compiled
def argmax(w, count):
    """Returns the index of the largest number of every lane, the first one on ties."""
    best, index = load_row(w), zero_row()
    for n in range(1, count):
        x = load_row(w + ROW * n)
        index = if_less(best, x, 1.0 * n, index)
        best = maximum(best, x)
    return index


@compiled
def divergence(v, q, at, v_p, at_p, count, ratio):
    """Fills log q_n - log p_n and returns KL(q || p); v_p = 0, at_p = log N for a uniform p."""
    kl = zero_row()
    for n in range(count):
        log_p = load_row(v_p + ROW * n) - at_p if v_p else 0.0 - at_p
        x = load_row(v + ROW * n) - at - log_p
        kl = muladd(load_row(q + ROW * n), x, kl)
        store(ratio + ROW * n, x)
    return kl


@compiled
def read_each(words, channel, buffer):
    """Returns the numbers of a tile's components as a row."""
    address, _ = place(words, Y, 0, 0, channel)
    copy(address, 0, buffer, 0, 1, width_of(words, channel), LANES)
    return load_row(buffer)


@compiled
def write_each(words, channel, x, buffer):
    """The inverse of `read_each`."""
    store(buffer, x)
    address, _ = place(words, Y, 0, 0, channel)
    copy(buffer, 0, address, 0, 1, width_of(words, channel), width_of(words, channel))


@compiled
def read_prior(words, channel, count, v_p, p):
    """Fills v_p and p; returns the address of v_p (0 if uniform) and what v_p exceeds log p by."""
    if load_word(words, H):
        read_states(words, H, 0, channel, v_p)
        return v_p, softmax(v_p, count, p)
    return 0, log(zero_row() + 1.0 * count)


@compiled
def sample(words, channel, scratch):
    count = load_word(words, COUNT)
    v, size = scratch + ROW, ROW * (count + 3)
    q, w, v_p, p = v + size, v + 2 * size, v + 3 * size, v + 4 * size
    read_states(words, A_, 0, channel, v)
    prior, at_p = read_prior(words, channel, count, v_p, p)
    kl = divergence(v, q, softmax(v, count, q), prior, at_p, count, w)
    write_each(words, channel, kl, scratch)
    read_states(words, H0, 0, channel, w)
    perturb(v, w, count, w)
    index = argmax(w, count)
    for n in range(count):
        store(w + ROW * n, if_equal(index, 1.0 * n, 1.0, 0.0))
    write_states(words, DB, 0, channel, w)


@compiled
def sample_gradient(words, channel, scratch):
    count = load_word(words, COUNT)
    v, size = scratch + ROW, ROW * (count + 3)
    q, w, v_p, p, ratio = v + size, v + 2 * size, v + 3 * size, v + 4 * size, v + 5 * size
    read_states(words, A_, 0, channel, v)
    dkl = read_each(words, channel, scratch)
    prior, at_p = read_prior(words, channel, count, v_p, p)
    kl = divergence(v, q, softmax(v, count, q), prior, at_p, count, ratio)
    read_states(words, H0, 0, channel, w)
    perturb(v, w, count, w)
    softmax(w, count, w)
    read_states(words, DB, 0, channel, v)  # dz takes the place of v, which is no longer needed
    mean = zero_row()
    for n in range(count):
        mean = muladd(load_row(w + ROW * n), load_row(v + ROW * n), mean)
    for n in range(count):
        x = load_row(q + ROW * n)
        drawn = load_row(w + ROW * n) * (load_row(v + ROW * n) - mean)
        store(v + ROW * n, muladd(dkl * x, load_row(ratio + ROW * n) - kl, drawn))
        if prior:
            store(p + ROW * n, dkl * (load_row(p + ROW * n) - x))
    write_states(words, DC, 0, channel, v)
    if prior:
        write_states(words, DA, 0, channel, p)


@compiled
def expected(words, channel, scratch, gradient):
    count = load_word(words, COUNT)
    v, size = scratch + ROW, ROW * (count + 3)
    q, v_p = v + size, v + 2 * size
    read_states(words, A_, 0, channel, v)
    softmax(v, count, q)
    read_states(words, H, 0, channel, v_p)
    at_p = softmax(v_p, count, v)  # v is p now
    if gradient:
        grad = read_each(words, channel, scratch)
        for n in range(count):
            store(v + ROW * n, grad * (load_row(q + ROW * n) - load_row(v + ROW * n)))
        write_states(words, DA, 0, channel, v)
    else:
        value = zero_row()
        for n in range(count):
            value = muladd(load_row(q + ROW * n), load_row(v_p + ROW * n) - at_p, value)
        write_each(words, channel, value, scratch)


@kernel
def _latents(words, scratch):
    what = load_word(words, FLAG)
    mode = set_float_mode(FLUSH)
    while True:
        _, first, last, _, _ = draw_task(words)
        if first == last:
            break
        for channel in range(LANES * first, LANES * last, LANES):
            if what == SAMPLE:
                sample(words, channel, scratch)
            elif what == SAMPLE_BACKWARD:
                sample_gradient(words, channel, scratch)
            else:
                expected(words, channel, scratch, what == EXPECTED_BACKWARD)
    set_float_mode(mode)


def sample_forward(
    logits: Tensor, noise: Tensor, prior: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns z (..., Z, N) in the given dtype and the KL (...)."""
    z, each = room(*logits.shape), _each(logits)
    _run(SAMPLE, each, v=logits, u=noise, v_p=prior, z=z)
    return z.to(dtype), each.view(logits.shape[:-1]).sum(-1)


def sample_backward(
    dz: Tensor, dkl: Tensor, logits: Tensor, noise: Tensor, prior: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the logits and of the prior's, (..., Z, N); empty for no prior."""
    dv, dp = room(*logits.shape), room(*(0,) if prior is None else prior.shape)
    _run(SAMPLE_BACKWARD, _each(logits, dkl), logits, noise, prior, dz, dv, dp)
    return dv, dp


def expected_forward(logits: Tensor, q: Tensor) -> Tensor:
    """Returns E_q log p, (...)."""
    each = _each(logits)
    _run(EXPECTED, each, v=q, v_p=logits)
    return each.view(logits.shape[:-1]).sum(-1)


def expected_backward(grad: Tensor, logits: Tensor, q: Tensor) -> Tensor:
    """Returns the gradient of the logits of p, (..., Z, N)."""
    dv = room(*logits.shape)
    _run(EXPECTED_BACKWARD, _each(logits, grad), v=q, v_p=logits, dv_p=dv)
    return dv


def _each(logits: Tensor, steps: Tensor | None = None) -> Tensor:
    """Returns one number per component, (1, 1, components): room, or those of its step."""
    if steps is None:
        return room(1, 1, math.prod(logits.shape[:-1]))
    return steps.float()[..., None].expand(logits.shape[:-1]).reshape(1, 1, -1)


def _run(what, each, v, u=None, v_p=None, z=None, dv=None, dv_p=None) -> None:
    rows, classes = (each, None, None, None, None, each, None, None, None), v.shape[-1]
    wholes = (v, None, None, u, v_p, z, dv, dv_p)
    wholes = tuple(x if x is None else x.float() for x in wholes)
    run(_latents, rows, wholes, classes, ROW * (1 + 6 * (classes + 3)), flag=what)
