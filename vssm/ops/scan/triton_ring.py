"""The kernel that runs the selective scan straight through time, with inputs copied ahead.

A program has BD lanes, 2**LOG lanes per channel with N states each, and walks over time in blocks
of K steps. A ring in shared memory has STAGES slots; a slot holds u, dt and z of the program's
channels, and B and C, of one block. While the program works on block i, the copies of blocks i + 2
to i + STAGES - 1 are under way (cp.async, 16 bytes each), which takes no registers. What does not
depend on the states (softplus, gate) is done a block ahead, so that it overlaps with them; each
lane of a channel does one step in 2**LOG.

A slot, row after row: u, dt, z (if given) as (K, BD / 2**LOG), then B, C as (K, N 2**LOG). Without
PTX (in Triton's interpreter) there is no ring, and values are loaded directly.

The letters are those of `vssm.ops.scan.triton`.
"""

import triton
import triton.language as tl

from vssm.ops.scan.triton_steps import (  # isort: skip
    LOG2E, _prepare, _put_states, _spread, _sum_parts, _take_states, _vector, _zeros,
)  # fmt: skip

# Shared memory of a program, by its size in kB. Triton has no way to ask for it.
STARTS = tl.constexpr(
    [f"{{ .shared .align 16 .b8 ring[{1024 * size}]; mov.u32 $0, ring; }}" for size in range(48)]
)
COPY = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; "
    "@p cp.async.cg.shared.global [$1], [$2], 16; mov.b32 $0, 0; }"
)
# The copies since the last commit form a group; groups end in order.
COMMIT = tl.constexpr("cp.async.commit_group; mov.b32 $0, $1;")
# Waits until all but n groups of a lane have ended, and then for all lanes: after it, copies of all
# lanes can be read, and what all lanes have read may be overwritten.
WAITS = tl.constexpr([f"cp.async.wait_group {n}; bar.sync 0; mov.b32 $0, $1;" for n in range(8)])
# Loads one bfloat16 as float32, which has the same upper half.
LOAD_HALF = tl.constexpr(
    "{ .reg .b16 h, zero; mov.b16 zero, 0; ld.shared.b16 h, [$1]; mov.b32 $0, {zero, h}; }"
)


@triton.jit
def _load_value(shared, pointer, PTX: tl.constexpr):
    """Loads one float32 for every lane, from a shared address or, without PTX, from a pointer."""
    if not PTX:
        return tl.load(pointer).to(tl.float32)
    elif pointer.dtype.element_ty == tl.bfloat16:
        return tl.inline_asm_elementwise(
            LOAD_HALF, "=f,r", [shared], tl.float32, is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "ld.shared.f32 $0, [$1];", "=f,r", [shared], tl.float32, is_pure=False, pack=1
        )


@triton.jit
def _load_row(shared, pointer, N: tl.constexpr, PTX: tl.constexpr):
    """Loads N adjacent values (whole 32-bit words) as float32, as `_load_value` does."""
    values = ()
    if PTX:
        words = ()
        WORDS: tl.constexpr = N * pointer.dtype.element_ty.primitive_bitwidth // 32
        for i in tl.static_range(WORDS // 4):
            words = words + tl.inline_asm_elementwise(
                "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [shared + 16 * i],
                (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
            )  # fmt: skip
        if WORDS % 4 >= 2:
            words = words + tl.inline_asm_elementwise(
                "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [shared + WORDS // 4 * 16],
                (tl.int32, tl.int32), is_pure=False, pack=1,
            )  # fmt: skip
        if WORDS % 2 == 1:
            at = shared + (WORDS - 1) * 4
            last = tl.inline_asm_elementwise(
                "ld.shared.b32 $0, [$1];", "=r,r", [at], tl.int32, is_pure=False, pack=1
            )
            words = words + (last,)
        for i in tl.static_range(len(words)):
            if pointer.dtype.element_ty == tl.bfloat16:
                values = values + ((words[i] << 16).to(tl.float32, bitcast=True),)
                values = values + ((words[i] & -65536).to(tl.float32, bitcast=True),)
            else:
                values = values + (words[i].to(tl.float32, bitcast=True),)
    else:
        for n in tl.static_range(N):
            values = values + (tl.load(pointer + n).to(tl.float32),)
    return values


@triton.jit
def _aim(aim, number, pointer, stride, WIDTH: tl.constexpr, K: tl.constexpr):
    """Lets copies from number 0 on read rows, WIDTH wide, of a pointer; each lane has a number.

    An aim is the address of a lane's 16 bytes in the first block, and the bytes to the next block.
    """
    BYTES: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    EACH: tl.constexpr = WIDTH * BYTES // 16  # copies a row
    row = (number // EACH).to(tl.int64)
    address = pointer.to(tl.int64, bitcast=True) + row * (stride * BYTES) + number % EACH * 16
    here = number >= 0
    return tl.where(here, address, aim[0]), tl.where(here, K * stride * BYTES, aim[1])


# fmt: off
@triton.jit
def _aims(inputs, strides, b, base, number, CHANNELS: tl.constexpr, STATES: tl.constexpr,
          K: tl.constexpr):
    # fmt: on
    """Returns the aim of the copy with this number, of a slot, for every lane."""
    dy, u, dt, A, B, C, D, z, dt_bias = inputs
    s_dy, s_u, s_dt, s_B, s_C, s_z = strides
    VECTORS: tl.constexpr = K * CHANNELS * u.dtype.element_ty.primitive_bitwidth // 128
    ROWS: tl.constexpr = K * STATES * B.dtype.element_ty.primitive_bitwidth // 128
    nowhere = tl.zeros_like(number).to(tl.int64)
    aim = _aim((nowhere, nowhere), number, u + b * s_u[0] + base, s_u[1], CHANNELS, K)
    number -= VECTORS
    aim = _aim(aim, number, dt + b * s_dt[0] + base, s_dt[1], CHANNELS, K)
    number -= VECTORS
    if z is not None:
        aim = _aim(aim, number, z + b * s_z[0] + base, s_z[1], CHANNELS, K)
        number -= VECTORS
    aim = _aim(aim, number, B + b * s_B[0], s_B[1], STATES, K)
    return _aim(aim, number - ROWS, C + b * s_C[0], s_C[1], STATES, K)


@triton.jit
def _copy(slot, addresses, strides, live, COUNT: tl.constexpr, BD: tl.constexpr):
    """Starts the COUNT copies of a block, if live; returns the addresses of the next block."""
    lane = tl.arange(0, BD)
    following = ()
    for r in tl.static_range(len(addresses)):
        number = r * BD + lane
        flag = ((number < COUNT) & live).to(tl.int32)
        operands = [slot + 16 * number, addresses[r], flag]
        tl.inline_asm_elementwise(COPY, "=r,r,l,r", operands, tl.int32, is_pure=False, pack=1)
        following = following + (addresses[r] + strides[r],)
    tl.inline_asm_elementwise(COMMIT, "=r,r", [lane], tl.int32, is_pure=False, pack=1)
    return following


# fmt: off
@triton.jit
def _ready(inputs, strides, b, t0, d, part, place, bias, skip, CHANNELS: tl.constexpr,
           K: tl.constexpr, PARTS: tl.constexpr, SOFTPLUS: tl.constexpr, PTX: tl.constexpr):
    # fmt: on
    """Returns delta, delta u, D u and, given z, silu(z) of every step of a block that a lane does.

    place is the address of u of the first such step, in a slot.
    """
    dy, u, dt, A, B, C, D, z, dt_bias = inputs
    s_dy, s_u, s_dt, s_B, s_C, s_z = strides
    BYTES: tl.constexpr = u.dtype.element_ty.primitive_bitwidth // 8
    steps = ()
    for j in tl.static_range(K // PARTS):
        t = t0 + j * PARTS + part
        at = place + j * PARTS * CHANNELS * BYTES
        x = _load_value(at, u + b * s_u[0] + t * s_u[1] + d, PTX)
        at += K * CHANNELS * BYTES
        raw = _load_value(at, dt + b * s_dt[0] + t * s_dt[1] + d, PTX)
        zs = ()
        if z is not None:
            at += K * CHANNELS * BYTES
            zs = (_load_value(at, z + b * s_z[0] + t * s_z[1] + d, PTX),)
        deltas, _slopes, shares = _prepare((raw,), zs, bias, len(zs), SOFTPLUS)
        step = (deltas[0], deltas[0] * x, skip * x)
        if z is not None:
            step = step + (zs[0] * shares[0],)
        steps = steps + (step,)
    return steps


# fmt: off
@triton.jit(do_not_specialize=["T"])
def _ring_kernel(
    inputs, strides, start, y, end, starts, T, channels: tl.constexpr, N: tl.constexpr,
    LOG: tl.constexpr, BD: tl.constexpr, K: tl.constexpr, EVERY: tl.constexpr, STAGES: tl.constexpr,
    SOFTPLUS: tl.constexpr, PTX: tl.constexpr,
):
    # fmt: on
    """Writes out and the last h of whole sequences, as `_lanes_kernel` does.

    starts: h before every EVERY steps, a multiple of K, as `_scan_kernel` writes it. T is a
    multiple of K, channels of BD / 2**LOG, and rows of inputs start at multiples of 16 bytes.
    """
    PARTS: tl.constexpr = 1 << LOG
    CHANNELS: tl.constexpr = BD // PARTS
    STATES: tl.constexpr = N * PARTS
    dy, u, dt, A, B, C, D, z, dt_bias = inputs
    s_dy, s_u, s_dt, s_B, s_C, s_z = strides
    # Bytes of the parts of a slot.
    VECTOR: tl.constexpr = K * CHANNELS * u.dtype.element_ty.primitive_bitwidth // 8
    ROW: tl.constexpr = STATES * B.dtype.element_ty.primitive_bitwidth // 8
    ROWS_AT: tl.constexpr = VECTOR * (2 if z is None else 3)
    SLOT: tl.constexpr = ROWS_AT + 2 * K * ROW
    RING: tl.constexpr = STAGES * SLOT
    blocks: tl.constexpr = channels // CHANNELS
    b = (tl.program_id(0) // blocks).to(tl.int64)
    base = tl.program_id(0) % blocks * CHANNELS
    lane = tl.arange(0, BD)
    part = lane % PARTS
    d = base + lane // PARTS
    every = d < channels
    own = part * N  # the first state of a lane
    if start is not None:
        place = start + b * channels * STATES
        states = _take_states(place + d * STATES, own, every, N, 1, False)
    else:
        states = _zeros(N, BD)
    rates = ()
    for n in tl.static_range(N):
        rates = rates + (tl.load(A + d * STATES + own + n).to(tl.float32) * LOG2E,)
    skip = _vector(D, d, channels, BD)
    bias = _vector(dt_bias, d, channels, BD)
    count = T // K
    ring = 0
    addresses = ()
    jumps = ()
    if PTX:
        START: tl.constexpr = STARTS[(RING + 1023) // 1024]
        ring = tl.inline_asm_elementwise(START, "=r,r", [T], tl.int32, is_pure=False, pack=1)
        for r in tl.static_range((SLOT // 16 + BD - 1) // BD):
            address, jump = _aims(inputs, strides, b, base, r * BD + lane, CHANNELS, STATES, K)
            addresses = addresses + (address,)
            jumps = jumps + (jump,)
        for s in tl.static_range(STAGES - 1):
            addresses = _copy(ring + s * SLOT, addresses, jumps, s < count, SLOT // 16, BD)
        FIRST: tl.constexpr = WAITS[STAGES - 2]
        tl.inline_asm_elementwise(FIRST, "=r,r", [lane], tl.int32, is_pure=False, pack=1)
    own_vectors = ring + (part * CHANNELS + lane // PARTS) * (VECTOR // (K * CHANNELS))
    own_rows = ring + ROWS_AT + own * (ROW // STATES)
    # Slots in bytes from the start of the ring: the one of the current block, and the one to fill.
    here = 0
    free = RING - SLOT
    ready = _ready(
        inputs, strides, b, 0, d, part, own_vectors, bias, skip, CHANNELS, K, PARTS, SOFTPLUS, PTX
    )
    for i in range(count):
        if PTX:
            WAIT: tl.constexpr = WAITS[STAGES - 3]
            tl.inline_asm_elementwise(WAIT, "=r,r", [lane], tl.int32, is_pure=False, pack=1)
            more = i + (STAGES - 1) < count
            addresses = _copy(ring + free, addresses, jumps, more, SLOT // 16, BD)
        t0 = tl.cast(i, tl.int64) * K
        # A branch is cheapest here, where all lanes have just waited for each other.
        if starts is not None:
            if i % (EVERY // K) == 0:
                place = starts + (b * tl.cdiv(T, EVERY) + t0 // EVERY) * (channels * STATES)
                for n in tl.static_range(N):
                    tl.store(place + (own * channels + d) + n * channels, states[n])
        now = ready
        following = tl.where(here + SLOT == RING, 0, here + SLOT)
        # After the last block the slot holds anything, and its values are not used.
        after = tl.minimum(t0 + K, T - K)
        ready = _ready(
            inputs, strides, b, after, d, part, own_vectors + following, bias, skip, CHANNELS, K,
            PARTS, SOFTPLUS, PTX,
        )  # fmt: skip
        for j in tl.static_range(K // PARTS):
            outs = ()
            for k in tl.static_range(PARTS):
                row = j * PARTS + k
                t = t0 + row
                at = own_rows + (here + row * ROW)
                row_B = _load_row(at, B + b * s_B[0] + t * s_B[1] + own, N, PTX)
                row_C = _load_row(at + K * ROW, C + b * s_C[0] + t * s_C[1] + own, N, PTX)
                delta = _spread(now[j][0], k, LOG, BD, PTX)
                drive = _spread(now[j][1], k, LOG, BD, PTX)
                out = tl.zeros((BD,), tl.float32)
                new_states = ()
                for n in tl.static_range(N):
                    state = tl.exp2(delta * rates[n]) * states[n] + drive * row_B[n]
                    new_states = new_states + (state,)
                    out += state * row_C[n]
                states = new_states
                outs = outs + (out,)
            out = _sum_parts(outs, LOG, BD, PTX) + now[j][2]
            if z is not None:
                out *= now[j][3]
            at = (j * PARTS + part) * channels + d
            tl.store(y + (b * T + t0) * channels + at, out.to(y.dtype.element_ty))
        here = following
        free = tl.where(free + SLOT == RING, 0, free + SLOT)
    _put_states(end + b * channels * STATES + d * STATES, states, own, every, False)
