"""The kernel that walks the selective scan back; see `vssm.ops.scan.triton`."""

# Kernels are written in the part of Python that Triton compiles: no star unpacking, no early return.
# ruff: noqa: ANN001, ANN202, E741, RUF005, RUF059, SIM102
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from vssm.ops.scan.triton_lanes import (
    SHARED_START,
    _fold,
    _gather,
    _keep,
    _kept,
    _merge,
    _own_rows,
    _own_scalars,
    _put_states,
    _share,
    _sum_lanes,
    _take_states,
)
from vssm.ops.scan.triton_steps import (
    LN2,
    LOG2E,
    _next,
    _prepare,
    _store,
    _vector,
    _vectors,
    _zeros,
)


# fmt: off
@triton.jit(do_not_specialize=["T", "length", "chunks", "items", "groups", "spans", "each"])
def _scan_backward_kernel(
    inputs, strides, start, adjoint, scratch, du, ddt, dz, dh0, dBC, partial,
    T, channels: tl.constexpr, length, chunks, items, groups, spans, each,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, FOLD: tl.constexpr, TURNED: tl.constexpr,
    SOFTPLUS: tl.constexpr, WORDS: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):
    # fmt: on
    """Writes the gradients; adjoint is l after every span of chunks (item), start h before every chunk.

    start is (B, chunks, D, STATES) or, if TURNED, (B, chunks, STATES, D). Only then a span has several
    chunks: `each`, but for the last of a sequence, which may have fewer. FOLD: lanes have their states in
    orders of their own, see `_fold`.
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
        place += tl.inline_asm_elementwise(SHARED_START, "=r,r", (lane,), tl.int32, is_pure=False, pack=1)
    else:
        place = scratch + tl.program_id(0).to(tl.int64) * tl.cdiv(length, 2 * K) * (2 * BD * N) + lane
    dBC += block.to(tl.int64) * (items // spans) * T * (32 * ROUNDS)
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
        b = item // spans
        if adjoint is not None:
            entry = adjoint + item * channels * STATES + d * STATES
            ls = _take_states(entry, first_state, mask, N, 1, FOLD)
        else:
            ls = _zeros(N, BD)
        count = chunks // spans  # 1 if not TURNED
        if TURNED:
            lowest = item % spans * each
            count = tl.minimum(each, chunks - lowest)
        for chunk in range(count):
            if TURNED:
                number = b * chunks + (lowest + count - 1 - chunk)
            else:
                number = (item + 1) * (chunks // spans) - 1 - chunk
            first = number % chunks * length
            last = tl.minimum(first + length, T)
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
            vectors = _vectors(first_pass, strides, b, first, last, d, part, channels, 2 * K, PARTS, EVEN)
            for s0 in range(0, steps, 2 * K):
                us, dts, _z, _dy = vectors
                after = _next(first + s0, last, 2 * K, EVEN)
                vectors = _vectors(first_pass, strides, b, after, last, d, part, channels, 2 * K, PARTS, EVEN)
                Bs = _own_rows(B_b, strides[3][1], first + s0, last, first_state, N, 2 * K, FOLD, WORDS, EVEN)
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
            vectors = _vectors(inputs, strides, b, first + final, last, d, part, channels, K, PARTS, EVEN)
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
                        # Not sooner: the states of the later steps, done by now, make room in registers.
                        at = first + before
                        vectors = _vectors(inputs, strides, b, at, last, d, part, channels, K, PARTS, EVEN)
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
                            sums = sums + (_sum_lanes(for_B[i : i + SOME], for_C[i : i + SOME], PARTS),)
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
                        _store(dBC + at + 32 * i, lane, sums[(K - 1 - k) * ROUNDS + i], stored, EVEN)
            # The next chunk overwrites the scratch that this one has just read.
            tl.debug_barrier()
        if dh0 is not None:
            if item % spans == 0:
                _put_states(dh0 + b * channels * STATES + d * STATES, ls, first_state, mask, FOLD)
    sum_D = _gather((sum_D, sum_D), 0, PARTS, PTX)
    sum_bias = _gather((sum_bias, sum_bias), 0, PARTS, PTX)
    partial += group * channels * (STATES + 2)
    _put_states(partial + d * STATES, sums_A, first_state, mask, FOLD)
    tl.store(partial + channels * STATES + d, sum_D, mask=mask)
    tl.store(partial + channels * (STATES + 1) + d, sum_bias, mask=mask)
