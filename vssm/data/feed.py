"""How a training takes its sequences: checked once, on the GPU where they fit, a batch at a time."""

import torch
from torch import Tensor

from vssm.data.dataset import Split
from vssm.distributions import HEADS_IN_UNIT, Head

__all__ = ["check_values", "is_grey", "moved", "place", "take"]

_SHARE = 4  # data lives on a GPU when it takes less than one part in so many of the free memory


def check_values(head: Head, split: Split, name: str) -> None:
    """Checks once what a model would otherwise have to check at every step."""
    if not len(split):
        raise ValueError(f"{name} is empty; allowed: at least one sequence")
    first = 0
    for x in split.parts():
        head.validate(x, name=f"{name} from row {first}", values=False)
        if head.name in HEADS_IN_UNIT and (
            x.min() < 0 or x.max() > 1
        ):  # the head is what to change here
            raise ValueError(
                f"head={head.name!r} is for values in [0, 1], {name} has others; allowed: 'auto'"
            )
        head.validate(x, name=f"{name} from row {first}")
        first += len(x)


def is_grey(split: Split) -> bool:
    """Says whether some values are neither 0 nor 1: a Bernoulli head is no distribution of them.

    Example:
        >>> is_grey(Split(torch.tensor([[[0.0, 1.0]]]))), is_grey(Split(torch.tensor([[[0.0, 0.5]]])))
        (False, True)
    """
    return any(bool(((x != 0) & (x != 1)).any()) for x in split.parts())


def take(split: Split, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Returns the sequences at `index`, and their lengths where they differ."""
    index = index.to(split.x.device)
    return split.batch(index, device), split.real(index, device)


def place(split: Split, device: torch.device) -> Split:
    """Moves a split to a GPU where it fits well."""
    if device.type == "cuda" and split.nbytes < torch.cuda.mem_get_info(device)[0] // _SHARE:
        return split.to(device)
    return split


def moved(
    x: Tensor,
    share: float,
    channels: int,
    generator: torch.Generator | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Tensor:
    """Moves some images by -1, 0 or 1 rows, and as many columns, each as often; edges are repeated.

    Arguments:
        x: Images, (B, height, width * channels).
        share: How many of them.
        channels: The values of a pixel.
        generator: The source of the draws.
        shard: Which part of a larger batch x is, as for `vssm.objective`.

    Example:
        >>> x = torch.arange(9.0).view(1, 3, 3).expand(1000, 3, 3)
        >>> sorted(set(moved(x, 0.5, channels=1)[:, 1, 1].tolist()))  # what comes to the middle
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    """
    index, count = shard
    (batch, height, size), device = x.shape, x.device
    draws = torch.rand(3, batch * count, dtype=torch.float32, device=device, generator=generator)
    chosen, *places = draws[:, index * batch : (index + 1) * batch].unbind()
    image = x.reshape(batch, height, size // channels, channels)
    for axis, place in enumerate(places, 1):
        length = image.shape[axis]
        step = ((3 * place).long() - 1) * (chosen < share)
        source = (torch.arange(length, device=device) + step[:, None]).clamp(0, length - 1)
        view = [batch, 1, 1, 1]
        view[axis] = length
        image = image.gather(axis, source.view(view).expand(image.shape))
    return image.reshape(x.shape)
