"""Kernels on a CPU: how numba compiles them, and how threads share their work.

A kernel is told all in a table of words (`vssm.ops.operands`). A task is a range of batch rows and a *group*,
some tiles of LANES channels; threads draw tasks from a counter. How the work is cut depends on the shapes
only, never on the number of threads, and every sum has one order: the same input gives the same bits.
"""

import functools
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numba import njit
from torch import Tensor

from vssm.ops.operands import table_of
from vssm.ops.vectors import LANES

__all__ = ["cut", "kernel", "room", "run", "total"]

GROUP = 8  # tiles, at most
BATCHES = 16  # partial sums over batch rows, at most
INLINE = 1 << 18  # with fewer elements, waking a second thread costs more than it saves
SHARED = (
    "conv/__init__",
    "operands",
    "tasks",
    "vectors",
)  # what kernels take code from, beside their own


def kernel(function: Callable) -> Callable:
    """Compiles `function(words, scratch)` at its first call, and keeps it on disk where that can be."""
    with suppress(OSError):  # a package without source files: numba has its own ways to name these
        # numba names a file on disk after the function and watches no source but that of the function itself.
        # A name of all sources is never that of what other code was compiled to.
        function.__qualname__ = f"{function.__qualname__}_{sources()}"
    try:
        return njit(error_model="numpy", nogil=True, cache=True)(function)
    except RuntimeError:  # there is no folder that could hold the compiled kernel
        return njit(error_model="numpy", nogil=True)(function)


@functools.cache
def sources() -> str:
    """Returns a digest of all code that kernels are made of."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    shared = (package / "ops" / f"{name}.py" for name in SHARED)
    for path in sorted([*package.rglob("*numba.py"), *shared]):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def room(*shape: int) -> Tensor:
    """Returns memory for results of a kernel: float32 on the CPU, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


@functools.lru_cache
def cut(batch: int, channels: int) -> tuple[int, int, int, int]:
    """Returns the batch rows of a task, the tiles of a group, and the number of batch parts and of groups."""
    per_task = max(1, -(-batch // BATCHES))
    parts, tiles = -(-batch // per_task), -(-channels // LANES)
    # A large group shares more, small groups keep more threads busy.
    per_group = min(GROUP, max(GROUP // 2, parts * tiles // 16))
    return per_task, per_group, parts, -(-tiles // per_group)


def run(
    function: Callable, rows: tuple, wholes: tuple, count: int, size: int, flag: bool = False
) -> None:
    """Runs all tasks of a kernel, in several threads if it pays.

    Arguments:
        function: The kernel.
        rows: The operands that have strides, in the order of their words; the first is (B, T, D).
        wholes: The other operands, in the order of their words.
        count: How many numbers a channel has at every step: states of a scan, taps of a convolution, classes.
        size: The bytes that a thread works in.
        flag: The last of the sizes in the table, of which every kernel has its own.
    """
    batch, length, channels = rows[0].shape
    per_task, per_group, parts, groups = cut(batch, channels)
    tasks = parts * groups
    sizes = (tasks, per_task, per_group, batch, length, channels, count, flag)
    table, copies = table_of(sizes, rows, wholes)
    address = table.buffer_info()[0]
    small = batch * length * channels * count < INLINE
    threads = 1 if small else min(torch.get_num_threads(), tasks)
    scratch = room(threads * size // 4)
    start = scratch.data_ptr()
    others = []
    if threads > 1:
        pool = _pool(os.getpid(), torch.get_num_threads())
        # Each holds on to the memory it works in, even if this thread is interrupted before it is done.
        memory = (table, scratch, copies, rows)
        others = [
            pool.submit(_work, function, address, start + size * i, memory)
            for i in range(1, threads)
        ]
    if tasks:
        function(address, start)
    for other in others:
        # All tasks are drawn by now, so a thread that has not begun has nothing left to do.
        if not other.cancel():
            other.result()


def total(parts: Tensor) -> Tensor:
    """Returns the sum over the first dimension."""
    # Not torch's sum, whose order of additions is its own affair.
    return parts[0] if len(parts) == 1 else torch.from_numpy(np.add.reduce(parts.numpy(), axis=0))


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    # A forked child has none of its parent's threads, so it must not find its parent's pool.
    return ThreadPoolExecutor(threads, "vssm-kernels")


def _work(function: Callable, words: int, scratch: int, memory: tuple) -> None:
    function(words, scratch)
