"""The selective scan on a CPU in float32: kernels that numba compiles at first use.

    a_t = exp(dt_t A)      h_t = a_t h_{t-1} + dt_t u_t B_t      y_t = C_t h_t + D u_t

with dt_t <- softplus(dt_t + dt_bias) before and y_t <- y_t silu(z_t) after.
Backward, with g_t = dL/dh_t, goes from the last step to the first:

    g_t = C_t dy_t + a_{t+1} g_{t+1}      dC_t = sum_d dy_t h_t       dB_t = sum_d g_t dt_t u_t
    e_t = a_t g_t h_{t-1}                 dA = sum_{b,t} e_t dt_t     d(dt_t u_t) = sum_n g_t B_t
    du_t = dt_t d(dt_t u_t) + D dy_t      ddt_t = u_t d(dt_t u_t) + sum_n e_t A

Nothing of size B T D N is stored: one state in STEPS is kept and the steps between are run again.
`vssm.ops.vectors` explains tiles, groups and tasks; `vssm.ops.launch_numba` starts the kernels.

| name             | meaning                                  | layout                        |
| ---------------- | ---------------------------------------- | ----------------------------- |
| `delta`, `drive` | dt_t and dt_t u_t                        | steps, LANES                  |
| `slope`          | gradient of C_t h_t + D u_t              | steps, LANES                  |
| `A2`             | A log2(e)                                | states rounded up to 4, LANES |
| `h`, `g`         | state and its gradient                   | states rounded up to 4, LANES |
| `B`, `C`         | B and C of some steps, with a stride     | steps, states rounded up to 4 |
| `trace`          | h, q, s with a_t = s (1 + q) of 4 states | steps, a record each          |
"""
# ruff: noqa: ANN001, ANN201 (numba infers the types of kernels)

from vssm.ops.vectors import (  # isort: skip
    A_, B_, BIAS, BLOCK, C_, CHANNELS, COUNT, D_, DA, DB, DBIAS, DC, DD, DDT, DH0, DT, DU, DZ, FLAG,
    FLUSH, H, H0, LANES, LENGTH, LN2, LOG2E, LONGEST, NUM_ROWS, PER_GROUP, PER_TASK, ROW, U, Y, Z,
    after, clear, compiled, copy, draw_task, exceeds, exp2, fold, gather, hint, kernel, load_block,
    load_row, load_rows, load_word, maximum, muladd, prefetch, read, read_numbers, read_states,
    read_vector, repeat, sequence, set_float_mode, sigmoid, softplus, softplus_derivative, spread,
    store, store_gathered, store_rows, width_of, write, write_states, written, zero_row,
)  # fmt: skip

STEPS = 32  # the trace of this many steps fits into the fastest cache; even, for `look_ahead`
SOFTPLUS, HOLD = 1, 2  # bits of the word FLAG

# Offsets in bytes: in a record of the trace, in the scratch memory of a thread, and in a tile's.
TRACE_Q, TRACE_S, TRACE_SUMS, RECORD = BLOCK, 2 * BLOCK, 3 * BLOCK, 3 * BLOCK + ROW
ROWS = STEPS * ROW
HINTS, SPARE, BUFFERS = 0, ROW, 2 * ROW
TRACE = BUFFERS + 6 * ROWS
NUMBERS = TRACE + STEPS * RECORD + BLOCK
BOUNDED, TILE_DD, TILE_DBIAS = 0, ROW, 2 * ROW
DELTA, DRIVE, SLOPE, OUT, DDRIVE, DDELTA, TILE = (3 * ROW + i * ROWS for i in range(7))


@compiled
def read_decay(words, channel, A2):
    """Fills A2, and the row before it with the largest |A2| of every channel."""
    read_states(words, A_, 0, channel, A2)
    peak = zero_row()
    for n in range(load_word(words, COUNT)):
        x = load_row(A2 + ROW * n) * LOG2E
        peak = maximum(peak, maximum(x, 0.0 - x))
        store(A2 + ROW * n, x)
    store(A2 - ROW, peak)


@compiled
def prepare(words, b, start, steps, channel, scratch, tile, A2):
    """Fills `delta` and `drive` of a tile, and notes whether all |dt A log2(e)| <= 126."""
    dt, dt_stride = read(words, DT, b, start, channel, steps, scratch + BUFFERS)
    u, u_stride = read(words, U, b, start, channel, steps, scratch + BUFFERS + ROWS)
    bias = read_vector(words, BIAS, channel, scratch + SPARE)
    peak = repeat(zero_row())
    for t in range(0, steps, 4):
        d = load_rows(dt + dt_stride * t, dt_stride) + bias
        if load_word(words, FLAG) & SOFTPLUS:
            d = softplus(d)
        peak = maximum(peak, maximum(d, 0.0 - d))
        store(tile + DELTA + ROW * t, d)
        store(tile + DRIVE + ROW * t, d * load_rows(u + u_stride * t, u_stride))
    store(tile + BOUNDED, 0 if exceeds(peak * repeat(load_row(A2 - ROW)), 126.0) else 1)


@compiled
def advance(tile, A2, h, B, B_stride, C, C_stride, y, trace, steps, first, last, hints):
    """Moves states first to last of a tile over some steps and adds C h to `y` if given.

    With a `trace`, for one block of states, h does not change; the trace gets h, q and s of every
    step. Each of four successive blocks prefetches the rows of one of the four `hints`.
    """
    bounded = load_word(tile + BOUNDED, 0) != 0
    for n in range(first, last, 4):
        a, x = load_block(A2 + ROW * n), load_block(h + ROW * n)
        ahead, ahead_stride = load_word(hints, n % 16 // 2), load_word(hints, n % 16 // 2 + 1)
        for t in range(steps):
            prefetch(ahead + ahead_stride * t)
            dt, du = load_row(tile + DELTA + ROW * t), load_row(tile + DRIVE + ROW * t)
            q, s = exp2(repeat(dt), a, bounded)
            if trace:
                store(trace + RECORD * t, x)
                store(trace + RECORD * t + TRACE_Q, q)
                store(trace + RECORD * t + TRACE_S, s)
            x = x * s
            x = muladd(q, x, muladd(repeat(du), spread(B + B_stride * t + 4 * n), x))
            if y:
                store(y + ROW * t, fold(x, spread(C + C_stride * t + 4 * n), load_row(y + ROW * t)))
        store(trace + RECORD * steps if trace else h + ROW * n, x)


@compiled
def look_ahead(tile, A2, h, B, B_stride, C, C_stride, y, steps, states):
    """As `advance`, but only odd steps change the state: as `scan_ahead` says."""
    bounded = load_word(tile + BOUNDED, 0) != 0
    for n in range(0, states, 4):
        a, kept = load_block(A2 + ROW * n), load_block(h + ROW * n)
        for t in range(steps):
            dt, du = load_row(tile + DELTA + ROW * t), load_row(tile + DRIVE + ROW * t)
            q, s = exp2(repeat(dt), a, bounded)
            x = kept * s
            x = muladd(q, x, muladd(repeat(du), spread(B + B_stride * t + 4 * n), x))
            store(y + ROW * t, fold(x, spread(C + C_stride * t + 4 * n), load_row(y + ROW * t)))
            if t % 2:
                kept = x
        store(h + ROW * n, kept)


@compiled
def retreat(tile, A2, g, dA, B, B_stride, C, C_stride, y, trace, steps, n):
    """Moves the gradients g of one block of states back over the steps of the trace.

    Adds to dA, `ddrive`, `ddelta` (without its factor log(2)), the sums for dB and dC, and adds
    C h to `y` if given.
    """
    a, c, da = load_block(A2 + ROW * n), load_block(g + ROW * n), load_block(dA + ROW * n)
    h = load_block(trace + RECORD * steps)
    for i in range(steps):
        t = steps - 1 - i
        here, record = tile + ROW * t, trace + RECORD * t
        dy, du, dt = load_row(here + SLOPE), load_row(here + DRIVE), load_row(here + DELTA)
        if y:
            store(y + ROW * t, fold(h, spread(C + C_stride * t + 4 * n), load_row(y + ROW * t)))
        dC_t = repeat(dy) * h
        c = muladd(repeat(dy), spread(C + C_stride * t + 4 * n), c)
        store(record + TRACE_SUMS, gather(repeat(du) * c, dC_t, load_row(record + TRACE_SUMS)))
        store(here + DDRIVE, fold(c, spread(B + B_stride * t + 4 * n), load_row(here + DDRIVE)))
        h = load_block(record)
        c = c * load_block(record + TRACE_S)
        c = muladd(load_block(record + TRACE_Q), c, c)
        e = c * h
        da = muladd(e, repeat(dt), da)
        store(here + DDELTA, fold(e, a, load_row(here + DDELTA)))
    store(g + ROW * n, c)
    store(dA + ROW * n, da)


@compiled
def finish_forward(words, b, start, steps, channel, scratch, tile):
    """Writes y = (C h + D u) silu(z)."""
    u, u_stride = read(words, U, b, start, channel, steps, scratch + BUFFERS)
    z, z_stride = read(words, Z, b, start, channel, steps, scratch + BUFFERS + ROWS)
    y, y_stride = write(words, Y, b, start, channel, steps, scratch + BUFFERS + 2 * ROWS)
    skip = read_vector(words, D_, channel, scratch + SPARE)
    for t in range(0, steps, 4):
        x = load_rows(u + u_stride * t, u_stride)
        value = muladd(skip, x, load_block(tile + OUT + ROW * t))
        if z:
            gate = load_rows(z + z_stride * t, z_stride)
            value = value * gate * sigmoid(gate)
        store_rows(y + y_stride * t, y_stride, value)
    written(words, Y, b, start, channel, steps, y)


@compiled
def begin_backward(words, b, start, steps, channel, scratch, tile, A2):
    """Fills `slope`, the gradient of C h + D u, and clears what `retreat` adds to."""
    prepare(words, b, start, steps, channel, scratch, tile, A2)
    z, z_stride = read(words, Z, b, start, channel, steps, scratch + BUFFERS)
    dy, dy_stride = read(words, Y, b, start, channel, steps, scratch + BUFFERS + ROWS)
    for t in range(0, steps, 4):
        slope = load_rows(dy + dy_stride * t, dy_stride)
        if z:
            gate = load_rows(z + z_stride * t, z_stride)
            slope = slope * gate * sigmoid(gate)
        store(tile + SLOPE + ROW * t, slope)
    clear(tile + OUT, 3 * STEPS)


@compiled
def finish_backward(words, b, start, steps, channel, scratch, tile):
    """Writes du, ddt and dz; adds to dD and ddt_bias."""
    buffers = scratch + BUFFERS
    u, u_stride = read(words, U, b, start, channel, steps, buffers)
    z, z_stride = read(words, Z, b, start, channel, steps, buffers + ROWS)
    dy, dy_stride = read(words, Y, b, start, channel, steps, buffers + 2 * ROWS)
    du, du_stride = write(words, DU, b, start, channel, steps, buffers + 3 * ROWS)
    ddt, ddt_stride = write(words, DDT, b, start, channel, steps, buffers + 4 * ROWS)
    dz, dz_stride = write(words, DZ, b, start, channel, steps, buffers + 5 * ROWS)
    skip = read_vector(words, D_, channel, scratch + SPARE)
    dD, dbias = load_row(tile + TILE_DD), load_row(tile + TILE_DBIAS)
    for t in range(0, steps, 4):
        here, x = tile + ROW * t, load_rows(u + u_stride * t, u_stride)
        delta, slope = load_block(here + DELTA), load_block(here + SLOPE)
        ddrive = load_block(here + DDRIVE)
        store_rows(du + du_stride * t, du_stride, muladd(delta, ddrive, skip * slope))
        ddelta = muladd(x, ddrive, load_block(here + DDELTA) * LN2)
        if load_word(words, FLAG) & SOFTPLUS:
            ddelta = ddelta * softplus_derivative(delta)
        store_rows(ddt + ddt_stride * t, ddt_stride, ddelta)
        dbias = fold(ddelta, 1.0, dbias)
        dD = fold(slope, x, dD)
        if z:
            gate = load_rows(z + z_stride * t, z_stride)
            s = sigmoid(gate)
            value = muladd(skip, x, load_block(here + OUT))
            value = value * load_rows(dy + dy_stride * t, dy_stride)
            store_rows(dz + dz_stride * t, dz_stride, value * muladd(gate * s, 1.0 - s, s))
    store(tile + TILE_DD, dD)
    store(tile + TILE_DBIAS, dbias)
    written(words, DU, b, start, channel, steps, du)
    written(words, DDT, b, start, channel, steps, ddt)
    written(words, DZ, b, start, channel, steps, dz)


@kernel
def forward_kernel(words, scratch):
    hints = scratch + HINTS
    states, hold = -(-load_word(words, COUNT) // 4) * 4, load_word(words, FLAG) & HOLD
    B_buffer, C_buffer = scratch + NUMBERS, scratch + NUMBERS + 4 * STEPS * states
    tile = scratch + NUMBERS + 16 * STEPS * states
    # Every tile of a group has the largest |A2|, A2 and h, one after the other.
    A2_first, A2_bytes, to_h = tile + TILE + ROW, ROW + 2 * states * ROW, states * ROW
    mode = set_float_mode(FLUSH)
    while True:
        _, first, last, b_first, b_last = draw_task(words)
        if first == last:
            break
        for i in range(first, last):
            read_decay(words, LANES * i, A2_first + A2_bytes * (i - first))
        for b in range(b_first, b_last):
            for i in range(first, last):
                read_states(words, H0, b, LANES * i, A2_first + A2_bytes * (i - first) + to_h)
            row, origin, length = sequence(words, b)
            for start in range(origin, origin + length, STEPS):
                steps = min(STEPS, origin + length - start)
                B, B_stride = read_numbers(words, B_, row, start, steps, B_buffer)
                C, C_stride = read_numbers(words, C_, row, start, steps, C_buffer)
                for i in range(first, last):
                    channel, A2 = LANES * i, A2_first + A2_bytes * (i - first)
                    h, y = A2 + to_h, tile + OUT
                    prepare(words, row, start, steps, channel, scratch, tile, A2)
                    clear(y, steps)
                    if hold:
                        look_ahead(tile, A2, h, B, B_stride, C, C_stride, y, steps, states)
                        finish_forward(words, row, start, steps, channel, scratch, tile)
                        continue
                    # Next comes another tile, or else later steps, or else another sequence.
                    more = i + 1 < last
                    t, c = (start, channel + LANES) if more else (start + STEPS, LANES * first)
                    row_next, t = (row, t) if t < origin + length else after(words, row, t)
                    hint(words, DT, row_next, t, c, hints)
                    hint(words, U, row_next, t, c, hints + 16)
                    hint(words, Y, row_next, t, c, hints + 32)
                    hint(words, Z, row_next, t, c, hints + 48)
                    advance(tile, A2, h, B, B_stride, C, C_stride, y, 0, steps, 0, states, hints)
                    finish_forward(words, row, start, steps, channel, scratch, tile)
            for i in range(first, last):
                write_states(words, H, b, LANES * i, A2_first + A2_bytes * (i - first) + to_h)
    set_float_mode(mode)


@kernel
def backward_kernel(words, scratch):
    hints, count = scratch + HINTS, load_word(words, COUNT)
    states = -(-count // 4) * 4
    numbers = 4 * STEPS * states
    trace, B_buffer, C_buffer = scratch + TRACE, scratch + NUMBERS, scratch + NUMBERS + numbers
    dB, dC = C_buffer + numbers, C_buffer + 2 * numbers
    tiles = dC + numbers
    # Every tile of a group has the largest |A2|, A2, g, dA and h before every chunk of STEPS.
    A2_first = tiles + TILE * load_word(words, PER_GROUP) + ROW
    A2_bytes = ROW + (3 + max(1, -(-load_word(words, LONGEST) // STEPS))) * states * ROW
    to_g, to_dA, to_h = states * ROW, 2 * states * ROW, 3 * states * ROW
    mode = set_float_mode(FLUSH)
    while True:
        group, first, last, b_first, b_last = draw_task(words)
        if first == last:
            break
        for i in range(first, last):
            A2 = A2_first + A2_bytes * (i - first)
            read_decay(words, LANES * i, A2)
            clear(A2 + to_dA, states)
            clear(tiles + TILE * (i - first) + TILE_DD, 2)
        for b in range(b_first, b_last):
            for i in range(first, last):
                A2 = A2_first + A2_bytes * (i - first)
                read_states(words, H0, b, LANES * i, A2 + to_h)
                read_states(words, H, b, LANES * i, A2 + to_g)
            row, origin, length = sequence(words, b)
            chunks = -(-length // STEPS)
            for chunk in range(chunks - 1):
                start = origin + chunk * STEPS
                B, B_stride = read_numbers(words, B_, row, start, STEPS, B_buffer)
                for i in range(first, last):
                    channel, A2 = LANES * i, A2_first + A2_bytes * (i - first)
                    prepare(words, row, start, STEPS, channel, scratch, tiles, A2)
                    h = A2 + to_h + states * ROW * (chunk + 1)
                    for n in range(states):
                        store(h + ROW * n, load_row(h + ROW * (n - states)))
                    hint(words, DT, row, start + STEPS, channel, hints)
                    hint(words, U, row, start + STEPS, channel, hints + 16)
                    advance(tiles, A2, h, B, B_stride, 0, 0, 0, 0, STEPS, 0, states, hints)
            for chunk in range(chunks - 1, -1, -1):
                start = origin + chunk * STEPS
                steps = min(STEPS, origin + length - start)
                B, B_stride = read_numbers(words, B_, row, start, steps, B_buffer)
                C, C_stride = read_numbers(words, C_, row, start, steps, C_buffer)
                for i in range(first, last):
                    tile, A2 = tiles + TILE * (i - first), A2_first + A2_bytes * (i - first)
                    begin_backward(words, row, start, steps, LANES * i, scratch, tile, A2)
                end = origin + chunks * STEPS - STEPS
                row_next, t = (row, start - STEPS) if chunk else after(words, row, end)
                for n in range(0, states, 4):
                    for step in range(steps):
                        clear(trace + RECORD * step + TRACE_SUMS, 1)
                    for i in range(first, last):
                        tile, A2 = tiles + TILE * (i - first), A2_first + A2_bytes * (i - first)
                        hint(words, DT, row_next, t, LANES * i, hints)
                        hint(words, U, row_next, t, LANES * i, hints + 16)
                        hint(words, Y, row_next, t, LANES * i, hints + 32)
                        hint(words, Z, row_next, t, LANES * i, hints + 48)
                        g, dA, h = A2 + to_g, A2 + to_dA, A2 + to_h + states * ROW * chunk
                        y = tile + OUT if load_word(words, Z) else 0
                        advance(tile, A2, h, B, B_stride, 0, 0, 0, trace, steps, n, n + 4, hints)
                        retreat(tile, A2, g, dA, B, B_stride, C, C_stride, y, trace, steps, n)
                    for step in range(steps):
                        sums, at = trace + RECORD * step + TRACE_SUMS, 4 * (states * step + n)
                        store_gathered(dB + at, dC + at, load_row(sums))
                at = load_word(words, LENGTH) * (load_word(words, NUM_ROWS) * group + row) + start
                at *= 4 * count
                copy(dB, 4 * states, load_word(words, DB) + at, 4 * count, steps, count, count)
                copy(dC, 4 * states, load_word(words, DC) + at, 4 * count, steps, count, count)
                for i in range(first, last):
                    tile = tiles + TILE * (i - first)
                    finish_backward(words, row, start, steps, LANES * i, scratch, tile)
            for i in range(first, last):
                write_states(words, DH0, b, LANES * i, A2_first + A2_bytes * (i - first) + to_g)
        part = b_first // load_word(words, PER_TASK)
        for i in range(first, last):
            channel, tile = LANES * i, tiles + TILE * (i - first)
            width, at = width_of(words, channel), 4 * (load_word(words, CHANNELS) * part + channel)
            write_states(words, DA, part, channel, A2_first + A2_bytes * (i - first) + to_dA)
            copy(tile + TILE_DD, 0, load_word(words, DD) + at, 0, 1, width, width)
            copy(tile + TILE_DBIAS, 0, load_word(words, DBIAS) + at, 0, 1, width, width)
    set_float_mode(mode)
