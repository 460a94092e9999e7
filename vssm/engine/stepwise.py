"""Generation step by step from recorded loops, for transformer, ssm, rnn and vrnn.

The noise is drawn in advance for many steps. A transformer's key-value cache has room for R steps;
when it is full, a loop with twice the room takes over.

Legend: e (B, 1, width) the embedded input that is read next; u, w uniform noise; R the room.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vssm.engine.loops import CachedLoop, Loop, decode_step
from vssm.engine.programs import Programs, Recorder
from vssm.engine.trees import as_input, join_steps
from vssm.models import VRNN, Autoregressive, Model, first_weight
from vssm.nn import State
from vssm.nn.stack import sinusoids
from vssm.noise import LATENT, OBSERVATION, Noise
from vssm.sampling.generation import read, sample
from vssm.sampling.request import Request, Result, divide, rows_of_slab
from vssm.sampling.slabs import in_slabs
from vssm.sampling.stepwise import next_vrnn, read_autoregressive

_NOISE_STEPS = 1024  # steps of noise that are drawn ahead of a loop
_WORTH = 64  # steps from which recording a loop pays within one call
_ROOM = 64  # steps in the smallest recorded key-value cache; others double it


def sample_stepwise(model: Model, programs: Programs, request: Request) -> Result:
    """Makes the steps of a request by recorded loops, or by the plain algorithm."""
    if isinstance(model, VRNN):
        return _sample_vrnn(model, programs, request)
    assert isinstance(model, Autoregressive)
    prompt, state, source, options = request
    _, rows = divide(model, prompt, state, source.num, options)

    def make(prompt: Tensor | None, state: State | None, source: Noise) -> State:
        own = Request(prompt, state, source, options)
        x, _, after = _sample_autoregressive(model, programs, own)
        assert after is not None
        return State({"x": x, "state": after})

    # If the keys and values of all rows would not fit, each slab of rows has its loop.
    made = in_slabs(make, rows, source.num, prompt, state, source)
    return made["x"], None, made.child("state")


def _sample_autoregressive(model: Autoregressive, programs: Programs, request: Request) -> Result:
    prompt, state, source, options = request
    num = source.num
    if prompt is not None:
        state = _read_prompt(model, programs, prompt, state)
    position, carried = 0, {}
    if state is not None:
        state = state.expand(num)
        position, carried = state.position, dict(state.children)
    carried["e"] = model.pending(num, state)
    if model.config.block == "attention":
        carried["at"] = torch.full((1,), position, device=first_weight(model).device)

    def feed(at: int, count: int) -> State:
        return State({"u": source.uniform(at, count, model.head.noise_size, OBSERVATION)})

    loop = partial(_run_loop, model, programs, _autoregressive_loop)
    sizes = num, options.temperature, options.sample
    made = loop(sizes, State(carried, position), feed, options.length)
    if made is None:  # the prompt is read already
        return sample(model, None, state, source, options)
    out, after = made
    children = {"stack": after.child("stack"), "last": after["last"]}
    return out["x"], None, State(children, after.position)


def _read_prompt(
    model: Autoregressive, programs: Programs, prompt: Tensor, state: State | None
) -> State:
    """Reads a prompt, by a program if a recording can hold it."""
    num, steps = prompt.shape[:2]
    whole = rows_of_slab(model, num, steps, False) == num  # else slabs keep the device busy
    if model.config.block == "gru" or not whole:
        return read_autoregressive(model, prompt, state)
    given: dict[str, Tensor | State] = {"prompt": prompt}
    if state is not None:
        given["state"] = as_input(model, state)

    def function(given: State) -> State:
        before = given.child("state") if "state" in given.children else None
        return State({"state": model(given["prompt"], before)[1]})

    end = steps + (0 if state is None else state.position)
    made = programs.run_function(("read",), function, State(given), end)
    return read_autoregressive(model, prompt, state) if made is None else made.child("state")


def _sample_vrnn(model: VRNN, programs: Programs, request: Request) -> Result:
    prompt, state, source, options = request
    num, start = source.num, State({"h": model.memory(source.num)})
    loop = partial(_run_loop, model, programs)
    if prompt is not None:
        x = prompt.expand(num, *prompt.shape[1:])
        first = 0 if state is None else state.position
        u = source.uniform(first, x.shape[1], model.config.latents, LATENT)
        known = State({"x": x, "u": u})

        def read_feed(at: int, count: int) -> State:
            return known.map(lambda t: t.narrow(1, at - first, count))

        made = loop(_vrnn_reading_loop, (num,), state or start, read_feed, x.shape[1])
        state = read(model, x, state, source) if made is None else made[1]

    def feed(at: int, count: int) -> State:
        u = source.uniform(at, count, model.config.latents, LATENT)
        if not options.sample:
            return State({"u": u})
        w = source.uniform(at, count, model.head.noise_size, OBSERVATION)
        return State({"u": u, "w": w})

    sizes = num, options.temperature, options.sample
    made = loop(_vrnn_loop, sizes, state or start, feed, options.length)
    if made is None:
        return sample(model, None, state, source, options)
    return made[0]["x"], made[0]["z"], made[1]


def _run_loop(
    model: Model,
    programs: Programs,
    make: Callable[..., Loop],
    arguments: tuple,
    carried: State,
    feed: Callable[[int, int], State],
    length: int,
) -> tuple[State, State] | None:
    """Replays a loop over `length` steps; returns its outputs and the tree after them.

    Arguments:
        model: The model.
        programs: The programs of the engine.
        make: Records the loop, from a recorder, the model, the room of its key-value caches, and
            further arguments.
        arguments: The further arguments.
        carried: The tree that the first step starts from.
        feed: Returns the inputs of a number of steps from a position on, each (B, T, ...).
        length: The number of steps.
    """
    end, parts = carried.position + length, []
    while carried.position < end:
        at, room = carried.position, 0
        count = min(end - at, _NOISE_STEPS)
        if model.config.block == "attention":
            room = max(_ROOM, 1 << at.bit_length())
            count = min(count, room - at)
        record = partial(make, model=model, room=room, arguments=arguments)
        at_once = bool(parts) or length >= _WORTH
        given = carried, feed(at, count)
        made = programs.run((make, room, *arguments), record, *given, at_once=at_once)
        if made is None:
            return None
        out, carried = made
        parts.append(out)
    return join_steps(parts), carried


def _autoregressive_loop(
    recorder: Recorder, model: Autoregressive, room: int, arguments: tuple[int, float, bool]
) -> Loop:
    """Records the steps of an ssm or rnn, or of a transformer with a cache of that room."""
    num, temperature, draws = arguments
    p_x, stack = model.next(1, None)  # for the shapes
    e, last = model.pending(num, None), p_x.mean.expand(num, *p_x.mean.shape[1:])
    start: dict[str, Tensor | State] = {"e": e, "last": last}
    caches, codes = [], None
    if room:
        size = 2, num, model.config.heads, room, model.config.width // model.config.heads
        with torch.inference_mode(False):
            caches = [e.new_zeros(size) for _ in model.stack.blocks]
            codes = sinusoids(0, room, e.shape[2], e.device, e.dtype)
            start["at"] = torch.zeros(1, dtype=torch.int64, device=e.device)
    else:
        start["stack"] = stack.expand(num)

    def step(carried: State, feed: State) -> tuple[State, State]:
        after: dict[str, Tensor | State] = {}
        if codes is None:
            w, after["stack"] = model.stack.run(carried["e"], carried.child("stack"))
        else:
            w = decode_step(model.stack, carried["e"], caches, carried["at"], codes)
            after["at"] = carried["at"] + 1
        p_x = model.head(w)
        x = p_x.sample(feed["u"], temperature)
        after = {"e": model.stack.embed(x), "last": x, **after}
        return State(after), State({"x": x if draws else p_x.mean})

    if room:
        return CachedLoop(recorder, step, State(start), caches)
    return Loop(recorder, step, State(start))


def _vrnn_loop(
    recorder: Recorder, model: VRNN, room: int, arguments: tuple[int, float, bool]
) -> Loop:
    """Records the steps of a vrnn."""
    num, temperature, _ = arguments

    def step(carried: State, feed: State) -> tuple[State, State]:
        w = feed["w"] if "w" in feed.children else None
        x, z, after = next_vrnn(model, carried["h"], carried, feed["u"], w, temperature)
        return after, State({"x": x, "z": z})

    return Loop(recorder, step, _vrnn_carried(model, num))


def _vrnn_reading_loop(recorder: Recorder, model: VRNN, room: int, arguments: tuple[int]) -> Loop:
    """Records the steps of a vrnn that reads data."""

    def step(carried: State, feed: State) -> tuple[State, State]:
        z = model.posterior(carried["h"], feed["x"]).sample(feed["u"])
        return model.advance(feed["x"], z, carried), State({})

    return Loop(recorder, step, _vrnn_carried(model, *arguments))


def _vrnn_carried(model: VRNN, num: int) -> State:
    """Returns a state of the right shapes."""
    h = model.memory(1)
    z = model.prior(h).mode
    return model.advance(model.likelihood(h, z).mean, z).expand(num)
