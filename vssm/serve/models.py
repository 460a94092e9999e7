"""The models and forecasters of a server, each under its name."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vssm import noise
from vssm.data import Meta, steps_left
from vssm.engine import Engine
from vssm.forecasting.forecaster import Forecaster
from vssm.models import AnyPart, Ladder, Model, Variational
from vssm.models.anypart import order_of_passes
from vssm.nn import State
from vssm.noise import Noise
from vssm.runs import pretrained
from vssm.runs.checkpoint import load_finite
from vssm.runs.config import SavedConfig

# Products of weights in one call: about 0.2 s of one core, or of a GPU.
_PRODUCTS = {"cpu": 10**10, "cuda": 10**12}
_MOST_CELLS = 8192  # sequences times steps of a call, which bounds its memory


class Served:
    """A model under the name that requests use; `meta` describes its data, if known."""

    def __init__(self, name: str, model: Model, meta: Meta | None = None) -> None:
        self.name: str = name
        self.meta: Meta | None = meta
        self.engine: Engine = Engine(model)
        self.model: Model = self.engine.model
        self.device: torch.device = self.engine.device
        self.parallel: bool = isinstance(model, Variational | Ladder | AnyPart)
        """Whether the model generates many steps in one pass."""
        self.fills: bool = isinstance(model, AnyPart)
        """Whether the model fills gaps."""
        self.continues: bool = not model.config.given
        """Whether the model generates and reads; given features must be known at every step."""
        self.remembers_steps: bool = model.config.kind in ("transformer", "tvae")
        """Whether its state grows with every step."""
        self.text: bool = model.head.tokens and meta is not None
        """Whether sequences can be shown as text."""
        self.parameters: int = sum(parameter.numel() for parameter in model.parameters())
        products = _PRODUCTS.get(self.device.type, _PRODUCTS["cpu"])
        products //= 1 if self.parallel else 2  # one step at a time takes about twice as long
        self.cells: int = max(1, min(_MOST_CELLS, products // self.parameters))
        """Most sequences times steps of a call."""

    def warm_up(self) -> None:
        """Makes a few steps, so that no request waits for a compiler."""
        if self.continues:
            self.engine.generate(num=1, length=2)

    def make(
        self,
        seed: Tensor,
        row: Tensor,
        prompt: Tensor | None,
        state: State | None,
        length: int,
        **options: Any,  # noqa: ANN401
    ) -> tuple[Tensor | None, State]:
        """Reads a prompt and makes steps; returns the new steps, if any, and the state after."""
        options |= {"seed": seed, "rows": row, "state": state}
        prompt = None if prompt is None else prompt.to(self.device)
        if prompt is not None and not length:
            return None, self.engine.observe(prompt, state, seed, row)
        made = self.engine.generate(len(row), length, prompt, **options)
        return made.x.cpu(), made.state

    def fill(
        self,
        seed: Tensor,
        row: Tensor,
        x: Tensor,
        known: Tensor,
        **options: Any,  # noqa: ANN401
    ) -> tuple[Tensor, None]:
        """Returns sequences whose unknown entries are filled."""
        options |= {"seed": seed, "rows": row}
        return self.engine.fill(x.to(self.device), known.to(self.device), **options).cpu(), None

    def order(self, known: Tensor, seed: Tensor, row: Tensor, passes: int) -> Tensor:
        """Returns which pass of `fill` makes each entry, from 0 on; -1 where x is known."""
        assert isinstance(self.model, AnyPart)
        unknown = self.model.pad(~known)
        columns = 1 if unknown.ndim == 2 else unknown.shape[2]
        u = Noise(seed, row).uniform(0, unknown.shape[1], columns, noise.ORDER).view(unknown.shape)
        passes = min(passes, self.model.most_passes)
        order = order_of_passes(unknown, u, self.model.config.window, passes)
        return order[:, : known.shape[1]].contiguous()

    def describe(self) -> dict[str, Any]:
        """Returns what clients need to know."""
        names = ("kind", "head", "features", "known", "given")
        shape = None if self.meta is None else self.meta.image_shape
        return {
            "name": self.name,
            **{name: getattr(self.model.config, name) for name in names},
            "tokens": self.model.head.tokens,
            "text": self.text,
            "parallel": self.parallel,
            "length": steps_left(self.meta, 0),
            "parameters": self.parameters,
            "data": None if self.meta is None else self.meta.name,
            "image_shape": None if shape is None else list(shape),
        }


class ServedForecaster(NamedTuple):
    """A forecaster under the name that requests use."""

    name: str
    forecaster: Forecaster

    def describe(self) -> dict[str, Any]:
        """Returns what clients need to know."""
        columns = list(self.forecaster.future_columns)
        return {"name": self.name, "horizon": self.forecaster.horizon, "future_columns": columns}


def open_models(
    sources: Sequence[str], device: str = "cpu"
) -> tuple[list[Served], list[ServedForecaster]]:
    """Loads the models and the forecasters to serve: those that `vssm serve` names."""
    sources = sources or pretrained.names()
    if not sources:
        raise ValueError("this installation ships no models; name one: vssm serve RUN_FOLDER")
    models: list[Served] = []
    forecasters: list[ServedForecaster] = []
    for source in sources:
        name, _, place = source.rpartition("=")
        name = name or re.sub(r"[^\w.-]", "-", Path(place.removeprefix("hf://").rstrip("/")).name)
        taken = [one.name for one in (*models, *forecasters)]
        if not re.fullmatch(r"\w[\w.-]{0,63}", name) or name in taken:
            raise ValueError(
                f"model name {name!r} is not allowed; use NAME=FOLDER and each name once"
            )
        if (Path(place) / "forecaster.json").is_file():
            forecasters.append(ServedForecaster(name, Forecaster.load(place)))
        else:
            model = load_finite(place, device).eval()
            models.append(Served(name, model, SavedConfig.read(pretrained.find(place)).meta()))
    return models, forecasters
