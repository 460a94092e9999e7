"""What sampling is asked for, the noise that it reads, and the states that it hands on."""

from typing import NamedTuple

import torch
from torch import Tensor

from vssm import noise
from vssm.engine.weights import first_weight
from vssm.models import VRNN, Autoregressive, Ladder, Model, Variational
from vssm.nn import State

__all__ = [
    "BLIND",
    "Inputs",
    "Noise",
    "Options",
    "Result",
    "end_of",
    "expand_rows",
    "nothing",
    "packed",
    "placed",
    "portable",
    "results",
    "taken",
    "unpacked",
]

BLIND = (
    "it has run over empty tokens, after which the model was never trained to read data; "
    "allowed: a state from observe, or from generate with recondition=True or passes > 1"
)


class Noise:
    """The noise of a batch: which seed and which row each sequence reads.

    Arguments:
        seed: The seed of each sequence, (B,), or one number for all.
        row: The row of each, (B,), or B for the rows 0 to B - 1.
        start: Added to all positions, where only the device knows it, (1,).
        device: Where the noise is made, if the others do not say it.
    """

    def __init__(
        self,
        seed: Tensor | int,
        row: Tensor | int,
        start: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._seed, self._row, self.start = seed, row, start
        self.number: int | None = None
        """The seed of all rows, if these are the usual: all that a recording needs to be told."""
        if isinstance(row, Tensor):
            self.num, self.device = len(row), row.device
        else:
            assert device is not None
            self.num, self.device = row, device
            if type(seed) is int:  # True and False are refused where the tensor is read
                self.number = seed

    # Made when they are read, since a replay needs numbers only, and filled there, since a copy would wait.

    @property
    def seed(self) -> Tensor:
        if isinstance(self._seed, int):
            self._seed = torch.full((self.num,), self._seed, device=self.device)
        return self._seed

    @property
    def row(self) -> Tensor:
        if isinstance(self._row, int):
            self._row = torch.arange(self.num, device=self.device)
        return self._row

    def adopt(self, state: State) -> None:
        """Takes the tensors from a state that has them already."""
        self._seed, self._row = state["seed"], state["row"]

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
    device = source.device
    z = (
        None
        if isinstance(model, Autoregressive)
        else torch.empty(num, 0, model.config.latents, dtype=torch.int64, device=device)
    )
    if model.head.tokens:
        return torch.empty(num, 0, dtype=torch.int64, device=device), z
    dtype = torch.promote_types(first_weight(model).dtype, torch.float32)  # that of steps
    return torch.empty(num, 0, model.config.features, dtype=dtype, device=device), z


class Inputs(NamedTuple):
    """What a call starts from, as `OneShot` takes it."""

    tensors: State
    numbers: dict[str, int]

    def fixed(self, source: Noise) -> State:
        """Returns tensors for the numbers, and the rows that a number for the seed stands for."""
        made: dict[str, Tensor | State] = {}
        if "seed" in self.numbers:
            made |= {"seed": source.seed, "row": source.row}
        if "start" in self.numbers:
            made["start"] = torch.full((1,), self.numbers["start"], device=source.device)
        return State(made)


def portable(model: Model, state: State) -> State:
    """Returns a state as input of a recording, without its position unless attention needs to know it."""
    kept = State(
        {n: c for n, c in state.children.items() if n not in ("seed", "row")}, state.position
    )
    return kept if model.config.block == "attention" else placed(kept, 0)


def packed(model: Model, prompt: Tensor | None, state: State | None, source: Noise) -> Inputs:
    """Returns what a call starts from as the inputs of a recording."""
    tensors: dict[str, Tensor | State] = {}
    numbers: dict[str, int] = {}
    if source.number is None:
        tensors |= {"seed": source.seed, "row": source.row}
    else:
        numbers["seed"] = source.number
    if prompt is not None:
        tensors["prompt"] = prompt
    if state is not None:
        tensors["state"] = portable(model, state)
        if model.config.block != "attention":
            numbers["start"] = state.position
    return Inputs(State(tensors), numbers)


def unpacked(inputs: State) -> tuple[Tensor | None, State | None, Noise]:
    """Returns the prompt, the state and the noise that were packed."""
    given = inputs.children
    source = Noise(inputs["seed"], inputs["row"], inputs["start"] if "start" in given else None)
    prompt = inputs["prompt"] if "prompt" in given else None
    return prompt, inputs.child("state") if "state" in given else None, source


def results(made: Result, source: Noise) -> State:
    """Returns what a recording makes: x, z and the state to go on from, which has its noise too."""
    x, z, after = made
    assert z is not None and after is not None
    state = State({**after.children, "seed": source.seed, "row": source.row})
    return State({"x": x, "z": z, "state": state})


def taken(made: State, source: Noise) -> Result:
    """Returns a copy of what was recorded as the result of a call."""
    after = made.child("state")
    source.adopt(after)
    return made["x"], made["z"], after


def end_of(prompt: Tensor | None, state: State | None, options: Options) -> int:
    """Returns the position after a call."""
    before = 0 if state is None else state.position
    return before + (0 if prompt is None else prompt.shape[1]) + options.length


def placed(state: State, position: int) -> State:
    """Returns the state at another position: all parts of a model have read as many steps."""
    children = {
        n: placed(c, position) if isinstance(c, State) else c for n, c in state.children.items()
    }
    return State(children, position, state.owner)


def expand_rows(state: State, num: int) -> State:
    """Views a state that all rows share as one of `num` rows."""
    return state if state.batch == num else state.expand(num)
