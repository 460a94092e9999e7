"""What commands show in the terminal while they work and when they are done."""

import sys
from typing import Any

__all__ = ["ProgressBar", "show_metrics", "show_table"]


def show_table(title: str, values: dict[str, Any]) -> None:
    """Prints names and values under a title."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), show_header=False, title_justify="left")
    for name, value in values.items():
        table.add_row(
            escape(name), f"{value:.4f}" if isinstance(value, float) else escape(str(value))
        )
    Console().print(table)


def show_metrics(title: str, metrics: dict[str, Any]) -> None:
    """Prints metrics in groups and in words, each with its name in JSON."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from vssm.runs.labels import grouped, label

    table = Table(title=escape(title), show_header=False, title_justify="left")
    for heading, _, names in grouped(metrics):
        table.add_section()
        table.add_row(f"[bold]{heading}[/bold]", "", "")
        for name in names:
            value = metrics[name]
            shown = f"{value:.4f}" if isinstance(value, float) else str(value)
            table.add_row(f"  {escape(label(name))}", shown, f"[dim]{escape(name)}[/dim]")
    Console().print(table)


class ProgressBar:
    """A progress bar of named stages; plain lines when the output is no terminal."""

    def __enter__(self) -> "ProgressBar":
        from rich.console import Console
        from rich.progress import Progress

        self._console = Console(stderr=True)
        self._progress = Progress(console=self._console, transient=True)
        self._tasks: dict[str, Any] = {}
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def show(self, stage: str, done: int, total: int) -> None:
        """Moves the bar of a stage, which appears with its first call."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
            if not self._console.is_terminal:
                print(f"{stage} ...", file=sys.stderr, flush=True)
        self._progress.update(self._tasks[stage], completed=done)
