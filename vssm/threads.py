"""Threads of PyTorch on a CPU that other programs use as well."""

import os

from vssm.interrupts import is_command

__all__ = ["sleep_soon"]

_BUSY = 0.5  # of the load average: somebody else computes
_SPINS = {"busy": 100, "idle": 10_000}  # rounds of a loop before a thread that waits sleeps; 300,000 is usual
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def sleep_soon() -> None:
    """Lets threads of a command sleep when they wait for each other; to be called before PyTorch is loaded.

    GNU OpenMP, which PyTorch's builds for Linux use, lets threads that wait spin for milliseconds. Where
    another program wants the processor, that is the time which the thread needs that they wait for: with one of two
    cores busy a step of training took twenty times as long. Short spins cost nothing on an idle machine, very
    short ones do. What the user has set stays as it is, and programs that import the package are left alone.
    """
    if not is_command() or any(name in os.environ for name in _SETTINGS) or not hasattr(os, "getloadavg"):
        return
    os.environ["GOMP_SPINCOUNT"] = str(_SPINS["busy" if os.getloadavg()[0] > _BUSY else "idle"])
