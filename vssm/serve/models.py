"""A served model: its name, its data, and measurements that batching and limits need.

This is the only module of the server that calls `generate` and `observe`.

Matrix libraries choose different kernels for few rows than for many, so a sequence computed alone
and the same sequence in a batch may differ in the last bit. From some number of rows on, the bits
no longer depend on the batch. `Served.measure` finds that number, and the worker pads to it.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vssm import noise
from vssm.data import Meta, read_meta, steps_left
from vssm.engine import Engine
from vssm.models import AnyPart, Ladder, Model, Variational
from vssm.models.anypart import order_of_passes
from vssm.nn import State
from vssm.runs import pretrained
from vssm.runs.checkpoint import load_finite
from vssm.sampling.filling import fill
from vssm.sampling.generation import Generation
from vssm.sampling.request import Noise
from vssm.storage import checksum

__all__ = ["Served", "open_models"]

_MOST_ROWS = 64  # from here on, bits are assumed not to depend on the number of rows
_ROWS = (48, 32, 24, 20, 16, 14, 12, 11, 10, 8, 6, 5, 4, 3, 2, 1)
# Products of weights in one piece of work: about 0.2 s of one core, or of a GPU.
_PRODUCTS = {"cpu": 10**10, "cuda": 10**12}
_MOST_CELLS = 8192  # sequences times steps of a piece, which bounds its memory


class Served:
    """A model under the name that requests use.

    Arguments:
        name: The name.
        model: The model.
        meta: Describes its data, if known.

    Example:
        >>> from vssm import ModelConfig, build
        >>> served = Served("small", build(ModelConfig(kind="ssm", features=3, width=8, layers=1)))
        >>> served.measure()
        >>> 1 <= served.floor <= 64, served.row_bytes[1]
        (True, 0)
    """

    def __init__(self, name: str, model: Model, meta: Meta | None = None) -> None:
        self.engine = Engine(model)
        self.name, self.model, self.meta = name, self.engine.model, meta
        self.parallel = isinstance(model, Variational | Ladder | AnyPart)
        """Whether the model generates many steps in one pass."""
        self.text = model.head.tokens and meta is not None
        """Whether sequences can be shown as text."""
        self.device = next(model.parameters()).device
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        products = _PRODUCTS.get(self.device.type, _PRODUCTS["cpu"])
        products //= 1 if self.parallel else 2  # one step at a time takes about twice as long
        self.cells = max(1, min(_MOST_CELLS, products // self.parameters))
        """Most cells of a piece of work. It depends on the model alone, so that bits do too."""
        weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        self.weights = checksum(weights)
        """Tells states of other weights under the same name apart."""
        self.floor = 1
        """Cells that a pass needs for its bits not to depend on the batch."""
        self.row_bytes = 0, 0
        """Bytes of the state of one sequence: fixed, and for each step."""

    def generate(self, **options: Any) -> Generation:  # noqa: ANN401
        """Makes new steps; options are those of `vssm.generate`."""
        return self.engine.generate(**options)

    def observe(self, x: Tensor, state: State | None = None, **options: Any) -> State:  # noqa: ANN401
        """Reads data; options are those of `vssm.observe`."""
        return self.engine.observe(x, state, **options)

    def fill(self, x: Tensor, known: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
        """Fills gaps; options are those of `vssm.fill`."""
        return fill(self.model, x, known, **options)

    def order(self, known: Tensor, seed: Tensor, row: Tensor, passes: int) -> Tensor:
        """Returns which pass of `fill` makes each entry, from 0 on; -1 where x is known."""
        assert isinstance(self.model, AnyPart)
        unknown = self.model.pad(~known)
        columns = 1 if unknown.ndim == 2 else unknown.shape[2]
        u = Noise(seed, row).uniform(0, unknown.shape[1], columns, noise.ORDER).view(unknown.shape)
        order = order_of_passes(unknown, u, self.model.config.window, passes)
        return order[:, : known.shape[1]].contiguous()

    @property
    def length(self) -> int:
        """Steps of a whole sequence of the training data, or 28 if that is not known."""
        return steps_left(self.meta, 0)

    def state_bytes(self, num: int, steps: int) -> int:
        """Returns the size of the state of `num` sequences after so many steps."""
        fixed, step = self.row_bytes
        return num * (fixed + step * steps)

    def describe(self) -> dict[str, Any]:
        """Returns what clients need to know."""
        config, meta = self.model.config, self.meta
        shape = None if meta is None or meta.image_shape is None else list(meta.image_shape)
        return {
            "name": self.name,
            "kind": config.kind,
            "head": config.head,
            "features": config.features,
            "tokens": self.model.head.tokens,
            "text": self.text,
            "parallel": self.parallel,
            "known": config.known,
            "given": config.given,
            "length": self.length,
            "parameters": self.parameters,
            "data": None if meta is None else meta.name,
            "image_shape": shape,
        }

    def measure(self) -> None:
        """Measures the row floor and the size of states."""
        if self.model.config.given:  # it fills gaps only, and keeps no state
            self.floor = _MOST_ROWS
            return
        self.floor = self._row_floor()
        # A model with any known part has its first state after a window.
        first = self.model.config.window if isinstance(self.model, AnyPart) else 1
        one, two = (
            sum(leaf.nbytes for leaf in self.generate(num=1, length=steps).state.leaves())
            for steps in (first, first + 1)
        )
        self.row_bytes = one - first * (two - one), two - one

    def _row_floor(self) -> int:
        dials: dict[str, Any] = {"chunk": 1, "recondition": True} if self.parallel else {}
        whole = self.generate(num=_MOST_ROWS, length=2, observe="sample", **dials).x
        floor = _MOST_ROWS
        for num in _ROWS:
            # The last rows, not the first: bits must not depend on the place in the batch either.
            rows = range(_MOST_ROWS - num, _MOST_ROWS)
            part = self.generate(num=num, length=2, observe="sample", rows=rows, **dials).x
            if not torch.equal(part, whole[_MOST_ROWS - num :]):
                break
            floor = num
        return floor


def open_models(sources: Sequence[str], device: str = "cpu") -> list[Served]:
    """Loads the models to serve.

    Arguments:
        sources: Run folders, names of shipped models or hf://OWNER/NAME, each optionally after
            NAME=. By default the models that ship with the package.
        device: Where the weights go.
    """
    sources = sources or pretrained.names()
    if not sources:
        raise ValueError("this installation ships no models; name one: vssm serve RUN_FOLDER")
    served: list[Served] = []
    for source in sources:
        name, _, place = source.rpartition("=")
        name = name or re.sub(r"[^\w.-]", "-", Path(place.removeprefix("hf://").rstrip("/")).name)
        if not re.fullmatch(r"\w[\w.-]{0,63}", name) or any(other.name == name for other in served):
            raise ValueError(
                f"model name {name!r} is not allowed; allowed: NAME=FOLDER, each name once"
            )
        model = load_finite(place, device).eval()
        served.append(Served(name, model, read_meta(pretrained.find(place))))
    return served
