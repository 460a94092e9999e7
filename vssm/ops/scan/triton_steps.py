"""What the kernels of the selective scan share: the values of a step, and states in registers.

PARTS neighbouring lanes (threads) of a warp share the states of a channel, N states each.
Shapes and letters are those of `vssm.ops.scan.triton`.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# One exchange each: with the lane whose number differs in bit k.
EXCHANGES = tl.constexpr(
    [f"shfl.sync.bfly.b32 $0, $1, {1 << k}, 0x1f, 0xffffffff;" for k in range(5)]
)
# The value of lane k of PARTS neighbouring lanes, for all of them, is at PARTS + k.
SPREADS = tl.constexpr(
    [""]
    + [
        f"shfl.sync.idx.b32 $0, $1, {k}, {(32 - parts) << 8 | 31}, 0xffffffff;"
        for parts in (1, 2, 4, 8, 16)
        for k in range(parts)
    ]
)


@triton.jit
def _reciprocal(x):
    # For positive numbers: two instructions instead of the eight of a division.
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _reciprocals(values):
    """Returns 1 / x of every value; pairs share one, which spares the unit of exponentials."""
    inverses = ()
    for i in tl.static_range(0, len(values) - 1, 2):
        both = _reciprocal(values[i] * values[i + 1])
        inverses = inverses + (both * values[i + 1], both * values[i])
    if len(values) % 2 == 1:
        inverses = inverses + (_reciprocal(values[len(values) - 1]),)
    return inverses


@triton.jit
def _sigmoid(x):
    return _reciprocal(1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def _softplus(x):
    """Returns log(1 + exp(x)) and its slope."""
    e = tl.exp2(-tl.abs(x) * LOG2E)
    return _softplus_of(x, e, _reciprocal((1.0 + e) * (2.0 + e)))


@triton.jit
def _softplus_of(x, e, r):
    """Returns log(1 + exp(x)) and its slope from e = exp(-|x|) and r = 1 / ((1 + e) (2 + e))."""
    # log1p(e) = 2 artanh(e / (2 + e)) by a polynomial: log(1 + e) would lose steps near 1e-3.
    s = e * (1.0 + e) * r
    q = s * s
    p = (((0.2817465726 * q + 0.2796141884) * q + 0.4002485372) * q + 0.6666631594) * q + 2.0
    return tl.maximum(x, 0.0) + s * p, tl.where(x >= 0, 1.0, e) * (2.0 + e) * r


@triton.jit
def _prepare(dts, zs, bias, GATES: tl.constexpr, SOFTPLUS: tl.constexpr):
    """Returns delta, its slope in dt and sigmoid(z) of some steps; GATES is the length of zs."""
    # Triton 3.6 gives functions of ((a, b), ()) and of ((a,), (b,)) the same name: hence GATES.
    raws = ()
    exponentials = ()
    denominators = ()
    for j in tl.static_range(len(dts)):
        raw = dts[j].to(tl.float32) + bias
        raws = raws + (raw,)
        if SOFTPLUS:
            e = tl.exp2(-tl.abs(raw) * LOG2E)
            exponentials = exponentials + (e,)
            denominators = denominators + ((1.0 + e) * (2.0 + e),)
    for j in tl.static_range(GATES):
        # At most 2**60, so that products of two stay finite.
        power = tl.minimum(zs[j].to(tl.float32) * -LOG2E, 60.0)
        denominators = denominators + (1.0 + tl.exp2(power),)
    inverses = _reciprocals(denominators)
    slopes = ()
    deltas = raws
    if SOFTPLUS:
        deltas = ()
        for j in tl.static_range(len(dts)):
            delta, slope = _softplus_of(raws[j], exponentials[j], inverses[j])
            deltas = deltas + (delta,)
            slopes = slopes + (slope,)
    else:
        for j in tl.static_range(len(dts)):
            slopes = slopes + (tl.full(raws[j].shape, 1.0, tl.float32),)
    return deltas, slopes, inverses[len(denominators) - GATES :]


@triton.jit
def _vector(pointer, index, limit, SIZE: tl.constexpr):
    """Loads pointer[index] as float32, zero from limit on; zeros if there is no pointer."""
    if pointer is not None:
        return tl.load(pointer + index, mask=index < limit, other=0.0).to(tl.float32)
    else:
        return tl.zeros((SIZE,), tl.float32)


@triton.jit
def _load(pointer, index, mask, EVEN: tl.constexpr):
    """Loads pointer[index], zero where the mask is not set; EVEN says that it is set everywhere."""
    if EVEN:
        return tl.load(pointer + index)
    else:
        return tl.load(pointer + index, mask=mask, other=0.0)


@triton.jit
def _store(pointer, index, value, mask, EVEN: tl.constexpr):
    value = value.to(pointer.dtype.element_ty)
    if EVEN:
        tl.store(pointer + index, value)
    else:
        tl.store(pointer + index, value, mask=mask)


@triton.jit
def _tile(d, channels, N: tl.constexpr, LOG: tl.constexpr):
    """Returns offsets and mask of the (D, N) entries of channels d, N padded to 2**LOG."""
    n = tl.arange(0, 1 << LOG)
    return d[:, None] * N + n[None, :], (d < channels)[:, None] & (n < N)[None, :]


@triton.jit
def _unstack(tile, N: tl.constexpr, LOG: tl.constexpr, BD: tl.constexpr):
    """Returns the first N columns of a (BD, 2**LOG) tile as a tuple of vectors."""
    if LOG == 0:
        parts = (tl.reshape(tile, (BD,)),)
    else:
        parts = (tile,)
    for level in tl.static_range(LOG):
        evens = ()
        odds = ()
        for i in tl.static_range(1 << level):
            if level == LOG - 1:
                even, odd = tl.split(parts[i])
            else:
                even, odd = tl.split(tl.reshape(parts[i], (BD, 1 << (LOG - 1 - level), 2)))
            evens = evens + (even,)
            odds = odds + (odd,)
        parts = evens + odds
    return parts[:N]


@triton.jit
def _stack(parts, LOG: tl.constexpr, BD: tl.constexpr):
    """Returns a (BD, 2**LOG) tile from its first columns, zero beyond."""
    for _ in tl.static_range((1 << LOG) - len(parts)):
        parts = parts + (tl.zeros((BD,), tl.float32),)
    for level in tl.static_range(LOG):
        joined = ()
        for i in tl.static_range(1 << (LOG - 1 - level)):
            joined = joined + (tl.join(parts[i], parts[i + (1 << (LOG - 1 - level))]),)
        parts = joined
    return tl.reshape(parts[0], (BD, 1 << LOG))


@triton.jit
def _sequence(packed, number, T, EVERY: tl.constexpr):
    """Returns the row of a sequence, its first step, the step after its last, and its kept states.

    Sequences that share a row have room for one state more each than fills their steps.
    """
    if packed is None:
        origin = number * 0
        return number, origin, origin + T, number * tl.cdiv(T, EVERY)
    else:
        origin = tl.load(packed + number)
        return number * 0, origin, tl.load(packed + number + 1), origin // EVERY + number


@triton.jit
def _zeros(N: tl.constexpr, BD: tl.constexpr):
    states = ()
    for _ in tl.static_range(N):
        states = states + (tl.zeros((BD,), tl.float32),)
    return states


@triton.jit
def _load_states(pointer, d, channels, N: tl.constexpr, LOG: tl.constexpr, BD: tl.constexpr):
    """Returns the N columns of rows d of a (D, N) matrix; zeros if there is none."""
    if pointer is not None:
        tile, mask = _tile(d, channels, N, LOG)
        return _unstack(tl.load(pointer + tile, mask=mask, other=0.0).to(tl.float32), N, LOG, BD)
    else:
        return _zeros(N, BD)


@triton.jit
def _store_states(
    pointer, states, d, channels, N: tl.constexpr, LOG: tl.constexpr, BD: tl.constexpr
):
    tile, mask = _tile(d, channels, N, LOG)
    tl.store(pointer + tile, _stack(states, LOG, BD).to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _rates(A, d, channels, N: tl.constexpr, LOG: tl.constexpr, BD: tl.constexpr):
    states = _load_states(A, d, channels, N, LOG, BD)
    rates = ()
    for n in tl.static_range(N):
        rates = rates + (states[n] * LOG2E,)
    return rates


@triton.jit
def _row(pointer, N: tl.constexpr, WORDS: tl.constexpr):
    """Loads N adjacent values for all threads: N scalars or, if WORDS, 64-bit words."""
    values = ()
    if WORDS:
        for i in tl.static_range(N * pointer.dtype.element_ty.primitive_bitwidth // 64):
            values = values + (tl.load(pointer.to(tl.pointer_type(tl.int64)) + i),)
    else:
        for n in tl.static_range(N):
            values = values + (tl.load(pointer + n),)
    return values


@triton.jit
def _scalars(row, dtype: tl.constexpr, WORDS: tl.constexpr):
    """Returns what `_row` loaded as a tuple of N float32 scalars."""
    values = ()
    for i in tl.static_range(len(row)):
        if WORDS:
            for half in tl.static_range(2):
                bits = (row[i] >> (32 * half)).to(tl.int32)
                if dtype == tl.float32:
                    values = values + (bits.to(tl.float32, bitcast=True),)
                elif dtype == tl.bfloat16:
                    values = values + ((bits << 16).to(tl.float32, bitcast=True),)
                    values = values + ((bits & -65536).to(tl.float32, bitcast=True),)
                else:
                    low = bits.to(tl.int16).to(tl.float16, bitcast=True)
                    high = (bits >> 16).to(tl.int16).to(tl.float16, bitcast=True)
                    values = values + (low.to(tl.float32), high.to(tl.float32))
        else:
            values = values + (row[i].to(tl.float32),)
    return values


# fmt: off
@triton.jit
def _vectors(inputs, strides, b, t0, last, d, part, channels, K: tl.constexpr,
             PARTS: tl.constexpr, EVEN: tl.constexpr):
    # fmt: on
    """Loads u, dt, z and dout of the steps t0 + part, t0 + part + PARTS, ... before t0 + K.

    Steps from last on read the last step. Only dt must be given.
    """
    dy, u, dt, A, B, C, D, z, dt_bias = inputs
    s_dy, s_u, s_dt, s_B, s_C, s_z = strides
    us = ()
    dts = ()
    zs = ()
    dys = ()
    mask = d < channels
    for k in tl.static_range(0, K, PARTS):
        near = k
        step = part
        if not EVEN:
            near = 0
            step = tl.minimum(k + part, last - 1 - t0)
        if u is not None:
            u_at = u + b * s_u[0] + t0 * s_u[1] + near * s_u[1]
            us = us + (_load(u_at, step * s_u[1] + d, mask, EVEN),)
        dt_at = dt + b * s_dt[0] + t0 * s_dt[1] + near * s_dt[1]
        dts = dts + (_load(dt_at, step * s_dt[1] + d, mask, EVEN),)
        if z is not None:
            z_at = z + b * s_z[0] + t0 * s_z[1] + near * s_z[1]
            zs = zs + (_load(z_at, step * s_z[1] + d, mask, EVEN),)
        if dy is not None:
            dy_at = dy + b * s_dy[0] + t0 * s_dy[1] + near * s_dy[1]
            dys = dys + (_load(dy_at, step * s_dy[1] + d, mask, EVEN),)
    return us, dts, zs, dys


# fmt: off
@triton.jit
def _rows(inputs, strides, b, t0, last, column, N: tl.constexpr, K: tl.constexpr,
          WORDS: tl.constexpr, EVEN: tl.constexpr):
    # fmt: on
    """Loads N states, from a column on, of B and C (if given) for the K steps from t0.

    Steps from last on read the last row.
    """
    dy, u, dt, A, B, C, D, z, dt_bias = inputs
    s_dy, s_u, s_dt, s_B, s_C, s_z = strides
    Bs = ()
    Cs = ()
    for k in tl.static_range(K):
        if EVEN:
            step = k
        else:
            step = tl.minimum(k, last - 1 - t0)
        if B is not None:
            Bs = Bs + (_row(B + b * s_B[0] + t0 * s_B[1] + step * s_B[1] + column, N, WORDS),)
        if C is not None:
            Cs = Cs + (_row(C + b * s_C[0] + t0 * s_C[1] + step * s_C[1] + column, N, WORDS),)
    return Bs, Cs


@triton.jit
def _next(t0, last, K: tl.constexpr, EVEN: tl.constexpr):
    """Returns the block to load ahead: the one after t0, or the last block again."""
    if EVEN:
        return tl.minimum(t0 + K, last - K)
    else:
        return t0 + K


@triton.jit
def _spread(x, STEP: tl.constexpr, LOG: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """Gives all 2**LOG lanes of a channel the value of the channel's lane STEP; x is (WIDTH,)."""
    if LOG == 0:
        return x
    elif PTX:
        SPREAD: tl.constexpr = SPREADS[(1 << LOG) + STEP]
        return tl.inline_asm_elementwise(SPREAD, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.gather(x, tl.arange(0, WIDTH) >> LOG << LOG | STEP, 0)


@triton.jit
def _partner(x, LEVEL: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """Gives every lane the value of the lane whose number differs in bit LEVEL; x is (WIDTH,)."""
    if PTX:
        EXCHANGE: tl.constexpr = EXCHANGES[LEVEL]
        return tl.inline_asm_elementwise(EXCHANGE, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.gather(x, tl.arange(0, WIDTH) ^ (1 << LEVEL), 0)


@triton.jit
def _sum_parts(values, LOG: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """Gives lane i of the 2**LOG lanes of a channel the sum of values[i] over these lanes.

    At every level a lane keeps half of the values, (WIDTH,), and gives the others to its partner.
    """
    lane = tl.arange(0, WIDTH)
    for level in tl.static_range(LOG):
        odd = (lane >> level) % 2 == 1
        sums = ()
        for i in tl.static_range(0, 1 << (LOG - level), 2):
            keep = tl.where(odd, values[i + 1], values[i])
            give = tl.where(odd, values[i], values[i + 1])
            sums = sums + (keep + _partner(give, level, WIDTH, PTX),)
        values = sums
    return values[0]


@triton.jit
def _number(first, slot, FOLD: tl.constexpr):
    """Returns the state that a lane has in a slot; first is the state in slot 0."""
    if FOLD:
        return first ^ slot
    else:
        return first + slot


@triton.jit
def _take_states(pointer, first, mask, N: tl.constexpr, STRIDE: tl.constexpr, FOLD: tl.constexpr):
    """Loads the N states of every lane, STRIDE apart, from the pointer of its channel."""
    states = ()
    for n in tl.static_range(N):
        at = pointer + _number(first, n, FOLD) * STRIDE
        states = states + (tl.load(at, mask=mask, other=0.0).to(tl.float32),)
    return states


@triton.jit
def _put_states(pointer, states, first, mask, FOLD: tl.constexpr):
    """Stores the states of every lane next to each other, at the pointer of its channel."""
    for n in tl.static_range(len(states)):
        state = states[n].to(pointer.dtype.element_ty)
        tl.store(pointer + _number(first, n, FOLD), state, mask=mask)
