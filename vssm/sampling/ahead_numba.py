"""The scan of `vssm.sampling.ahead` on a CPU in float32: `vssm.ops.scan.numba` with a state that
waits.

    x_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t     y_t = C_t x_t + D u_t     h_t = x_t if t is odd, else h_{t-1}

with dt_t <- softplus(dt_t + dt_bias) before and y_t <- y_t silu(z_t) after; steps are counted from
0. Layouts and names are those of `scan_numba`, which cuts time into STEPS steps, an even number:
odd steps stay odd.
"""
# ruff: noqa: ANN001, ANN202 (numba infers the types of kernels)

from torch import Tensor

from vssm.ops.scan.numba import (
    B_,
    BOUNDED,
    C_,
    COUNT,
    DELTA,
    DRIVE,
    H0,
    LENGTH,
    NUMBERS,
    OUT,
    STEPS,
    TILE,
    _compile,
    clear,
    draw_task,
    finish_forward,
    prepare,
    read_decay,
    read_numbers,
    read_states,
    run_scan,
)
from vssm.ops.tasks import kernel, room
from vssm.ops.vectors import (
    FLUSH,
    LANES,
    ROW,
    exp2,
    fold,
    load_block,
    load_row,
    load_word,
    muladd,
    repeat,
    set_float_mode,
    spread,
    store,
)

__all__ = ["forward"]


@_compile
def look_ahead(tile, A2, h, B, B_stride, C, C_stride, y, steps, states):
    """Moves the states of a tile over the odd steps, and adds C x to `y` for all steps."""
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


@kernel
def _forward(words, scratch):
    length, states = load_word(words, LENGTH), -(-load_word(words, COUNT) // 4) * 4
    B_buffer, C_buffer = scratch + NUMBERS, scratch + NUMBERS + 4 * STEPS * states
    tile = scratch + NUMBERS + 16 * STEPS * states
    A2_first, A2_bytes = tile + TILE + ROW, ROW + 2 * states * ROW
    mode = set_float_mode(FLUSH)
    while True:
        _, first, last, b_first, b_last = draw_task(words)
        if first == last:
            break
        for i in range(first, last):
            read_decay(words, LANES * i, A2_first + A2_bytes * (i - first))
        for b in range(b_first, b_last):
            for i in range(first, last):
                read_states(
                    words, H0, b, LANES * i, A2_first + A2_bytes * (i - first) + states * ROW
                )
            for start in range(0, length, STEPS):
                steps = min(STEPS, length - start)
                B, B_stride = read_numbers(words, B_, b, start, steps, B_buffer)
                C, C_stride = read_numbers(words, C_, b, start, steps, C_buffer)
                for i in range(first, last):
                    channel, A2 = LANES * i, A2_first + A2_bytes * (i - first)
                    prepare(words, b, start, steps, channel, scratch, tile, A2)
                    clear(tile + OUT, steps)
                    h, y = A2 + states * ROW, tile + OUT
                    look_ahead(tile, A2, h, B, B_stride, C, C_stride, y, steps, states)
                    finish_forward(words, b, start, steps, channel, scratch, tile)
    set_float_mode(mode)


def forward(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    h0: Tensor | None,
) -> Tensor:
    """Returns y; the arguments are those of `scan_ahead`."""
    dt, A, B, C, D, z, dt_bias = (t.float() for t in (dt, A, B, C, D, z, dt_bias))
    y = room(*u.shape)
    run_scan(_forward, (u, dt, z, B, C, y, None, None, None), (A, D, dt_bias, h0, None), True, 1, 2)
    return y
