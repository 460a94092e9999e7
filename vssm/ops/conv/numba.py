"""The causal convolution with SiLU on a CPU in float32: kernels that numba compiles at first use.

Backward computes s of `vssm.ops.conv` again and goes from the last step to the first:

    ds_t = dy_t sigmoid(s_t) (1 + s_t (1 - sigmoid(s_t)))      dbias = sum_{b,t} ds_t
    dx_t = sum_k w_k ds_{t+K-1-k}                              dw_k  = sum_{b,t} ds_t x_{t-K+1+k}

`vssm.ops.vectors` explains tiles, groups and tasks. Here the words of its table mean:

| word      | operand                          | word            | operand                       |
| --------- | -------------------------------- | --------------- | ----------------------------- |
| `U`, `DU` | x, dx (B, T, D)                  | `DT`            | w (1, K, D)                   |
| `Z`, `DZ` | state, its gradient (B, K-1, D)  | `DDT`           | dw and dbias, (parts, K+1, D) |
| `Y`       | y, or dy in backward             | `BIAS`, `COUNT` | bias (D,), K                  |

Scratch memory holds rows of LANES numbers: `window`, the inputs of some steps and the K - 1 inputs
before them; `slopes`, ds of the steps and of the K - 1 steps after them.
"""
# ruff: noqa: ANN001, ANN201 (numba infers the types of kernels)

from vssm.ops.conv import MAX_TAPS

from vssm.ops.vectors import (  # isort: skip
    BIAS, COUNT, DDT, DT, DU, DZ, FLUSH, LANES, PER_TASK, ROW, U, Y, Z, clear, compiled, copy,
    draw_task, fold, kernel, load_block, load_row, load_rows, load_word, muladd, place, read,
    read_vector, repeat, sequence, set_float_mode, sigmoid, store, store_rows, width_of, write,
    written, zero_row,
)  # fmt: skip

STEPS = 32  # a window of this many steps stays in the fastest cache
# Offsets in bytes in the scratch memory of a thread.
WINDOW = 0
SLOPES = WINDOW + (MAX_TAPS + STEPS) * ROW
BUFFER = SLOPES + (MAX_TAPS + STEPS) * ROW
SPARE = BUFFER + STEPS * ROW
TAPS = SPARE + ROW
DTAPS = TAPS + MAX_TAPS * ROW
SIZE = DTAPS + (MAX_TAPS + 1) * ROW


@compiled
def read_taps(words, channel, taps):
    address, stride = place(words, DT, 0, 0, channel)
    copy(address, stride, taps, ROW, load_word(words, COUNT), width_of(words, channel), LANES)


@compiled
def fill_window(words, b, start, steps, channel, window):
    """Copies the inputs of some steps and the K - 1 before them, with zeros where none exist."""
    before, width = load_word(words, COUNT) - 1, width_of(words, channel)
    early = max(0, before - start)  # inputs from before the sequence
    row, origin, _ = sequence(words, b)
    x, x_stride = place(words, U, row, origin + start - before + early, channel)
    state, state_stride = place(words, Z, b, before - early, channel)
    if state:
        copy(state, state_stride, window, ROW, early, width, LANES)
    else:
        clear(window, early)
    copy(x, x_stride, window + ROW * early, ROW, before + steps - early, width, LANES)
    clear(window + ROW * (before + steps), -steps % 4)


@compiled
def convolve(taps, count, rows, bias):
    """Returns s of four steps; `rows` starts at the first input that the first step sees."""
    s = bias
    for k in range(count):
        s = muladd(repeat(load_row(taps + ROW * k)), load_block(rows + ROW * k), s)
    return s


@kernel
def forward_kernel(words, scratch):
    count = load_word(words, COUNT)
    window, taps = scratch + WINDOW, scratch + TAPS
    mode = set_float_mode(FLUSH)
    while True:
        _, first, last, b_first, b_last = draw_task(words)
        if first == last:
            break
        for channel in range(LANES * first, LANES * last, LANES):
            read_taps(words, channel, taps)
            bias = read_vector(words, BIAS, channel, scratch + SPARE)
            for b in range(b_first, b_last):
                row, origin, length = sequence(words, b)
                for start in range(0, length, STEPS):
                    steps, at = min(STEPS, length - start), origin + start
                    fill_window(words, b, start, steps, channel, window)
                    y, y_stride = write(words, Y, row, at, channel, steps, scratch + BUFFER)
                    for t in range(0, steps, 4):
                        s = convolve(taps, count, window + ROW * t, bias)
                        store_rows(y + y_stride * t, y_stride, s * sigmoid(s))
                    written(words, Y, row, at, channel, steps, y)
    set_float_mode(mode)


@kernel
def backward_kernel(words, scratch):
    count = load_word(words, COUNT)
    window, slopes, buffer = scratch + WINDOW, scratch + SLOPES, scratch + BUFFER
    taps, dtaps, dbias = scratch + TAPS, scratch + DTAPS, scratch + DTAPS + count * ROW
    mode = set_float_mode(FLUSH)
    while True:
        _, first, last, b_first, b_last = draw_task(words)
        if first == last:
            break
        for channel in range(LANES * first, LANES * last, LANES):
            read_taps(words, channel, taps)
            bias = read_vector(words, BIAS, channel, scratch + SPARE)
            width = width_of(words, channel)
            clear(dtaps, count + 1)
            for b in range(b_first, b_last):
                clear(slopes, count - 1)
                row, origin, length = sequence(words, b)
                for start in range((length - 1) // STEPS * STEPS, -1, -STEPS):
                    steps = min(STEPS, length - start)
                    for k in range(count - 1):  # the first steps of the later chunk follow here
                        store(slopes + ROW * (steps + k), load_row(slopes + ROW * k))
                    fill_window(words, b, start, steps, channel, window)
                    at = origin + start
                    dy, dy_stride = read(words, Y, row, at, channel, steps, buffer)
                    for t in range(0, steps, 4):
                        s = convolve(taps, count, window + ROW * t, bias)
                        gate = sigmoid(s)
                        ds = load_rows(dy + dy_stride * t, dy_stride)
                        ds = ds * gate * muladd(s, 1.0 - gate, 1.0)
                        store(slopes + ROW * t, ds)  # zero after the last step, as dy is
                        for k in range(count):
                            tap = dtaps + ROW * k
                            store(tap, fold(ds, load_block(window + ROW * (t + k)), load_row(tap)))
                        store(dbias, fold(ds, 1.0, load_row(dbias)))
                    dx, dx_stride = write(words, DU, row, at, channel, steps, buffer)
                    for t in range(0, steps, 4):
                        made = repeat(zero_row())
                        for k in range(count):
                            tap = repeat(load_row(taps + ROW * k))
                            made = muladd(tap, load_block(slopes + ROW * (t + count - 1 - k)), made)
                        store_rows(dx + dx_stride * t, dx_stride, made)
                    written(words, DU, row, at, channel, steps, dx)
                for t in range(count - 1 if load_word(words, DZ) else 0):  # before the sequence
                    made = zero_row()
                    for k in range(t + 1):
                        tap = load_row(taps + ROW * k)
                        made = muladd(tap, load_row(slopes + ROW * (t - k)), made)
                    store(buffer, made)
                    address, _ = place(words, DZ, b, t, channel)
                    copy(buffer, 0, address, 0, 1, width, width)
            part = b_first // load_word(words, PER_TASK)
            address, stride = place(words, DDT, part, 0, channel)
            copy(dtaps, ROW, address, stride, count + 1, width, width)
    set_float_mode(mode)
