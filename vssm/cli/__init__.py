"""The command line: a table of commands, each a dataclass of options with a `run` method.

    vssm COMMAND --help          an example, and what the command takes

tyro makes the options of a command from its fields and their docstrings. A class may have a
`default` method, which returns the values of options that are not given. Shared modules:

| module | what |
| --- | --- |
| `options` | the options of a data set and of a training run |
| `samples` | checks of files, prompts and samples |
| `display` | tables and progress in the terminal |
| `errors` | one line and an exit code for each mistake of the user |
"""

import contextlib
import io
import sys
from typing import Any

import tyro

from vssm import __version__
from vssm.checks import check_choice
from vssm.cli.data import Data
from vssm.cli.errors import box_as_line, report_mistakes, report_sigterm, report_warnings
from vssm.cli.evaluate import Evaluate, Report
from vssm.cli.fill import Fill
from vssm.cli.forecast import Backtest, Forecast
from vssm.cli.generate import Generate
from vssm.cli.hub import Pull, Push
from vssm.cli.lab import Bench, Demo, Reproduce, Sweep
from vssm.cli.serve import Serve
from vssm.cli.train import Train

__all__ = ["COMMANDS", "EXAMPLES", "main"]

COMMANDS: dict[str, type] = {
    "demo": Demo,
    "data": Data,
    "train": Train,
    "generate": Generate,
    "fill": Fill,
    "evaluate": Evaluate,
    "forecast": Forecast,
    "backtest": Backtest,
    "report": Report,
    "sweep": Sweep,
    "reproduce": Reproduce,
    "push": Push,
    "pull": Pull,
    "serve": Serve,
    "bench": Bench,
}
EXAMPLES = {
    "demo": "demo --out demo",
    "data": "data series --series.path electricity.csv --out electricity.png",
    "train": "train mnist --model.kind vssm --train.epochs 20 --out runs/mnist",
    "generate": "generate runs/mnist --num 16 --seed 7 --out samples.png",
    "fill": "fill runs/weather --input weather.csv --num 100 --out filled.csv",
    "evaluate": "evaluate runs/mnist --quick",
    "forecast": "forecast weather.csv --horizon 96 --out forecast.csv",
    "backtest": "backtest weather.csv --horizon 96 --windows 5",
    "report": "report runs/mnist runs/other --out report.html",
    "sweep": "sweep digits --kinds vssm ssm --learning-rates 1e-3 5e-4 --seeds 0 1",
    "reproduce": "reproduce digits --scale small",
    "push": "push runs/mnist OWNER/NAME --private",
    "pull": "pull OWNER/NAME",
    "serve": "serve runs/mnist second=runs/other --port 8000",
    "bench": "bench generate --kinds vssm ssm --out generate.json",
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
                _parse(name, rest).run()


def _parse(name: str, arguments: list[str]) -> Any:  # noqa: ANN401
    """Returns the command with its options."""
    command = COMMANDS[name]
    if {"-h", "--help"} & set(arguments):
        print(f"example: vssm {EXAMPLES[name]}\n", flush=True)
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
    head, tail = "usage: vssm COMMAND [options]\n", "\nvssm COMMAND --help lists its options."
    return "\n".join([head, *lines, tail])
