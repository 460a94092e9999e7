"""Threads of PyTorch on a CPU that other programs use as well."""

import os
import warnings

from vssm.interrupts import is_command

__all__ = ["single_after_fork", "sleep_soon"]

_SPINS = "3000"  # rounds of a loop before a thread that waits sleeps; 300,000 is usual
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_used_by: list[
    int
] = []  # the process that last computed here: a forked child finds its parent's number


def sleep_soon() -> None:
    """Lets threads of a command sleep when they wait for each other; to be called before PyTorch is loaded.

    GNU OpenMP, which PyTorch's builds for Linux use, lets threads that wait spin for milliseconds. Where
    another program wants the processor, they take it from the thread that they wait for: with one of two
    cores busy a step of training took ten times as long. Fewer rounds are better still there, but cost time
    on an idle machine. What the user has set stays as it is, and programs that import the package are left
    alone.
    """
    if is_command() and not any(name in os.environ for name in _SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def single_after_fork() -> None:
    """Keeps a forked process on one thread if its parent has computed; to be called before computing.

    A child has none of its parent's threads, but GNU OpenMP believes that it has, and waits for them forever.
    PyTorch's DataLoader does the same in its workers.
    """
    import torch

    if torch.compiler.is_compiling() or _used_by == [os.getpid()]:
        return
    if _used_by and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        warnings.warn(
            "this process was forked from one that had computed, so PyTorch runs on one thread here; more "
            "would wait forever. For more threads, start it with multiprocessing.get_context('spawn')",
            stacklevel=4,
        )
    _used_by[:] = [os.getpid()]
