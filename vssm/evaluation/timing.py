"""How long a call takes."""

import time
from collections.abc import Callable

import torch

_SHORT = 100.0  # milliseconds that short calls are repeated for
_MOST_CALLS = 500
EMPTIED = 2**30
"""Bytes that are written before a call timed by events. A GPU needs longer for this than Python for
the next call, so the device never waits between the two events."""

Call = Callable[[], object]


def take_times(
    call: Call,
    device: torch.device,
    repeats: int | None = None,
    seconds: float = 20.0,
    events: bool = False,
) -> list[float]:
    """Returns the milliseconds of repeated calls, after calls that warm up.

    Arguments:
        call: What is timed.
        device: Where its work is done.
        repeats: How many calls are timed; by default 5, and more of a short call.
        seconds: Fewer calls are timed if they would take longer than this; one always is.
        events: On CUDA, time by the device's own events, with an empty L2 cache before each call:
            the time of the kernels alone, on data that comes from memory. Otherwise the clock
            runs until the device has done all work of a call: the time that a user waits.
    """
    call()  # may compile
    spent = 0.0
    while device.type == "cuda" and spent < _SHORT:  # records graphs; an idle GPU has a slow clock
        spent += wall(call, device)
    first = wall(call, device)
    count = min(_MOST_CALLS, max(5, int(_SHORT / max(first, 1e-3)))) if repeats is None else repeats
    count = max(1, min(count, int(1e3 * seconds / max(first, 1e-3))))
    if not (events and device.type == "cuda"):
        return [first, *(wall(call, device) for _ in range(count - 1))]
    cache = torch.empty(EMPTIED, dtype=torch.uint8, device=device)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in pairs:
        cache.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairs]


def wall(call: Call, device: torch.device) -> float:
    """Returns the milliseconds from a call to the end of all work that it started."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)
