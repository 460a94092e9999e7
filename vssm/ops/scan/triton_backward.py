"""The kernel that walks the selective scan back, and what its lanes exchange.

PARTS lanes (one or two) share a channel. With two lanes of eight states (FOLD), slot n of a lane is
not always state n of its part: `_fold` says why. See `vssm.ops.scan.triton` for formulas.
"""

import triton
import triton.language as tl

from vssm.ops.scan.triton_steps import (  # isort: skip
    EXCHANGES, LN2, LOG2E, _next, _prepare, _put_states, _row, _scalars, _sequence, _stack, _store,
    _take_states, _vector, _vectors, _zeros,
)  # fmt: skip

# Shared memory of a program, for which Triton has no words: 12 programs fit a multiprocessor.
SHARED_BYTES = 16384
SHARED_START = tl.constexpr(f"{{ .shared .align 16 .b8 kept[{SHARED_BYTES}]; mov.u32 $0, kept; }}")
# The value of the first or the second lane of a pair, for both.
TAKES = tl.constexpr([f"shfl.sync.idx.b32 $0, $1, {k}, 0x1e1f, 0xffffffff;" for k in range(2)])


@triton.jit
def _swap(x, LEVEL: tl.constexpr, M: tl.constexpr):
    """Gives every lane the values of the lane whose number differs in bit LEVEL; x is (32, M)."""
    bits = tl.reshape(x.to(tl.int32, bitcast=True), (16 >> LEVEL, 2, 1 << LEVEL, M))
    swapped = tl.reshape(bits ^ tl.xor_sum(bits, 1, keep_dims=True), (32, M))
    return swapped.to(tl.float32, bitcast=True)


@triton.jit
def _halve(low, high, LEVEL: tl.constexpr, M: tl.constexpr):
    """Adds pairs of lanes, (32, M): lanes whose bit LEVEL is set keep high, the others low."""
    odd = ((tl.arange(0, 32) >> LEVEL) % 2 == 1)[:, None]
    return tl.where(odd, high, low) + _swap(tl.where(odd, low, high), LEVEL, M)


@triton.jit
def _exchange(x, LEVEL: tl.constexpr, PTX: tl.constexpr):
    """Gives every lane the value of the lane whose number differs in bit LEVEL; x is (32,)."""
    if PTX:
        EXCHANGE: tl.constexpr = EXCHANGES[LEVEL]
        return tl.inline_asm_elementwise(EXCHANGE, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.reshape(_swap(x[:, None], LEVEL, 1), (32,))


@triton.jit
def _merge(low, high, LEVEL: tl.constexpr, PTX: tl.constexpr):
    """As `_halve`, for vectors (32,)."""
    odd = (tl.arange(0, 32) >> LEVEL) % 2 == 1
    return tl.where(odd, high, low) + _exchange(tl.where(odd, low, high), LEVEL, PTX)


@triton.jit
def _from_lane(x, LANE: tl.constexpr, PTX: tl.constexpr):
    """Gives both lanes of a channel the value of the first or the second."""
    if PTX:
        TAKE: tl.constexpr = TAKES[LANE]
        return tl.inline_asm_elementwise(TAKE, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.where(tl.arange(0, 32) % 2 == LANE, x, _exchange(x, 0, PTX))


@triton.jit
def _share(x, PARTS: tl.constexpr, PTX: tl.constexpr):
    """Gives all lanes of a channel the value of each of them: a tuple of PARTS vectors."""
    values = (x,)
    if PARTS == 2:
        values = (_from_lane(x, 0, PTX), _from_lane(x, 1, PTX))
    return values


@triton.jit
def _gather(values, STEP: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr):
    """Gives lane i of a channel the sum of values[STEP + i] over the lanes of the channel."""
    if PARTS == 2:
        return _merge(values[STEP], values[STEP + 1], 0, PTX)
    else:
        return values[STEP]


# fmt: off
@triton.jit
def _own_rows(pointer, stride, t0, last, first, N: tl.constexpr, K: tl.constexpr,
              FOLD: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr):
    # fmt: on
    """Loads each lane's part of the rows of K steps from t0; later steps read the last row."""
    rows = ()
    for k in tl.static_range(K):
        step = k
        if not EVEN:
            step = tl.minimum(k, last - 1 - t0)
        row = pointer + t0 * stride + step * stride
        if FOLD:
            rows = rows + (_folded_row(row, first, N, WORDS),)
        else:
            rows = rows + (_row(row + first, N, WORDS),)
    return rows


@triton.jit
def _folded_row(pointer, first, N: tl.constexpr, WORDS: tl.constexpr):
    """Loads each lane's part of a row: in slot order or, if WORDS, in pairs not yet in order."""
    values = ()
    if WORDS:
        EACH: tl.constexpr = 64 // pointer.dtype.element_ty.primitive_bitwidth
        for i in tl.static_range(0, N, EACH):
            word = ((first & -4) ^ i) // EACH  # lanes differ in which half comes first
            values = values + (tl.load(pointer.to(tl.pointer_type(tl.int64)) + word),)
    else:
        for n in tl.static_range(N):
            values = values + (tl.load(pointer + (first ^ n)),)
    return values


# fmt: off
@triton.jit
def _own_scalars(row, first, dtype: tl.constexpr, FOLD: tl.constexpr, WORDS: tl.constexpr,
                 PTX: tl.constexpr):
    # fmt: on
    """Returns one row of `_own_rows` as N float32 vectors, in slot order."""
    if not (FOLD and WORDS):
        return _scalars(row, dtype, WORDS)
    else:
        odd = first & 1  # neighbours change places
        values = ()
        if PTX and dtype == tl.bfloat16:
            # Converting and changing places is one permutation of bytes.
            low = tl.where(odd == 1, 0x3244, 0x1044)
            high = tl.where(odd == 1, 0x1044, 0x3244)
            for i in tl.static_range(2 * len(row)):
                bits = (row[i // 2] >> (32 * (i % 2))).to(tl.int32)
                values = values + (_permute(bits, low), _permute(bits, high))
        else:
            pairs = _scalars(row, dtype, WORDS)
            for i in tl.static_range(0, len(pairs), 2):
                values = values + (tl.where(odd == 1, pairs[i + 1], pairs[i]),)
                values = values + (tl.where(odd == 1, pairs[i], pairs[i + 1]),)
        return values


@triton.jit
def _permute(bits, bytes):
    """Returns float32 made of bytes of bits: digits 0 to 3 of `bytes` name a byte, 4 a zero."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;", "=f,r,r", [bits, bytes], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _fold(values, PTX: tl.constexpr):
    """Sums 8 slots over lane bits 3, 4 and 2, which become bits 0, 2 and 1 of the lane's state.

    Slot n of a lane is state n with bits 0 and 2 flipped where lane bits 3 and 4 are set. So all
    lanes give away the same slots, and only one level needs selects.
    """
    half = ()
    for i in tl.static_range(0, 8, 2):
        half = half + (values[i] + _exchange(values[i + 1], 3, PTX),)
    low = half[0] + _exchange(half[2], 4, PTX)
    high = half[1] + _exchange(half[3], 4, PTX)
    return _merge(low, high, 2, PTX)


@triton.jit
def _sum_lanes(low, high, PARTS: tl.constexpr):
    """Returns the sums of the vectors low and high over lanes, per part: (2, 16 / PARTS, PARTS).

    At every level a lane keeps half of the vectors and gives the others to its partner: 31
    exchanges for 32 vectors, where separate sums would need 160.
    """
    LOG: tl.constexpr = 5 - PARTS  # of 16 / PARTS
    part = _halve(_stack(low, LOG, 32), _stack(high, LOG, 32), 4, 1 << LOG)
    for level in tl.static_range(LOG - 1, -1, -1):
        low, high = tl.split(tl.permute(tl.reshape(part, (32, 2, 1 << level)), (0, 2, 1)))
        part = _halve(low, high, level + PARTS - 1, 1 << level)
    return tl.reshape(part, (32,))


@triton.jit
def _keep(place, states, index, N: tl.constexpr, SHARED: tl.constexpr):
    """Stores N states of every lane as number index, at a shared address or a pointer."""
    for i in tl.static_range(N // 4 if SHARED else 0):
        tl.inline_asm_elementwise(
            "st.shared.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;", "=r,r,f,f,f,f",
            (place + (index * N * 128 + 512 * i),) + states[4 * i : 4 * i + 4],
            tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    for n in tl.static_range(0 if SHARED else N):
        tl.store(place + (index * N * 32 + 32 * n), states[n])


@triton.jit
def _kept(place, index, N: tl.constexpr, SHARED: tl.constexpr):
    """Loads what `_keep` stored."""
    states = ()
    for i in tl.static_range(N // 4 if SHARED else 0):
        states = states + tl.inline_asm_elementwise(
            "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r",
            (place + (index * N * 128 + 512 * i),),
            (tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
    for n in tl.static_range(0 if SHARED else N):
        states = states + (tl.load(place + (index * N * 32 + 32 * n)),)
    return states


# fmt: off
@triton.jit(do_not_specialize=["T", "length", "chunks", "items", "groups", "spans", "each"])
def _scan_backward_kernel(
    inputs, strides, packed, start, adjoint, scratch, du, ddt, dz, dh0, dBC, dA, dD, dbias,
    T, length, chunks, items, groups, spans, each, channels: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, PARTS: tl.constexpr, FOLD: tl.constexpr, TURNED: tl.constexpr,
    SOFTPLUS: tl.constexpr, WORDS: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr,
):
    # fmt: on
    """Writes the gradients; an item is a span of chunks, walked back by one program.

    adjoint is l after every span, start is h before every chunk: (B, chunks, D, STATES) or, if
    TURNED, (B, chunks, STATES, D). Only then a span has several chunks: `each`, or fewer at the end
    of a sequence. packed: where sequences start that share one row, and T; then each of them is a
    span. dBC, dA, dD, dbias: sums of a program, or of its block of channels, which are still to be
    added. FOLD: lanes order their states as `_fold` says.
    """
    dy, u, dt, A, B, C, D, z, dt_bias = inputs
    first_pass = (None, u, dt, A, B, None, None, None, dt_bias)
    BD: tl.constexpr = 32
    STATES: tl.constexpr = N * PARTS
    SOME: tl.constexpr = 16 // PARTS
    ROUNDS: tl.constexpr = (N + SOME - 1) // SOME
    blocks: tl.constexpr = (channels * PARTS + BD - 1) // BD
    block = tl.program_id(0) % blocks
    group = (tl.program_id(0) // blocks).to(tl.int64)
    lane = tl.arange(0, BD)
    d = (block * BD + lane) // PARTS
    mask = d < channels
    part = lane % PARTS
    first_state = part * N
    if PARTS == 1:
        first_state = 0
    if FOLD:
        first_state += (lane >> 3) % 2 + 4 * (lane >> 4)
    if SHARED:
        place = 16 * lane
        place += tl.inline_asm_elementwise(
            SHARED_START, "=r,r", (lane,), tl.int32, is_pure=False, pack=1
        )
    else:
        program = tl.program_id(0).to(tl.int64)
        place = scratch + program * tl.cdiv(length, 2 * K) * (2 * BD * N) + lane
    sequences = items // spans
    if packed is not None:
        sequences = 1
    dBC += block.to(tl.int64) * sequences * T * (32 * ROUNDS)
    row_A = _take_states(A + d * STATES, first_state, mask, N, 1, FOLD)
    rates = ()
    for n in tl.static_range(N):
        rates = rates + (row_A[n] * LOG2E,)
    sums_A = _zeros(N, BD)
    zero = tl.zeros((BD,), tl.float32)
    sum_D = zero
    sum_bias = zero
    skip = _vector(D, d, channels, BD)
    bias = _vector(dt_bias, d, channels, BD)
    for item in range(group, items, groups):
        b, origin, stop, base = _sequence(packed, item // spans, T, length)
        if adjoint is not None:
            entry = adjoint + item * channels * STATES + d * STATES
            ls = _take_states(entry, first_state, mask, N, 1, FOLD)
        else:
            ls = _zeros(N, BD)
        count = chunks // spans  # 1 if not TURNED
        lowest = 0  # chunk of the span
        if packed is not None:
            count = tl.cdiv(stop - origin, length)
        elif TURNED:
            lowest = item % spans * each
            count = tl.minimum(each, chunks - lowest)
        else:
            lowest = item % spans * count
        for chunk in range(count):
            of_sequence = lowest + count - 1 - chunk
            number = base + of_sequence
            first = origin + of_sequence * length
            last = tl.minimum(first + length, stop)
            steps = (last - first).to(tl.int32)
            if start is None:
                states = _zeros(N, BD)
            elif TURNED:
                entry = start + number * channels * STATES + d
                states = _take_states(entry, first_state, mask, N, channels, FOLD)
            else:
                entry = start + number * channels * STATES + d * STATES
                states = _take_states(entry, first_state, mask, N, 1, FOLD)
            B_b = B + b * strides[3][0]
            C_b = C + b * strides[4][0]
            vectors = _vectors(
                first_pass, strides, b, first, last, d, part, channels, 2 * K, PARTS, EVEN
            )
            for s0 in range(0, steps, 2 * K):
                us, dts, _z, _dy = vectors
                after = _next(first + s0, last, 2 * K, EVEN)
                vectors = _vectors(
                    first_pass, strides, b, after, last, d, part, channels, 2 * K, PARTS, EVEN
                )
                t0 = first + s0
                Bs = _own_rows(
                    B_b, strides[3][1], t0, last, first_state, N, 2 * K, FOLD, WORDS, EVEN
                )
                own_deltas, _slopes, _shares = _prepare(dts, (), bias, 0, SOFTPLUS)
                deltas = ()
                drives = ()
                for j in tl.static_range(2 * K // PARTS):
                    delta = own_deltas[j]
                    if not EVEN:
                        delta = tl.where(s0 + (j * PARTS + part) < steps, delta, 0.0)
                    deltas = deltas + _share(delta, PARTS, PTX)
                    drives = drives + _share(delta * us[j].to(tl.float32), PARTS, PTX)
                for k in tl.static_range(2 * K):
                    if k % K == 0:
                        _keep(place, states, (s0 + k) // K, N, SHARED)
                    row_B = _own_scalars(Bs[k], first_state, B.dtype.element_ty, FOLD, WORDS, PTX)
                    new_states = ()
                    for n in tl.static_range(N):
                        decay = tl.exp2(deltas[k] * rates[n])
                        new_states = new_states + (decay * states[n] + drives[k] * row_B[n],)
                    states = new_states
            tl.debug_barrier()
            final = (steps - 1) // K * K
            vectors = _vectors(
                inputs, strides, b, first + final, last, d, part, channels, K, PARTS, EVEN
            )
            kept = _kept(place, final // K, N, SHARED)
            for back in range(0, steps, K):
                s0 = final - back
                t0 = first + s0
                before = tl.maximum(s0 - K, 0)
                us, dts, zs, dys = vectors
                hs = kept
                Bs = _own_rows(B_b, strides[3][1], t0, last, first_state, N, K, FOLD, WORDS, EVEN)
                Cs = _own_rows(C_b, strides[4][1], t0, last, first_state, N, K, FOLD, WORDS, EVEN)
                own_deltas, slopes, shares = _prepare(dts, zs, bias, len(zs), SOFTPLUS)
                own = ()
                deltas = ()
                drives = ()
                gs = ()
                for j in tl.static_range(K // PARTS):
                    x = us[j].to(tl.float32)
                    delta = own_deltas[j]
                    slope = slopes[j]
                    g = dys[j].to(tl.float32)
                    if not EVEN:
                        live = s0 + (j * PARTS + part) < steps
                        delta = tl.where(live, delta, 0.0)
                        slope = tl.where(live, slope, 0.0)
                        g = tl.where(live, g, 0.0)
                    per_y = zero
                    if z is not None:
                        gate = zs[j].to(tl.float32)
                        share = shares[j]
                        per_y = g * share * (1.0 + gate * (1.0 - share))
                        g *= gate * share
                    sum_D += g * x
                    own = own + ((x, delta, slope, g, per_y),)
                    deltas = deltas + _share(delta, PARTS, PTX)
                    drives = drives + _share(delta * x, PARTS, PTX)
                    gs = gs + _share(g, PARTS, PTX)
                decays = ()
                rows_B = ()
                for k in tl.static_range(K):
                    row_B = _own_scalars(Bs[k], first_state, B.dtype.element_ty, FOLD, WORDS, PTX)
                    rows_B = rows_B + (row_B,)
                    for n in tl.static_range(N):
                        decay = tl.exp2(deltas[k] * rates[n])
                        hs = hs + (decay * hs[k * N + n] + drives[k] * row_B[n],)
                        decays = decays + (decay,)
                ys = ()
                grad_drives = ()
                grad_deltas = ()
                sums = ()
                for k in tl.static_range(K - 1, -1, -1):
                    if k == 0:
                        # Only now: the later steps, which are done, have freed registers.
                        at = first + before
                        vectors = _vectors(
                            inputs, strides, b, at, last, d, part, channels, K, PARTS, EVEN
                        )
                        kept = _kept(place, before // K, N, SHARED)
                    row_B = rows_B[k]
                    row_C = _own_scalars(Cs[k], first_state, C.dtype.element_ty, FOLD, WORDS, PTX)
                    y = zero
                    grad_drive = zero
                    grad_delta = zero
                    for_B = ()
                    for_C = ()
                    new_ls = ()
                    new_sums_A = ()
                    for n in tl.static_range(N):
                        y += hs[(k + 1) * N + n] * row_C[n]
                        l = ls[n] + gs[k] * row_C[n]
                        for_B = for_B + (drives[k] * l,)
                        for_C = for_C + (gs[k] * hs[(k + 1) * N + n],)
                        grad_drive += l * row_B[n]
                        l *= decays[k * N + n]
                        p = l * hs[k * N + n]
                        grad_delta += p * rates[n]
                        new_sums_A = new_sums_A + (sums_A[n] + deltas[k] * p,)
                        new_ls = new_ls + (l,)
                    ls = new_ls
                    sums_A = new_sums_A
                    ys = (y,) + ys
                    grad_drives = (grad_drive,) + grad_drives
                    grad_deltas = (grad_delta,) + grad_deltas
                    if FOLD:
                        sums = sums + (_merge(_fold(for_B, PTX), _fold(for_C, PTX), 1, PTX),)
                    else:
                        for i in tl.static_range(0, N, SOME):
                            both = for_B[i : i + SOME], for_C[i : i + SOME]
                            sums = sums + (_sum_lanes(both[0], both[1], PARTS),)
                for j in tl.static_range(K // PARTS):
                    x, delta, slope, g, per_y = own[j]
                    grad_drive = _gather(grad_drives, j * PARTS, PARTS, PTX)
                    grad_delta = _gather(grad_deltas, j * PARTS, PARTS, PTX)
                    grad_delta = slope * (x * grad_drive + LN2 * grad_delta)
                    sum_bias += grad_delta
                    at = (b * T + t0) * channels + j * PARTS * channels
                    own_step = part * channels + d
                    stored = mask & (s0 + (j * PARTS + part) < steps)
                    _store(du + at, own_step, delta * grad_drive + skip * g, stored, EVEN)
                    _store(ddt + at, own_step, grad_delta, stored, EVEN)
                    if z is not None:
                        y = _gather(ys, j * PARTS, PARTS, PTX) + skip * x
                        _store(dz + at, own_step, per_y * y, stored, EVEN)
                for k in tl.static_range(K):
                    at = (b * T + t0) * (32 * ROUNDS) + k * (32 * ROUNDS)
                    stored = lane < tl.where(s0 + k < steps, 32, 0)
                    for i in tl.static_range(ROUNDS):
                        value = sums[(K - 1 - k) * ROUNDS + i]
                        _store(dBC + at + 32 * i, lane, value, stored, EVEN)
            # The next chunk overwrites the scratch that this one has just read.
            tl.debug_barrier()
        if dh0 is not None:
            if item % spans == 0:
                entry = dh0 + item // spans * channels * STATES + d * STATES
                _put_states(entry, ls, first_state, mask, FOLD)
    sum_D = _gather((sum_D, sum_D), 0, PARTS, PTX)
    sum_bias = _gather((sum_bias, sum_bias), 0, PARTS, PTX)
    at = group * channels + d
    _put_states(dA + at * STATES, sums_A, first_state, mask, FOLD)
    tl.store(dD + at, sum_D, mask=mask)
    tl.store(dbias + at, sum_bias, mask=mask)
