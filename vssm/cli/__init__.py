"""The command line: a table of commands, each a dataclass of options with a `run`, or a function.

    vssm COMMAND --help          an example, and what the command takes

tyro makes the options of a command from its fields or arguments and their docstrings. A command is
imported when it is called. Shared modules:

| module | what |
| --- | --- |
| `options` | the options of a data set and of a training run |
| `samples` | checks of files, prompts and samples |
| `display` | tables and progress in the terminal |
| `errors` | one line and an exit code for each mistake of the user |
"""

import contextlib
import functools
import importlib
import io
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import tyro

from vssm import __version__
from vssm.checks import check_choice
from vssm.cli.errors import box_as_line, report_mistakes, report_sigterm, report_warnings
from vssm.cli.options import RunOptions

__all__ = ["COMMANDS", "Command", "main", "parse"]


class Command(NamedTuple):
    """A command: where it is, what it does, and an example of its arguments."""

    place: str
    """Module and name of a class with `run`, of a function, or of a table of functions."""
    summary: str
    example: str
    parts: tuple[str, ...] = ()
    """Examples of its parts, if it is a table of functions."""


COMMANDS = {
    "demo": Command(
        "vssm.lab.demo:demo",
        "Draws digits, races three models, trains three, writes a report.",
        "--out demo",
    ),
    "data": Command(
        "vssm.cli.data:Data",
        "Prepares a data set; shows its shape, range, splits and a picture.",
        "series --series.path electricity.csv --out electricity.png",
    ),
    "train": Command(
        "vssm.cli.train:Train",
        "Trains a model and keeps everything about it in a run folder.",
        "mnist --model.kind vssm --train.epochs 20 --out runs/mnist",
    ),
    "generate": Command(
        "vssm.cli.generate:Generate",
        "Generates samples, a picture or text, and a state to resume from.",
        "runs/mnist --num 16 --seed 7 --out samples.png",
    ),
    "fill": Command(
        "vssm.cli.fill:Fill",
        "Fills the gaps of a table, a picture or a text.",
        "runs/weather --input weather.csv --num 100 --out filled.csv",
    ),
    "evaluate": Command(
        "vssm.cli.evaluate:Evaluate",
        "Measures a run on test data: likelihoods, sample quality, times.",
        "runs/mnist --quick",
    ),
    "forecast": Command(
        "vssm.cli.forecast:Forecast",
        "Forecasts what follows a table file: quantiles and a fan chart.",
        "weather.csv --horizon 96 --out forecast.csv",
    ),
    "backtest": Command(
        "vssm.cli.forecast:Backtest",
        "Scores forecasts of a table's last windows, next to naive forecasts.",
        "weather.csv --horizon 96 --windows 5",
    ),
    "report": Command(
        "vssm.cli.report:report_page",
        "Makes one HTML page from runs.",
        "runs/mnist runs/other --out report.html",
    ),
    "sweep": Command(
        "vssm.cli.sweep:Sweep",
        "Trains over a grid of learning rates, seeds and kinds.",
        "digits --kinds vssm ssm --learning-rates 1e-3 5e-4 --seeds 0 1",
    ),
    "reproduce": Command(
        "vssm.lab.reproduce:reproduce",
        "Repeats the paper's experiments; skips finished ones.",
        "digits --scale small",
    ),
    "push": Command(
        "vssm.cli.hub:push_model",
        "Uploads a model and its model card to the Hugging Face hub.",
        "runs/mnist OWNER/NAME --private",
    ),
    "pull": Command(
        "vssm.cli.hub:pull_model",
        "Downloads a model from the Hugging Face hub and says where it is.",
        "OWNER/NAME",
    ),
    "serve": Command(
        "vssm.serve.run:serve",
        "Serves models over HTTP, with a page to try them out at /.",
        "runs/mnist second=runs/other --port 8000",
    ),
    "bench": Command(
        "vssm.lab.bench:BENCHMARKS",
        "Times the scan, training or generation.",
        "generate --kinds vssm ssm --out generate.json",
        ("scan --shapes 64x1024 8x4096 --out scan.json", "train --kinds vssm ssm --steps 20"),
    ),
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command that the arguments name."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with report_mistakes(), report_warnings(), report_sigterm():
        match arguments:
            case [] | ["-h" | "--help" | "help"]:
                print(_help(), flush=True)
            case ["-V" | "--version", *_]:
                print(__version__)
            case ["help", name, *_]:
                main([name, "--help"])
            case [name, *rest]:
                check_choice("command", name, tuple(COMMANDS))
                parse(name, rest)()


def parse(name: str, arguments: list[str]) -> Callable[[], object]:
    """Returns a function that runs a command with these arguments."""
    module, _, attribute = COMMANDS[name].place.partition(":")
    try:
        command: Any = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if name != "serve":  # the others need no extra to begin
            raise
        message = f"serving needs {error.name}; install it with: pip install 'vssm[serve]'"
        raise ValueError(message) from None
    if {"-h", "--help"} & set(arguments):
        own = (part for part in COMMANDS[name].parts if part.split()[0] in arguments)
        print(f"example: vssm {name} {next(own, COMMANDS[name].example)}\n", flush=True)
    if isinstance(command, dict) and arguments and arguments[0] in command:
        command, name, arguments = command[arguments[0]], f"{name} {arguments[0]}", arguments[1:]
    options: dict[str, Any] = {"prog": f"vssm {name}", "args": arguments}
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            if isinstance(command, dict):
                table = {word: _bind(function) for word, function in command.items()}
                return tyro.extras.subcommand_cli_from_dict(table, **options)
            if not isinstance(command, type):
                return tyro.cli(_bind(command), **options)
            if issubclass(command, RunOptions):
                options["default"] = command.default(arguments)
            return tyro.cli(command, **options).run
    except SystemExit as stop:
        box = errors.getvalue()
        if stop.code == 0 or not box.strip():
            raise
    raise ValueError(box_as_line(box, name))


def _bind(function: Callable[..., object]) -> Callable[..., Callable[[], object]]:
    """Returns a function of the same options that is called later: tyro calls what it parses."""

    @functools.wraps(function)
    def bind(*given: Any, **options: Any) -> Callable[[], object]:  # noqa: ANN401
        return functools.partial(function, *given, **options)

    return bind


def _help() -> str:
    lines = [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    head, tail = "usage: vssm COMMAND [options]\n", "\nvssm COMMAND --help lists its options."
    return "\n".join([head, *lines, tail])
