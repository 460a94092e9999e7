"""The engine: a frozen copy of a model that generates fast.

Plain `vssm.generate(model, ...)` keeps nothing. An engine keeps everything that depends on the
weights alone, because its own weights never change:

| kept                                           | where                  | for        |
| ---------------------------------------------- | ---------------------- | ---------- |
| weights in the layout of the kernels           | `vssm.engine.fused`    | CUDA       |
| calls that repeat, as CUDA graphs              | `vssm.engine.programs` | CUDA       |
| the partial posterior's pass over empty tokens | here                   | vssm, tvae |

A call is checked as `vssm.generate` checks it. Then it is looked up by a key, which holds
everything that a recording fixes: options, shapes, dtypes, and for attention the position. The
first call of a key runs the plain algorithm, the second is recorded, and later calls replay the
recording: prompt, state, seed and rows are copied into its inputs, and results out of its outputs.
"""

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from vssm.checks import check_model
from vssm.config import ModelConfig
from vssm.distributions import Latents
from vssm.engine.fused import fuse
from vssm.engine.programs import OneShot, Programs, Recorder
from vssm.engine.stepwise import sample_stepwise
from vssm.engine.trees import as_input, describe, is_relative
from vssm.models import AnyPart, Ladder, Model, Variational, first_weight
from vssm.models.anypart import Part
from vssm.nn import State
from vssm.noise import Noise
from vssm.sampling.anypart import make_part
from vssm.sampling.filling import check_filling
from vssm.sampling.generation import Generation, own_state, read, sample
from vssm.sampling.parallel import empty_steps
from vssm.sampling.request import (
    Options,
    Request,
    Result,
    check_reading,
    check_request,
    divide,
)

_EMPTY_BYTES = 2**28  # of the passes over empty tokens that are kept together


class Engine:
    """Creates a frozen copy of a model for fast generation.

    `generate`, `observe` and `fill` have the arguments of `vssm.generate`, `vssm.observe` and
    `vssm.fill` without the model, and the same results, up to rounding. Training or moving the
    model later does not change the engine. Hooks of the model are not called when a recording is
    replayed.

    Arguments:
        model: Any of the six models, on the device where it should generate.

    Example:
        >>> import vssm
        >>> sizes = {"width": 8, "layers": 1, "latents": 4, "classes": 5}
        >>> model = vssm.build(vssm.ModelConfig(kind="vssm", features=3, **sizes))
        >>> engine = Engine(model)
        >>> made = engine.generate(num=2, length=8, seed=1)
        >>> torch.allclose(made.x, vssm.generate(model, num=2, length=8, seed=1).x, atol=1e-6)
        True
        >>> engine
        Engine(vssm on cpu)
    """

    def __init__(self, model: Model) -> None:
        self.model: Model = copy.deepcopy(check_model(model)).requires_grad_(False)
        """The frozen copy. Its layers may be fused; do not train or change it."""
        self.config: ModelConfig = self.model.config
        """The config of the model."""
        self.device: torch.device = first_weight(self.model).device
        """Where the engine generates."""
        if self.device.type == "cuda":
            with torch.no_grad():
                fuse(self.model)
        self._programs = Programs(self.device)
        self._empty: dict[int, tuple[Latents, State]] = {}

    def __repr__(self) -> str:
        return f"Engine({self.config.kind} on {self.device})"

    def __reduce__(self) -> tuple[type["Engine"], tuple[Model]]:
        return Engine, (self.model,)  # a copy records anew

    @torch.no_grad()
    def generate(
        self,
        num: int | None = None,
        length: int = 28,
        prompt: Tensor | None = None,
        chunk: int | None = None,
        recondition: bool = False,
        passes: int = 1,
        temperature: float = 1.0,
        observe: str = "mean",
        seed: int | Tensor | None = None,
        state: State | None = None,
        rows: Sequence[int] | Tensor | None = None,
        cache: bool = True,
    ) -> Generation:
        """Generates steps, as `vssm.generate` does."""
        dials = chunk, recondition, passes, temperature, observe, cache
        request = check_request(self.model, num, length, prompt, state, seed, rows, *dials)
        x, z, after = self._sample(request)
        return Generation(x, z, own_state(after, request.source, self.model.owner))

    @torch.no_grad()
    def observe(
        self,
        x: Tensor,
        state: State | None = None,
        seed: int | Tensor | None = None,
        rows: Sequence[int] | Tensor | None = None,
        num: int | None = None,
    ) -> State:
        """Reads real data, as `vssm.observe` does."""
        x, before, source = check_reading(self.model, x, state, seed, rows, num)
        return own_state(read(self.model, x, before, source), source, self.model.owner)

    @torch.no_grad()
    def fill(
        self,
        x: Tensor,
        known: Tensor | None = None,
        num: int | None = None,
        passes: int = 1,
        temperature: float = 1.0,
        observe: str = "mean",
        seed: int = 0,
        rows: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """Draws the unknown entries, as `vssm.fill` does."""
        task = check_filling(self.model, x, known, num, passes, temperature, observe, seed, rows)
        _, part, source, options = task.work
        tensors = {"x": part.x, "known": part.known, "made": part.made}
        given = State({**tensors, "seed": source.seed, "row": source.row})
        make = partial(_make_entries, self.model, options)
        made = self._programs.run_function(("fill", options), make, given) or make(given)
        return task.finish(made["x"])

    def _sample(self, request: Request) -> Result:
        """Generates steps, by a program or by the plain algorithm."""
        options = request.options
        if options.length and options.cache and self._programs.can_record():
            if not isinstance(self.model, Variational | Ladder | AnyPart):
                return sample_stepwise(self.model, self._programs, request)
            made = self._one_shot(request)
            if made is not None:
                return made
        empty = self._empty_pass(request)
        if empty is not None:  # the state is the caller's own
            empty = empty[0], empty[1].map(torch.clone)
        return sample(self.model, *request, empty)

    def _one_shot(self, request: Request) -> Result | None:
        """Replays a whole call of a vssm or tvae; returns None if the plain path should run."""
        prompt, state, source, options = request
        model, position = self.model, None
        given: dict[str, Tensor | State] = {"seed": source.seed, "row": source.row}
        if prompt is not None:
            given["prompt"] = prompt
        if state is not None:
            given["state"] = as_input(model, state)
            if is_relative(model):
                given["start"] = torch.full((1,), state.position, device=self.device)
                position = state.position + options.length
                position += 0 if prompt is None else prompt.shape[1]
        inputs = State(given)

        def record(recorder: Recorder) -> OneShot | None:
            divided, rows = divide(model, prompt, state, source.num, options)
            if rows < source.num:  # slabs keep the device busy anyway, and it would hold memory
                return None
            empty = self._empty_pass(request)

            def function(given: State) -> State:
                x, z, after = sample(model, *_unpack(given), divided, empty)
                assert z is not None and after is not None
                return State({"x": x, "z": z, "state": after})

            return OneShot(recorder, function, inputs)

        key = "one shot", options, describe(inputs)
        made = self._programs.run(key, record, inputs, position)
        return None if made is None else (made["x"], made["z"], made.child("state"))

    def _empty_pass(self, request: Request) -> tuple[Latents, State] | None:
        """Returns the pass over empty tokens that a call from nothing starts with."""
        prompt, state, source, options = request
        model = self.model
        if not isinstance(model, Variational) or prompt is not None or state is not None:
            return None
        options, _ = divide(model, None, None, source.num, options)
        steps = empty_steps(options, source.num)
        size = model.config.latents * model.config.classes
        if model.config.block == "attention":  # keys and values, which hold on to the queries
            size += 3 * model.config.width * model.config.layers
        size *= first_weight(model).itemsize
        if not steps or steps * size > _EMPTY_BYTES or torch.is_autocast_enabled(self.device.type):
            return None
        made = self._empty.get(steps)
        if made is None:
            if (sum(self._empty) + steps) * size > _EMPTY_BYTES:
                self._empty.clear()  # programs keep those that they read
            with torch.inference_mode(False), torch.no_grad():  # serves calls in every mode
                made = model.partial_posterior(empty=steps)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # any stream may read it
            self._empty[steps] = made
        return made


def _unpack(given: State) -> tuple[Tensor | None, State | None, Noise]:
    """Returns the prompt, the state and the noise that were packed."""
    names = given.children
    source = Noise(given["seed"], given["row"], given["start"] if "start" in names else None)
    prompt = given["prompt"] if "prompt" in names else None
    return prompt, given.child("state") if "state" in names else None, source


def _make_entries(model: Model, options: Options, given: State) -> State:
    """Draws the unknown entries of a part."""
    assert isinstance(model, AnyPart)
    part = Part(given["x"], given["known"], given["made"])
    source = Noise(given["seed"], given["row"])
    return State({"x": make_part(model, part, source, options, position=0, states=None)[0]})
