"""The causal convolution with SiLU on a GPU: Triton kernels that read every input once.

Backward, with e_t = dy_t silu'(s_t) and s_t computed again (`vssm.ops.conv` has the forward):

    dx_t = sum_k weight_k e_{t + K - 1 - k}                dbias = sum_{b, t} e_t
    dweight_k = sum_{b, t} e_t x_{t - K + 1 + k}

A program owns a block of channels and goes through a chunk of time with the last K inputs (and,
backward, the last K values of e) in registers. It recomputes what it needs from beyond its chunk.
Sums over batch and time leave as one partial per program; PyTorch adds them, so results repeat bit
for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vssm.ops.launch_triton import ceil_div, contiguous, launch, next_power, processors

_CHUNK = 32  # steps of a program
_BLOCK = 512  # channels of a program
_SHORT = 16  # steps of a short sequence
_PROGRAMS = 8  # programs per multiprocessor, backward: each leaves partial sums


@triton.jit
def _input(x, state, stride, t, T, d, channels, K: tl.constexpr):
    """Loads x_t: from the state before the start, zeros without a state and after the end."""
    t = tl.cast(t, tl.int64)
    limit = tl.where((t >= 0) & (t < T), channels, 0)
    value = tl.load(x + t * stride + d, mask=d < limit, other=0.0).to(tl.float32)
    if state is not None:
        limit = tl.where(t < 0, channels, 0)
        before = tl.load(state + (t + K - 1) * channels + d, mask=d < limit, other=0.0)
        value += before.to(tl.float32)
    return value


@triton.jit
def _inputs(x, state, stride, t, T, d, channels, K: tl.constexpr, STEPS: tl.constexpr):
    """Loads x of several steps from t on."""
    values = ()
    for i in tl.static_range(STEPS):
        values = values + (_input(x, state, stride, t + i, T, d, channels, K),)
    return values


@triton.jit
def _sequence(packed, b, T):
    """Returns the first step of sequence b, of all that are in memory, and its length."""
    if packed is None:
        return b * T, T
    else:
        begin = tl.load(packed + b)
        return begin, tl.load(packed + b + 1) - begin


@triton.jit
def _taps(weight, d, channels, K: tl.constexpr):
    taps = ()
    for k in tl.static_range(K):
        taps = taps + (tl.load(weight + d * K + k, mask=d < channels, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _convolve(window, taps, shift, K: tl.constexpr):
    s = shift
    for k in tl.static_range(K):
        s += taps[k] * window[k]
    return s


# fmt: off
@triton.jit(do_not_specialize=["T", "chunks"])
def _conv_kernel(
    x, weight, bias, state, packed, y, after, row, stride, T, channels, chunks,
    K: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):
    # fmt: on
    """STEPS divides CHUNK. packed: where sequences start that share one row, and where it ends."""
    item = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = (item // chunks).to(tl.int64)
    first = item % chunks * CHUNK
    begin, T = _sequence(packed, b, T)
    if packed is None:
        x += b * row
    else:
        x += begin * stride
    y += begin * channels
    if state is not None:
        state += b * (K - 1) * channels
    taps = _taps(weight, d, channels, K)
    shift = tl.load(bias + d, mask=d < channels, other=0.0).to(tl.float32)
    window = ()
    for k in tl.static_range(K - 1):
        window = window + (_input(x, state, stride, first - (K - 1) + k, T, d, channels, K),)
    following = _inputs(x, state, stride, first, T, d, channels, K, STEPS)
    for t0 in range(first, tl.minimum(first + CHUNK, T), STEPS):
        window = window + following
        following = _inputs(x, state, stride, t0 + STEPS, T, d, channels, K, STEPS)
        for i in tl.static_range(STEPS):
            s = _convolve(window[i : i + K], taps, shift, K)
            at = tl.cast(t0 + i, tl.int64) * channels + d
            limit = tl.where(t0 + i < T, channels, 0)
            tl.store(y + at, (s * tl.sigmoid(s)).to(y.dtype.element_ty), mask=d < limit)
        window = window[STEPS:]
    if after is not None:
        limit = tl.where((first < T) & (first + CHUNK >= T), channels, 0)
        for k in tl.static_range(K - 1):
            value = _input(x, state, stride, T - (K - 1) + k, T, d, channels, K)
            at = (b * (K - 1) + k) * channels + d
            tl.store(after + at, value.to(after.dtype.element_ty), mask=d < limit)


# fmt: off
@triton.jit(do_not_specialize=["steps", "chunks", "items"])
def _conv_backward_kernel(
    x, weight, bias, state, packed, dy, dx, dstate, partial, row, stride, steps, channels, chunks,
    items,
    K: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Goes over a chunk and K - 1 steps beyond it, whose e reach back into the chunk."""
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    taps = _taps(weight, d, channels, K)
    shift = tl.load(bias + d, mask=d < channels, other=0.0).to(tl.float32)
    zero = tl.zeros((BLOCK,), tl.float32)
    sums = ()
    for _ in tl.static_range(K + 1):
        sums = sums + (zero,)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        b = (item // chunks).to(tl.int64)
        first = item % chunks * CHUNK
        begin, T = _sequence(packed, b, steps)
        last = tl.minimum(first + CHUNK, T)
        if packed is None:
            source = x + b * row
        else:
            source = x + begin * stride
        slope = dy + begin * channels
        target = dx + begin * channels
        before = state
        if state is not None:
            before = state + b * (K - 1) * channels
        window = ()
        errors = ()
        for k in tl.static_range(K - 1):
            step = first - (K - 1) + k
            window = window + (_input(source, before, stride, step, T, d, channels, K),)
            errors = errors + (zero,)
        for t in range(first, last + K - 1):
            window = window + (_input(source, before, stride, t, T, d, channels, K),)
            s = _convolve(window, taps, shift, K)
            share = tl.sigmoid(s)
            t = tl.cast(t, tl.int64)
            limit = tl.where(t < T, channels, 0)
            g = tl.load(slope + t * channels + d, mask=d < limit, other=0.0).to(tl.float32)
            e = g * share * (1.0 + s * (1.0 - share))
            errors = errors + (e,)
            own = tl.where(t < last, e, 0.0)
            new_sums = ()
            for k in tl.static_range(K):
                new_sums = new_sums + (sums[k] + own * window[k],)
            sums = new_sums + (sums[K] + own,)
            back = t - (K - 1)  # the step whose gradient is complete
            value = zero
            for k in tl.static_range(K):
                value += taps[K - 1 - k] * errors[k]
            limit = tl.where(back >= first, channels, 0)
            tl.store(target + back * channels + d, value.to(dx.dtype.element_ty), mask=d < limit)
            if dstate is not None:
                limit = tl.where(back < 0, channels, 0)
                at = (b * (K - 1) + t) * channels + d
                tl.store(dstate + at, value.to(dstate.dtype.element_ty), mask=d < limit)
            window = window[1:]
            errors = errors[1:]
    partial += tl.program_id(0).to(tl.int64) * (K + 1) * channels
    for k in tl.static_range(K + 1):
        tl.store(partial + k * channels + d, sums[k], mask=d < channels)


def _rows(x: Tensor, starts: Tensor | None) -> tuple[int, int, Tensor | None]:
    """Returns the number of sequences, the length of the longest, and where packed ones start."""
    if starts is None:
        return len(x), x.shape[1], None
    return len(starts) - 1, int(starts.diff().max()), starts.to(x.device)


def conv_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    state: Tensor | None,
    starts: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """Returns y (B, T, D) in the dtype of x, and fills the state `after` if T > 0.

    starts says where packed sequences start, and where the last one ends.
    """
    channels, taps = weight.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    x = x if x.stride(2) == 1 else x.contiguous()
    batch, length, packed = _rows(x, starts)
    # Steps are loaded several at once, as many as there are registers for.
    if x.dtype == torch.float32:
        chunk, block, steps = 16, 128, 4 if length <= _SHORT else 8
    else:
        block = min(_BLOCK, max(128, next_power(channels)))
        chunk, steps = _CHUNK, 4 if length <= _SHORT else 1
    chunks = ceil_div(length, chunk)
    launch(
        _conv_kernel, (batch * chunks, ceil_div(channels, block)),
        x, weight.contiguous(), bias, contiguous(state), packed, y, after, x.stride(0),
        x.stride(1), length, channels, chunks, K=taps, CHUNK=chunk, BLOCK=block, STEPS=steps,
        num_warps=max(1, block // 256),
    )  # fmt: skip
    return y


def conv_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    state: Tensor | None,
    starts: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x, weight, bias and state."""
    channels, taps = weight.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dstate = None if state is None else x.new_zeros(state.shape)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight), torch.zeros_like(bias), dstate
    x = x if x.stride(2) == 1 else x.contiguous()
    batch, length, packed = _rows(x, starts)
    chunks, blocks = ceil_div(length, _CHUNK), ceil_div(channels, _BLOCK)
    programs = min(batch * chunks, ceil_div(_PROGRAMS * processors(x.device), blocks))
    partial = torch.empty((programs, taps + 1, channels), dtype=torch.float32, device=x.device)
    launch(
        _conv_backward_kernel, (programs, blocks),
        x, weight.contiguous(), bias, contiguous(state), packed, dy.contiguous(), dx,
        dstate, partial, x.stride(0), x.stride(1), length, channels,
        chunks, batch * chunks, K=taps, CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    sums = partial.sum(0)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    return dx, dweight.copy_(sums[:taps].T), dbias.copy_(sums[taps]), dstate
