"""What sampling is asked for, and the noise that it reads."""

from typing import NamedTuple

import torch
from torch import Tensor

from vssm import noise
from vssm.models import VRNN, Autoregressive, Ladder, Model, Variational, first_weight
from vssm.nn import State

__all__ = ["BLIND", "Noise", "Options", "Result", "expand_rows", "no_steps"]

BLIND = (
    "it has run over empty tokens, after which the model was never trained to read data; "
    "allowed: a state from observe, or from generate with recondition=True or passes > 1"
)


class Noise:
    """The noise of a batch: the seed and the row that each sequence reads.

    Arguments:
        seed: The seed of each sequence, (B,).
        row: The row of each sequence, (B,).
        start: Added to all positions, (1,), where only the device knows them.
    """

    def __init__(self, seed: Tensor, row: Tensor, start: Tensor | None = None) -> None:
        self.seed, self.row, self.start = seed, row, start

    @property
    def num(self) -> int:
        """The number of sequences."""
        return len(self.row)

    @property
    def device(self) -> torch.device:
        """Where the noise is made."""
        return self.row.device

    def latent(self, model: Variational | VRNN | Ladder, position: int, length: int) -> Tensor:
        """Returns uniform numbers for the latents of some steps, (B, length, Z)."""
        return self._uniform(position, length, model.config.latents, noise.LATENT)

    def observation(self, model: Model, position: int, length: int) -> Tensor:
        """Returns uniform numbers for the observations of some steps, (B, length, ...)."""
        return self._uniform(position, length, model.head.noise_size, noise.OBSERVATION)

    def uniform(
        self, position: int, length: int, components: int, stream: int, draw: int = 0
    ) -> Tensor:
        """Returns uniform numbers of a stream for some steps, (B, length, components)."""
        return noise.uniform(self.seed, self.row, position, length, components, stream, draw)

    def _uniform(self, position: int, length: int, components: int, stream: int) -> Tensor:
        where = position if self.start is None else self.start + position
        return noise.uniform(self.seed, self.row, where, length, components, stream)


class Options(NamedTuple):
    """The options of `generate`, checked."""

    length: int
    chunk: int
    recondition: bool
    passes: int
    temperature: float
    sample: bool
    """Whether x is a sample of the head rather than its mean."""
    cache: bool = True


Result = tuple[Tensor, Tensor | None, State | None]
"""x, z and the state after them."""


def no_steps(model: Model, source: Noise) -> tuple[Tensor, Tensor | None]:
    """Returns x and z of zero steps."""
    num, device, z = source.num, source.device, None
    if not isinstance(model, Autoregressive):
        z = torch.empty(num, 0, model.config.latents, dtype=torch.int64, device=device)
    if model.head.tokens:
        return torch.empty(num, 0, dtype=torch.int64, device=device), z
    dtype = torch.promote_types(first_weight(model).dtype, torch.float32)  # that of made steps
    return torch.empty(num, 0, model.config.features, dtype=dtype, device=device), z


def expand_rows(state: State, num: int) -> State:
    """Views a state that all rows share as one of `num` rows."""
    return state if state.batch == num else state.expand(num)
