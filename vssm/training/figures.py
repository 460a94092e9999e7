"""The curves of a training, drawn from its log."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from vssm.runs.folder import read_line
from vssm.runs.labels import is_number
from vssm.storage import write_atomically

__all__ = ["curves"]

_TERMS = ("loss", "reconstruction", "kl", "partial", "partial_elbo")


def curves(log: str | Path, path: str | Path) -> None:
    """Draws the loss terms of a run against its epochs.

    Arguments:
        log: A log.jsonl.
        path: The PNG, replaced as a whole.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: list[dict[str, Any]] = []
    for line in Path(log).read_bytes().splitlines():
        with suppress(ValueError):  # a damaged line is no reason to end a training
            lines.append(read_line(line))
    terms = [name for name in _TERMS if any(line.get(name) for line in lines)] or ["loss"]
    figure = Figure(figsize=(4 * len(terms), 3), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, len(terms), squeeze=False)[0], terms, strict=True):
        for split, style in (("train", "-"), ("valid", "o-")):
            points = [(line["epoch"], line.get(name)) for line in lines if line["split"] == split]
            points = [(epoch, value) for epoch, value in points if is_number(value)]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=split, linewidth=1, markersize=3)
        axes.set_xlabel("epoch")
        axes.set_title(f"{name} (nats a sequence)", fontsize=9)
        if axes.lines:
            axes.legend(fontsize=8)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=100))
