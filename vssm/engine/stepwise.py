"""Generation step by step from recorded loops, for transformer, ssm, rnn and vrnn.

A loop carries a tree of tensors from step to step and reads noise and data from a feed. What does
not depend on the weights is drawn in advance for many steps. A transformer's key-value cache has
room for R steps; when it is full, a loop with twice the room takes over.

Legend: e (B, 1, width) the embedded input that is read next; u, w uniform noise; R the room.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vssm.engine.fused import decode_step
from vssm.engine.programs import Programs, portable
from vssm.engine.recording import Decoder, Loop, Recorder
from vssm.engine.trees import join_steps
from vssm.models import VRNN, Autoregressive, Model, first_weight
from vssm.nn import State
from vssm.nn.stack import sinusoids
from vssm.sampling.generation import read, sample
from vssm.sampling.request import Noise, Options, Request, Result
from vssm.sampling.slabs import divide, in_slabs, rows_of_slab
from vssm.sampling.stepwise import next_vrnn, read_autoregressive

__all__ = ["StepByStep"]

_NOISE_STEPS = 1024  # steps of noise that are drawn ahead of a loop
_WORTH = 64  # steps from which recording a loop pays within one call
_ROOM = 64  # steps in the smallest recorded key-value cache; others double it

Feed = Callable[[int, int], State]
"""Returns what a number of steps from a position on read, each (B, T, ...)."""


class StepByStep:
    """Replays the loops of a model; methods return None if the plain algorithm should run."""

    def __init__(self, model: Model, programs: Programs) -> None:
        self._model, self._programs = model, programs

    def sample(self, request: Request) -> Result | None:
        """Makes the steps of a request."""
        if isinstance(self._model, VRNN):
            return self._sample_vrnn(self._model, request)
        assert isinstance(self._model, Autoregressive)
        return self._sample_autoregressive(self._model, request)

    def _sample_autoregressive(self, model: Autoregressive, request: Request) -> Result | None:
        prompt, state, source, options = request
        num = source.num
        _, rows = divide(model, prompt, state, num, options)
        if rows < num:  # the keys and values of all rows would not fit: each slab has its loop
            return self._sample_slabs(model, request, rows)
        if prompt is not None:
            state = self._read_prompt(model, prompt, state)
        position, carried = 0, {}
        if state is not None:
            state = state.expand(num)
            position, carried = state.position, dict(state.children)
        carried["e"] = model.pending(num, state)
        if model.config.block == "attention":
            carried["at"] = torch.full((1,), position, device=first_weight(model).device)
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

    def _sample_slabs(self, model: Autoregressive, request: Request, rows: int) -> Result:
        prompt, state, source, options = request

        def make(prompt: Tensor | None, state: State | None, source: Noise) -> State:
            own = Request(prompt, state, source, options)
            x, _, after = self._sample_autoregressive(model, own) or sample(model, *own)
            assert after is not None
            return State({"x": x, "state": after})

        slabs = in_slabs(make, rows, source.num, prompt, state, source)
        return slabs["x"], None, slabs.child("state")

    def _read_prompt(self, model: Autoregressive, prompt: Tensor, state: State | None) -> State:
        """Reads a prompt, by a program if a recording can hold it."""
        num, steps = prompt.shape[:2]
        whole = rows_of_slab(model, num, steps, False) == num  # else slabs keep the device busy
        if model.config.block == "gru" or not whole:
            return read_autoregressive(model, prompt, state)
        given: dict[str, Tensor | State] = {"prompt": prompt}
        if state is not None:
            given["state"] = portable(model, state)

        def function(given: State) -> State:
            before = given.child("state") if "state" in given.children else None
            return State({"state": model(given["prompt"], before)[1]})

        end = steps + (0 if state is None else state.position)
        made = self._programs.run_once(("read",), function, State(given), position=end)
        return read_autoregressive(model, prompt, state) if made is None else made.child("state")

    def _sample_vrnn(self, model: VRNN, request: Request) -> Result:
        prompt, state, source, options = request
        num = source.num
        if prompt is not None:
            x = prompt.expand(num, *prompt.shape[1:])
            first = 0 if state is None else state.position
            known = State({"x": x, "u": source.latent(model, first, x.shape[1])})
            made = self._loop(
                ("read", num),
                partial(vrnn_reading_loop, model, num),
                State({"h": model.memory(num)}) if state is None else state,
                lambda at, count: known.map(lambda t: t.narrow(1, at - first, count)),
                x.shape[1],
            )
            state = read(model, x, state, source) if made is None else made[1]

        def feed(at: int, count: int) -> State:
            u = source.latent(model, at, count)
            if not options.sample:
                return State({"u": u})
            return State({"u": u, "w": source.observation(model, at, count)})

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
        """Replays a loop over `length` steps; returns its outputs and the tree after them.

        Arguments:
            key: Everything that is fixed in the loop except the room of its key-value caches.
            make: Records the loop with a room.
            carried: The tree that the first step starts from.
            feed: Returns what the steps from a position on read.
            length: The number of steps.
        """
        end, parts = carried.position + length, []
        while carried.position < end:
            at, room = carried.position, 0
            count = min(end - at, _NOISE_STEPS)
            if self._model.config.block == "attention":
                room = max(_ROOM, 1 << at.bit_length())
                count = min(count, room - at)
            at_once = bool(parts) or length >= _WORTH
            record = partial(make, room)
            made = self._programs.run(
                (*key, room), record, carried, feed(at, count), at_once=at_once
            )
            if made is None:
                return None
            out, carried = made
            parts.append(out)
        return join_steps(parts), carried


def autoregressive_loop(
    model: Autoregressive, num: int, options: Options, room: int, recorder: Recorder
) -> Loop:
    """Records the steps of an ssm or rnn, or of a transformer with a cache of that room."""
    p_x, stack = model.next(1, None)  # for the shapes
    e, last = model.pending(num, None), p_x.mean.expand(num, *p_x.mean.shape[1:])
    if room:
        return _transformer_loop(model, num, options, room, recorder, State({"e": e, "last": last}))

    def step(carried: State, feed: State) -> tuple[State, State]:
        w, stack = model.stack.run(carried["e"], carried.child("stack"))
        p_x = model.head(w)
        x = p_x.sample(feed["u"], options.temperature)
        after = State({"e": model.stack.embed(x), "last": x, "stack": stack})
        return after, State({"x": x if options.sample else p_x.mean})

    return Loop(recorder, step, State({"e": e, "last": last, "stack": stack.expand(num)}))


def _transformer_loop(
    model: Autoregressive, num: int, options: Options, room: int, recorder: Recorder, start: State
) -> Loop:
    e, config = start["e"], model.config
    shape = 2, num, config.heads, room, config.width // config.heads
    with torch.inference_mode(False):
        caches = [e.new_zeros(shape) for _ in model.stack.blocks]
        codes = sinusoids(0, room, e.shape[2], e.device, e.dtype)
        at = torch.zeros(1, dtype=torch.int64, device=e.device)

    def step(carried: State, feed: State) -> tuple[State, State]:
        w = decode_step(model.stack, carried["e"], caches, carried["at"], codes)
        p_x = model.head(w)
        x = p_x.sample(feed["u"], options.temperature)
        after = State({"e": model.stack.embed(x), "last": x, "at": carried["at"] + 1})
        return after, State({"x": x if options.sample else p_x.mean})

    return Decoder(recorder, step, State({**start.children, "at": at}), caches)


def vrnn_loop(model: VRNN, num: int, options: Options, _: int, recorder: Recorder) -> Loop:
    """Records the steps of a vrnn."""

    def step(carried: State, feed: State) -> tuple[State, State]:
        w = feed["w"] if "w" in feed.children else None
        x, z, after = next_vrnn(model, carried["h"], carried, feed["u"], w, options.temperature)
        return after, State({"x": x, "z": z})

    return Loop(recorder, step, _vrnn_carried(model, num))


def vrnn_reading_loop(model: VRNN, num: int, _: int, recorder: Recorder) -> Loop:
    """Records the steps of a vrnn that reads data."""

    def step(carried: State, feed: State) -> tuple[State, State]:
        z = model.posterior(carried["h"], feed["x"]).sample(feed["u"])
        return model.advance(feed["x"], z, carried), State({})

    return Loop(recorder, step, _vrnn_carried(model, num))


def _vrnn_carried(model: VRNN, num: int) -> State:
    """Returns a state of the right shapes."""
    h = model.memory(1)
    z = model.prior(h).mode
    return model.advance(model.likelihood(h, z).mean, z).expand(num)
