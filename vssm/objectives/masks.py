"""Which entries of a sequence are known: at random for training, by name for evaluation.

    nothing    K is empty
    prefix     the first C steps are known, C uniform
    random     each entry is known with a probability that is uniform for each sequence
    steps      one block of steps is unknown
    entries    one block of entries, some columns at some steps, is unknown
    columns    each column is known, as a whole, with a probability of one half

Tokens have no columns: their masks are the first four.

Legend: a mask is True where an entry is known, (B, T, D), or (B, T) for tokens, one entry a step.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor

_SHARES = {
    "nothing": 0.25,
    "prefix": 0.2,
    "random": 0.25,
    "steps": 0.1,
    "entries": 0.1,
    "columns": 0.1,
}
_SHARES_OF_TOKENS = {"nothing": 0.35, "prefix": 0.2, "random": 0.3, "steps": 0.15}


def random_masks(batch: int, length: int, columns: int, uniform: Callable[..., Tensor]) -> Tensor:
    """Draws the mask of known entries of each sequence in a training step, (B, T, D).

    Arguments:
        batch: B.
        length: T.
        columns: D, 1 for tokens.
        uniform: From sizes (...) to uniform numbers (B, ...).

    Example:
        >>> known = random_masks(5, 8, 3, lambda *sizes: torch.rand(5, *sizes))
        >>> known.shape, known.dtype
        (torch.Size([5, 8, 3]), torch.bool)
    """
    which, share, first, size, left, width = uniform(6)[..., None, None].unbind(1)
    steps = torch.arange(length, device=which.device)[:, None]
    across = torch.arange(columns, device=which.device)
    in_steps = _inside(steps, first, size, length)
    kinds = {
        "nothing": torch.zeros_like(which, dtype=torch.bool),
        "prefix": steps < (share * (length + 1)).floor(),
        "random": uniform(length, columns) < share,
        "steps": ~in_steps,
        "entries": ~(in_steps & _inside(across, left, width, columns)),
        "columns": uniform(1, columns) < 0.5,
    }
    known = torch.zeros(batch, length, columns, dtype=torch.bool, device=which.device)
    start = 0.0
    for name, share_of_rows in (_SHARES_OF_TOKENS if columns == 1 else _SHARES).items():
        chosen = (which >= start) & (which < start + share_of_rows)
        known = torch.where(chosen, kinds[name], known)
        start += share_of_rows
    return known


def _inside(places: Tensor, first: Tensor, size: Tensor, length: int) -> Tensor:
    """Says which places lie in a block of 1 to `length` places at a random start."""
    block = 1 + (size * length).floor()
    start = (first * (length - block + 1)).floor()
    return (places >= start) & (places < start + block)


def named_mask(name: str, length: int, columns: int, noise: Tensor) -> Tensor:
    """Returns the mask of a name, (B, T, D), True where an entry is known.

    Arguments:
        name: "prefix" if the first half of the steps is known; "random:P" if each entry is unknown
            with probability P; "block:N" if N steps in the middle are unknown; "hole:N" if only N
            columns of these N steps are unknown.
        length: T.
        columns: D, 1 for tokens.
        noise: Uniform numbers (B, T, D), for "random".

    Example:
        >>> named_mask("hole:2", 4, 4, torch.zeros(1, 4, 4))[0].int()
        tensor([[1, 1, 1, 1],
                [1, 0, 0, 1],
                [1, 0, 0, 1],
                [1, 1, 1, 1]], dtype=torch.int32)
        >>> named_mask("half", 4, 4, torch.zeros(1, 4, 4))
        Traceback (most recent call last):
        ValueError: known='half' is unknown; use prefix, random:P, block:N or hole:N
    """
    kind, number = parse_mask(name)
    known = torch.ones_like(noise, dtype=torch.bool)
    if kind == "prefix":
        known[:, length // 2 :] = False
        return known
    if kind == "random":
        return noise >= number
    size = int(number)
    most = length if kind == "block" else min(length, columns)
    if not 1 <= size <= most:
        raise ValueError(f"known={name!r} does not fit; use {kind}:N with N from 1 to {most}")
    first = (length - size) // 2
    left, right = 0, columns
    if kind == "hole":
        left = (columns - size) // 2
        right = left + size
    known[:, first : first + size, left:right] = False
    return known


def parse_mask(name: str) -> tuple[str, float]:
    """Returns the kind of a named mask and its number.

    Example:
        >>> parse_mask("random:0.5"), parse_mask("hole:14"), parse_mask("prefix")
        (('random', 0.5), ('hole', 14.0), ('prefix', 0.0))
    """
    pattern = r"(prefix)|(random):(0?\.\d+|1(?:\.0*)?)|(block|hole):(\d{1,9})"
    if not isinstance(name, str) or (found := re.fullmatch(pattern, name)) is None:
        raise ValueError(f"known={name!r} is unknown; use prefix, random:P, block:N or hole:N")
    kind, *number = (group for group in found.groups() if group is not None)
    return kind, float(number[0]) if number else 0.0
