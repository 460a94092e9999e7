"""The result of a benchmark: written after every number, and continued from its own file.

Every benchmark has one shape: open a `Record`, time calls with a `Stopwatch`, return `finish(...)`.
A file is continued only if the same code made it on the same machine with the same settings.
"""

import importlib.metadata
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from vssm.lab.bench.plot import check_plot, plot_result
from vssm.ops import choose_backend
from vssm.runs.results import machine, result, source, write_result

__all__ = ["Record", "failure", "number"]

_PACKAGES = ("torch", "triton", "numba", "transformers", "mambapy")
_UNTIMED = ("cli/", "evaluation/", "report/", "serve/")  # changes here do not change times
_NOT_MEASURED = ("out", "plot", "restart")  # options that say where results go


class Record:
    """The numbers and notes of one benchmark.

    Arguments:
        benchmark: The function that measures, called `main_NAME`.
        options: The values of its arguments.
        device: Where it runs.
        config: The settings, ready for JSON.
        dtype: What the scan works on, which chooses its backend.
    """

    def __init__(
        self,
        benchmark: Callable[..., object],
        options: Mapping[str, Any],
        device: torch.device,
        config: Mapping[str, Any],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.name = benchmark.__name__.removeprefix("main_")
        self.command = command_line(self.name, benchmark, options)
        self.device, self.plot = device, options["plot"]
        self.out = None if options["out"] is None else Path(options["out"])
        settings = {
            "device": device.type,
            "backend": choose_backend("auto", device, dtype),
            "threads": torch.get_num_threads(),
            **config,
            "versions": {package: _version(package) for package in _PACKAGES},
            "source": source(_UNTIMED),
        }
        self.config: dict[str, Any] = json.loads(json.dumps(settings))  # tuples become lists
        self.metrics: dict[str, float | None] = {}
        self.notes: dict[str, str] = {}
        self._earlier_commands: list[str] = []
        check_plot(self.plot)
        if self.out is not None:
            if self.out.is_dir():
                raise ValueError(f"out={str(self.out)!r} is a folder; give the name of a JSON file")
            self.out.parent.mkdir(parents=True, exist_ok=True)
            if self.out.exists() and not options["restart"]:
                self._continue(self.out)
        made = self.result()
        versions = ", ".join(f"{name} {v}" for name, v in self.config["versions"].items() if v)
        print(
            f"{self.command}: {made['machine']['gpu' if device.type == 'cuda' else 'cpu']}, "
            f"scan backend {self.config['backend']}, {versions}, commit {made['commit']}"
        )
        if self.metrics:
            print(f"{len(self.metrics)} numbers are in {self.out} already", flush=True)

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
        """Returns the result so far, with all commands that contributed to it."""
        made = result(self.name, self.command, {**self.config, "notes": self.notes}, self.metrics)
        return {**made, "command": " && ".join([*self._earlier_commands, made["command"]])}

    def finish(self, title: str, headings: list[str], rows: list[list[str]]) -> dict[str, Any]:
        """Prints a table, draws the picture if one was asked for, and returns the result."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for heading in headings:
            table.add_column(heading, no_wrap=True)
        for row in rows:
            table.add_row(*row)
        Console(width=250).print(table)  # wide enough for the numbers, whatever the terminal
        made = self.result()
        if self.plot is not None:
            plot_result(made, self.plot)
        return made

    def _write(self) -> None:
        if self.out is not None:
            write_result(self.out, self.result())

    def _continue(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
            metrics, config = found["metrics"], found["config"]
            notes, command = config.pop("notes", {}), str(found["command"])
            assert all(
                value is None or isinstance(value, int | float) for value in metrics.values()
            )
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
            raise ValueError(
                f"out={str(path)!r} is damaged or no result; give a new name, or --restart"
            ) from None
        wanted = {"name": self.name, "machine": machine(), **self.config}
        given = {"name": found.get("name"), "machine": found.get("machine"), **config}
        for key, value in wanted.items():
            if value != given.get(key):
                raise ValueError(
                    f"out={str(path)!r} has {key}={given.get(key)!r}, this run has {value!r}; "
                    "use the same, a new name, or --restart"
                )
        self.metrics, self.notes = metrics, notes
        this = self.result()["command"]
        self._earlier_commands = [each for each in command.split(" && ") if each != this]


def failure(error: Exception) -> str:
    """Describes in one line how other people's code failed.

    >>> failure(TypeError("no such\\nargument"))
    'failed: TypeError: no such'
    """
    if isinstance(error, torch.OutOfMemoryError):
        return "does not fit in the device's memory"
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def command_line(name: str, function: Callable[..., object], options: Mapping[str, Any]) -> str:
    """Returns the command that repeats a call, with the options that differ from their defaults.

    >>> def bench(out=None, device="auto", lengths=None, check=False): ...
    >>> options = {"out": "a.json", "device": "cuda", "lengths": (1, 2), "check": True}
    >>> command_line("scan", bench, options)
    'vssm bench scan --device cuda --lengths 1 2 --check'
    """
    words = ["vssm", "bench", name]
    for option, parameter in inspect.signature(function).parameters.items():
        value, flag = options.get(option, parameter.default), option.replace("_", "-")
        if option in _NOT_MEASURED or value == parameter.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, list | tuple) else (value,)
            words += [f"--{flag}", *map(str, values)]
    return " ".join(words)


def number(value: float | None) -> str:
    """Writes a time with two digits, a long one whole.

    >>> number(0.0123), number(12.3), number(1234.5), number(None)
    ('0.012', '12', '1234', '')
    """
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.2g}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
