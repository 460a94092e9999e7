"""Draws the moving picture of the README: `python docs/race.py` writes docs/pictures/race.gif.

Sixteen upper halves of digits are given to two shipped models. The vssm makes all missing rows in
one parallel pass, the ssm makes one row in a pass. Every frame is one pass of both.
"""

from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

import vssm

OUT = Path(__file__).parent / "pictures" / "race.gif"
SIDE, SCALE, GAP, TOP = 4, 3, 36, 34  # digits in a row, pixels of a pixel, of the gaps
INK, PAPER, NEW = (20, 20, 40), (255, 255, 255), (0, 90, 200)


def make(num: int = SIDE * SIDE, seed: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Returns upper halves (num, 14, 28), and the lower halves that vssm and ssm make of them."""
    digits = vssm.generate(vssm.load("mnist-best-small"), num=num, length=28, seed=seed).x
    upper = digits[:, :14]
    parallel = vssm.generate(vssm.load("mnist-small"), length=14, prompt=upper, seed=seed).x
    stepwise = vssm.generate(vssm.load("mnist-small-ssm"), length=14, prompt=upper, seed=seed).x
    return upper, parallel, stepwise


def panel(upper: Tensor, lower: Tensor, rows: int) -> Image.Image:
    """Draws the digits with the first `rows` made rows, in colour, on paper."""
    height, side = 28, SIDE * 28
    shown = torch.zeros(len(upper), height, 28)
    shown[:, :14] = upper
    shown[:, 14 : 14 + rows] = lower[:, :rows]
    ink = torch.tensor(INK).expand(height, 3).clone()
    ink[14:] = torch.tensor(NEW)
    colour = 255 + shown.clamp(0, 1)[..., None] * (ink[:, None] - 255)
    grid = colour.unflatten(0, (SIDE, SIDE)).transpose(1, 2).reshape(side, side, 3)
    image = Image.fromarray(grid.round().byte().numpy())
    return image.resize((side * SCALE, side * SCALE), Image.Resampling.NEAREST)


def frame(upper: Tensor, lowers: tuple[Tensor, Tensor], passes: int) -> Image.Image:
    """Draws both panels side by side, after so many passes."""
    side = SIDE * 28 * SCALE
    image = Image.new("RGB", (2 * side + GAP, side + TOP), PAPER)
    text, font = ImageDraw.Draw(image), ImageFont.load_default(18)
    named = (("vssm: all rows at once", 1), ("ssm: row by row", 14))
    for i, ((title, last), lower) in enumerate(zip(named, lowers, strict=True)):
        done = min(passes, last)
        left = i * (side + GAP)
        image.paste(panel(upper, lower, 14 if done == last else done), (left, TOP))
        words = "ready" if done == last else f"pass {done}"
        text.text((left + 4, 6), title, fill=INK, font=font)
        text.text((left + side - 4, 6), words, fill=NEW, font=font, anchor="ra")
    return image


def main() -> None:
    """Writes the picture."""
    upper, *lowers = make()
    frames = [frame(upper, (lowers[0], lowers[1]), passes) for passes in range(15)]
    small = [image.quantize(32, dither=Image.Dither.NONE) for image in frames]
    times = [1200, *[180] * 13, 2500]
    small[0].save(OUT, save_all=True, append_images=small[1:], duration=times, loop=0)
    print(f"{OUT.name}: {OUT.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
