"""What the lanes of a warp do with and for each other in the kernels of the selective scan.

PARTS lanes in a row share the states of a channel, N each. Backward, with two lanes of eight states (FOLD)
slot n of a lane need not be state n of its part: `_fold` says why.
"""

# Kernels are written in the part of Python that Triton compiles: no star unpacking, no early return.
# ruff: noqa: ANN001, ANN202, RET505, RUF005
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from vssm.ops.scan.triton_steps import _row, _scalars, _stack

# Shared memory of a program's own, which Triton has no words for: 12 programs fit a multiprocessor.
SHARED_BYTES = 16384
SHARED_START = tl.constexpr(f"{{ .shared .align 16 .b8 kept[{SHARED_BYTES}]; mov.u32 $0, kept; }}")
# One exchange between lanes each, where `_swap` takes three instructions: with the lane whose number differs
# in one bit; what the first or second of a pair of lanes has, for both.
EXCHANGES = tl.constexpr(
    [f"shfl.sync.bfly.b32 $0, $1, {1 << k}, 0x1f, 0xffffffff;" for k in range(5)]
)
TAKES = tl.constexpr([f"shfl.sync.idx.b32 $0, $1, {k}, 0x1e1f, 0xffffffff;" for k in range(2)])
# What one of PARTS lanes has, for all of them: number PARTS + k is that of lane k.
SPREADS = tl.constexpr(
    [""]
    + [
        f"shfl.sync.idx.b32 $0, $1, {k}, {(32 - parts) << 8 | 31}, 0xffffffff;"
        for parts in (1, 2, 4, 8, 16)
        for k in range(parts)
    ]
)


@triton.jit
def _swap(x, LEVEL: tl.constexpr, M: tl.constexpr):
    """Gives every lane what the lane has whose number differs in bit LEVEL; x is (32, M)."""
    bits = tl.reshape(x.to(tl.int32, bitcast=True), (16 >> LEVEL, 2, 1 << LEVEL, M))
    return tl.reshape(bits ^ tl.xor_sum(bits, 1, keep_dims=True), (32, M)).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _halve(low, high, LEVEL: tl.constexpr, M: tl.constexpr):
    """Adds up pairs of lanes; those with bit LEVEL of their number set keep high, the others low (32, M)."""
    odd = ((tl.arange(0, 32) >> LEVEL) % 2 == 1)[:, None]
    return tl.where(odd, high, low) + _swap(tl.where(odd, low, high), LEVEL, M)


@triton.jit
def _exchange(x, LEVEL: tl.constexpr, PTX: tl.constexpr):
    """Gives every lane what the lane has whose number differs in bit LEVEL; x is (32,)."""
    if PTX:
        EXCHANGE: tl.constexpr = EXCHANGES[LEVEL]
        return tl.inline_asm_elementwise(EXCHANGE, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.reshape(_swap(x[:, None], LEVEL, 1), (32,))


@triton.jit
def _merge(low, high, LEVEL: tl.constexpr, PTX: tl.constexpr):
    """As `_halve`, of vectors."""
    odd = (tl.arange(0, 32) >> LEVEL) % 2 == 1
    return tl.where(odd, high, low) + _exchange(tl.where(odd, low, high), LEVEL, PTX)


@triton.jit
def _from_lane(x, LANE: tl.constexpr, PTX: tl.constexpr):
    """Gives both lanes of a channel what the first or second of them has."""
    if PTX:
        TAKE: tl.constexpr = TAKES[LANE]
        return tl.inline_asm_elementwise(TAKE, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.where(tl.arange(0, 32) % 2 == LANE, x, _exchange(x, 0, PTX))


@triton.jit
def _spread(x, STEP: tl.constexpr, LOG: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """Gives all 2**LOG lanes of a channel what lane STEP of them has; x is (WIDTH,)."""
    if LOG == 0:
        return x
    elif PTX:
        SPREAD: tl.constexpr = SPREADS[(1 << LOG) + STEP]
        return tl.inline_asm_elementwise(SPREAD, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.gather(x, tl.arange(0, WIDTH) >> LOG << LOG | STEP, 0)


@triton.jit
def _partner(x, LEVEL: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """As `_exchange`, of a vector (WIDTH,) of several warps."""
    if PTX:
        EXCHANGE: tl.constexpr = EXCHANGES[LEVEL]
        return tl.inline_asm_elementwise(EXCHANGE, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.gather(x, tl.arange(0, WIDTH) ^ (1 << LEVEL), 0)


@triton.jit
def _sum_parts(values, LOG: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """Returns for lane i of the 2**LOG of a channel the sum of values[i] over these lanes; all are (WIDTH,).

    At every level a lane keeps half of the values and gives the other half to its partner.
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
def _share(x, PARTS: tl.constexpr, PTX: tl.constexpr):
    """Returns what each lane of a channel has, for all of them: a tuple of PARTS vectors."""
    values = (x,)
    if PARTS == 2:
        values = (_from_lane(x, 0, PTX), _from_lane(x, 1, PTX))
    return values


@triton.jit
def _gather(values, STEP: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr):
    """Returns for lane i of a channel the sum of values[STEP + i] over the lanes of the channel."""
    if PARTS == 2:
        return _merge(values[STEP], values[STEP + 1], 0, PTX)
    else:
        return values[STEP]


@triton.jit
def _number(first, slot, FOLD: tl.constexpr):
    """Returns which state a lane has in a slot, where first is the one in slot 0."""
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
    """Stores the states of every lane, next to each other, at the pointer of its channel."""
    for n in tl.static_range(len(states)):
        state = states[n].to(pointer.dtype.element_ty)
        tl.store(pointer + _number(first, n, FOLD), state, mask=mask)


# fmt: off
@triton.jit
def _own_rows(pointer, stride, t0, last, first, N: tl.constexpr, K: tl.constexpr, FOLD: tl.constexpr,
              WORDS: tl.constexpr, EVEN: tl.constexpr):
    # fmt: on
    """Loads what every lane needs of the rows of K steps from t0; steps from last on read the last row."""
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
    """Loads the states of every lane: one by one or, if WORDS, neighbours not yet in their order."""
    values = ()
    if WORDS:
        EACH: tl.constexpr = 64 // pointer.dtype.element_ty.primitive_bitwidth
        for i in tl.static_range(0, N, EACH):
            word = ((first & -4) ^ i) // EACH  # lanes differ in which half of their eight comes first
            values = values + (tl.load(pointer.to(tl.pointer_type(tl.int64)) + word),)
    else:
        for n in tl.static_range(N):
            values = values + (tl.load(pointer + (first ^ n)),)
    return values


# fmt: off
@triton.jit
def _own_scalars(row, first, dtype: tl.constexpr, FOLD: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr):
    # fmt: on
    """Returns what `_own_rows` loaded of a step as N float32 vectors, in the order of slots."""
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
    """Returns float32 whose bytes are those of bits (0 to 3) and zeros (4) that the digits of bytes name."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;", "=f,r,r", [bits, bytes], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _fold(values, PTX: tl.constexpr):
    """Sums 8 slots over lane bits 3, 4 and 2, which are then bits 0, 2 and 1 of the state that a lane has.

    Slot n of a lane is state n with bits 0 and 2 changed where lane bits 3 and 4 are set, so what lanes give
    away is in the same slots everywhere: no selects, but for one level.
    """
    half = ()
    for i in tl.static_range(0, 8, 2):
        half = half + (values[i] + _exchange(values[i + 1], 3, PTX),)
    low = half[0] + _exchange(half[2], 4, PTX)
    high = half[1] + _exchange(half[3], 4, PTX)
    return _merge(low, high, 2, PTX)


@triton.jit
def _sum_lanes(low, high, PARTS: tl.constexpr):
    """Returns (2, 16 / PARTS, PARTS), flat: the sums over the lanes of each part of the vectors low and high.

    At every level a lane keeps half of the vectors and gives the other half to its partner: 31 exchanges for
    32 vectors, where separate sums would need 160.
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
