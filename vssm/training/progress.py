"""What a training shows while it runs: a bar on a terminal or in a notebook, else plain lines."""

import sys
import time
from datetime import timedelta
from importlib.util import find_spec
from typing import IO, Any

_QUIET_SECONDS = 10  # between two plain lines, unless there is a validation


class Progress:
    """Shows nothing. `train` calls these methods; a subclass may do anything with them."""

    def start(self, step: int, total: int) -> None:
        """Called once, with the steps that are done and the steps in all."""

    def step(self, step: int) -> None:
        """Called after every step, with the steps that are done."""

    def line(self, line: dict[str, Any]) -> None:
        """Called with every line of log.jsonl."""

    def message(self, text: str) -> None:
        """Called with messages to the user."""

    def close(self) -> None:
        """Called at the end, also after an error."""


def choose_progress() -> Progress:
    """Returns a bar where one can be shown, else plain lines."""
    return Bar() if shows_bars(sys.stdout) else Lines()


def shows_bars(stream: IO[str]) -> bool:
    """Returns whether rich can draw a bar: on a terminal, or in a notebook with ipywidgets."""
    from rich import get_console

    return stream.isatty() or (get_console().is_jupyter and find_spec("ipywidgets") is not None)


class Lines(Progress):
    """Prints a line at every validation, and every ten seconds between validations."""

    def start(self, step: int, total: int) -> None:
        self._first, self._total = step, total
        self._began = self._printed = time.monotonic()

    def line(self, line: dict[str, Any]) -> None:
        now = time.monotonic()
        if line["split"] == "train" and now - self._printed < _QUIET_SECONDS:
            return
        self._printed = now
        step = line["step"]
        seconds = (now - self._began) / max(1, step - self._first) * (self._total - step)
        left = timedelta(seconds=round(seconds))
        print(f"step {step}/{self._total}  {describe(line)}  {left} left", flush=True)

    def message(self, text: str) -> None:
        print(text, flush=True)


class Bar(Progress):
    """Draws a bar with the loss terms, the speed and the time left."""

    def start(self, step: int, total: int) -> None:
        from rich import progress

        columns = (progress.BarColumn(), progress.MofNCompleteColumn())
        columns += (progress.TimeRemainingColumn(), progress.TextColumn("{task.fields[state]}"))
        self._bar = progress.Progress(progress.TextColumn("{task.description}"), *columns)
        self._task = self._bar.add_task("train", total=total, completed=step, state="")
        self._bar.start()

    def step(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def line(self, line: dict[str, Any]) -> None:
        if line["split"] == "valid":
            self._bar.console.print(f"step {line['step']}  {describe(line)}", highlight=False)
        else:
            epoch = f"epoch {line['epoch']:.1f}"
            self._bar.update(self._task, description=epoch, state=describe(line))

    def message(self, text: str) -> None:
        if hasattr(self, "_bar"):
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if hasattr(self, "_bar"):
            self._bar.stop()


def describe(line: dict[str, Any]) -> str:
    """Says a line of the log in words, without the terms that a model does not have.

    >>> describe({"split": "train", "epoch": 1.5, "loss": -3.0, "kl": 0.0, "tokens_per_second": 9})
    'epoch 1.50  train loss -3.00  9 tokens/s'
    """
    loss = "not finite" if line["loss"] is None else f"{line['loss']:.2f}"
    words = [f"epoch {line['epoch']:.2f}", f"{line['split']} loss {loss}"]
    terms = ("reconstruction", "kl", "partial")
    words += [f"{name} {line[name]:.2f}" for name in terms if line.get(name)]
    if line.get("tokens_per_second"):
        words.append(f"{line['tokens_per_second']:,.0f} tokens/s")
    if line.get("best"):
        words.append("(best)")
    if line.get("skipped"):
        words.append(f"{line['skipped']} steps skipped")
    return "  ".join(words)
