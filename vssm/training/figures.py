"""The pictures of a training: curves of its log, and samples."""

from pathlib import Path

import torch

from vssm.data import Meta, Split, draw
from vssm.data.storage import write_atomically
from vssm.models import Model
from vssm.runs.folder import read_log
from vssm.sampling.filling import fill
from vssm.sampling.generation import generate

__all__ = ["curves", "samples"]

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


def samples(model: Model, meta: Meta, split: Split, num: int, seed: int, path: Path) -> None:
    """Draws samples; features that are given are those of the first sequences of the split."""
    if meta.given:
        device = next(model.parameters()).device
        index = torch.arange(num, device=split.x.device) % len(split)
        x = split.batch(index, device)
        meta.without_given(x)[:] = torch.nan
        x = fill(model, x, seed=seed)
    else:
        x = generate(model, num=num, length=meta.length, seed=seed).x
    write_atomically(path, lambda file: draw(meta, x, file))
