"""The kernels that run the selective scan forward, and those that chain chunks of time.

`vssm.ops.scan.triton` explains them; `vssm.ops.scan.triton_ring` has one more.
"""

import triton
import triton.language as tl

from vssm.ops.scan.triton_steps import (  # isort: skip
    LOG2E, _load_states, _next, _prepare, _put_states, _rates, _rows, _scalars, _sequence, _spread,
    _store, _store_states, _sum_parts, _take_states, _vector, _vectors, _zeros,
)  # fmt: skip


@triton.jit
def _first_column(T, PTX: tl.constexpr):
    """Returns a zero that, as far as the compiler knows, differs from lane to lane.

    So B and C stay in vector registers. From uniform registers they would be moved at every use.
    """
    column = 0
    if PTX:
        column = tl.inline_asm_elementwise(
            "{ .reg .u32 lane; mov.u32 lane, %laneid; mul.lo.u32 $0, $1, lane; }", "=r,r",
            [tl.minimum(T, 0)], tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return column


# fmt: off
@triton.jit(do_not_specialize=["T", "length", "chunks"])
def _scan_kernel(
    inputs, strides, packed, start, y, end, total, local, pull, starts, T, length, chunks,
    channels: tl.constexpr, N: tl.constexpr, LOG: tl.constexpr, BD: tl.constexpr,
    K: tl.constexpr, EVERY: tl.constexpr,
    AHEAD: tl.constexpr, HOLD: tl.constexpr, SOFTPLUS: tl.constexpr, WORDS: tl.constexpr,
    EVEN: tl.constexpr, PTX: tl.constexpr,
):
    # fmt: on
    """Runs over chunks of time and writes each result that it is given room for.

    y, end: out and the last h. total, local, pull: sum delta, local and pull of every chunk.
    starts: h before every EVERY steps, (B, T / EVERY, N, D). EVERY and length are multiples of K.
    packed: where sequences start that share one row, and T; each is one chunk, as `_sequence` says.
    HOLD: even steps leave h as it was; K is even.
    """
    dy, u, dt, A, B, C, D, z, dt_bias = inputs
    blocks = tl.cdiv(channels, BD)
    item = (tl.program_id(0) // blocks).to(tl.int64)
    d = tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    b, origin, stop, kept = _sequence(packed, item // chunks, T, EVERY)
    first = origin + item % chunks * length
    last = tl.minimum(first + length, stop)
    if start is not None:
        start += item * channels * N
    states = _load_states(start, d, channels, N, LOG, BD)
    rates = _rates(A, d, channels, N, LOG, BD)
    zero = tl.zeros((BD,), tl.float32)
    elapsed = zero
    pulls = ()
    products = ()
    if pull is not None:
        for _ in tl.static_range(N):
            pulls = pulls + (zero,)
            products = products + (zero + 1.0,)
    skip = _vector(D, d, channels, BD)
    bias = _vector(dt_bias, d, channels, BD)
    column = _first_column(T, PTX)
    next_vectors = _vectors(inputs, strides, b, first, last, d, 0, channels, K, 1, EVEN)
    if AHEAD:
        next_rows = _rows(inputs, strides, b, first, last, column, N, K, WORDS, EVEN)
    for t0 in range(first, last, K):
        if starts is not None:
            if (t0 - origin) % EVERY == 0:
                place = starts + (kept + (t0 - origin) // EVERY) * channels * N
                for n in tl.static_range(N):
                    _store(place + n * channels, d, states[n], d < channels, EVEN)
        us, dts, zs, dys = next_vectors
        after = _next(t0, last, K, EVEN)
        next_vectors = _vectors(inputs, strides, b, after, last, d, 0, channels, K, 1, EVEN)
        if AHEAD:
            Bs, Cs = next_rows
            next_rows = _rows(inputs, strides, b, after, last, column, N, K, WORDS, EVEN)
        else:
            Bs, Cs = _rows(inputs, strides, b, t0, last, column, N, K, WORDS, EVEN)
        deltas, _slopes, shares = _prepare(dts, zs, bias, len(zs), SOFTPLUS)
        outs = ()
        for k in tl.static_range(K):
            x = us[k].to(tl.float32)
            delta = deltas[k]
            if not EVEN:
                delta = tl.where(t0 + k < last, delta, 0.0)
            drive = delta * x
            elapsed += delta
            row_B = _scalars(Bs[k], B.dtype.element_ty, WORDS)
            if C is not None:
                row_C = _scalars(Cs[k], C.dtype.element_ty, WORDS)
            if z is not None:
                gate = zs[k].to(tl.float32) * shares[k]
            if pull is not None:
                g = dys[k].to(tl.float32)
                if z is not None:
                    g *= gate
                if not EVEN:
                    g = tl.where(t0 + k < last, g, 0.0)
            out = zero
            new_states = ()
            new_pulls = ()
            new_products = ()
            for n in tl.static_range(N):
                decay = tl.exp2(delta * rates[n])
                state = decay * states[n] + drive * row_B[n]
                new_states = new_states + (state,)
                if y is not None:
                    out += state * row_C[n]
                if pull is not None:
                    product = decay * products[n]
                    new_products = new_products + (product,)
                    new_pulls = new_pulls + (pulls[n] + product * (g * row_C[n]),)
            if not HOLD or k % 2 == 1:
                states = new_states
            pulls = new_pulls
            products = new_products
            if y is not None:
                out += skip * x
                if z is not None:
                    out *= gate
                outs = outs + (out,)
        if y is not None:
            # Stores come last: they would delay the loads of the next steps.
            for k in tl.static_range(K):
                mask = d < tl.where(t0 + k < last, channels, 0)
                _store(y + (b * T + t0) * channels + k * channels, d, outs[k], mask, EVEN)
    if end is not None:
        if last == stop:
            _store_states(end + item // chunks * channels * N, states, d, channels, N, LOG, BD)
    if total is not None:
        tl.store(total + item * channels + d, elapsed, mask=d < channels)
        _store_states(local + item * channels * N, states, d, channels, N, LOG, BD)
        if pull is not None:
            _store_states(pull + item * channels * N, pulls, d, channels, N, LOG, BD)


# fmt: off
@triton.jit(do_not_specialize=["T", "length", "spans"])
def _pull_kernel(
    inputs, strides, total, pull, T, length, spans, channels: tl.constexpr,
    N: tl.constexpr, LOG: tl.constexpr, BD: tl.constexpr, K: tl.constexpr,
    AHEAD: tl.constexpr, SOFTPLUS: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr,
):
    # fmt: on
    """Writes sum delta and pull of every span of time. It walks back and needs no states."""
    dy, u, dt, A, B, C, D, z, dt_bias = inputs
    blocks = tl.cdiv(channels, BD)
    item = (tl.program_id(0) // blocks).to(tl.int64)
    d = tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    b = item // spans
    first = item % spans * length
    last = tl.minimum(first + length, T)
    final = first + (last - 1 - first) // K * K
    rates = _rates(A, d, channels, N, LOG, BD)
    pulls = _zeros(N, BD)
    elapsed = tl.zeros((BD,), tl.float32)
    bias = _vector(dt_bias, d, channels, BD)
    column = _first_column(T, PTX)
    next_vectors = _vectors(inputs, strides, b, final, last, d, 0, channels, K, 1, EVEN)
    if AHEAD:
        next_rows = _rows(inputs, strides, b, final, last, column, N, K, WORDS, EVEN)
    for back in range(0, last - first, K):
        t0 = final - back
        _us, dts, zs, dys = next_vectors
        before = tl.maximum(t0 - K, first)
        next_vectors = _vectors(inputs, strides, b, before, last, d, 0, channels, K, 1, EVEN)
        if AHEAD:
            _Bs, Cs = next_rows
            next_rows = _rows(inputs, strides, b, before, last, column, N, K, WORDS, EVEN)
        else:
            _Bs, Cs = _rows(inputs, strides, b, t0, last, column, N, K, WORDS, EVEN)
        deltas, _slopes, shares = _prepare(dts, zs, bias, len(zs), SOFTPLUS)
        for k in tl.static_range(K - 1, -1, -1):
            delta = deltas[k]
            g = dys[k].to(tl.float32)
            if z is not None:
                g *= zs[k].to(tl.float32) * shares[k]
            if not EVEN:
                delta = tl.where(t0 + k < last, delta, 0.0)
                g = tl.where(t0 + k < last, g, 0.0)
            elapsed += delta
            row_C = _scalars(Cs[k], C.dtype.element_ty, WORDS)
            new_pulls = ()
            for n in tl.static_range(N):
                decay = tl.exp2(delta * rates[n])
                new_pulls = new_pulls + (decay * (pulls[n] + g * row_C[n]),)
            pulls = new_pulls
    tl.store(total + item * channels + d, elapsed, mask=d < channels)
    _store_states(pull + item * channels * N, pulls, d, channels, N, LOG, BD)


# fmt: off
@triton.jit(do_not_specialize=["T"])
def _lanes_kernel(
    inputs, strides, start, y, end, T, channels: tl.constexpr,
    N: tl.constexpr, LOG: tl.constexpr, BD: tl.constexpr, K: tl.constexpr,
    SOFTPLUS: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):
    # fmt: on
    """Writes out and the last h of whole sequences; 2**LOG lanes share a channel, N states each.

    Each lane of a channel does softplus, gate and out of one step in 2**LOG.
    """
    PARTS: tl.constexpr = 1 << LOG
    dy, u, dt, A, B, C, D, z, dt_bias = inputs
    blocks = tl.cdiv(channels * PARTS, BD)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    lane = tl.arange(0, BD)
    d = tl.program_id(0) % blocks * (BD // PARTS) + lane // PARTS
    part = lane % PARTS
    mask = d < channels
    own = part * N  # the first state of a lane
    last = T.to(tl.int64)  # so that places of steps are 64-bit
    zero = tl.zeros((BD,), tl.float32)
    states = ()
    if start is not None:
        place = start + b * channels * N * PARTS
        states = _take_states(place + d * (N * PARTS), own, mask, N, 1, False)
    else:
        for _ in tl.static_range(N):
            states = states + (zero,)
    rates = ()
    for n in tl.static_range(N):
        rate = tl.load(A + d * (N * PARTS) + own + n, mask=mask, other=0.0)
        rates = rates + (rate.to(tl.float32) * LOG2E,)
    skip = _vector(D, d, channels, BD)
    bias = _vector(dt_bias, d, channels, BD)
    next_vectors = _vectors(inputs, strides, b, 0, last, d, part, channels, K, PARTS, EVEN)
    next_rows = _rows(inputs, strides, b, 0, last, own, N, K, WORDS, EVEN)
    for t0 in range(0, last, K):
        us, dts, zs, dys = next_vectors
        Bs, Cs = next_rows
        after = _next(t0, last, K, EVEN)
        next_vectors = _vectors(inputs, strides, b, after, last, d, part, channels, K, PARTS, EVEN)
        next_rows = _rows(inputs, strides, b, after, last, own, N, K, WORDS, EVEN)
        deltas, _slopes, shares = _prepare(dts, zs, bias, len(zs), SOFTPLUS)
        for j in tl.static_range(len(us)):
            step = t0 + j * PARTS + part
            delta = deltas[j]
            if not EVEN:
                delta = tl.where(step < last, delta, 0.0)
            x = us[j].to(tl.float32)
            drive = delta * x
            outs = ()
            for k in tl.static_range(PARTS):
                delta_k = _spread(delta, k, LOG, BD, PTX)
                drive_k = _spread(drive, k, LOG, BD, PTX)
                row_B = _scalars(Bs[j * PARTS + k], B.dtype.element_ty, WORDS)
                row_C = _scalars(Cs[j * PARTS + k], C.dtype.element_ty, WORDS)
                out = zero
                new_states = ()
                for n in tl.static_range(N):
                    decay = tl.exp2(delta_k * rates[n])
                    state = decay * states[n] + drive_k * row_B[n]
                    new_states = new_states + (state,)
                    out += state * row_C[n]
                states = new_states
                outs = outs + (out,)
            out = _sum_parts(outs, LOG, BD, PTX) + skip * x
            if z is not None:
                out *= zs[j].to(tl.float32) * shares[j]
            at = (j * PARTS + part) * channels + d
            _store(y + (b * T + t0) * channels, at, out, mask & (step < last), EVEN)
    _put_states(end + b * channels * N * PARTS + d * (N * PARTS), states, own, mask, False)


# fmt: off
@triton.jit(do_not_specialize=["chunks"])
def _combine_kernel(
    local, total, A, initial, channels, chunks,
    N: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, REVERSE: tl.constexpr,
):
    # fmt: on
    """Turns the local term of every chunk, in place, into the value that enters the chunk."""
    blocks = tl.cdiv(channels * N, BLOCK)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    entry = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    rate = _vector(A, entry, channels * N, BLOCK) * LOG2E
    if initial is not None:
        initial += b * channels * N
    value = _vector(initial, entry, channels * N, BLOCK)
    for c0 in range(0, chunks, AHEAD):
        terms = ()
        elapsed = ()
        # Loads come first: the recurrence over chunks is short, waiting for memory is not.
        for k in tl.static_range(AHEAD):
            limit = tl.where(c0 + k < chunks, channels * N, 0)
            if REVERSE:
                row = (b + 1) * chunks - 1 - c0 - k
            else:
                row = b * chunks + c0 + k
            there = entry < limit
            term = tl.load(local + row * channels * N + entry, mask=there, other=0.0)
            delta = tl.load(total + row * channels + entry // N, mask=there, other=0.0)
            terms = terms + (term,)
            elapsed = elapsed + (delta,)
        for k in tl.static_range(AHEAD):
            limit = tl.where(c0 + k < chunks, channels * N, 0)
            if REVERSE:
                row = (b + 1) * chunks - 1 - c0 - k
            else:
                row = b * chunks + c0 + k
            tl.store(local + row * channels * N + entry, value, mask=entry < limit)
            value = tl.exp2(rate * elapsed[k]) * value + terms[k]
