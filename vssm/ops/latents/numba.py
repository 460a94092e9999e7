"""Draws of categorical latents in training, on a CPU in float32, compiled by numba.

    e_n = exp(v_n - max v)     S = sum_n e_n     q_n = e_n / S     log q_n = v_n - max v - log S
    w_n = v_n - log(-log u_n)                    z = one_hot(argmax w)               s = softmax(w)
    KL = sum_n q_n (log q_n - log p_n)
    dv = s (dz - sum_n s_n dz_n) + dKL q (log q - log p - KL)            dv_p = dKL (p - q)

A tile is LANES components that go through their classes together, one row per class, so no sum
goes across a register. `vssm.ops.vectors` explains tables and tasks. Here its words mean:

| word                | operand                                                      |
| ------------------- | ------------------------------------------------------------ |
| `CHANNELS`, `COUNT` | the numbers of components (of all steps) and of classes      |
| `FLAG`              | 1 to compute the gradients                                   |
| `A_`, `H0`, `H`     | v, u and v_p (none: a uniform prior), (components, classes)  |
| `DB`, `DC`, `DA`    | z or dz, dv and dv_p, (components, classes)                  |
| `U`                 | KL, or dKL, (1, 1, components)                               |
"""
# ruff: noqa: ANN001, ANN201 (numba infers the types of kernels)

from vssm.ops.vectors import (  # isort: skip
    A_, COUNT, DA, DB, DC, FLAG, FLUSH, H, H0, LANES, ROW, U, compiled, copy, draw_task, exp,
    if_equal, if_less, kernel, load_row, load_word, log, maximum, muladd, read_states,
    set_float_mode, store, width_of, write_states, zero_row,
)  # fmt: skip


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
def divergence(words, channel, v, q, v_p, p, ratio):
    """Fills q, p and log q_n - log p_n, and returns KL(q || p)."""
    count, prior = load_word(words, COUNT), load_word(words, H)
    at = softmax(v, count, q)
    at_p = log(zero_row() + 1.0 * count)  # of a uniform prior
    if prior:
        read_states(words, H, 0, channel, v_p)
        at_p = softmax(v_p, count, p)
    kl = zero_row()
    for n in range(count):
        log_p = load_row(v_p + ROW * n) - at_p if prior else 0.0 - at_p
        x = load_row(v + ROW * n) - at - log_p
        kl = muladd(load_row(q + ROW * n), x, kl)
        store(ratio + ROW * n, x)
    return kl


@compiled
def draw_classes(words, channel, w):
    """Writes z, and overwrites w. The first of equal classes is drawn."""
    count = load_word(words, COUNT)
    best, index = load_row(w), zero_row()
    for n in range(1, count):
        x = load_row(w + ROW * n)
        index = if_less(best, x, 1.0 * n, index)
        best = maximum(best, x)
    for n in range(count):
        store(w + ROW * n, if_equal(index, 1.0 * n, 1.0, 0.0))
    write_states(words, DB, 0, channel, w)


@compiled
def write_gradients(words, channel, kl, dkl, w, dz, q, p, ratio):
    """Writes dv and dv_p, and overwrites dz and p."""
    count, prior = load_word(words, COUNT), load_word(words, H)
    softmax(w, count, w)
    read_states(words, DB, 0, channel, dz)
    mean = zero_row()
    for n in range(count):
        mean = muladd(load_row(w + ROW * n), load_row(dz + ROW * n), mean)
    for n in range(count):
        x = load_row(q + ROW * n)
        drawn = load_row(w + ROW * n) * (load_row(dz + ROW * n) - mean)
        store(dz + ROW * n, muladd(dkl * x, load_row(ratio + ROW * n) - kl, drawn))
        if prior:
            store(p + ROW * n, dkl * (load_row(p + ROW * n) - x))
    write_states(words, DC, 0, channel, dz)
    if prior:
        write_states(words, DA, 0, channel, p)


@kernel
def latents_kernel(words, scratch):
    count = load_word(words, COUNT)
    v, size = scratch + ROW, ROW * (count + 3)
    q, w, v_p, p, ratio = v + size, v + 2 * size, v + 3 * size, v + 4 * size, v + 5 * size
    mode = set_float_mode(FLUSH)
    while True:
        _, first, last, _, _ = draw_task(words)
        if first == last:
            break
        for channel in range(LANES * first, LANES * last, LANES):
            each, width = load_word(words, U) + 4 * channel, width_of(words, channel)
            read_states(words, A_, 0, channel, v)
            kl = divergence(words, channel, v, q, v_p, p, ratio)
            read_states(words, H0, 0, channel, w)
            for n in range(count):
                noise = log(0.0 - log(load_row(w + ROW * n)))
                store(w + ROW * n, load_row(v + ROW * n) - noise)
            if load_word(words, FLAG):
                copy(each, 0, scratch, 0, 1, width, LANES)
                dkl, dz = load_row(scratch), v  # v is no longer needed
                write_gradients(words, channel, kl, dkl, w, dz, q, p, ratio)
            else:
                store(scratch, kl)
                copy(scratch, 0, each, 0, 1, width, width)
                draw_classes(words, channel, w)
    set_float_mode(mode)
