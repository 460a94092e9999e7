"""The curves of a training, drawn from its log."""

from pathlib import Path

from vssm.data.storage import write_atomically
from vssm.runs.folder import read_log

__all__ = ["curves"]

_TERMS = ("loss", "reconstruction", "kl", "partial", "partial_elbo")


def curves(folder: Path) -> None:
    """Draws the loss terms of the run in a folder against its epochs, as curves.png."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_log(folder)
    terms = [name for name in _TERMS if any(line.get(name) for line in lines)] or ["loss"]
    figure = Figure(figsize=(4 * len(terms), 3), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, len(terms), squeeze=False)[0], terms, strict=True):
        for split, style in (("train", "-"), ("valid", "o-")):
            points = [(line["epoch"], line.get(name)) for line in lines if line["split"] == split]
            points = [(epoch, value) for epoch, value in points if value is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=split, linewidth=1, markersize=3)
        axes.set_xlabel("epoch")
        axes.set_title(f"{name} (nats a sequence)", fontsize=9)
        if axes.lines:
            axes.legend(fontsize=8)
    path = folder / "curves.png"
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=100))
