"""What all benchmarks share: how a call is timed, and the record of a benchmark.

A benchmark opens a `Record`, calls `time` for each of its numbers, prints `table(...)`, and returns
the record. The JSON file is written after each number, so a benchmark that is stopped leaves its
numbers so far.
"""

import gc
import inspect
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vssm.checks import check_choice, check_number, choose_device, whole_number
from vssm.config import KINDS, ModelConfig
from vssm.ops import choose_backend
from vssm.runs.results import result, write_result

__all__ = ["Record", "check_sizes", "command_line", "failure", "memory_in_use", "model_options"]
__all__ += ["number", "open_device", "spread", "take_times", "wall"]

_SHORT = 100.0  # milliseconds that short calls are repeated for
_MOST_CALLS = 500
# Emptying so much memory takes a GPU longer than Python takes to make the next call, so the
# device never waits between the two events of a call.
_CACHE = 2**30

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
    if device.type == "cuda":  # may record a graph; and an idle GPU takes time to raise its clock
        spent = wall(call, device)
        while spent < _SHORT:
            spent += wall(call, device)
    first = wall(call, device)
    count = min(_MOST_CALLS, max(5, int(_SHORT / max(first, 1e-3)))) if repeats is None else repeats
    count = max(1, min(count, int(1e3 * seconds / max(first, 1e-3))))
    if not (events and device.type == "cuda"):
        return [first, *(wall(call, device) for _ in range(count - 1))]
    cache = torch.empty(_CACHE, dtype=torch.uint8, device=device)
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


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median and the 10 % and 90 % quantiles."""
    median, low, high = np.quantile(times, (0.5, 0.1, 0.9)).tolist()
    return median, low, high


def memory_in_use(device: torch.device) -> int:
    """Frees what is cached on a GPU, resets the peak, and returns the bytes that stay in use."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def open_device(name: str) -> torch.device:
    """Returns the device that "auto", "cpu", "cuda" or "cuda:N" means."""
    device = choose_device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} can not be timed; use 'auto', 'cpu' or 'cuda'")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)  # where events are recorded
    return device


def model_options(kinds: Sequence[str], levels: Sequence[int] = ()) -> dict[str, dict[str, Any]]:
    """Returns options of `ModelConfig` by the name in the result: a kind, or a vssm with levels.

    >>> model_options(["ssm"], [4])
    {'ssm': {'kind': 'ssm'}, 'vssm_l4': {'kind': 'vssm', 'levels': 4}}
    """
    for kind in kinds:
        check_choice("kinds", kind, KINDS)
    models: dict[str, dict[str, Any]] = {kind: {"kind": kind} for kind in kinds}
    models |= {f"vssm_l{number}": {"kind": "vssm", "levels": number} for number in levels}
    for options in models.values():
        ModelConfig(features=1, **options)  # checks the levels before anything is measured
    return models


def check_sizes(**options: int | Sequence[int]) -> None:
    """Raises `ValueError` unless every option is a whole number from 1 on, or a list of them."""
    for name, value in options.items():
        for each in value if isinstance(value, list | tuple) else (value,):
            whole_number(name, each, 1)


class Record:
    """The numbers and notes of one benchmark.

    Arguments:
        name: The name of the result.
        command: What to type to get it again.
        device: Where it runs.
        config: The settings, ready for JSON.
        out: The JSON file, if one is written.
        repeats: As in `take_times`.
        seconds: As in `take_times`; a longer call is left out.
        dtype: What the scan works on, which chooses its backend.
        quantiles: Whether to keep quantiles and, on CUDA, the peak memory: x_p10_ms_y, x_p90_ms_y
            and x_mib_y beside x_ms_y.
    """

    name: str
    command: str
    device: torch.device
    quantiles: bool
    repeats: int | None
    seconds: float

    def __init__(
        self,
        name: str,
        command: str,
        device: torch.device,
        config: Mapping[str, Any],
        out: str | Path | None = None,
        repeats: int | None = None,
        seconds: float = 20.0,
        dtype: torch.dtype = torch.float32,
        quantiles: bool = False,
    ) -> None:
        check_number("seconds_per_point", seconds, 0, above=True)
        check_sizes(repeats=1 if repeats is None else repeats)
        self.name, self.command, self.device, self.quantiles = name, command, device, quantiles
        self.repeats, self.seconds = repeats, seconds
        settings = {
            "device": device.type,
            "backend": choose_backend("auto", device, dtype),
            "threads": torch.get_num_threads(),
            **config,
            "versions": {
                name: version(name) for name in ("torch", "triton", "numba") if find_spec(name)
            },
        }
        self.config: dict[str, Any] = json.loads(json.dumps(settings))  # tuples become lists
        self.metrics: dict[str, float | None] = {}
        self.notes: dict[str, str] = {}
        self.out: Path | None = None if out is None else Path(out)
        if self.out is not None:
            if self.out.is_dir():
                raise ValueError(f"out={str(self.out)!r} is a folder; give the name of a JSON file")
            self.out.parent.mkdir(parents=True, exist_ok=True)
        made = self.result()
        versions = ", ".join(f"{name} {v}" for name, v in self.config["versions"].items())
        print(
            f"{self.command}: {made['machine']['gpu' if device.type == 'cuda' else 'cpu']}, "
            f"scan backend {self.config['backend']}, {versions}, commit {made['commit']}",
            flush=True,
        )

    def time(self, name: str, call: Call, events: bool = False, peer: bool = False) -> None:
        """Times a call and adds its median, unless it would take too long.

        Arguments:
            name: The metric, such as vssm_ms_b1_t28.
            call: What is timed.
            events: As in `take_times`.
            peer: Whether the code is not ours, so that any failure is noted; otherwise only a
                lack of memory is.
        """
        if self._too_long(name):
            return
        before = memory_in_use(self.device)
        try:
            times = take_times(call, self.device, self.repeats, self.seconds, events)
        except Exception as error:
            if not peer and not isinstance(error, torch.OutOfMemoryError):
                raise
            self.note(name, failure(error))
            return
        median, low, high = spread(times)
        metrics: dict[str, float | None] = {name: median}
        if self.quantiles and len(times) > 1:
            metrics[name.replace("_ms_", "_p10_ms_")] = low
            metrics[name.replace("_ms_", "_p90_ms_")] = high
        if self.quantiles and self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - before
            peak -= _CACHE if events else 0  # which `take_times` allocates
            metrics[name.replace("_ms_", "_mib_")] = peak / 2**20
        self.add(metrics)

    def _too_long(self, name: str) -> bool:
        """Notes a call that would exceed its seconds, as shorter sequences of its series show."""
        series, _, length = name.rpartition("_t")
        shorter = [
            (int(match[1]), taken)
            for key, taken in self.metrics.items()
            if taken and (match := re.fullmatch(rf"{re.escape(series)}_t(\d+)", key))
            if int(match[1]) < int(length)
        ]
        steps, taken = max(shorter, default=(1, 0.0))
        if 2 * taken * int(length) / steps <= 1e3 * self.seconds:
            return False
        budget = f"two calls would take longer than {self.seconds:g} s"
        self.note(name, f"left out: {steps} steps took {taken / 1e3:.1f} s, so {budget}")
        return True

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Adds numbers and writes the file."""
        self.metrics |= metrics
        self._write()

    def note(self, name: str, text: str) -> None:
        """Prints and keeps why a number is missing, or what to know about it."""
        self.notes[name] = text
        print(f"{name}: {text}", flush=True)
        self._write()

    def result(self) -> dict[str, Any]:
        """Returns the result so far."""
        return result(self.name, self.command, {**self.config, "notes": self.notes}, self.metrics)

    def table(self, title: str, headings: list[str], rows: list[list[str]]) -> None:
        """Prints a table."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for heading in headings:
            table.add_column(heading, no_wrap=True)
        for row in rows:
            table.add_row(*row)
        Console(width=250).print(table)  # wide enough for the numbers, whatever the terminal

    def _write(self) -> None:
        if self.out is not None:
            write_result(self.out, self.result())


def failure(error: Exception) -> str:
    """Describes in one line how a call failed."""
    if isinstance(error, torch.OutOfMemoryError):
        return "does not fit in the device's memory"
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def command_line(benchmark: Callable[..., object], options: Mapping[str, Any]) -> str:
    """Returns the command that repeats a benchmark, with the options that are not the defaults.

    >>> def main_scan(out=None, device="auto", lengths=None): ...
    >>> command_line(main_scan, {"out": "a.json", "device": "cuda", "lengths": (1, 2)})
    'vssm bench scan --device cuda --lengths 1 2'
    """
    words = ["vssm", "bench", benchmark.__name__.removeprefix("main_")]
    for name, parameter in inspect.signature(benchmark).parameters.items():
        value = options[name]
        if name != "out" and value != parameter.default:
            values = value if isinstance(value, list | tuple) else (value,)
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return " ".join(words)


def number(value: float | None) -> str:
    """Writes a time with two digits, a long one whole.

    >>> number(0.0123), number(12.3), number(1234.5), number(None)
    ('0.012', '12', '1234', '')
    """
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.2g}"
