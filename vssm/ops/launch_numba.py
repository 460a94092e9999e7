"""Starts the CPU kernels of the operations: lays out their operands and shares their tasks.

A kernel reads a table of words, which `vssm.ops.vectors` explains. `run` fills the table and
starts the threads; the functions before it say which operand of an operation has which word. How
the work is cut depends on the shapes only, never on the number of threads, and every sum has one
order: the same input always gives the same bits.
"""

import functools
import math
import os
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from vssm.ops.conv import numba as conv
from vssm.ops.latents import numba as latents
from vssm.ops.scan import numba as scan
from vssm.ops.vectors import LANES, ROW

GROUP = 8  # tiles of a group, at most
BATCHES = 16  # partial sums over batch rows, at most
INLINE = 1 << 18  # with fewer elements, waking a second thread costs more than it saves


def scan_forward(
    inputs: tuple, softplus: bool, kept: None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns y and the last states; the inputs are (u, dt, A, B, C, D, z, dt_bias, h0)."""
    u, A = inputs[0], inputs[2]
    y, h = room(*u.shape), room(_num_sequences(u, starts), *A.shape)
    _run_scan(inputs, y, h, scan.SOFTPLUS if softplus else 0, starts)
    return y, h


def scan_ahead(inputs: tuple) -> Tensor:
    """Returns y of `vssm.ops.scan.scan_ahead`."""
    y = room(*inputs[0].shape)
    _run_scan(inputs, y, None, scan.SOFTPLUS | scan.HOLD, None)
    return y


def _run_scan(inputs: tuple, y: Tensor, h: Tensor | None, flag: int, starts: Tensor | None) -> None:
    u, dt, A, B, C, D, z, dt_bias, h0 = inputs
    rows, wholes = (u, dt, z, B, C, y, None, None, None), (A, D, dt_bias, h0, h)
    states = -(-A.shape[1] // 4) * 4
    size, per_tile = scan.NUMBERS + 16 * scan.STEPS * states + scan.TILE, ROW * (1 + 2 * states)
    run(scan.forward_kernel, rows, wholes, A.shape[1], size, per_tile, flag, starts)


def scan_backward(
    dy: Tensor,
    dh: Tensor | None,
    inputs: tuple,
    softplus: bool,
    kept: None = None,
    starts: Tensor | None = None,
) -> list[Tensor | None]:
    """Returns the gradients of the inputs of `scan_forward`."""
    u, dt, A, B, C, D, z, dt_bias, h0 = inputs
    (batch, length, channels), count = u.shape, A.shape[1]
    _, _, parts, groups = _cut(_num_sequences(u, starts), channels)
    du, ddt = room(*u.shape), room(*u.shape)
    dz, dh0 = (None if x is None else room(*x.shape) for x in (z, h0))
    dA, dD, dbias = room(parts, channels, count), room(parts, channels), room(parts, channels)
    dB, dC = room(groups, batch, length, count), room(groups, batch, length, count)
    rows = (u, dt, z, B, C, dy, du, ddt, dz)
    wholes = (A, D, dt_bias, h0, dh, dB, dC, dA, dD, dbias, dh0)
    states, chunks = -(-count // 4) * 4, -(-_longest(u, starts) // scan.STEPS)
    per_tile = scan.TILE + ROW * (1 + (3 + max(1, chunks)) * states)
    size, flag = scan.NUMBERS + 16 * scan.STEPS * states, scan.SOFTPLUS if softplus else 0
    run(scan.backward_kernel, rows, wholes, count, size, per_tile, flag, starts)
    sums = _total(dA), _total(dB), _total(dC), _total(dD), _total(dbias)
    return [du, ddt, *sums[:4], dz, sums[4], dh0]


def conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None, starts: Tensor | None = None
) -> Tensor:
    """Returns y (B, T, D); the arguments are those of `causal_conv_silu`, in float32."""
    y, taps = room(*x.shape), weight.T.contiguous()[None]
    rows = (x, taps, state, None, None, y, None, None, None)
    run(conv.forward_kernel, rows, (None, None, bias), taps.shape[1], conv.SIZE, starts=starts)
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
    channels = x.shape[2]
    parts, taps = _cut(_num_sequences(x, starts), channels)[2], weight.T.contiguous()[None]
    dx, dtaps = room(*x.shape), room(parts, taps.shape[1] + 1, channels)  # and one for the bias
    dstate = None if state is None else room(*state.shape)
    rows = (x, taps, state, None, None, dy, dx, dtaps, dstate)
    run(conv.backward_kernel, rows, (None, None, bias), taps.shape[1], conv.SIZE, starts=starts)
    sums = _total(dtaps)
    return dx, sums[:-1].T.contiguous(), sums[-1], dstate


def sample_forward(
    logits: Tensor, noise: Tensor, prior: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns z (..., Z, N) in the given dtype and the KL (...)."""
    z, kl = room(*logits.shape), room(1, 1, math.prod(logits.shape[:-1]))
    _run_latents(0, kl, logits, noise, prior, z, None, None)
    return z.to(dtype), kl.view(logits.shape[:-1]).sum(-1)


def sample_backward(
    dz: Tensor, dkl: Tensor, logits: Tensor, noise: Tensor, prior: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the logits and of the prior's, (..., Z, N); empty for no prior."""
    dv, dp = room(*logits.shape), room(*(0,) if prior is None else prior.shape)
    dkl = dkl.float()[..., None].expand(logits.shape[:-1]).reshape(1, 1, -1)
    _run_latents(1, dkl, logits, noise, prior, dz, dv, dp)
    return dv, dp


def _run_latents(backward: int, kl: Tensor, *operands: Tensor | None) -> None:
    v, *rest = (None if x is None else x.float() for x in operands)
    assert v is not None
    rows, wholes, classes = (kl, *[None] * 8), (v, None, None, *rest), v.shape[-1]
    size = ROW * (1 + 6 * (classes + 3))
    run(latents.latents_kernel, rows, wholes, classes, size, flag=backward)


def room(*shape: int) -> Tensor:
    """Returns memory for results: float32 on the CPU, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def run(
    kernel: Callable,
    rows: tuple,
    wholes: tuple,
    count: int,
    size: int,
    per_tile: int = 0,
    flag: int = 0,
    starts: Tensor | None = None,
) -> None:
    """Runs all tasks of a kernel, in several threads if that pays.

    Arguments:
        kernel: The function that `vssm.ops.vectors.kernel` compiles.
        rows: The operands with steps, in the order of their words; the first is (B, T, D).
        wholes: The other operands, in the order of their words.
        count: Numbers per channel: states of a scan, taps of a convolution, classes of a latent.
        size: The bytes of scratch memory of a thread.
        per_tile: The further bytes for every tile of a group.
        flag: An option of the kernel, its word FLAG.
        starts: The first steps of packed sequences, and their end, int64.
    """
    batch, length, channels = rows[0].shape
    sequences, longest = _num_sequences(rows[0], starts), _longest(rows[0], starts)
    per_task, per_group, parts, groups = _cut(sequences, channels)
    tasks = parts * groups
    words = [0, tasks, per_task, per_group, sequences, length, channels, count, flag]
    words += (0 if starts is None else starts.data_ptr(), batch, longest)
    copies = []  # they must live as long as the table
    for x in rows:
        if x is None:
            words += (0, 0, 0)
            continue
        if x.stride(2) != 1:
            copies.append(x := x.contiguous())
        words += (x.data_ptr(), 4 * x.stride(0), 4 * x.stride(1))
    for x in wholes:
        if x is not None:
            copies.append(x := x.contiguous())
        words.append(0 if x is None else x.data_ptr())
    table = array("q", words)
    address = table.buffer_info()[0]
    small = batch * length * channels * count < INLINE
    threads = 1 if small else min(torch.get_num_threads(), tasks)
    size += per_tile * per_group
    scratch = room(threads * size // 4)
    start = scratch.data_ptr()

    # A worker holds on to the memory that it uses, even if the calling thread is interrupted.
    def work(i: int, memory: tuple = (table, scratch, rows, copies, starts)) -> None:
        kernel(address, start + size * i)

    pool = _pool(os.getpid(), torch.get_num_threads()) if threads > 1 else None
    others = [pool.submit(work, i) for i in range(1, threads)] if pool else []
    if tasks:
        work(0)
    for other in others:
        # All tasks are drawn by now, so a worker that has not begun has nothing left to do.
        if not other.cancel():
            other.result()


def _num_sequences(x: Tensor, starts: Tensor | None) -> int:
    """Returns how many sequences x (B, T, D) has: B, or those that are packed in one row."""
    return len(x) if starts is None else len(starts) - 1


def _longest(x: Tensor, starts: Tensor | None) -> int:
    """Returns the length of the longest sequence."""
    return x.shape[1] if starts is None or len(starts) < 2 else int(starts.diff().max())


def _cut(batch: int, channels: int) -> tuple[int, int, int, int]:
    """Returns the batch rows of a task, the tiles of a group, and the numbers of parts and groups.

    The batch is cut into parts, the channels into groups.
    """
    per_task = max(1, -(-batch // BATCHES))
    parts, tiles = -(-batch // per_task), -(-channels // LANES)
    # Tiles of a large group share B and C; small groups keep more threads busy.
    per_group = min(GROUP, max(GROUP // 2, parts * tiles // 16))
    return per_task, per_group, parts, -(-tiles // per_group)


def _total(parts: Tensor) -> Tensor:
    """Returns the sum over the first dimension, added in a fixed order, unlike torch's sum."""
    return parts[0] if len(parts) == 1 else torch.from_numpy(np.add.reduce(parts.numpy(), axis=0))


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    # By process, because a forked child does not have the threads of its parent.
    return ThreadPoolExecutor(threads, "vssm-kernels")
