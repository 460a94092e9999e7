"""Tables and progress in the terminal."""

import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from vssm.runs.labels import grouped, label


def show_table(title: str, values: dict[str, Any]) -> None:
    """Prints names and values under a title."""
    table = _table(title)
    for name, value in values.items():
        table.add_row(escape(name), _text(value))
    Console().print(table)


def show_metrics(title: str, metrics: dict[str, Any]) -> None:
    """Prints metrics in groups and in words, each with its name in JSON."""
    table = _table(title)
    for heading, _, names in grouped(metrics):
        table.add_section()
        table.add_row(f"[bold]{heading}[/bold]")
        for name in names:
            table.add_row(f"  {label(name)}", _text(metrics[name]), f"[dim]{name}[/dim]")
    Console().print(table)


def _table(title: str) -> Table:
    return Table(title=escape(title), show_header=False, title_justify="left")


def _text(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else escape(str(value))


class ProgressBar(Progress):
    """A progress bar of named stages; plain lines when the output is not a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        super().__init__(console=console, transient=True, disable=not console.is_terminal)

    def show(self, stage: str, done: int, total: int) -> None:
        """Moves the bar of a stage, which appears with its first call."""
        known = {task.description: task.id for task in self.tasks}
        if stage not in known:
            known[stage] = self.add_task(stage, total=total)
            if self.disable:
                print(f"{stage} ...", file=sys.stderr, flush=True)
        self.update(known[stage], completed=done)
