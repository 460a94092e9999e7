"""Shows a data set: its facts as a dictionary, a few sequences as a picture."""

import hashlib
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vssm.data.dataset import Data
from vssm.data.meta import Meta
from vssm.data.storage import write_atomically


def describe(data: Data) -> dict[str, Any]:
    """Returns the facts about a data set, ready for JSON; reads all splits, test included.

    Example:
        >>> from vssm.data import DataConfig, open_data
        >>> facts = describe(open_data(DataConfig(name="digits")))
        >>> facts["shape"], facts["range"], facts["splits"]
        ([8, 8], [0.0, 1.0], {'train': 1294, 'valid': 144, 'test': 359})
    """
    splits = {"train": data.train, "valid": data.valid, "test": data.test()}
    train = data.train
    bounds = [bound.item() for bound in torch.aminmax(train.x)]
    facts: dict[str, Any] = {
        "name": data.meta.name,
        "shape": list(train.shape),
        "features": data.meta.features,
        "dtype": str(train.x.dtype).removeprefix("torch."),
        "range": bounds if train.maximum == 1 else [bound / train.maximum for bound in bounds],
        "splits": {name: len(split) for name, split in splits.items()},
        "split_seed": data.config.seed,
        "suggested_head": data.meta.suggested_head,
        "files": [
            {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in data.files
        ],
    }
    if train.labels is not None:
        labels = {name: split.labels for name, split in splits.items() if split.labels is not None}
        facts["classes"] = {k: torch.bincount(v, minlength=10).tolist() for k, v in labels.items()}
    if train.lengths is not None:
        facts["lengths"] = [bound.item() for bound in torch.aminmax(train.lengths)]
    if data.meta.columns is not None:
        facts["columns"] = list(data.meta.columns)
    return facts


def picture(data: Data, path: str | Path) -> Path:
    """Saves a PNG of training sequences, spread evenly over the training set; returns its path."""
    num = min(len(data.train), 32 if data.meta.image_shape else 6)
    index = np.linspace(0, len(data.train) - 1, num).astype(int)
    x, lengths = data.train.batch(index), data.train.real(index)
    if lengths is not None:  # padding is not drawn
        x[torch.arange(x.shape[1]) >= lengths[:, None]] = torch.nan
    path = Path(path)
    write_atomically(path, lambda file: draw(data.meta, x, file))
    return path


def draw(meta: Meta, x: Tensor, path: str | Path) -> Path:
    """Saves a PNG of sequences: a grid of images, the lines of up to six series, or some text.

    Arguments:
        meta: What the sequences are.
        x: (B, T, D) values or (B, T) tokens, as a model reads or generates them.
        path: Where the PNG goes.

    Returns:
        `path`.
    """
    path, x = Path(path), x.detach().cpu()
    if meta.image_shape is not None:
        from matplotlib.image import imsave

        grid = tiled(meta.to_image(x).numpy(), min(8, len(x)))
        zoom = max(1, 600 // grid.shape[1])
        imsave(path, grid.repeat(zoom, 0).repeat(zoom, 1), format="png")
        return path
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as a box
        if x.dim() == 2:
            _draw_text(figure, [meta.decode(tokens) for tokens in x[:4]])
        else:
            _draw_lines(figure, meta, meta.without_given(x[:6]).float().numpy())
        figure.savefig(path, format="png", dpi=100)
    return path


def tiled(images: np.ndarray, across: int) -> np.ndarray:
    """Returns images (M, H, W, C) in [0, 1] as one of 8-bit RGB, in rows of so many."""
    down = -(-len(images) // across)
    frame = [(0, down * across - len(images)), (1, 1), (1, 1), (0, 0)]
    images = np.pad(np.nan_to_num(images), frame, constant_values=1)  # white
    _, height, width, channels = images.shape
    grid = images.reshape(down, across, height, width, channels).swapaxes(1, 2)
    grid = grid.reshape(down * height, across * width, channels)
    return np.rint(np.broadcast_to(grid, (*grid.shape[:2], 3)) * 255).astype(np.uint8)


def _draw_lines(figure: Any, meta: Meta, x: np.ndarray) -> None:  # noqa: ANN401
    figure.set(figwidth=8, figheight=1.6 * len(x), layout_engine="constrained")
    rows = figure.subplots(len(x), 1, sharex=True, squeeze=False)[:, 0]
    for axes, sequence in zip(rows, x, strict=True):
        axes.plot(sequence, linewidth=0.8)
        if meta.context is not None:
            axes.axvline(meta.context - 0.5, color="grey", linestyle=":", linewidth=0.8)
    if meta.columns is not None and len(meta.columns) <= 10:
        names = [name.replace("$", r"\$") for name in meta.columns]
        rows[0].legend(names, fontsize=6, ncols=5)


def _draw_text(figure: Any, texts: list[str]) -> None:  # noqa: ANN401
    lines = []
    for text in texts:
        shown = "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
        lines += [part for line in shown.split("\n") for part in textwrap.wrap(line, 90) or [""]]
        lines.append("─" * 90)
    figure.set(figwidth=8, figheight=0.17 * len(lines) + 0.2)
    style = {"va": "top", "family": "monospace", "fontsize": 8, "parse_math": False}
    figure.text(0.01, 0.99, "\n".join(lines), **style)
