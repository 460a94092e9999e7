"""What sampling is asked for, the noise that it reads, and the states that it hands on."""

from typing import NamedTuple

import torch
from torch import Tensor

from vssm import noise
from vssm.models import VRNN, Autoregressive, Ladder, Model, Variational
from vssm.nn import State

__all__ = [
    "BLIND",
    "Noise",
    "Options",
    "Result",
    "end_of",
    "expand_rows",
    "nothing",
    "packed",
    "placed",
    "portable",
    "unpacked",
]

BLIND = (
    "it has run over empty tokens, after which the model was never trained to read data; "
    "allowed: a state from observe, or from generate with recondition=True or passes > 1"
)


class Noise(NamedTuple):
    """The noise of a batch: which seed and which row each sequence reads."""

    seed: Tensor
    row: Tensor
    start: Tensor | None = None
    """Added to all positions, where only the device knows it, (1,)."""

    def latent(self, model: Variational | VRNN | Ladder, position: int, length: int) -> Tensor:
        return self._uniform(position, length, model.config.latents, noise.LATENT)

    def observation(self, model: Model, position: int, length: int) -> Tensor:
        return self._uniform(position, length, model.head.noise_size, noise.OBSERVATION)

    def _uniform(self, position: int, length: int, components: int, stream: int) -> Tensor:
        where = position if self.start is None else self.start + position
        return noise.uniform(self.seed, self.row, where, length, components, stream)


class Options(NamedTuple):
    length: int
    chunk: int
    recondition: bool
    passes: int
    temperature: float
    sample: bool


Result = tuple[Tensor, Tensor | None, State | None]
"""x, z and the state after them."""


def nothing(model: Model, num: int, source: Noise) -> tuple[Tensor, Tensor | None]:
    """Returns x and z of no steps."""
    device = source.row.device
    z = (
        None
        if isinstance(model, Autoregressive)
        else torch.empty(num, 0, model.config.latents, dtype=torch.int64, device=device)
    )
    if model.head.tokens:
        return torch.empty(num, 0, dtype=torch.int64, device=device), z
    return torch.empty(num, 0, model.config.features, device=device), z


def portable(model: Model, state: State) -> dict[str, Tensor | State]:
    """Returns a state as input of a recording; its position is a tensor unless attention needs to know it."""
    kept = State({n: c for n, c in state.children.items() if n not in ("seed", "row")}, state.position)
    if model.config.block == "attention":
        return {"state": kept}
    start = torch.full((1,), state.position, device=state.device)
    return {"start": start, "state": placed(kept, 0)}


def packed(model: Model, prompt: Tensor | None, state: State | None, source: Noise) -> State:
    """Returns what a call starts from as the inputs of a recording."""
    tensors: dict[str, Tensor | State] = {"seed": source.seed, "row": source.row}
    if prompt is not None:
        tensors["prompt"] = prompt
    if state is not None:
        tensors |= portable(model, state)
    return State(tensors)


def unpacked(inputs: State) -> tuple[Tensor | None, State | None, Noise]:
    """Returns the prompt, the state and the noise that were packed."""
    given = inputs.children
    source = Noise(inputs["seed"], inputs["row"], inputs["start"] if "start" in given else None)
    prompt = inputs["prompt"] if "prompt" in given else None
    return prompt, inputs.child("state") if "state" in given else None, source


def end_of(prompt: Tensor | None, state: State | None, options: Options) -> int:
    """Returns the position after a call."""
    before = 0 if state is None else state.position
    return before + (0 if prompt is None else prompt.shape[1]) + options.length


def placed(state: State, position: int) -> State:
    """Returns the state at another position: all parts of a model have read as many steps."""
    children = {n: placed(c, position) if isinstance(c, State) else c for n, c in state.children.items()}
    return State(children, position, state.owner)


def expand_rows(state: State, num: int) -> State:
    """Views a state that all rows share as one of `num` rows."""
    return state if state.batch == num else state.expand(num)
