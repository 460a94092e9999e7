"""The selective scan on a GPU: Triton kernels for the `triton` backend of `selective_scan`.

    h_t = a_t h_{t-1} + w_t B_t      y_t = C_t h_t + D u_t      out_t = y_t silu(z_t)
    a_t = exp(delta_t A)             w_t = delta_t u_t          delta_t = softplus(dt_t + dt_bias)

Backward, with g_t = dout_t silu(z_t) and l_t the gradient of h_t:

    l_t  = a_{t+1} l_{t+1} + C_t g_t                  p_t = a_t l_t h_{t-1}
    dB_t = sum_d w_t l_t     dC_t = sum_d g_t h_t     dw_t = sum_n B_t l_t     dA = sum_t delta_t p_t
    du_t = delta_t dw_t + D g_t                       ddelta_t = u_t dw_t + sum_n A p_t
    dz_t = dout_t silu'(z_t) y_t                      dD = sum_t g_t u_t

Shapes: u, dt, z, out (B, T, D); A (D, N); B, C (B, T, N); D, dt_bias (D,); h, l (B, D, N).

Forward, a thread owns whole channels and runs over time: the N states of a channel are N register variables
(a tuple of vectors over channels), so sums over n cost no communication. Backward, PARTS lanes share the
states of a channel. All is float32 inside; exp is exp2 with A scaled by log2(e); addresses are 64-bit. A
program is one warp.

- `_scan_kernel` either writes out, or summarises a chunk of time: h at its end is P h_start + local with P =
  exp(A sum delta), and the gradient that it hands back, a l of its first step, is P times the one handed to
  it + pull with pull = sum_t exp(A sum_{s <= t} delta_s) C_t g_t. One exp serves both. `_combine_kernel`
  chains the chunks of a long sequence; then all can run side by side.
- `_backward_kernel` runs a chunk forward and keeps h of every K-th step in shared memory (in a scratch if it
  does not fit), then walks back K steps at a time with their states in registers. Of every PARTS steps each
  lane of a channel loads one, does what is not per state (softplus, gate) and stores its gradients; `_share`
  and `_gather` pass on what the other lanes need. Sums over channels (dB, dC) leave as one partial for the
  channels of a program, sums over time and batch (dA, dD, ddt_bias) as one per program; PyTorch adds the
  partials. No atomics: results repeat bit for bit.
"""

# Kernels are written in the part of Python that Triton compiles: no star unpacking, no early return.
# ruff: noqa: ANN001, ANN202, E741, RET505, RUF005, RUF059, SIM102
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward", "forward"]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Shared memory of a program's own, which Triton has no words for: 12 programs fit a multiprocessor.
SHARED_BYTES = 16384
SHARED_START = tl.constexpr(f"{{ .shared .align 16 .b8 kept[{SHARED_BYTES}]; mov.u32 $0, kept; }}")


@triton.jit
def _reciprocal(x):
    # Of a positive number: two instructions, where a division takes eight.
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _sigmoid(x):
    return _reciprocal(1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def _softplus(x):
    """Returns log(1 + exp(x)) and its slope."""
    # log1p(e) = 2 artanh(e / (2 + e)), a polynomial: log(1 + e) would lose the small steps dt near 1e-3.
    e = tl.exp2(-tl.abs(x) * LOG2E)
    r = _reciprocal((1.0 + e) * (2.0 + e))
    s = e * (1.0 + e) * r
    q = s * s
    p = (((0.2817465726 * q + 0.2796141884) * q + 0.4002485372) * q + 0.6666631594) * q + 2.0
    return tl.maximum(x, 0.0) + s * p, tl.where(x >= 0, 1.0, e) * (2.0 + e) * r


@triton.jit
def _delta(raw, bias, live, SOFTPLUS: tl.constexpr, EVEN: tl.constexpr):
    """Returns delta and its slope in dt; a step that is not live (never so if EVEN) changes nothing."""
    delta = raw.to(tl.float32) + bias
    slope = tl.full(delta.shape, 1.0, tl.float32)
    if SOFTPLUS:
        delta, slope = _softplus(delta)
    if not EVEN:
        delta = tl.where(live, delta, 0.0)
        slope = tl.where(live, slope, 0.0)
    return delta, slope


@triton.jit
def _vector(pointer, index, limit, SIZE: tl.constexpr):
    """Loads pointer[index] as float32, zero from limit on; zeros if there is no pointer."""
    if pointer is not None:
        return tl.load(pointer + index, mask=index < limit, other=0.0).to(tl.float32)
    else:
        return tl.zeros((SIZE,), tl.float32)


@triton.jit
def _load(pointer, index, mask, EVEN: tl.constexpr):
    """Loads pointer[index], zero where mask is not set; EVEN: it is set everywhere."""
    if EVEN:
        return tl.load(pointer + index)
    else:
        return tl.load(pointer + index, mask=mask, other=0.0)


@triton.jit
def _store(pointer, index, value, mask, EVEN: tl.constexpr):
    value = value.to(pointer.dtype.element_ty)
    if EVEN:
        tl.store(pointer + index, value, eviction_policy="evict_first")
    else:
        tl.store(pointer + index, value, mask=mask, eviction_policy="evict_first")


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
def _load_states(pointer, d, channels, N: tl.constexpr, LOG: tl.constexpr, BD: tl.constexpr):
    """Returns the N columns of rows d of a (D, N) matrix; zeros if there is none."""
    if pointer is not None:
        tile, mask = _tile(d, channels, N, LOG)
        states = _unstack(tl.load(pointer + tile, mask=mask, other=0.0).to(tl.float32), N, LOG, BD)
    else:
        states = ()
        for _ in tl.static_range(N):
            states = states + (tl.zeros((BD,), tl.float32),)
    return states


@triton.jit
def _store_states(pointer, states, d, channels, N: tl.constexpr, LOG: tl.constexpr, BD: tl.constexpr):
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
    """Loads N adjacent values, the same for all threads: N scalars or, if WORDS, 64-bit words."""
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
                    values = values + (bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),)
                    values = values + ((bits >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),)
        else:
            values = values + (row[i].to(tl.float32),)
    return values


# fmt: off
@triton.jit
def _vectors(inputs, strides, b, t0, last, d, part, channels, K: tl.constexpr, PARTS: tl.constexpr,
             EVEN: tl.constexpr):
    # fmt: on
    """Loads u, dt, z, dout of every PARTS-th of the K steps from t0, part steps on; none is after last."""
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
        us = us + (_load(u + b * s_u[0] + t0 * s_u[1] + near * s_u[1], step * s_u[1] + d, mask, EVEN),)
        dts = dts + (_load(dt + b * s_dt[0] + t0 * s_dt[1] + near * s_dt[1], step * s_dt[1] + d, mask, EVEN),)
        if z is not None:
            zs = zs + (_load(z + b * s_z[0] + t0 * s_z[1] + near * s_z[1], step * s_z[1] + d, mask, EVEN),)
        if dy is not None:
            dy_at = dy + b * s_dy[0] + t0 * s_dy[1] + near * s_dy[1]
            dys = dys + (_load(dy_at, step * s_dy[1] + d, mask, EVEN),)
    return us, dts, zs, dys


# fmt: off
@triton.jit
def _rows(inputs, strides, b, t0, last, column, N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr,
          EVEN: tl.constexpr):
    # fmt: on
    """Loads N states from column on of B, C of the K steps from t0; steps from last on read the last row."""
    dy, u, dt, A, B, C, D, z, dt_bias = inputs
    s_dy, s_u, s_dt, s_B, s_C, s_z = strides
    Bs = ()
    Cs = ()
    for k in tl.static_range(K):
        if EVEN:
            step = k
        else:
            step = tl.minimum(k, last - 1 - t0)
        Bs = Bs + (_row(B + b * s_B[0] + t0 * s_B[1] + step * s_B[1] + column, N, WORDS),)
        if C is not None:
            Cs = Cs + (_row(C + b * s_C[0] + t0 * s_C[1] + step * s_C[1] + column, N, WORDS),)
    return Bs, Cs


@triton.jit
def _next(t0, last, K: tl.constexpr, EVEN: tl.constexpr):
    """Returns where to load ahead: the block after t0, or the last block again."""
    if EVEN:
        return tl.minimum(t0 + K, last - K)
    else:
        return t0 + K


# fmt: off
@triton.jit(do_not_specialize=["T", "length", "chunks"])
def _scan_kernel(
    inputs, strides, start, y, end, total, local, pull, T, channels, length, chunks,
    N: tl.constexpr, LOG: tl.constexpr, BD: tl.constexpr, K: tl.constexpr, AHEAD: tl.constexpr,
    SOFTPLUS: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr,
):
    # fmt: on
    """Writes out and the last h if y is given; else sum delta, local and (if given) pull of every chunk."""
    dy, u, dt, A, B, C, D, z, dt_bias = inputs
    blocks = tl.cdiv(channels, BD)
    item = (tl.program_id(0) // blocks).to(tl.int64)
    d = tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    b = item // chunks
    first = item % chunks * length
    last = tl.minimum(first + length, T)
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
    next_vectors = _vectors(inputs, strides, b, first, last, d, 0, channels, K, 1, EVEN)
    if AHEAD:
        next_rows = _rows(inputs, strides, b, first, last, 0, N, K, WORDS, EVEN)
    for t0 in range(first, last, K):
        us, dts, zs, dys = next_vectors
        after = _next(t0, last, K, EVEN)
        next_vectors = _vectors(inputs, strides, b, after, last, d, 0, channels, K, 1, EVEN)
        if AHEAD:
            Bs, Cs = next_rows
            next_rows = _rows(inputs, strides, b, after, last, 0, N, K, WORDS, EVEN)
        else:
            Bs, Cs = _rows(inputs, strides, b, t0, last, 0, N, K, WORDS, EVEN)
        outs = ()
        for k in tl.static_range(K):
            x = us[k].to(tl.float32)
            delta, _slope = _delta(dts[k], bias, t0 + k < last, SOFTPLUS, EVEN)
            drive = delta * x
            elapsed += delta
            row_B = _scalars(Bs[k], B.dtype.element_ty, WORDS)
            if C is not None:
                row_C = _scalars(Cs[k], C.dtype.element_ty, WORDS)
            if z is not None:
                gate = zs[k].to(tl.float32)
                gate *= _sigmoid(gate)
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
            states = new_states
            pulls = new_pulls
            products = new_products
            if y is not None:
                out += skip * x
                if z is not None:
                    out *= gate
                outs = outs + (out,)
        if y is not None:
            # Stores last: they would hold back the loads of the steps that follow.
            for k in tl.static_range(K):
                mask = d < tl.where(t0 + k < last, channels, 0)
                _store(y + (b * T + t0) * channels + k * channels, d, outs[k], mask, EVEN)
    if y is not None:
        if last == T:
            _store_states(end + b * channels * N, states, d, channels, N, LOG, BD)
    else:
        tl.store(total + item * channels + d, elapsed, mask=d < channels)
        _store_states(local + item * channels * N, states, d, channels, N, LOG, BD)
        if pull is not None:
            _store_states(pull + item * channels * N, pulls, d, channels, N, LOG, BD)


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
        # Loads first: the recurrence over chunks is short, waiting for memory is not.
        for k in tl.static_range(AHEAD):
            limit = tl.where(c0 + k < chunks, channels * N, 0)
            if REVERSE:
                row = (b + 1) * chunks - 1 - c0 - k
            else:
                row = b * chunks + c0 + k
            terms = terms + (tl.load(local + row * channels * N + entry, mask=entry < limit, other=0.0),)
            elapsed = elapsed + (tl.load(total + row * channels + entry // N, mask=entry < limit, other=0.0),)
        for k in tl.static_range(AHEAD):
            limit = tl.where(c0 + k < chunks, channels * N, 0)
            if REVERSE:
                row = (b + 1) * chunks - 1 - c0 - k
            else:
                row = b * chunks + c0 + k
            tl.store(local + row * channels * N + entry, value, mask=entry < limit)
            value = tl.exp2(rate * elapsed[k]) * value + terms[k]


@triton.jit
def _swap(x, LEVEL: tl.constexpr, M: tl.constexpr):
    """Gives every lane what the lane has whose number differs in bit LEVEL; x is (32, M)."""
    bits = tl.reshape(x.to(tl.int32, bitcast=True), (16 >> LEVEL, 2, 1 << LEVEL, M))
    return tl.reshape(bits ^ tl.xor_sum(bits, 1, keep_dims=True), (32, M)).to(tl.float32, bitcast=True)


@triton.jit
def _halve(low, high, LEVEL: tl.constexpr, M: tl.constexpr):
    """Adds up pairs of lanes; those with bit LEVEL of their number set keep high, the others low (32, M)."""
    odd = ((tl.arange(0, 32) >> LEVEL) % 2 == 1)[:, None]
    return tl.where(odd, high, low) + _swap(tl.where(odd, low, high), LEVEL, M)


@triton.jit
def _share(x, PARTS: tl.constexpr):
    """Returns what each lane of a channel has, for all of them: a tuple of PARTS vectors."""
    values = (x,)
    if PARTS == 2:
        odd = tl.arange(0, 32) % 2 == 1
        other = tl.reshape(_swap(x[:, None], 0, 1), (32,))
        values = (tl.where(odd, other, x), tl.where(odd, x, other))
    return values


@triton.jit
def _gather(values, STEP: tl.constexpr, PARTS: tl.constexpr):
    """Returns for lane i of a channel the sum of values[STEP + i] over the lanes of the channel."""
    if PARTS == 2:
        return tl.reshape(_halve(values[STEP][:, None], values[STEP + 1][:, None], 0, 1), (32,))
    else:
        return values[STEP]


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


# fmt: off
@triton.jit(do_not_specialize=["T", "length", "chunks", "items", "groups", "spans"])
def _backward_kernel(
    inputs, strides, start, adjoint, scratch, du, ddt, dz, dh0, dBC, partial,
    T, channels: tl.constexpr, length, chunks, items, groups, spans,
    N: tl.constexpr, LOG: tl.constexpr, BD: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    SOFTPLUS: tl.constexpr, WORDS: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr,
):
    # fmt: on
    """Writes the gradients; start is h before every chunk, adjoint l after every span of chunks (item)."""
    dy, u, dt, A, B, C, D, z, dt_bias = inputs
    first_pass = (None, u, dt, A, B, None, None, None, dt_bias)
    SOME: tl.constexpr = 16 // PARTS
    ROUNDS: tl.constexpr = (N + SOME - 1) // SOME
    lanes = channels * PARTS
    blocks = tl.cdiv(lanes, BD)
    block = tl.program_id(0) % blocks
    group = (tl.program_id(0) // blocks).to(tl.int64)
    lane = tl.arange(0, BD)
    row = block * BD + lane  # of A and h as (D PARTS, N)
    d = row // PARTS
    part = row % PARTS
    column = 0
    if PARTS > 1:
        column = part * N
    if SHARED:
        place = 16 * lane
        place += tl.inline_asm_elementwise(SHARED_START, "=r,r", (lane,), tl.int32, is_pure=False, pack=1)
    else:
        place = scratch + tl.program_id(0).to(tl.int64) * tl.cdiv(length, 2 * K) * (2 * BD * N) + lane
    dBC += block.to(tl.int64) * (items // spans) * T * (32 * ROUNDS)
    rates = _rates(A, row, lanes, N, LOG, BD)
    sums_A = _load_states(None, row, lanes, N, LOG, BD)
    zero = tl.zeros((BD,), tl.float32)
    sum_D = zero
    sum_bias = zero
    skip = _vector(D, d, channels, BD)
    bias = _vector(dt_bias, d, channels, BD)
    for item in range(group, items, groups):
        b = item // spans
        if adjoint is not None:
            ls = _load_states(adjoint + item * lanes * N, row, lanes, N, LOG, BD)
        else:
            ls = _load_states(None, row, lanes, N, LOG, BD)
        for chunk in range(chunks // spans):
            number = (item + 1) * (chunks // spans) - 1 - chunk
            first = number % chunks * length
            last = tl.minimum(first + length, T)
            steps = (last - first).to(tl.int32)
            if start is not None:
                states = _load_states(start + number * lanes * N, row, lanes, N, LOG, BD)
            else:
                states = _load_states(None, row, lanes, N, LOG, BD)
            vectors = _vectors(first_pass, strides, b, first, last, d, part, channels, 2 * K, PARTS, EVEN)
            for s0 in range(0, steps, 2 * K):
                us, dts, _z, _dy = vectors
                after = _next(first + s0, last, 2 * K, EVEN)
                vectors = _vectors(first_pass, strides, b, after, last, d, part, channels, 2 * K, PARTS, EVEN)
                Bs, _C = _rows(first_pass, strides, b, first + s0, last, column, N, 2 * K, WORDS, EVEN)
                deltas = ()
                drives = ()
                for j in tl.static_range(2 * K // PARTS):
                    live = s0 + (j * PARTS + part) < steps
                    delta, _slope = _delta(dts[j], bias, live, SOFTPLUS, EVEN)
                    deltas = deltas + _share(delta, PARTS)
                    drives = drives + _share(delta * us[j].to(tl.float32), PARTS)
                for k in tl.static_range(2 * K):
                    if k % K == 0:
                        _keep(place, states, (s0 + k) // K, N, SHARED)
                    row_B = _scalars(Bs[k], B.dtype.element_ty, WORDS)
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
                Bs, Cs = _rows(inputs, strides, b, t0, last, column, N, K, WORDS, EVEN)
                own = ()
                deltas = ()
                drives = ()
                gs = ()
                for j in tl.static_range(K // PARTS):
                    live = s0 + (j * PARTS + part) < steps
                    x = us[j].to(tl.float32)
                    delta, slope = _delta(dts[j], bias, live, SOFTPLUS, EVEN)
                    g = dys[j].to(tl.float32)
                    if not EVEN:
                        g = tl.where(live, g, 0.0)
                    per_y = zero
                    if z is not None:
                        gate = zs[j].to(tl.float32)
                        share = _sigmoid(gate)
                        per_y = g * share * (1.0 + gate * (1.0 - share))
                        g *= gate * share
                    sum_D += g * x
                    own = own + ((x, delta, slope, g, per_y),)
                    deltas = deltas + _share(delta, PARTS)
                    drives = drives + _share(delta * x, PARTS)
                    gs = gs + _share(g, PARTS)
                decays = ()
                for k in tl.static_range(K):
                    row_B = _scalars(Bs[k], B.dtype.element_ty, WORDS)
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
                    row_B = _scalars(Bs[k], B.dtype.element_ty, WORDS)
                    row_C = _scalars(Cs[k], C.dtype.element_ty, WORDS)
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
                    for i in tl.static_range(0, N, SOME):
                        sums = sums + (_sum_lanes(for_B[i : i + SOME], for_C[i : i + SOME], PARTS),)
                for j in tl.static_range(K // PARTS):
                    x, delta, slope, g, per_y = own[j]
                    grad_drive = _gather(grad_drives, j * PARTS, PARTS)
                    grad_delta = _gather(grad_deltas, j * PARTS, PARTS)
                    grad_delta = slope * (x * grad_drive + LN2 * grad_delta)
                    sum_bias += grad_delta
                    at = (b * T + t0) * channels + j * PARTS * channels
                    entry = part * channels + d
                    mask = d < tl.where(s0 + (j * PARTS + part) < steps, channels, 0)
                    _store(du + at, entry, delta * grad_drive + skip * g, mask, EVEN)
                    _store(ddt + at, entry, grad_delta, mask, EVEN)
                    if z is not None:
                        y = _gather(ys, j * PARTS, PARTS) + skip * x
                        _store(dz + at, entry, per_y * y, mask, EVEN)
                for k in tl.static_range(K):
                    at = (b * T + t0) * (32 * ROUNDS) + k * (32 * ROUNDS)
                    mask = lane < tl.where(s0 + k < steps, 32, 0)
                    for i in tl.static_range(ROUNDS):
                        _store(dBC + at + 32 * i, lane, sums[(K - 1 - k) * ROUNDS + i], mask, EVEN)
            # The next chunk overwrites the scratch that this one has just read.
            tl.debug_barrier()
        if dh0 is not None:
            if item % spans == 0:
                _store_states(dh0 + b * lanes * N, ls, row, lanes, N, LOG, BD)
    sum_D = _gather((sum_D, sum_D), 0, PARTS)
    sum_bias = _gather((sum_bias, sum_bias), 0, PARTS)
    partial += group * channels * (N * PARTS + 2)
    _store_states(partial, sums_A, row, lanes, N, LOG, BD)
    tl.store(partial + lanes * N + d, sum_D, mask=d < channels)
    tl.store(partial + lanes * N + channels + d, sum_bias, mask=d < channels)


class Plan(NamedTuple):
    """How a call is cut up; fixed by the sizes, so that a call repeats bit for bit."""

    length: int  # steps of a chunk of time
    BD: int  # channels a program
    K: int  # steps a block: loaded together; backward: from one kept state to the next
    registers: int | None  # a thread, at most
    ahead: bool  # B and C are loaded a block ahead, as the others always are
    programs: int = 0  # backward: at most
    parts: int = 1  # backward: lanes a channel
    split: bool = True  # backward: chunks run side by side, not one after the other


def _processors(device: torch.device) -> int:
    # The interpreter has no multiprocessors; two make small tests take every branch.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def plan_forward(batch: int, length: int, channels: int, states: int, processors: int) -> Plan:
    """Returns how `forward` runs: over the whole length at once if that fills the device, else in chunks."""
    warps = batch * triton.cdiv(channels, 64)
    K = 1 if length == 1 or states > 32 else 2
    if states > 16 or (warps < 2 * processors and length < 128):
        return Plan(length, 32, K, None, True)
    if warps >= 6 * processors or length < 128:
        return Plan(length, 64, K, 128, False)
    # Four waves of programs, 16 a multiprocessor; or fewer, when chunks would be too short to be worth it.
    chunk = triton.cdiv(length * warps, 64 * processors)
    return Plan(32 if chunk <= 32 else triton.cdiv(chunk, 64) * 64, 64, K, 128, False)


def plan_summary(length: int, states: int, adjoint: bool) -> Plan:
    """Returns how the chunks are summarised, with or without the adjoint."""
    if states > 16:
        return Plan(length, 32, 1, None, False)
    return Plan(length, 32, 4, 128, False) if adjoint else Plan(length, 64, 2, 128, True)


def plan_backward(batch: int, length: int, channels: int, states: int, processors: int) -> Plan:
    """Returns how `backward` runs: chunks side by side unless rows and channels alone fill the device."""
    # Twelve programs of 168 registers fit a multiprocessor, else eight. Twice as many even out the end; but a
    # scratch, where shared memory does not do, grows with the length and should stay in the cache.
    if states in (8, 16):
        programs = 24 * processors
        split = batch * triton.cdiv(channels, 16) < 2 * programs
        return Plan(min(length, 512 // states), 32, 2, 168, True, programs, 2, split)
    K = 1 if length == 1 or states > 32 else 2
    programs = (16 if length <= 64 else 8) * processors
    split = batch * triton.cdiv(channels, 32) < 2 * programs
    return Plan(min(length, 64), 32, K, None, True, programs, 1, split)


def _words(*tensors: Tensor) -> bool:
    """Says whether the rows of the tensors are whole, aligned 64-bit words."""
    return all(
        t.data_ptr() % 8 == 0
        and all(size * t.element_size() % 8 == 0 for size in (t.stride(0), t.stride(1), t.shape[2]))
        for t in tensors
    )


class _Call(NamedTuple):
    """The tensors as the kernels take them (dy, u, dt, A, B, C, D, z, dt_bias) and what depends on them."""

    inputs: tuple
    strides: tuple
    softplus: bool
    words: bool

    def settings(self, plan: Plan) -> dict:
        _, length, channels = self.inputs[1].shape
        states = self.inputs[3].shape[1] // plan.parts
        return {
            "N": states,
            "LOG": (states - 1).bit_length(),
            "BD": plan.BD,
            "K": plan.K,
            "SOFTPLUS": self.softplus,
            "WORDS": self.words and states * self.inputs[4].element_size() % 8 == 0,
            "EVEN": channels * plan.parts % plan.BD == length % plan.K == plan.length % plan.K == 0,
            "num_warps": 1,
        } | ({} if plan.registers is None else {"maxnreg": plan.registers})


def _call(dy, u, dt, A, B, C, D, z, dt_bias, softplus) -> _Call:
    # Rows may be strided: u and z are often halves of one tensor, dt, B and C parts of another.
    rows = [t if t is None or t.stride(2) == 1 else t.contiguous() for t in (dy, u, dt, B, C, z)]
    strides = tuple((0, 0) if t is None else (t.stride(0), t.stride(1)) for t in rows)
    dy, u, dt, B, C, z = rows
    A, D, dt_bias = (None if t is None else t.contiguous() for t in (A, D, dt_bias))
    return _Call((dy, u, dt, A, B, C, D, z, dt_bias), strides, softplus, _words(B, C))


def _enter_chunks(
    call: _Call, length: int, h0: Tensor | None, dh: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns h before every chunk and, if dh is given, l after it: (B, chunks, D, N) in float32."""
    dy, u, dt, A, B, C, _, z, dt_bias = call.inputs
    batch, T, channels = u.shape
    chunks = triton.cdiv(T, length)
    total = torch.empty((batch, chunks, channels), dtype=torch.float32, device=u.device)
    local = torch.empty((batch, chunks, *A.shape), dtype=torch.float32, device=u.device)
    pull = None if dh is None else torch.empty_like(local)
    plan = plan_summary(length, A.shape[1], dh is not None)
    inputs = (dy, u, dt, A, B, C, None, z, dt_bias)
    if dh is None:
        inputs = (None, u, dt, A, B, None, None, None, dt_bias)
    _scan_kernel[(batch * chunks * triton.cdiv(channels, plan.BD),)](
        inputs, call.strides, None, None, None, total, local, pull, T, channels, length, chunks,
        AHEAD=plan.ahead, **call.settings(plan),
    )  # fmt: skip
    for term, initial, reverse in ((local, h0, False), (pull, dh, True)):
        if term is not None:
            _combine_kernel[(batch * triton.cdiv(A.numel(), 64),)](
                term, total, A, initial, channels, chunks,
                N=A.shape[1], BLOCK=64, AHEAD=16, REVERSE=reverse, num_warps=1,
            )  # fmt: skip
    return local, pull


def forward(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    h0: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns y (B, T, D) in the dtype of u and the last state (B, D, N) in float32."""
    batch, length, channels = u.shape
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    end = torch.empty((batch, *A.shape), dtype=torch.float32, device=u.device)
    if u.numel() == 0:
        return y, end.zero_() if h0 is None else end.copy_(h0)
    call = _call(None, u, dt, A, B, C, D, z, dt_bias, softplus)
    plan = plan_forward(batch, length, channels, A.shape[1], _processors(u.device))
    chunks = triton.cdiv(length, plan.length)
    start = None if h0 is None else h0.contiguous()
    if chunks > 1:
        start, _ = _enter_chunks(call, plan.length, start, None)
    _scan_kernel[(batch * chunks * triton.cdiv(channels, plan.BD),)](
        call.inputs, call.strides, start, y, end, None, None, None, length, channels, plan.length, chunks,
        AHEAD=plan.ahead, **call.settings(plan),
    )  # fmt: skip
    return y, end


def backward(
    dy: Tensor,
    dh: Tensor | None,
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    h0: Tensor | None,
) -> tuple[Tensor, ...]:
    """Returns the gradients of u, dt, A, B, C, D, z, dt_bias, h0; empty for an argument not given.

    No dh stands for zeros.
    """
    batch, length, channels = u.shape
    states = A.shape[1]
    given = (u, dt, A, B, C, D, z, dt_bias, h0)
    grads = [u.new_empty(0) if t is None else t.new_empty(t.shape) for t in given]
    if u.numel() == 0:
        for grad in grads[:8]:
            grad.zero_()
        grads[8].zero_() if dh is None or h0 is None else grads[8].copy_(dh)
        return tuple(grads)
    call = _call(dy, u, dt, A, B, C, D, z, dt_bias, softplus)
    plan = plan_backward(batch, length, channels, states, _processors(u.device))
    chunks = triton.cdiv(length, plan.length)
    spans = chunks if plan.split else 1
    start, adjoint = (None if t is None else t.contiguous() for t in (h0, dh))
    if chunks > 1 and plan.split:
        if adjoint is None:
            adjoint = torch.zeros((batch, *A.shape), dtype=torch.float32, device=u.device)
        start, adjoint = _enter_chunks(call, plan.length, start, adjoint)
    elif chunks > 1:
        start, _ = _enter_chunks(call, plan.length, start, None)
    settings = call.settings(plan)
    settings["EVEN"] &= length % (2 * plan.K) == 0 and plan.length % (2 * plan.K) == 0
    blocks = triton.cdiv(channels * plan.parts, plan.BD)
    groups = min(batch * spans, max(1, plan.programs // blocks))
    kept = 2 * triton.cdiv(plan.length, 2 * plan.K) * settings["N"] * plan.BD
    # Triton's interpreter and other makers' GPUs know no PTX: a scratch takes the place of shared memory.
    ptx = u.is_cuda and torch.version.cuda is not None
    shared = ptx and settings["N"] % 4 == 0 and 4 * kept <= SHARED_BYTES
    some = 16 // plan.parts  # states of a lane that one sum over lanes takes
    rounds = triton.cdiv(settings["N"], some)
    scratch, dBC, partial = (
        torch.empty(shape, dtype=torch.float32, device=u.device)
        for shape in (
            (blocks * groups, 0 if shared else kept),
            (blocks, batch, length, rounds, 2, some, plan.parts),
            (groups, (states + 2) * channels),
        )
    )
    # Compiled for these strides of time and channels: in registers they cost 6 % more instructions.
    strides = tuple((row, tl.constexpr(step if length > 1 else 0)) for row, step in call.strides)
    _backward_kernel[(blocks * groups,)](
        call.inputs, strides, start, adjoint, scratch,
        grads[0], grads[1], None if z is None else grads[6], None if h0 is None else grads[8], dBC, partial,
        length, channels, plan.length, chunks, batch * spans, groups, spans,
        PARTS=plan.parts, SHARED=shared, **settings,
    )  # fmt: skip
    dB, dC = dBC.sum(0).permute(3, 0, 1, 5, 2, 4).flatten(4)[..., : settings["N"]].flatten(3).unbind(0)
    dA, dD, ddt_bias = partial.sum(0).split((states * channels, channels, channels))
    for index, grad in ((2, dA.view(channels, states)), (3, dB), (4, dC), (5, dD), (7, ddt_bias)):
        if given[index] is not None:
            grads[index].copy_(grad)
    return tuple(grads)
