"""The result of a benchmark as it grows: written after every number, taken up again where it stopped.

A file is gone on with only if it was made by the same code, on the same machine, with the same settings;
a damaged one, or one of something else, is named and left alone.
"""

import importlib.metadata
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import vssm
from vssm.ops import choose_backend
from vssm.runs.results import commit, machine, result, source, write_result

__all__ = ["Record", "failure", "number", "table", "typed"]

_PACKAGES = ("torch", "triton", "numba", "transformers", "mambapy")
# Beginnings of names in the package, of what no benchmark times.
_UNTIMED = ("cli/", "evaluation/", "lab/bench/plot", "lab/compare_text", "lab/demo", "lab/page/")
_UNTIMED += ("lab/reproduce", "lab/scale", "lab/sweep", "report/", "runs/results", "serve/")
_PLACES = ("out", "plot", "restart")  # options that say where things go, not what is measured


class Record:
    """Creates a record of numbers and notes, with those that the file `out` already holds.

    Arguments:
        name: What is measured: "scan", "train", "generate", "forecast" or "table1".
        command: What to type to get it again.
        device: Where it runs.
        config: The settings, ready for JSON.
        out: The file; nothing is written if not given.
        restart: Whether to leave what the file holds and write it anew.
        dtype: What the scan works on, which chooses its backend.
    """

    def __init__(
        self,
        name: str,
        command: str,
        device: torch.device,
        config: Mapping[str, Any],
        out: str | Path | None = None,
        restart: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.name, self.command, self.out = name, command, None if out is None else Path(out)
        self.config = {
            "device": device.type,
            "backend": choose_backend("auto", device, dtype),
            "threads": torch.get_num_threads(),
            **config,
            "versions": {package: _version(package) for package in _PACKAGES},
            "source": _source(),
        }
        self.config = json.loads(json.dumps(self.config))  # tuples as a file has them
        self.metrics: dict[str, float | None] = {}
        self.notes: dict[str, str] = {}
        self._before: list[str] = []  # commands that the file has numbers of
        if self.out is not None:
            if self.out.is_dir():
                raise ValueError(
                    f"out={str(self.out)!r} is a folder; allowed: the name of a JSON file"
                )
            self.out.parent.mkdir(parents=True, exist_ok=True)
            if self.out.exists() and not restart:
                self._take_up(self.out)
        versions = ", ".join(
            f"{key} {value}" for key, value in self.config["versions"].items() if value
        )
        where = machine()["gpu"] if device.type == "cuda" else machine()["cpu"]
        print(
            f"{command}: {where}, scan backend {self.config['backend']}, {versions}, commit {commit()}"
        )
        if self.metrics:
            print(f"{len(self.metrics)} numbers are in {self.out} already", flush=True)

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Adds numbers and writes the file."""
        self.metrics |= metrics
        self.write()

    def note(self, name: str, text: str) -> None:
        """Says, and keeps, why a number is missing or what to know about it."""
        self.notes[name] = text
        print(f"{name}: {text}", flush=True)
        self.write()

    def fail(self, name: str, error: Exception) -> None:
        """Notes how code of others failed."""
        self.note(name, failure(error))

    def made(self) -> dict[str, Any]:
        """Returns the result so far, in the envelope of all results, with all commands that made it."""
        made = result(self.name, self.command, {**self.config, "notes": self.notes}, self.metrics)
        return {**made, "command": " && ".join([*self._before, made["command"]])}

    def write(self) -> None:
        """Writes what there is, if the record has a file."""
        if self.out is not None:
            write_result(self.out, self.made())

    def _take_up(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
            metrics, config, notes = (
                found["metrics"],
                found["config"],
                found["config"].pop("notes", {}),
            )
            assert all(isinstance(part, dict) for part in (metrics, config, notes))
            assert all(
                value is None or isinstance(value, int | float) for value in metrics.values()
            )
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
            raise ValueError(
                f"out={str(path)!r} is damaged or no result; allowed: a new name, or --restart"
            ) from None
        given = {"name": found.get("name"), "machine": found.get("machine"), **config}
        made = self.made()
        own = {**made["config"], "name": self.name, "machine": machine()}
        own.pop("notes")
        for key in own:
            if own.get(key) != given.get(key):
                raise ValueError(
                    f"out={str(path)!r} has {key}={given.get(key)!r}, this run {own.get(key)!r}; "
                    "allowed: the same, a new name, or --restart"
                )
        self.metrics, self.notes = metrics, notes
        commands = str(found.get("command")).split(" && ")
        self._before = [command for command in commands if command != made["command"]]


def failure(error: Exception) -> str:
    """Says how code of others failed, in one line.

    >>> failure(TypeError("no such\\nargument"))
    'failed: TypeError: no such'
    """
    if isinstance(error, torch.OutOfMemoryError):
        return "does not fit the device's memory"
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def typed(what: str, function: Callable[..., object], given: Mapping[str, Any]) -> str:
    """Returns what to type for a call of a benchmark: only options that differ from their defaults.

    >>> def bench(out=None, device="auto", lengths=None, check=False): ...
    >>> typed("scan", bench, {"out": "a.json", "device": "cuda", "lengths": (1, 2), "check": True})
    'vssm bench scan --device cuda --lengths 1 2 --check'
    """
    words = ["vssm", "bench", what]
    for name, parameter in inspect.signature(function).parameters.items():
        value, flag = given.get(name, parameter.default), name.replace("_", "-")
        if name in _PLACES or value == parameter.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, list | tuple) else (value,)
            words += [
                f"--{flag}",
                *("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values),
            ]
    return " ".join(words)


def table(title: str, headings: list[str], rows: list[list[str]]) -> None:
    """Prints a table, wide enough for its numbers whatever the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in headings:
        made.add_column(heading, no_wrap=True)
    for row in rows:
        made.add_row(*row)
    Console(width=250).print(made)


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


def _source() -> str:
    """Returns a digest of the code that is timed, and that times: there may be no commit where it runs."""
    return source(_UNTIMED, Path(vssm.__file__).parent)
