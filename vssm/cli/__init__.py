"""The command line: a table of commands, each a dataclass of options with a `run` method.

    vssm COMMAND --help          what a command takes

Options come from the typed dataclasses that Python users fill in as well. Each command has a module of its
name (`push` and `pull` share `hub`); what commands share:

| module | what |
| --- | --- |
| `options` | the options of a data set and of a training run |
| `folders` | the folder that a name stands for, and what it says of its data |
| `samples` | prompts and samples as files |
| `display` | tables and progress in the terminal |
| `errors` | one line and an exit code for each mistake of the user |
"""

import contextlib
import io
import sys
from typing import Any

import tyro

from vssm.checks import check_choice
from vssm.cli.bench import Bench
from vssm.cli.data import Data
from vssm.cli.demo import Demo
from vssm.cli.errors import (
    box_as_line,
    mistakes_in_one_line,
    stopped_by_signal,
    warnings_in_one_line,
)
from vssm.cli.evaluate import Evaluate
from vssm.cli.forecast import Forecast
from vssm.cli.generate import Generate
from vssm.cli.hub import Pull, Push
from vssm.cli.report import Report
from vssm.cli.reproduce import Reproduce
from vssm.cli.serve import Serve
from vssm.cli.sweep import Sweep
from vssm.cli.train import Train

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, type] = {
    "demo": Demo,
    "data": Data,
    "train": Train,
    "generate": Generate,
    "evaluate": Evaluate,
    "forecast": Forecast,
    "report": Report,
    "sweep": Sweep,
    "reproduce": Reproduce,
    "push": Push,
    "pull": Pull,
    "serve": Serve,
    "bench": Bench,
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command that the arguments name."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) > 1 and arguments[0] == "help":
        arguments = [arguments[1], "--help"]
    with mistakes_in_one_line(), warnings_in_one_line(), stopped_by_signal():
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(_help(), flush=True)
            return
        if arguments[0] in ("-V", "--version"):
            import vssm

            print(vssm.__version__)
            return
        name, rest = arguments[0], arguments[1:]
        check_choice("command", name, tuple(COMMANDS))
        _parse(name, rest).run()


def _parse(name: str, arguments: list[str]) -> Any:  # noqa: ANN401
    """Returns the command with its options."""
    command = COMMANDS[name]
    default = command.default(arguments) if hasattr(command, "default") else tyro.MISSING_NONPROP
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(command, prog=f"vssm {name}", args=arguments, default=default)
    except SystemExit as stop:
        box = errors.getvalue()
        if stop.code == 0 or not box.strip():
            raise
    raise ValueError(box_as_line(box, name))


def _help() -> str:
    lines = [
        f"  {name:<10}{(command.__doc__ or '').splitlines()[0]}"
        for name, command in COMMANDS.items()
    ]
    head, tail = (
        ["usage: vssm COMMAND [options]", ""],
        ["", "vssm COMMAND --help says what it takes."],
    )
    return "\n".join(head + lines + tail)
