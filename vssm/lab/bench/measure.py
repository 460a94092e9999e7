"""What all benchmarks share: how a call is timed, and the record of a benchmark.

A benchmark opens a `Record`, calls `time` for each of its numbers, prints `table(...)`, and returns
the record. The JSON file is written after each number, so a benchmark that is stopped leaves its
numbers so far.
"""

import gc
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from vssm.checks import check_choice, check_number, choose_device, whole_number
from vssm.config import KINDS, ModelConfig
from vssm.evaluation.timing import EMPTIED, take_times
from vssm.ops import choose_backend
from vssm.runs.results import result, write_result

Call = Callable[[], object]
T = TypeVar("T")


def median_and_tails(times: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median and the 10 % and 90 % quantiles."""
    median, low, high = np.quantile(times, (0.5, 0.1, 0.9)).tolist()
    return median, low, high


def open_device(name: str) -> torch.device:
    """Returns the device that "auto", "cpu", "cuda" or "cuda:N" means."""
    device = choose_device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} cannot be timed; use 'auto', 'cpu' or 'cuda'")
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


@dataclass
class Record:
    """The numbers and notes of one benchmark."""

    name: str
    command: str
    """What to type to get it again."""
    device: torch.device
    config: dict[str, Any]
    """The settings, ready for JSON."""
    out: Path | None = None
    """The JSON file, if one is written."""
    repeats: int | None = None
    """As in `take_times`."""
    seconds: float = 20.0
    """As in `take_times`; a longer call is left out."""
    dtype: torch.dtype = torch.float32
    """What the scan works on, which chooses its backend."""
    metrics: dict[str, float | None] = field(default_factory=dict, init=False)
    notes: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        check_number("seconds_per_point", self.seconds, 0, above=True)
        check_sizes(repeats=1 if self.repeats is None else self.repeats)
        if self.out is not None:
            self.out = Path(self.out)
            if self.out.is_dir():
                raise ValueError(f"out={str(self.out)!r} is a folder; give the name of a JSON file")
            self.out.parent.mkdir(parents=True, exist_ok=True)
        found = {name: version(name) for name in ("torch", "triton", "numba") if find_spec(name)}
        self.config = {
            "device": self.device.type,
            "backend": choose_backend("auto", self.device, self.dtype),
            "threads": torch.get_num_threads(),
            **self.config,
            "versions": found,
        }
        made, versions = self.result(), ", ".join(f"{name} {v}" for name, v in found.items())
        print(
            f"{self.command}: {made['machine']['gpu' if self.device.type == 'cuda' else 'cpu']}, "
            f"scan backend {self.config['backend']}, {versions}, commit {made['commit']}",
            flush=True,
        )

    def time(self, name: str, call: Call, events: bool = False, peer: bool = False) -> None:
        """Times a call and adds its median, unless it would take too long.

        Of several calls the 10 % and 90 % quantiles are added as well, and on CUDA the peak memory:
        x_p10_ms_y, x_p90_ms_y and x_mib_y beside x_ms_y.

        Arguments:
            name: The metric, such as vssm_ms_b1_t28.
            call: What is timed.
            events: As in `take_times`.
            peer: As in `attempt`.
        """
        if self._too_long(name):
            return
        timed = partial(take_times, call, self.device, self.repeats, self.seconds, events)
        if (made := self.attempt(name, timed, peer)) is None:
            return
        times, peak = made
        median, low, high = median_and_tails(times)
        metrics = {name: median}
        if len(times) > 1:
            metrics[name.replace("_ms_", "_p10_ms_")] = low
            metrics[name.replace("_ms_", "_p90_ms_")] = high
        if peak is not None:
            cache = EMPTIED / 2**20 if events else 0  # which `take_times` allocates
            metrics[name.replace("_ms_", "_mib_")] = peak - cache
        self.add(metrics)

    def attempt(
        self, name: str, call: Callable[[], T], peer: bool = False
    ) -> tuple[T, float | None] | None:
        """Returns what a call returns, and the MiB that it needed on CUDA.

        Notes a lack of memory, and any failure of a `peer`, whose code is not ours; returns None
        then.
        """
        cuda, before = self.device.type == "cuda", 0
        if cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        try:
            made = call()
        except Exception as error:
            if not peer and not isinstance(error, torch.OutOfMemoryError):
                raise
            self.note(name, failure(error))
            return None
        peak = torch.cuda.max_memory_allocated(self.device) - before if cuda else 0
        return made, peak / 2**20 if cuda else None

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
        if self.out is not None:
            write_result(self.out, self.result())

    def note(self, name: str, text: str) -> None:
        """Prints and keeps why a number is missing, or what to know about it."""
        self.notes[name] = text
        print(f"{name}: {text}", flush=True)
        self.add({})

    def result(self) -> dict[str, Any]:
        """Returns the result so far."""
        return result(self.name, self.command, {**self.config, "notes": self.notes}, self.metrics)

    def print_times(self, title: str) -> None:
        """Prints all medians x_ms_b1_t28: a row for each x, a column for each problem b1_t28."""
        times: dict[str, dict[str, float]] = {}
        for name, value in self.metrics.items():
            match = re.fullmatch(r"(?!.*_p[19]0_)(\w+)_ms_(\w+)", name)
            if match and value is not None:
                times.setdefault(match[1], {})[match[2]] = value
        sizes = list(dict.fromkeys(size for own in times.values() for size in own))
        rows = [[name, *(number(own.get(size)) for size in sizes)] for name, own in times.items()]
        self.table(title, ["", *sizes], rows)

    def table(self, title: str, headings: list[str], rows: list[list[str]]) -> None:
        """Prints a table."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(*headings, title=title, title_justify="left", box=SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        Console(width=250).print(table)  # wide enough for the numbers, whatever the terminal


def failure(error: Exception) -> str:
    """Describes in one line how a call failed."""
    if isinstance(error, torch.OutOfMemoryError):
        return "does not fit in the device's memory"
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def command_line(command: str, function: Callable[..., object], options: Mapping[str, Any]) -> str:
    """Returns a command with the options that are given and not the defaults, but for `out`.

    >>> def main_scan(out=None, device="auto", lengths=None): ...
    >>> options = {"out": "a.json", "device": "cuda", "lengths": (1, 2)}
    >>> command_line("vssm bench scan", main_scan, options)
    'vssm bench scan --device cuda --lengths 1 2'
    """
    words = [command]
    for name, parameter in inspect.signature(function).parameters.items():
        value = options.get(name)
        if name != "out" and value is not None and value != parameter.default:
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
