"""Threads of PyTorch on a CPU that other programs use as well."""

import os

from vssm.interrupts import is_command

__all__ = ["sleep_soon"]

_SPINS = "3000"  # rounds of a loop before a thread that waits sleeps; 300,000 is usual
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


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
