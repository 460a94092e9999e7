"""Which part of a sequence is known, by name: "prefix", "random:P", "block:N" or "hole:N".

The names are those of `vssm.objectives.masks`; for images the entries are pixels.
"""

import re

import torch
import torch.nn.functional as F
from torch import Tensor

from vssm import noise
from vssm.data import Meta
from vssm.objectives.masks import named_mask

_SEED = 1  # of the masks "random:P"; the number of a sequence, not its batch, decides its mask


def suffix(known: str, passes: int = 1) -> str:
    """Returns the end of the names of metrics.

    Example:
        >>> suffix("random:0.5"), suffix("hole:14", passes=4)
        ('random50', 'hole14_s4')
    """
    if share := re.fullmatch(r"random:(.*)", known):
        known = f"random{round(100 * float(share[1]))}"
    return known.replace(":", "") + (f"_s{passes}" if passes > 1 else "")


def known_entries(meta: Meta, known: str | None, numbers: Tensor) -> Tensor:
    """Returns which entries are known of the sequences with these numbers, (B, T, D) or (B, T)."""
    tokens = meta.suggested_head == "categorical"
    channels = meta.image_shape[2] if meta.image_shape else 1  # a pixel is known as a whole
    columns = 1 if tokens else (meta.features - meta.given) // channels
    seeds = torch.full_like(numbers, _SEED)
    u = noise.uniform(seeds, numbers, 0, meta.length, columns, stream=noise.ORDER)
    nothing = torch.zeros_like(u, dtype=torch.bool)
    mask = nothing if known is None else named_mask(known, meta.length, columns, u)
    if tokens:
        return mask.squeeze(-1)
    return F.pad(mask.repeat_interleave(channels, -1), (0, meta.given), value=True)
