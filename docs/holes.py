"""Draws docs/pictures/holes.png: what `mnist-any-small` makes of labels, holes and missing pixels.

    python docs/holes.py

Rows: one digit of each label from nothing in one pass; the same digits with a hole; two ways to
fill it; with 75 % of their pixels missing; filled again.
"""

from pathlib import Path

import torch
from PIL import Image

import vssm

PICTURE = Path(__file__).parent / "pictures" / "holes.png"
PIXELS, LABELS, SCALE = 28, 10, 3


def main() -> None:
    model = vssm.load("mnist-any-small")
    x = torch.full((LABELS, PIXELS, PIXELS + LABELS), torch.nan)
    x[..., PIXELS:] = torch.eye(LABELS)[:, None]
    digits = vssm.fill(model, x, seed=3)
    hole, sparse = digits.clone(), digits.clone()
    hole[:, 7:21, 7:21] = torch.nan
    noise = torch.rand(LABELS, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0))
    sparse[..., :PIXELS][noise < 0.75] = torch.nan
    filled = [vssm.fill(model, hole, seed=seed) for seed in (0, 1)]
    rows = [digits, hole, *filled, sparse, vssm.fill(model, sparse)]
    lines = [torch.cat(list(row[..., :PIXELS].nan_to_num(0.5).clamp(0, 1)), 1) for row in rows]
    grey = (torch.cat(lines) * 255).byte().numpy()
    image = Image.fromarray(grey)
    size = image.width * SCALE, image.height * SCALE
    image.resize(size, Image.Resampling.NEAREST).save(PICTURE, optimize=True)
    print(PICTURE.name, image.size)


if __name__ == "__main__":
    main()
