"""Draws and expectations of categorical latents on a CPU in float32: kernels compiled by numba at first use.

    e_n = exp(v_n - max v)     S = sum_n e_n     q_n = e_n / S     log q_n = v_n - max v - log S
    w_n = v_n - log(-log u_n)                    z = one_hot(argmax w)               s = softmax(w)
    KL = sum_n q_n (log q_n - log p_n)           dKL/dv_n = q_n (log q_n - log p_n - KL)     dKL/dv_p = p - q
    dz -> v: J(s) dz, or for reinmax 2 J((z + q) / 2) dz - J(q) dz / 2         J(p) dz = p_n (dz_n - p dz)
    E_q log p -> v_p: q_n - p_n

A tile is LANES components that go through their classes together, a row of them in every register: nothing is
summed across a register. Tables and tasks are those of `vssm.ops.operands` and `vssm.ops.tasks`, whose names
are for a scan; here they mean:

| word                | operand                                                      |
| ------------------- | ------------------------------------------------------------ |
| `CHANNELS`, `COUNT` | the number of components, of all steps, and of classes       |
| `SOFTPLUS`          | whether the gradient is that of reinmax                      |
| `A_`, `H0`, `H`     | v, u and v_p (none: a uniform prior), (components, classes)  |
| `DB`, `DC`, `DA`    | z or dz, dv and dv_p, (components, classes)                  |
| `Y`                 | KL or E_q log p, or the gradient of it, (1, 1, components)   |

For E_q log p, v are the logits of q and v_p those of p.
"""
# ruff: noqa: ANN001, ANN202 (numba infers the types of kernels)

import math
from collections.abc import Callable
from typing import Any

import torch
from numba import njit
from torch import Tensor

from vssm.ops.operands import (
    A_,
    CHANNELS,
    COUNT,
    DA,
    DB,
    DC,
    H0,
    SOFTPLUS,
    H,
    Y,
    copy,
    draw_task,
    place,
    read_states,
    write_states,
)
from vssm.ops.tasks import kernel, room, run
from vssm.ops.vectors import (
    FLUSH,
    LANES,
    ROW,
    exp,
    if_equal,
    if_less,
    load_row,
    load_word,
    log,
    maximum,
    muladd,
    options,
    set_float_mode,
    store,
    zero_row,
)

__all__ = ["expected_backward", "expected_forward", "sample_backward", "sample_forward"]

_compile: Any = njit(**options)


@_compile
def softmax(v, count, q):
    """Fills q and returns max v + log S, so that log q_n = v_n minus that."""
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


@_compile
def perturb(v, u, count, w):
    """Fills w with v - log(-log u)."""
    for n in range(count):
        store(w + ROW * n, load_row(v + ROW * n) - log(0.0 - log(load_row(u + ROW * n))))


@_compile
def argmax(w, count):
    """Returns the index of the largest number of every lane, the first of equal ones."""
    best, index = load_row(w), zero_row()
    for n in range(1, count):
        x = load_row(w + ROW * n)
        index = if_less(best, x, 1.0 * n, index)
        best = maximum(best, x)
    return index


@_compile
def divergence(v, q, at, v_p, at_p, count, ratio):
    """Fills log q_n - log p_n and returns KL(q || p); a uniform p is told by v_p = 0 and at_p = log N."""
    kl = zero_row()
    for n in range(count):
        log_p = load_row(v_p + ROW * n) - at_p if v_p else 0.0 - at_p
        x = load_row(v + ROW * n) - at - log_p
        kl = muladd(load_row(q + ROW * n), x, kl)
        store(ratio + ROW * n, x)
    return kl


@_compile
def read_each(words, channel, buffer):
    """The numbers of a tile's components as a row."""
    address, _ = place(words, Y, 0, 0, channel)
    copy(address, 0, buffer, 0, 1, min(LANES, load_word(words, CHANNELS) - channel), LANES)
    return load_row(buffer)


@_compile
def write_each(words, channel, x, buffer):
    store(buffer, x)
    width = min(LANES, load_word(words, CHANNELS) - channel)
    address, _ = place(words, Y, 0, 0, channel)
    copy(buffer, 0, address, 0, 1, width, width)


@_compile
def read_prior(words, channel, count, v_p, p):
    """Fills v_p and p, and returns where they are and what turns v_p into log p; 0 for a uniform prior."""
    if load_word(words, H):
        read_states(words, H, 0, channel, v_p)
        return v_p, softmax(v_p, count, p)
    return 0, log(zero_row() + 1.0 * count)


@kernel
def _sample(words, scratch):
    count = load_word(words, COUNT)
    v, size = scratch + ROW, ROW * (count + 3)
    q, w, v_p, p = v + size, v + 2 * size, v + 3 * size, v + 4 * size
    mode = set_float_mode(FLUSH)
    while True:
        _, first, last, _, _ = draw_task(words)
        if first == last:
            break
        for channel in range(LANES * first, LANES * last, LANES):
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
    set_float_mode(mode)


@kernel
def _sample_backward(words, scratch):
    count, reinmax = load_word(words, COUNT), load_word(words, SOFTPLUS)
    v, size = scratch + ROW, ROW * (count + 3)
    q, w, v_p, p, ratio = v + size, v + 2 * size, v + 3 * size, v + 4 * size, v + 5 * size
    mode = set_float_mode(FLUSH)
    while True:
        _, first, last, _, _ = draw_task(words)
        if first == last:
            break
        for channel in range(LANES * first, LANES * last, LANES):
            read_states(words, A_, 0, channel, v)
            dkl = read_each(words, channel, scratch)
            prior, at_p = read_prior(words, channel, count, v_p, p)
            kl = divergence(v, q, softmax(v, count, q), prior, at_p, count, ratio)
            read_states(words, H0, 0, channel, w)
            perturb(v, w, count, w)
            if reinmax:
                index = argmax(w, count)
                for n in range(count):
                    z = if_equal(index, 1.0 * n, 1.0, 0.0)
                    store(w + ROW * n, 0.5 * (load_row(q + ROW * n) + z))
            else:
                softmax(w, count, w)
            read_states(words, DB, 0, channel, v)  # dz in the place of v, which is done with
            mean, mean_q = zero_row(), zero_row()
            for n in range(count):
                mean = muladd(load_row(w + ROW * n), load_row(v + ROW * n), mean)
                mean_q = muladd(load_row(q + ROW * n), load_row(v + ROW * n), mean_q)
            for n in range(count):
                x, dz = load_row(q + ROW * n), load_row(v + ROW * n)
                drawn = load_row(w + ROW * n) * (dz - mean)
                if reinmax:
                    drawn = 2.0 * drawn - 0.5 * x * (dz - mean_q)
                store(v + ROW * n, muladd(dkl * x, load_row(ratio + ROW * n) - kl, drawn))
                if prior:
                    store(p + ROW * n, dkl * (load_row(p + ROW * n) - x))
            write_states(words, DC, 0, channel, v)
            if prior:
                write_states(words, DA, 0, channel, p)
    set_float_mode(mode)


@kernel
def _expected(words, scratch):
    count = load_word(words, COUNT)
    v, size = scratch + ROW, ROW * (count + 3)
    q, v_p = v + size, v + 2 * size
    mode = set_float_mode(FLUSH)
    while True:
        _, first, last, _, _ = draw_task(words)
        if first == last:
            break
        for channel in range(LANES * first, LANES * last, LANES):
            read_states(words, A_, 0, channel, v)
            softmax(v, count, q)
            read_states(words, H, 0, channel, v_p)
            at_p, value = softmax(v_p, count, v), zero_row()
            for n in range(count):
                value = muladd(load_row(q + ROW * n), load_row(v_p + ROW * n) - at_p, value)
            write_each(words, channel, value, scratch)
    set_float_mode(mode)


@kernel
def _expected_backward(words, scratch):
    count = load_word(words, COUNT)
    v, size = scratch + ROW, ROW * (count + 3)
    q = v + size
    mode = set_float_mode(FLUSH)
    while True:
        _, first, last, _, _ = draw_task(words)
        if first == last:
            break
        for channel in range(LANES * first, LANES * last, LANES):
            grad = read_each(words, channel, scratch)
            read_states(words, A_, 0, channel, v)
            softmax(v, count, q)
            read_states(words, H, 0, channel, v)
            softmax(v, count, v)
            for n in range(count):
                store(v + ROW * n, grad * (load_row(q + ROW * n) - load_row(v + ROW * n)))
            write_states(words, DA, 0, channel, v)
    set_float_mode(mode)


def sample_forward(
    logits: Tensor, noise: Tensor, prior: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns z (..., Z, N) in the given dtype and the KL (...)."""
    z, each = room(*logits.shape), _each(logits)
    _run(_sample, each, v=logits, u=noise, v_p=prior, z=z)
    return z.to(dtype), _steps(each, logits)


def sample_backward(
    dz: Tensor, dkl: Tensor, logits: Tensor, noise: Tensor, prior: Tensor | None, reinmax: bool
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the logits and of the prior's, (..., Z, N); of nothing for no prior."""
    dv, dp = room(*logits.shape), room(*(0,) if prior is None else prior.shape)
    _run(_sample_backward, _each(logits, dkl), logits, noise, prior, dz, dv, dp, reinmax)
    return dv, dp


def expected_forward(logits: Tensor, q: Tensor) -> Tensor:
    """Returns E_q log p, (...)."""
    each = _each(logits)
    _run(_expected, each, v=q, v_p=logits)
    return _steps(each, logits)


def expected_backward(grad: Tensor, logits: Tensor, q: Tensor) -> Tensor:
    """Returns the gradient of the logits of p, (..., Z, N)."""
    dv = room(*logits.shape)
    _run(_expected_backward, _each(logits, grad), v=q, v_p=logits, dv_p=dv)
    return dv


def _each(logits: Tensor, steps: Tensor | None = None) -> Tensor:
    """Returns room for a number of every component, (1, 1, components), or those of its step repeated."""
    if steps is None:
        return room(1, 1, math.prod(logits.shape[:-1]))
    return steps.float()[..., None].expand(logits.shape[:-1]).reshape(1, 1, -1)


def _steps(each: Tensor, logits: Tensor) -> Tensor:
    return each.view(logits.shape[:-1]).sum(-1)


def _run(
    function: Callable,
    each: Tensor,
    v: Tensor,
    u: Tensor | None = None,
    v_p: Tensor | None = None,
    z: Tensor | None = None,
    dv: Tensor | None = None,
    dv_p: Tensor | None = None,
    reinmax: bool = False,
) -> None:
    rows, classes = (each, None, None, None, None, each, None, None, None), v.shape[-1]
    size = ROW * (1 + 6 * (classes + 3))
    wholes = (v, None, None, u, v_p, z, dv, dv_p)
    run(
        function, rows, tuple(x if x is None else x.float() for x in wholes), classes, size, reinmax
    )
