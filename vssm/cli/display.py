"""Tables and progress in the terminal."""

import sys
from typing import Any

__all__ = ["ProgressBar", "show_metrics", "show_table"]


def show_table(title: str, values: dict[str, Any]) -> None:
    """Prints names and values under a title."""
    from rich.markup import escape

    _print_table(title, [[[escape(name), _text(value)] for name, value in values.items()]])


def show_metrics(title: str, metrics: dict[str, Any]) -> None:
    """Prints metrics in groups and in words, each with its name in JSON."""
    from vssm.runs.labels import grouped, label

    groups = []
    for heading, _, names in grouped(metrics):
        rows = [[f"  {label(name)}", _text(metrics[name]), f"[dim]{name}[/dim]"] for name in names]
        groups.append([[f"[bold]{heading}[/bold]"], *rows])
    _print_table(title, groups)


def _print_table(title: str, groups: list[list[list[str]]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), show_header=False, title_justify="left")
    for rows in groups:
        table.add_section()
        for row in rows:
            table.add_row(*row)
    Console().print(table)


def _text(value: object) -> str:
    from rich.markup import escape

    return f"{value:.4f}" if isinstance(value, float) else escape(str(value))


class ProgressBar:
    """A progress bar of named stages; plain lines when the output is not a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._plain = not console.is_terminal
        self._progress = Progress(console=console, transient=True, disable=self._plain)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, stage: str, done: int, total: int) -> None:
        """Moves the bar of a stage, which appears with its first call."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
            if self._plain:
                print(f"{stage} ...", file=sys.stderr, flush=True)
        self._progress.update(self._tasks[stage], completed=done)
