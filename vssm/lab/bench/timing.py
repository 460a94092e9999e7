"""How time is taken: medians and quantiles of repeated calls after a warm-up, within a budget.

On CUDA, `wall` waits for the device before and after a call, so it measures what a user waits for.
`kernel` uses the device's own events and empties the L2 cache before every call, so it measures
what a kernel takes on data that comes from memory.
"""

import gc
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vssm.checks import check_choice, check_number, choose_device, whole_number
from vssm.config import KINDS, ModelConfig
from vssm.lab.bench.record import Record, failure

__all__ = ["Stopwatch", "check_whole", "kernel", "model_options", "open_device", "spread", "wall"]

# Emptying so much memory takes a GPU longer than Python takes to make the next call, so the
# device never waits between the two events of a call.
_CACHE = 2**30
_MOST_CALLS = 500
_LONG = 1.0  # seconds; calls that take longer get fewer warm-up calls

Call = Callable[[], object]


def open_device(name: str) -> torch.device:
    """Returns the device that "auto", "cpu", "cuda" or "cuda:N" means."""
    device = choose_device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not timed; allowed: 'auto', 'cpu', 'cuda'")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)  # where events are recorded
    return device


def model_options(kinds: Sequence[str], levels: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Returns options of `ModelConfig` by the name in the result: a kind, or a vssm with levels.

    >>> model_options(["ssm"], [4])
    {'ssm': {'kind': 'ssm'}, 'vssm_l4': {'kind': 'vssm', 'levels': 4}}
    """
    for kind in kinds:
        check_choice("kinds", kind, KINDS)
    check_whole(levels=levels)
    models: dict[str, dict[str, Any]] = {kind: {"kind": kind} for kind in kinds}
    models |= {f"vssm_l{number}": {"kind": "vssm", "levels": number} for number in levels}
    for options in models.values():
        ModelConfig(features=1, **options)  # checks the levels before anything is measured
    return models


def check_whole(**options: int | Sequence[int]) -> None:
    """Raises `ValueError` unless every option is a whole number from 1 on, or a list of them."""
    for name, value in options.items():
        for each in value if isinstance(value, list | tuple) else (value,):
            whole_number(name, each, 1)


def wall(call: Call, device: torch.device) -> float:
    """Returns the milliseconds from a call to the end of all work that it started."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def kernel(call: Call, device: torch.device, total_ms: float = 100, most: int = 200) -> list[float]:
    """Returns the milliseconds of each of 3 to `most` calls that take `total_ms` together."""
    call()
    repeats = int(min(most, max(3, total_ms / max(wall(call, device), 1e-3))))
    if device.type != "cuda":
        return [wall(call, device) for _ in range(repeats)]
    cache = torch.empty(_CACHE, dtype=torch.uint8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        cache.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median and the 10 % and 90 % quantiles.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    (3.0, 1.4, 4.6)
    """
    if len(times) == 1:
        return times[0], times[0], times[0]
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return statistics.median(times), deciles[0], deciles[-1]


@dataclass
class Stopwatch:
    """Times calls by the clock and adds each number to the record as soon as it is known."""

    record: Record
    repeats: int
    """How often each call is timed, if the budget allows it."""
    seconds: float
    """The budget of each number, without its warm-up; one call is always timed."""
    at_least: float = 0.0
    """Seconds that short calls are repeated for. They also warm up as long, because an idle GPU
    slows down its clock."""
    more: bool = False
    """Whether to record quantiles and, for single calls on CUDA, the peak memory: beside x_ms_y
    they are x_p10_ms_y, x_p90_ms_y and x_mib_y."""

    def __post_init__(self) -> None:
        check_whole(repeats=self.repeats)
        check_number("seconds_per_point", self.seconds, 0, above=True)
        self.device = self.record.device
        self.warm = 3 if self.device.type == "cuda" else 1

    def time(self, calls: Mapping[str, Call], expected: float = 0.0) -> None:
        """Times calls in turns, so that a disturbance meets all of them.

        Arguments:
            calls: What to time, by metric name; a name that has a number already is skipped.
            expected: Seconds that a call is expected to take.
        """
        watched = self.more and self.device.type == "cuda" and len(calls) == 1
        before = torch.cuda.memory_allocated(self.device) if watched else 0
        if watched:
            torch.cuda.reset_peak_memory_stats(self.device)
        times: dict[str, list[float]] = {}
        for name, call in calls.items():
            if name in self.record.metrics:
                continue
            self.record.notes.pop(name, None)
            if self._fits(name, lambda call=call: self._warm_up(call, expected)) is not None:
                times[name] = []
        for turn in range(max(self.repeats, _MOST_CALLS)):
            for name in list(times):
                spent = sum(times[name]) / 1e3
                enough = turn >= self.repeats and spent >= self.at_least
                if times[name] and (enough or spent >= self.seconds):
                    continue
                taken = self._fits(name, lambda name=name: wall(calls[name], self.device))
                if taken is None:
                    del times[name]
                else:
                    times[name].append(taken)
        for name, taken in times.items():
            median, low, high = spread(taken)
            metrics: dict[str, float | None] = {name: median}
            if self.more and len(taken) > 1:
                metrics[name.replace("_ms_", "_p10_ms_")] = low
                metrics[name.replace("_ms_", "_p90_ms_")] = high
            if watched:
                peak = torch.cuda.max_memory_allocated(self.device) - before
                metrics[name.replace("_ms_", "_mib_")] = peak / 2**20
            self.record.add(metrics)

    def time_length(self, series: str, where: str, length: int, call: Call) -> None:
        """Times one call of a series over lengths, unless shorter ones predict a broken budget."""
        name = f"{series}_{where}t{length}"
        pattern = re.compile(rf"{re.escape(series)}_{where}t(\d+)")
        shorter = [
            (int(match[1]), taken)
            for key, taken in self.record.metrics.items()
            if taken is not None and (match := pattern.fullmatch(key)) and int(match[1]) < length
        ]
        steps, taken = max(shorter, default=(length, 0.0))
        expected = taken / 1e3 * length / steps
        if 2 * expected > self.seconds and name not in self.record.metrics:
            budget = f"two calls would take longer than {self.seconds:g} s"
            self.record.note(name, f"left out: {steps} steps took {taken / 1e3:.1f} s, so {budget}")
            return
        self.time({name: call}, expected)

    def free_memory(self) -> None:
        """Gives memory back, so that one call does not take it from the next."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _warm_up(self, call: Call, expected: float) -> int:
        """Makes the calls that do not count; returns their number."""
        # Never one alone on CUDA: the second may be recorded, and takes twice as long then.
        wanted = min(2, self.warm) if expected > _LONG else self.warm
        call()  # may compile
        calls, spent = 1, 0.0
        while calls < wanted or (spent < self.at_least and calls < _MOST_CALLS):
            spent += wall(call, self.device) / 1e3
            calls += 1
        return calls

    def _fits(self, name: str, call: Callable[[], float]) -> float | None:
        """Returns what a call returns, or None with a note where memory does not suffice."""
        try:
            return call()
        except torch.OutOfMemoryError as error:
            self.record.note(name, failure(error))
        self.free_memory()
        return None
