"""What the CPU kernels share: a table of operands, tiles of channels, and tasks for threads.

A kernel is `function(words, scratch)`. `words` is the address of a table of 64-bit words: sizes,
then an address and two strides in bytes (batch, time) for each operand that has steps, then the
addresses of the other operands. Address 0 means that the operand is not given.

A *tile* is LANES channels that go through time together. A *group* is several tiles. A *task* is a
group and a range of batch rows; threads draw tasks from a counter. How the work is cut depends on
the shapes only, never on the number of threads, and every sum has one order: the same input always
gives the same bits.

Kernels read and write whole rows of LANES channels, four steps at a time. Channels, steps and
states that do not fill a row or a block go through a buffer that is padded with zeros. The names of
the words are those of the scan (`vssm.ops.scan.numba`); other kernels say what they use them for.
"""
# ruff: noqa: ANN001, ANN201 (numba infers the types of kernels)

import functools
import hashlib
import os
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit, types
from torch import Tensor

from vssm.ops.vectors import (  # isort: skip
    LANES, ROW, draw, inline, load_number, load_row, load_word, options, repeat, store,
    store_number, transpose, zero_row,
)  # fmt: skip

GROUP = 8  # tiles of a group, at most
BATCHES = 16  # partial sums over batch rows, at most
INLINE = 1 << 18  # with fewer elements, waking a second thread costs more than it saves

# From numpy, because numba compiles a function again for every Python integer passed to it.
TASK, TASKS, PER_TASK, PER_GROUP, BATCH, LENGTH, CHANNELS, COUNT, FLAG = np.arange(9)
U, DT, Z, B_, C_, Y, DU, DDT, DZ = np.arange(9, 36, 3)
A_, D_, BIAS, H0, H, DB, DC, DA, DD, DBIAS, DH0 = np.arange(36, 47)

compiled: Any = njit(**options)

_digest = hashlib.sha256()
for _path in sorted(Path(__file__).parent.rglob("*.py")):
    _digest.update(_path.name.encode() + _path.read_bytes())
SOURCES = _digest.hexdigest()[:12]


def kernel(function: Callable) -> Callable:
    """Compiles `function(words, scratch)` at its first call and caches it on disk if possible."""
    # numba names the file after the function and watches the source of that function alone. With
    # the digest, a change of any source gives the file another name.
    function.__qualname__ = f"{function.__qualname__}_{SOURCES}"
    try:
        return njit(error_model="numpy", nogil=True, cache=True)(function)
    except RuntimeError:  # no folder can hold the compiled kernel
        return njit(error_model="numpy", nogil=True)(function)


def room(*shape: int) -> Tensor:
    """Returns memory for results: float32 on the CPU, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def cut(batch: int, channels: int) -> tuple[int, int, int, int]:
    """Returns the batch rows of a task, the tiles of a group, and the numbers of parts and groups.

    The batch is cut into parts, the channels into groups.
    """
    per_task = max(1, -(-batch // BATCHES))
    parts, tiles = -(-batch // per_task), -(-channels // LANES)
    # Tiles of a large group share B and C; small groups keep more threads busy.
    per_group = min(GROUP, max(GROUP // 2, parts * tiles // 16))
    return per_task, per_group, parts, -(-tiles // per_group)


def run(
    function: Callable,
    rows: tuple,
    wholes: tuple,
    count: int,
    size: int,
    per_tile: int = 0,
    flag: int = 0,
) -> None:
    """Runs all tasks of a kernel, in several threads if that pays.

    Arguments:
        function: The kernel.
        rows: The operands with steps, in the order of their words; the first is (B, T, D).
        wholes: The other operands, in the order of their words.
        count: Numbers per channel: states of a scan, taps of a convolution, classes of a latent.
        size: The bytes of scratch memory of a thread.
        per_tile: The further bytes for every tile of a group.
        flag: An option of the kernel, its word FLAG.
    """
    batch, length, channels = rows[0].shape
    per_task, per_group, parts, groups = cut(batch, channels)
    tasks = parts * groups
    words = [0, tasks, per_task, per_group, batch, length, channels, count, flag]
    size += per_tile * per_group
    copies = []  # they must live as long as the table
    for x in rows:
        if x is None:
            words += (0, 0, 0)
            continue
        by_batch, by_time, by_channel = x.stride()
        if by_channel != 1:
            copies.append(x := x.contiguous())
            by_batch, by_time, _ = x.stride()
        words += (x.data_ptr(), 4 * by_batch, 4 * by_time)
    for x in wholes:
        if x is not None:
            copies.append(x := x.contiguous())
        words.append(0 if x is None else x.data_ptr())
    table = array("q", words)
    address = table.buffer_info()[0]
    small = batch * length * channels * count < INLINE
    threads = 1 if small else min(torch.get_num_threads(), tasks)
    scratch = room(threads * size // 4)
    start = scratch.data_ptr()
    others = []
    if threads > 1:
        pool = _pool(os.getpid(), torch.get_num_threads())
        # Each worker holds on to the memory it uses, even if this thread is interrupted.
        memory = (table, scratch, rows, copies)
        others = [
            pool.submit(_work, function, address, start + size * i, memory)
            for i in range(1, threads)
        ]
    if tasks:
        function(address, start)
    for other in others:
        # All tasks are drawn by now, so a worker that has not begun has nothing left to do.
        if not other.cancel():
            other.result()


def total(parts: Tensor) -> Tensor:
    """Returns the sum over the first dimension, added in a fixed order, unlike torch's sum."""
    return parts[0] if len(parts) == 1 else torch.from_numpy(np.add.reduce(parts.numpy(), axis=0))


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    # By process, because a forked child does not have the threads of its parent.
    return ThreadPoolExecutor(threads, "vssm-kernels")


def _work(function: Callable, words: int, scratch: int, memory: tuple) -> None:
    function(words, scratch)


@inline
def draw_task(words):
    """Returns the next group, its tiles and its batch rows; no tiles when all tasks are drawn."""
    task, per_group = draw(words), load_word(words, PER_GROUP)
    tiles = -(-load_word(words, CHANNELS) // LANES)
    groups = -(-tiles // per_group)
    first, b = task % groups * per_group, task // groups * load_word(words, PER_TASK)
    last = min(first + per_group, tiles) if task < load_word(words, TASKS) else first
    b_last = min(b + load_word(words, PER_TASK), load_word(words, BATCH))
    return task % groups, first, last, b, b_last


@inline
def width_of(words, channel):
    """Returns how many channels the tile that starts at a channel has."""
    return min(LANES, load_word(words, CHANNELS) - channel)


@inline
def clear(target, rows):
    for i in range(rows):
        store(target + ROW * i, zero_row())


@compiled
def copy(source, source_stride, target, target_stride, steps, count, padded):
    """Copies `count` numbers per step and adds zeros up to `padded`."""
    for t in range(steps):
        x, y = source + source_stride * t, target + target_stride * t
        n = 0
        while n + LANES <= count:
            store(y + 4 * n, load_row(x + 4 * n))
            n += LANES
        while n < padded:
            store_number(y + 4 * n, load_number(x + 4 * n) if n < count else types.float32(0.0))
            n += 1


@inline
def place(words, which, b, t, channel):
    """Returns the address (0 if not given) and time stride of an operand at row, step, channel."""
    address, stride = load_word(words, which), load_word(words, which + 2)
    at = address + load_word(words, which + 1) * b + stride * t + 4 * channel
    return (at if address else 0), stride


@inline
def place_states(words, which, b, channel):
    address, count = load_word(words, which), load_word(words, COUNT)
    return address + 4 * count * (load_word(words, CHANNELS) * b + channel) if address else 0


@compiled
def read(words, which, b, t, channel, steps, buffer):
    """Returns where rows can be read by blocks: in place, or in a zero-padded copy."""
    address, stride = place(words, which, b, t, channel)
    width = width_of(words, channel)
    if not address or (width == LANES and steps % 4 == 0):
        return address, stride
    copy(address, stride, buffer, ROW, steps, width, LANES)
    clear(buffer + ROW * steps, -steps % 4)
    return buffer, ROW


@compiled
def write(words, which, b, t, channel, steps, buffer):
    """Returns where rows can be written by blocks: in place, or in a buffer (see `written`)."""
    if width_of(words, channel) == LANES and steps % 4 == 0:
        return place(words, which, b, t, channel)
    return buffer, ROW


@compiled
def written(words, which, b, t, channel, steps, buffer):
    """Moves what `write` sent to a buffer to its place."""
    address, stride = place(words, which, b, t, channel)
    if buffer != address and address:
        width = width_of(words, channel)
        copy(buffer, ROW, address, stride, steps, width, width)


@compiled
def read_numbers(words, which, b, t, steps, buffer):
    """Returns where B or C can be read with states rounded up to 4: in place or in a copy."""
    address, stride = place(words, which, b, t, 0)
    count = load_word(words, COUNT)
    states = -(-count // 4) * 4
    if count == states:
        return address, stride
    copy(address, stride, buffer, 4 * states, steps, count, states)
    return buffer, 4 * states


@compiled
def read_vector(words, which, channel, buffer):
    """Returns a tile's channels of a vector as a block of equal rows; zeros if not given."""
    width = width_of(words, channel) if load_word(words, which) else 0
    copy(load_word(words, which) + 4 * channel, 0, buffer, 0, 1, width, LANES)
    return repeat(load_row(buffer))


@compiled
def read_states(words, which, b, channel, target):
    """Lays out (channels, states) as (states rounded up to 4, LANES), padded with zeros."""
    source, count = place_states(words, which, b, channel), load_word(words, COUNT)
    width = width_of(words, channel)
    for n in range(0, count, LANES):
        if source and width == LANES and n + LANES <= count:
            transpose(source + 4 * n, 4 * count, target + ROW * n, ROW)
            continue
        for m in range(n, min(n + LANES, -(-count // 4) * 4)):
            store(target + ROW * m, zero_row())
            for c in range(width if source and m < count else 0):
                store_number(target + ROW * m + 4 * c, load_number(source + 4 * (count * c + m)))


@compiled
def write_states(words, which, b, channel, source):
    """The inverse of `read_states`."""
    target, count = place_states(words, which, b, channel), load_word(words, COUNT)
    width = width_of(words, channel)
    for n in range(0, count if target else 0, LANES):
        if width == LANES and n + LANES <= count:
            transpose(source + ROW * n, ROW, target + 4 * n, 4 * count)
            continue
        for m in range(n, min(n + LANES, count)):
            for c in range(width):
                store_number(target + 4 * (count * c + m), load_number(source + ROW * m + 4 * c))


@inline
def hint(words, which, b, t, channel, target):
    """Notes where an operand will be read next, for `prefetch`."""
    address, stride = place(words, which, b, t, channel)
    store(target, address)
    store(target + 8, stride)
