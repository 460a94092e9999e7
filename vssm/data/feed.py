"""How training takes its sequences: checked once, on the GPU if they fit, a batch at a time."""

import torch
from torch import Tensor

from vssm.data.dataset import Split
from vssm.distributions import HEADS_IN_UNIT, Head

__all__ = ["check_values", "is_grey", "moved", "place", "take"]

_SHARE = 4  # data moves to a GPU if it takes less than a quarter of the free memory


def check_values(head: Head, split: Split, name: str, given: int = 0) -> None:
    """Checks once, before training, that the model can read all sequences.

    The last `given` features have no distribution and any finite values. Others may be missing if
    the split says so.
    """
    if not len(split):
        raise ValueError(f"{name} is empty; allowed: at least one sequence")
    first = 0
    for x in split.parts():
        if given:
            x, always = x.split([x.shape[-1] - given, given], -1)
            if not always.isfinite().all():
                raise ValueError(f"{name} from row {first} has given features that are not known")
        if split.missing:
            x = torch.where(x.isnan(), 0.0, x)
        head.validate(x, name=f"{name} from row {first}", values=False)
        if head.name in HEADS_IN_UNIT and (x.min() < 0 or x.max() > 1):
            raise ValueError(
                f"head={head.name!r} is for values in [0, 1], {name} has others; allowed: 'auto'"
            )
        head.validate(x, name=f"{name} from row {first}")
        first += len(x)


def is_grey(split: Split) -> bool:
    """Says whether some values are neither 0 nor 1, so that a Bernoulli head does not suit them.

    Example:
        >>> is_grey(Split(torch.tensor([[[0.0, 1.0]]]))), is_grey(Split(torch.tensor([[[0.5]]])))
        (False, True)
    """
    return any(bool(((x != 0) & (x != 1) & (x == x)).any()) for x in split.parts())


def take(split: Split, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Returns the sequences at `index`, and their lengths if they differ."""
    index = index.to(split.x.device)
    return split.batch(index, device), split.real(index, device)


def place(split: Split, device: torch.device) -> Split:
    """Moves a split to a GPU if it fits well."""
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
    """Moves a `share` of images (B, height, width * channels) by up to one row and one column.

    Steps of -1, 0 and 1 are equally likely, and edges are repeated. `shard` is the part of a larger
    batch that x is, as for `vssm.objective`.
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
