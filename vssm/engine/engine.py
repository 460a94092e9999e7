"""The engine: a frozen copy of a model that generates fast.

Plain `vssm.generate(model, ...)` keeps nothing. An engine keeps everything that depends on the
weights alone, because its own weights never change:

| kept                                           | where                  | for        |
| ---------------------------------------------- | ---------------------- | ---------- |
| weights in the layout of the kernels           | `vssm.engine.fused`    | CUDA       |
| calls that repeat, as CUDA graphs              | `vssm.engine.programs` | CUDA       |
| the partial posterior's pass over empty tokens | here                   | vssm, tvae |

A call of a new shape runs as it is; the second call of that shape is recorded, and later calls
replay the recording.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from vssm.config import ModelConfig
from vssm.distributions import Latents
from vssm.engine.fused import fuse
from vssm.engine.loops import Feed, autoregressive_loop, vrnn_loop, vrnn_reading_loop
from vssm.engine.paths import Finish, PathProgram
from vssm.engine.programs import Programs
from vssm.engine.recording import Loop, OneShot, Recorder
from vssm.engine.trees import describe, join_steps, place
from vssm.models import VRNN, Autoregressive, Ladder, Model, Variational, first_weight, inner_model
from vssm.models.anypart import Part
from vssm.nn import State
from vssm.sampling.anypart import make_part
from vssm.sampling.filling import check_filling
from vssm.sampling.generation import Generation, divide, own_state, read, sample
from vssm.sampling.parallel import empty_steps
from vssm.sampling.paths import Task, paths_after
from vssm.sampling.request import (
    Noise,
    Options,
    Request,
    Result,
    check_reading,
    check_request,
    expand_rows,
    owner_of,
)
from vssm.sampling.slabs import in_slabs, rows_of_slab
from vssm.sampling.stepwise import read_autoregressive

__all__ = ["Engine"]

_PLAIN_TYPES = (int, float, bool, str, type(None))
_CALLS = 64  # calls from nothing whose programs are found by their arguments
_EMPTY_BYTES = 2**28  # of all passes over empty tokens together
_NOISE_STEPS = 1024  # steps of noise that are drawn ahead of a loop
_WORTH = 64  # steps from which recording a loop pays within one call
_ROOM = 64  # steps in the smallest recorded key-value cache; others double it


class Engine:
    """Creates a frozen copy of a model for fast generation.

    `generate`, `observe` and `fill` have the arguments of `vssm.generate`, `vssm.observe` and
    `vssm.fill` without the model, and the same results, to rounding. Training or moving the model
    later does not change the engine. Hooks of the model are not called when a recording is
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
        self._model = copy.deepcopy(inner_model(model)).requires_grad_(False)
        self.device = first_weight(self._model).device
        """Where the engine generates."""
        if self.device.type == "cuda":
            with torch.no_grad():
                fuse(self._model)
        self._owner = owner_of(self._model.config)
        self._programs = Programs(self.device)
        self._unconditional: dict[tuple, tuple] = {}  # arguments of a call, and its program's key
        self._empty: dict[int, tuple[Latents, State]] = {}

    @property
    def config(self) -> ModelConfig:
        """The config of the model."""
        return self._model.config

    @property
    def model(self) -> Model:
        """The frozen copy. Its layers may be fused; do not train or change it."""
        return self._model

    def __repr__(self) -> str:
        return f"Engine({self.config.kind} on {self.device})"

    def __reduce__(self) -> tuple[type["Engine"], tuple[Model]]:
        return Engine, (self._model,)  # a copy records anew

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
        """Generates new steps, as `vssm.generate` does."""
        asked, number = None, 0 if seed is None else seed
        if prompt is None and state is None and rows is None and type(number) is int:
            asked = _plain_arguments(
                num, length, chunk, recondition, passes, temperature, observe, cache
            )
            made = self._replay_unconditional(asked, number, length)
            if made is not None:
                return made
        with torch.no_grad():
            request = check_request(
                self._model,
                num,
                length,
                prompt,
                chunk,
                recondition,
                passes,
                temperature,
                observe,
                seed,
                state,
                rows,
                cache,
            )
            known = number if asked is not None and isinstance(number, int) else None
            x, z, after = self._sample(request, asked, known)
            return Generation(x, z, own_state(self._model, after, request.source))

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
        x, before, source = check_reading(self._model, x, state, seed, rows, num)
        return own_state(self._model, read(self._model, x, before, source), source)

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
        """Draws the entries that are not known, as `vssm.fill` does."""
        task = check_filling(self._model, x, known, num, passes, temperature, observe, seed, rows)
        model, part, source, options = task.work
        tensors = {"x": part.x, "known": part.known, "made": part.made}
        inputs = State({**tensors, "seed": source.seed, "row": source.row})

        def function(given: State) -> State:
            now = Part(given["x"], given["known"], given["made"])
            own = Noise(given["seed"], given["row"])
            return State({"x": make_part(model, now, own, options, position=0, states=None)[0]})

        key = ("fill", options, describe(inputs))
        made = self._programs.run(
            key, lambda recorder: OneShot(recorder, function, inputs, {}), inputs, {}, 0
        )
        return task.finish((made or function(inputs))["x"])

    @torch.no_grad()
    def paths(
        self, task: Task, x: Tensor, clock: Tensor | None, seed: int, first: int, finish: Finish
    ) -> Tensor:
        """Returns what `finish` makes of paths after histories (`vssm.sampling.paths`).

        Arguments:
            task: Sizes, scale and temperature.
            x: The histories in the units of the data, (B, C, channels), on the host.
            clock: Time features, (C, cycles) in float64, on the host.
            seed: Names the paths.
            first: The row of the first history; the others follow.
            finish: Maps paths, factor and shift to the result, which must not share their memory.
        """
        model = self._model
        assert isinstance(model, Variational)
        given = x.numpy(), None if clock is None else clock.numpy(), seed, first
        made = self._programs.run(
            ("paths", task), lambda recorder: PathProgram(recorder, model, task), *given, finish
        )
        if made is not None:
            return made
        times = None if clock is None else clock.to(self.device)
        numbers = (torch.tensor(number, device=self.device) for number in (seed, first))
        return finish(*paths_after(model, task, x.to(self.device), times, *numbers))

    def _replay_unconditional(
        self, asked: tuple | None, seed: int, length: int
    ) -> Generation | None:
        """Replays a call from nothing without more checks; returns None if it was not recorded."""
        key = None if asked is None else self._unconditional.get(asked)
        if key is None or not -(2**63) <= seed < 2**63:
            return None
        made = self._programs.replay(key, State({}), {"seed": seed}, length)
        if made is None:
            return None
        state = made.child("state")
        return Generation(made["x"], made["z"], State(state.children, state.position, self._owner))

    def _sample(self, request: Request, asked: tuple | None, seed: int | None) -> Result:
        """Makes new steps, by a program or by the plain algorithm."""
        prompt, state, source, options = request
        model, made = self._model, None
        if options.length and options.cache and self._programs.usable():
            if isinstance(model, Variational | Ladder):
                made = self._one_shot(request, asked, seed)
            elif isinstance(model, VRNN):
                made = self._vrnn_steps(model, prompt, state, source, options)
            elif isinstance(model, Autoregressive):
                made = self._autoregressive_steps(model, prompt, state, source, options)
        if made is not None:
            return made
        empty = self._empty_pass(request)
        if empty is not None:  # the state is the caller's own
            empty = empty[0], empty[1].map(torch.clone)
        return sample(model, prompt, state, source, options, empty)

    def _empty_pass(self, request: Request) -> tuple[Latents, State] | None:
        """Returns the pass over empty tokens that a call from nothing starts with."""
        prompt, state, source, options = request
        model = self._model
        if not isinstance(model, Variational) or prompt is not None or state is not None:
            return None
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
                self._programs.clear()  # they read the passes
                self._empty.clear()
            with torch.inference_mode(False), torch.no_grad():  # serves calls in every mode
                made = model.partial_posterior(empty=steps)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # any stream may read it
            self._empty[steps] = made
        return made

    def _one_shot(self, request: Request, asked: tuple | None, seed: int | None) -> Result | None:
        """Replays a whole call of a vssm or tvae; returns None if the plain path should run."""
        prompt, state, source, options = request
        model, num = self._model, source.num
        options, rows = divide(model, prompt, state, num, options)
        if rows < num:  # a call in slabs keeps the device busy anyway, and a recording holds memory
            return None
        request = request._replace(options=options)
        inputs, scalars, fixed = _pack(model, request, seed)
        empty = self._empty_pass(request)

        def function(given: State) -> State:
            prompt, state, source = _unpack(given)
            x, z, after = sample(model, prompt, state, source, options, empty)
            assert z is not None and after is not None
            noise = {"seed": source.seed, "row": source.row}
            return State({"x": x, "z": z, "state": State({**after.children, **noise})})

        key = ("one shot", options, num, seed is not None, describe(inputs))
        before = 0 if state is None else state.position
        end = before + (0 if prompt is None else prompt.shape[1]) + options.length
        made = self._programs.run(
            key, lambda recorder: OneShot(recorder, function, inputs, fixed), inputs, scalars, end
        )
        if made is None:
            return None
        if asked is not None:
            if len(self._unconditional) >= _CALLS:
                self._unconditional.clear()
            self._unconditional[asked] = key
        return made["x"], made["z"], made.child("state")

    def _autoregressive_steps(
        self,
        model: Autoregressive,
        prompt: Tensor | None,
        state: State | None,
        source: Noise,
        options: Options,
    ) -> Result | None:
        num = source.num
        _, rows = divide(model, prompt, state, num, options)
        if rows < num:  # the keys and values of all rows would not fit: each slab has its loop

            def make(prompt: Tensor | None, state: State | None, source: Noise) -> State:
                made = self._autoregressive_steps(model, prompt, state, source, options)
                x, _, after = made or sample(model, prompt, state, source, options)
                assert after is not None
                return State({"x": x, "state": after})

            slabs = in_slabs(make, rows, num, prompt, state, source)
            return slabs["x"], None, slabs.child("state")
        if prompt is not None:
            state = self._read_prompt(model, prompt, state)
        state = None if state is None else expand_rows(state, num)
        position = 0 if state is None else state.position
        carried: dict[str, Tensor | State] = {} if state is None else dict(state.children)
        carried["e"] = model.pending(num, state)
        if model.config.block == "attention":
            carried["at"] = torch.full((1,), position, device=self.device)
        made = self._loop(
            ("steps", num, options.temperature, options.sample),
            partial(autoregressive_loop, model, num, options),
            State(carried, position),
            lambda at, count: State({"u": source.observation(model, at, count)}),
            options.length,
        )
        if made is None:  # the prompt is read already
            return sample(model, None, state, source, options)
        out, after = made
        children = {"stack": after.child("stack"), "last": after["last"]}
        return out["x"], None, State(children, after.position)

    def _read_prompt(self, model: Autoregressive, prompt: Tensor, state: State | None) -> State:
        """Reads a prompt, by a program where a recording can hold it."""
        num, steps = prompt.shape[:2]
        whole = rows_of_slab(model, num, steps, False) == num  # else slabs keep the device busy
        if model.config.block != "gru" and whole:
            given: dict[str, Tensor | State] = {"prompt": prompt}
            if state is not None:
                given["state"] = _portable(model, state)
            inputs = State(given)

            def function(given: State) -> State:
                before = given.child("state") if "state" in given.children else None
                return State({"state": model(given["prompt"], before)[1]})

            end = steps + (0 if state is None else state.position)
            made = self._programs.run(
                ("read", describe(inputs)),
                lambda recorder: OneShot(recorder, function, inputs, {}),
                inputs,
                {},
                end,
            )
            if made is not None:
                return made.child("state")
        return read_autoregressive(model, prompt, state)

    def _vrnn_steps(
        self,
        model: VRNN,
        prompt: Tensor | None,
        state: State | None,
        source: Noise,
        options: Options,
    ) -> Result | None:
        num = source.num
        if prompt is not None:
            x = prompt.expand(num, *prompt.shape[1:])
            position = 0 if state is None else state.position
            u = source.latent(model, position, x.shape[1])
            known = State({"x": x, "u": u})
            made = self._loop(
                ("read", num),
                partial(vrnn_reading_loop, model, num),
                State({"h": model.memory(num)}) if state is None else state,
                lambda at, count: known.map(lambda t: t.narrow(1, at - position, count)),
                x.shape[1],
            )
            state = read(model, x, state, source) if made is None else made[1]

        def feed(at: int, count: int) -> State:
            u = {"u": source.latent(model, at, count)}
            if options.sample:
                u["w"] = source.observation(model, at, count)
            return State(dict(u))

        made = self._loop(
            ("steps", num, options.temperature, options.sample),
            partial(vrnn_loop, model, num, options),
            State({"h": model.memory(num)}) if state is None else state,
            feed,
            options.length,
        )
        if made is None:
            return sample(model, None, state, source, options)
        return made[0]["x"], made[0]["z"], made[1]

    def _loop(
        self,
        key: tuple,
        make: Callable[[int, Recorder], Loop],
        carried: State,
        feed: Feed,
        length: int,
    ) -> tuple[State, State] | None:
        """Replays a loop over `length` steps; returns None if the plain path should run.

        Arguments:
            key: Everything that is fixed in the loop except the room of its key-value caches.
            make: Records the loop with that room.
            carried: The tree that the first step starts from.
            feed: Returns what the steps from a position on read.
            length: The number of steps.
        """
        end, parts = carried.position + length, []
        while carried.position < end:
            at, room = carried.position, 0
            count = min(end - at, _NOISE_STEPS)
            if self.config.block == "attention":
                room = max(_ROOM, 1 << at.bit_length())
                count = min(count, room - at)
            made = self._programs.run(
                (*key, room),
                partial(make, room),
                carried,
                feed(at, count),
                at_once=bool(parts) or length >= _WORTH,
            )
            if made is None:
                return None
            out, carried = made
            parts.append(out)
        return join_steps(parts), carried


def _plain_arguments(*arguments: object) -> tuple | None:
    """Returns arguments as a key, with their types, because 1, 1.0 and True are equal.

    Returns None if one of them is of another type: an array may change its value between calls.
    """
    types = tuple(map(type, arguments))
    return (arguments, types) if all(kind in _PLAIN_TYPES for kind in types) else None


def _portable(model: Model, state: State) -> State:
    """Returns a state as input of a recording: without its noise, and without its position.

    Attention keeps the position, because the shape of its cache depends on it.
    """
    kept = {name: child for name, child in state.children.items() if name not in ("seed", "row")}
    attention = model.config.block == "attention"
    return place(State(kept, state.position), state.position if attention else 0)


def _pack(
    model: Model, request: Request, seed: int | None
) -> tuple[State, dict[str, int], dict[str, Tensor]]:
    """Returns the inputs of a recorded call: tensors, numbers, and tensors to fill with them."""
    prompt, state, source, _ = request
    tensors: dict[str, Tensor | State] = {}
    numbers: dict[str, int] = {}
    fixed: dict[str, Tensor] = {}
    if seed is None:
        tensors |= {"seed": source.seed, "row": source.row}
    else:  # one seed for all rows: one number tells it
        numbers["seed"] = seed
        fixed |= {"seed": source.seed, "row": source.row}
    if prompt is not None:
        tensors["prompt"] = prompt
    if state is not None:
        tensors["state"] = _portable(model, state)
        if model.config.block != "attention":
            numbers["start"] = state.position
            fixed["start"] = torch.zeros(1, dtype=torch.int64, device=source.device)
    return State(tensors), numbers, fixed


def _unpack(given: State) -> tuple[Tensor | None, State | None, Noise]:
    """Returns the prompt, the state and the noise that were packed."""
    children = given.children
    source = Noise(given["seed"], given["row"], given["start"] if "start" in children else None)
    prompt = given["prompt"] if "prompt" in children else None
    return prompt, given.child("state") if "state" in children else None, source
