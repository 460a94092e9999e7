"""Where a scan on a CPU finds what it reads and writes: a table of words, and tensors of any width by rows.

A kernel is told all in one table: sizes, then the address and strides (batch, time) of operands that go by
steps, then the addresses of the others. Strides are in bytes; address 0 is an operand that is not given.

Rows are LANES numbers, and channels and states may be others than a multiple of that: what does not fit goes
through a buffer with zeros around it. Layouts and letters are those of `scan_numba`.
"""
# ruff: noqa: ANN001, ANN201 (numba infers the types of kernels)

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit, types
from torch import Tensor

from vssm.ops.vectors import (
    LANES,
    ROW,
    draw,
    inline,
    load_number,
    load_row,
    load_word,
    options,
    repeat,
    store,
    store_number,
    transpose,
    zero_row,
)

# From numpy because numba compiles a function again for every Python integer passed to it.
TASK, TASKS, PER_TASK, PER_GROUP, BATCH, LENGTH, CHANNELS, COUNT, SOFTPLUS = np.arange(9)
U, DT, Z, B_, C_, Y, DU, DDT, DZ = np.arange(9, 36, 3)
A_, D_, BIAS, H0, H, DB, DC, DA, DD, DBIAS, DH0 = np.arange(36, 47)

_compile: Any = njit(**options)


def table_of(
    sizes: Sequence[int], rows: Sequence[Tensor | None], wholes: Sequence[Tensor | None]
) -> tuple[array, list]:
    """Returns the table for a kernel, and copies that must live as long as it.

    Arguments:
        sizes: In the order of their words, from TASKS on.
        rows: The operands that have strides, in the order of their words, from u on.
        wholes: The other operands, in the order of their words, from A on.
    """
    words, copies = [0, *sizes], []
    for x in rows:
        if x is None:
            words += (0, 0, 0)
            continue
        by_batch, by_time, by_channel = x.stride()
        if by_channel != 1:
            x = x.contiguous()
            copies.append(x)
            by_batch, by_time, _ = x.stride()
        words += (x.data_ptr(), 4 * by_batch, 4 * by_time)
    for x in wholes:
        x = None if x is None else x.contiguous()
        copies.append(x)
        words.append(0 if x is None else x.data_ptr())
    return array("q", words), copies


@inline
def clear(target, rows):
    for i in range(rows):
        store(target + ROW * i, zero_row())


@_compile
def copy(source, source_stride, target, target_stride, steps, count, padded):
    """Copies `count` numbers a step and adds zeros up to `padded`."""
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
    """Address and stride of an operand from batch row b, step t and a channel on; address 0 if not given."""
    address, stride = load_word(words, which), load_word(words, which + 2)
    return (
        address + load_word(words, which + 1) * b + stride * t + 4 * channel if address else 0
    ), stride


@inline
def place_states(words, which, b, channel):
    address, count, channels = (
        load_word(words, which),
        load_word(words, COUNT),
        load_word(words, CHANNELS),
    )
    return address + 4 * count * (channels * b + channel) if address else 0


@_compile
def read(words, which, b, t, channel, steps, buffer):
    """Address and stride of rows that can be read by blocks: where they are, or a copy with zeros around."""
    address, stride = place(words, which, b, t, channel)
    if not address or (channel + LANES <= load_word(words, CHANNELS) and steps % 4 == 0):
        return address, stride
    copy(
        address, stride, buffer, ROW, steps, min(LANES, load_word(words, CHANNELS) - channel), LANES
    )
    clear(buffer + ROW * steps, -steps % 4)
    return buffer, ROW


@_compile
def write(words, which, b, t, channel, steps, buffer):
    """Address and stride of rows that can be written by blocks: where they belong, or else a buffer."""
    if channel + LANES <= load_word(words, CHANNELS) and steps % 4 == 0:
        return place(words, which, b, t, channel)
    return buffer, ROW


@_compile
def written(words, which, b, t, channel, steps, buffer):
    """Moves what was written to a buffer to where it belongs."""
    address, stride = place(words, which, b, t, channel)
    if buffer != address and address:
        width = min(LANES, load_word(words, CHANNELS) - channel)
        copy(buffer, ROW, address, stride, steps, width, width)


@_compile
def read_numbers(words, which, b, t, steps, buffer):
    """Address and stride of B or C with states rounded up to 4: where it is, or a copy with zeros added."""
    address, stride = place(words, which, b, t, 0)
    count, states = load_word(words, COUNT), -(-load_word(words, COUNT) // 4) * 4
    if count == states:
        return address, stride
    copy(address, stride, buffer, 4 * states, steps, count, states)
    return buffer, 4 * states


@_compile
def read_vector(words, which, channel, buffer):
    """The channels of a vector as a block of equal rows; zero if it is not given."""
    width = min(LANES, load_word(words, CHANNELS) - channel) if load_word(words, which) else 0
    copy(load_word(words, which) + 4 * channel, 0, buffer, 0, 1, width, LANES)
    return repeat(load_row(buffer))


@_compile
def read_states(words, which, b, channel, target):
    """Lays (channels, states) numbers out as (states rounded up to 4, LANES), zero where there are none."""
    source, count = place_states(words, which, b, channel), load_word(words, COUNT)
    width = min(LANES, load_word(words, CHANNELS) - channel)
    for n in range(0, count, LANES):
        if source and width == LANES and n + LANES <= count:
            transpose(source + 4 * n, 4 * count, target + ROW * n, ROW)
            continue
        for m in range(n, min(n + LANES, -(-count // 4) * 4)):
            store(target + ROW * m, zero_row())
            for c in range(width if source and m < count else 0):
                store_number(target + ROW * m + 4 * c, load_number(source + 4 * (count * c + m)))


@_compile
def write_states(words, which, b, channel, source):
    """The inverse of `read_states`."""
    target, count = place_states(words, which, b, channel), load_word(words, COUNT)
    width = min(LANES, load_word(words, CHANNELS) - channel)
    for n in range(0, count if target else 0, LANES):
        if width == LANES and n + LANES <= count:
            transpose(source + ROW * n, ROW, target + 4 * n, 4 * count)
            continue
        for m in range(n, min(n + LANES, count)):
            for c in range(width):
                store_number(target + 4 * (count * c + m), load_number(source + ROW * m + 4 * c))


@inline
def hint(words, which, b, t, channel, target):
    address, stride = place(words, which, b, t, channel)
    store(target, address)
    store(target + 8, stride)


@inline
def draw_task(words):
    """The next task: its group, its tiles and its batch rows; no tiles when all tasks are drawn."""
    task, groups = (
        draw(words),
        -(-load_word(words, CHANNELS) // (LANES * load_word(words, PER_GROUP))),
    )
    first, b = (
        task % groups * load_word(words, PER_GROUP),
        task // groups * load_word(words, PER_TASK),
    )
    last = (
        min(first + load_word(words, PER_GROUP), -(-load_word(words, CHANNELS) // LANES))
        if task < load_word(words, TASKS)
        else first
    )
    return (
        task % groups,
        first,
        last,
        b,
        min(b + load_word(words, PER_TASK), load_word(words, BATCH)),
    )
