"""How time is taken: after a warm-up, a call at a time, medians and quantiles, within a budget.

On CUDA `wall` waits for the device before and after a call, so that it counts what a user waits for, while
`kernel` uses the device's own events and empties its L2 cache before every call, so that it counts what a
kernel takes on data that comes from memory.
"""

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vssm.checks import check_choice, choose_device
from vssm.config import KINDS, ModelConfig
from vssm.lab.bench.record import Record

__all__ = [
    "Stopwatch",
    "best_ms",
    "check_whole",
    "kernel",
    "open_device",
    "options_of",
    "spread",
    "wall",
]

_CACHE = 256 * 2**20  # bytes that push everything else out of any L2 cache
_MOST_CALLS = 500
_LONG, _ENDLESS = (
    1.0,
    10.0,
)  # seconds of a call that two calls warm up, or none: its start is lost in it

Call = Callable[[], object]


def open_device(name: str) -> torch.device:
    """Returns the device that "auto", "cpu", "cuda" or "cuda:N" means."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"device={name!r} is unknown; allowed: 'auto', 'cpu', 'cuda', 'cuda:N'")
    device = choose_device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)  # where events are recorded
    return device


def options_of(kinds: Sequence[str], levels: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Returns what a `ModelConfig` needs for each name in a record: a kind, or a vssm with levels.

    >>> options_of(["ssm"], [4])
    {'ssm': {'kind': 'ssm'}, 'vssm_l4': {'kind': 'vssm', 'levels': 4}}
    """
    for kind in kinds:
        check_choice("kinds", kind, KINDS)
    check_whole("levels", *levels)
    models: dict[str, dict[str, Any]] = {kind: {"kind": kind} for kind in kinds}
    for number in levels:
        models[f"vssm_l{number}"] = {"kind": "vssm", "levels": number}
        ModelConfig(
            features=1, **models[f"vssm_l{number}"]
        )  # for its checks, before anything is measured
    return models


def check_whole(name: str, *values: int) -> None:
    """Raises `ValueError` unless all values are whole numbers from 1 on."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not allowed; allowed: whole numbers >= 1")


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
    """Returns the milliseconds of each of several calls, by CUDA events; on a CPU by the clock.

    Arguments:
        call: What to time.
        device: Where it runs.
        total_ms: How long all calls should take together; there are at least 3, and `most` at most.
        most: The largest number of calls.
    """
    call()
    repeats = int(min(most, max(3, total_ms / max(wall(call, device), 1e-3))))
    if device.type != "cuda":
        return [wall(call, device) for _ in range(repeats)]
    cache = torch.empty(_CACHE, dtype=torch.uint8, device=device)
    starts, ends = (
        [torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2)
    )
    for start, end in zip(starts, ends, strict=True):
        cache.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median and the 10 % and 90 % quantiles.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    (3.0, 1.4, 4.6)
    """
    if len(times) == 1:
        return times[0], times[0], times[0]
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return statistics.median(times), deciles[0], deciles[-1]


def best_ms(call: Call, device: torch.device, repeats: int = 10) -> float:
    """Returns the shortest of several calls, after one that does not count."""
    call()
    return min(wall(call, device) for _ in range(repeats))


@dataclass
class Stopwatch:
    """Times calls by the clock within a budget, and writes each number down as soon as it is known."""

    device: torch.device
    """Where the calls run."""
    repeats: int
    """How often each is timed, if the budget allows it."""
    seconds: float
    """What each may take in all after its first call; one timed call is always taken."""
    warm: int
    """Calls before the timed ones; fewer when they use up half of the budget or take long."""
    more: bool = False
    """Whether to record the 10 % and 90 % quantiles and, of a call alone on CUDA, the most memory it took as
    well: beside x_ms_y they are x_p10_ms_y, x_p90_ms_y and x_mib_y."""

    at_least: float = 0.0
    """Seconds that short calls should take together, 500 at most: they are timed more often and, since a GPU
    that has little to do slows down its clock, warm up as long."""

    def __post_init__(self) -> None:
        check_whole("repeats", self.repeats)
        if not self.seconds > 0:
            raise ValueError(
                f"seconds_per_point={self.seconds} is not allowed; allowed: a number > 0"
            )

    @property
    def turns(self) -> bool:
        """Whether calls take turns: a CPU has other work that disturbs, a GPU memory that is short."""
        return self.device.type == "cpu"

    def together(self, record: Record, calls: Mapping[str, Call], expected: float = 0.0) -> None:
        """Times calls in turns, so that a disturbance meets all of them, and records what they took.

        A call whose number is known already, or that does not fit the device's memory, is left out; the
        latter is noted. Those that are `expected` to take long, in seconds, are timed after fewer others.
        """
        # Never one alone: the second may be recorded, and takes twice as long then.
        most_warm = (
            0 if expected > _ENDLESS else min(2, self.warm) if expected > _LONG else self.warm
        )
        times: dict[str, list[float]] = {}
        spent: dict[str, float] = {}
        watched = self.more and self.device.type == "cuda" and len(calls) == 1
        before = torch.cuda.memory_allocated(self.device) if watched else 0
        if watched:
            torch.cuda.reset_peak_memory_stats(self.device)
        for name, call in calls.items():
            if name in record.metrics:
                continue
            record.notes.pop(name, None)
            with self._memory(record, name):
                warm, spent[name] = self._warm_up(call, most_warm)
                times[name] = []
                if warm < self.warm:
                    why = (
                        f"{self.seconds:g} s a point" if most_warm == self.warm else "it takes long"
                    )
                    record.note(name, f"warmed up by {warm} calls, not {self.warm}: {why}")
        for turn in range(max(self.repeats, _MOST_CALLS)):
            for name in list(times):
                if times[name] and spent[name] >= self.seconds:
                    continue
                if turn >= self.repeats and sum(times[name]) >= 1e3 * self.at_least:
                    continue
                taken = None
                with self._memory(record, name):
                    taken = wall(calls[name], self.device)
                    times[name].append(taken)
                    spent[name] += taken / 1e3
                if taken is None:
                    del times[name]
        for name, taken in times.items():
            median, *quantiles = spread(taken)
            metrics: dict[str, float | None] = {name: median}
            if self.more and len(taken) > 1:
                for part, value in zip(("p10", "p90"), quantiles, strict=True):
                    metrics[name.replace("_ms_", f"_{part}_ms_")] = value
            if watched:
                most = torch.cuda.max_memory_allocated(self.device) - before
                metrics[name.replace("_ms_", "_mib_")] = most / 2**20
            record.add(metrics)

    def alone(self, record: Record, series: str, where: str, length: int, call: Call) -> None:
        """Times one call of a series over lengths, unless a shorter one says that it breaks the budget."""
        name = f"{series}_{where}t{length}"
        if name in record.metrics:
            return
        known = [
            (int(match[1]), taken)
            for key, taken in record.metrics.items()
            if taken is not None
            and (match := re.fullmatch(rf"{re.escape(series)}_{where}t(\d+)", key))
        ]
        steps, taken = max((point for point in known if point[0] < length), default=(length, 0.0))
        seconds = taken / 1e3 * length / steps
        if 2 * seconds > self.seconds:
            told = f"left out: {steps} steps took {taken / 1e3:.1f} s, so two calls pass {self.seconds:g} s"
            record.note(name, told)
            return
        self.together(record, {name: call}, seconds)

    def tidy(self) -> None:
        """Gives memory back, so that one call does not take it from the next."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _warm_up(self, call: Call, most: int) -> tuple[int, float]:
        """Returns the calls made and the seconds that all but the first, which may compile, took."""
        if most == 0:
            return 0, 0.0
        call()
        warm, spent = 1, 0.0
        while spent < self.seconds / 2 and (
            warm < most or (most == self.warm and spent < self.at_least and warm < _MOST_CALLS)
        ):
            spent += wall(call, self.device) / 1e3
            warm += 1
        return warm, spent

    @contextmanager
    def _memory(self, record: Record, name: str) -> Iterator[None]:
        """Notes what does not fit the device's memory, and goes on."""
        try:
            yield
        except torch.OutOfMemoryError:
            record.note(name, "does not fit the device's memory")
        else:
            return
        self.tidy()
