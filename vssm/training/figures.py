"""The picture of a training: samples."""

from pathlib import Path

import torch

from vssm.data import Meta, Split, draw
from vssm.data.storage import write_atomically
from vssm.models import Model
from vssm.sampling.filling import fill
from vssm.sampling.generation import generate

__all__ = ["samples"]


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
