"""What is served: a model, what its data are, and the rows from which on bits do not depend on the batch.

Matrix libraries choose another kernel for a few rows than for many, so a sequence computed alone and the same
sequence computed in a batch may differ in the last bit. From some number of rows on they do not, on a given
machine: `row_floor` measures it, and the engine pads smaller batches up to it.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vssm.data import Meta, read_meta, steps_left
from vssm.models import Ladder, Model, Variational
from vssm.runs import pretrained
from vssm.runs.checkpoint import load_finite
from vssm.sampling.generation import generate, observe
from vssm.storage import checksum

__all__ = ["Served", "Speed", "measure_speed", "open_models", "row_bytes", "row_floor"]

_MOST = 64  # rows at which bits are taken to have settled
_STEPS = 4  # of the passes whose time is measured
_SIZES = (48, 32, 24, 20, 16, 14, 12, 11, 10, 8, 6, 5, 4, 3, 2, 1)
# Products of weights in one piece of work: about 0.2 s of one core, or of a GPU.
_PRODUCTS = {"cpu": 10**10, "cuda": 10**12}
_MOST_CELLS = 8192  # sequences times steps of a piece, which bounds its memory
_SHIPPED = "no model was named and this installation ships none; allowed: vssm serve RUN_FOLDER"


@dataclass
class Speed:
    """Predicts the seconds of a pass: `calls` times a fixed cost, and a cost of each sequence and step.

    Example:
        >>> Speed(read=(0.1, 0.01), make=(0.2, 0.02)).make
        (0.2, 0.02)
    """

    read: tuple[float, float] = (0.0, 0.0)
    """Seconds of a call that reads, and of each of its cells (sequences times steps)."""
    make: tuple[float, float] = (0.0, 0.0)
    """The same for calls that make steps; a step-by-step model makes one call for each step."""
    stretch: float = 1.0
    """How much longer passes have taken lately than was measured at the start."""

    def learn(self, expected: float, seconds: float) -> None:
        """Corrects later predictions by a pass that took so long."""
        if expected > 0:
            weight = min(0.2, seconds / 2)  # short passes say little about long ones
            self.stretch *= 1 - weight + weight * min(10.0, seconds / expected)


@dataclass(eq=False)
class Served:
    """A model under the name by which requests ask for it."""

    name: str
    model: Model
    meta: Meta | None = None
    floor: int = 1
    """Rows times steps that a pass needs for bits not to depend on the batch."""
    row_bytes: tuple[int, int] = (0, 0)
    """Bytes of the state of one sequence: those that it always has, and those of each step."""
    speed: Speed = field(default_factory=Speed)
    """How long passes take."""
    cells: int = field(init=False)
    """Most sequences times steps of one piece of work; it depends on the model alone, so that bits do too."""
    weights: str = field(init=False)
    """A checksum of the weights, by which states of others under the same name are told apart."""

    def __post_init__(self) -> None:
        size = sum(parameter.numel() for parameter in self.model.parameters())
        products = _PRODUCTS.get(next(self.model.parameters()).device.type, _PRODUCTS["cpu"])
        products //= 1 if self.parallel else 2  # one step at a time takes about twice as long
        self.cells = max(1, min(_MOST_CELLS, products // size))
        self.weights = checksum(
            {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
        )

    @property
    def parallel(self) -> bool:
        """Whether the model generates many steps in one pass."""
        return isinstance(self.model, Variational | Ladder)

    @property
    def text(self) -> bool:
        """Whether sequences can be shown as text."""
        return self.model.head.tokens and self.meta is not None

    @property
    def length(self) -> int:
        """Steps of a whole sequence of the training data, as far as it is known."""
        return steps_left(self.meta, 0)

    def state_bytes(self, num: int, steps: int) -> int:
        """Returns the size of the state of `num` sequences after so many steps."""
        fixed, step = self.row_bytes
        return num * (fixed + step * steps)

    def describe(self) -> dict[str, Any]:
        """Returns what clients need to know."""
        config, meta = self.model.config, self.meta
        return {
            "name": self.name,
            "kind": config.kind,
            "head": config.head,
            "features": config.features,
            "tokens": self.model.head.tokens,
            "text": self.text,
            "parallel": self.parallel,
            "length": self.length,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "data": None if meta is None else meta.name,
            "image_shape": None
            if meta is None or meta.image_shape is None
            else list(meta.image_shape),
        }


def open_models(sources: Sequence[str], device: str = "cpu") -> list[Served]:
    """Loads what is to be served.

    Arguments:
        sources: Run folders, names of shipped models or hf://OWNER/NAME, each optionally after NAME=.
            With none, the models that ship with the package.
        device: Where the weights go.
    """
    served: list[Served] = []
    for source in sources or _shipped():
        name, _, place = source.rpartition("=")
        name = name or re.sub(r"[^\w.-]", "-", Path(place.removeprefix("hf://").rstrip("/")).name)
        if not re.fullmatch(r"\w[\w.-]{0,63}", name) or any(other.name == name for other in served):
            raise ValueError(
                f"model name {name!r} is not allowed; allowed: NAME=FOLDER, each name once"
            )
        model = load_finite(place, device).eval()
        served.append(Served(name, model, _meta(place)))
    return served


def row_floor(model: Model) -> int:
    """Measures from how many rows on a step's bits do not depend on the number of rows, at most 64.

    Example:
        >>> from vssm import ModelConfig, build
        >>> 1 <= row_floor(build(ModelConfig(kind="ssm", features=3, width=8, layers=1))) <= 64
        True
    """
    dial = {"chunk": 1, "recondition": True} if isinstance(model, Variational | Ladder) else {}
    whole = generate(model, num=_MOST, length=2, observe="sample", **dial).x
    settled = _MOST
    for num in _SIZES:
        # The last rows, not the first: a row must not depend on its place in the batch either.
        rows = range(_MOST - num, _MOST)
        part = generate(model, num=num, length=2, observe="sample", rows=rows, **dial).x
        if not torch.equal(part, whole[_MOST - num :]):
            break
        settled = num
    return settled


def row_bytes(model: Model) -> tuple[int, int]:
    """Measures the bytes of the state of one sequence: those that it always has, and those of each step.

    Example:
        >>> from vssm import ModelConfig, build
        >>> row_bytes(build(ModelConfig(kind="ssm", features=3, width=8, layers=1)))[1]
        0
    """
    one, two = (generate(model, num=1, length=steps).state for steps in (1, 2))
    first, second = (sum(leaf.nbytes for leaf in state.leaves()) for state in (one, two))
    return 2 * first - second, second - first


def measure_speed(model: Model) -> Speed:
    """Measures how long passes take, from one sequence and from many.

    Example:
        >>> from vssm import ModelConfig, build
        >>> measure_speed(build(ModelConfig(kind="ssm", features=3, width=8, layers=1))).make[0] > 0
        True
    """
    # Zeros suit every head; what the model makes could overflow, and would not be read.
    x = torch.zeros_like(generate(model, num=_MOST, length=_STEPS).x)
    calls = 1 if isinstance(model, Variational | Ladder) else _STEPS
    makes = [
        _seconds(lambda num=num: generate(model, num=num, length=_STEPS)) for num in (1, _MOST)
    ]
    reads = [_seconds(lambda num=num: observe(model, x[:num])) for num in (1, _MOST)]
    return Speed(_line(reads, 1), _line(makes, calls))


def _seconds(run: Callable[[], object]) -> float:
    run()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _line(seconds: Sequence[float], calls: int) -> tuple[float, float]:
    """Returns the seconds of a call and of a cell, from those of one sequence and of many."""
    one, many = seconds
    cell = max(0.0, many - one) / ((_MOST - 1) * _STEPS)
    return max(one - cell * _STEPS, 0.01 * one) / calls, cell


def _shipped() -> list[str]:
    names = pretrained.names()
    if not names:
        raise ValueError(_SHIPPED)
    return list(names)


def _meta(place: str) -> Meta | None:
    return read_meta(pretrained.find(place))
