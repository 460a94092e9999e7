"""Sampling step by step: transformer, ssm, rnn and vrnn.

Legend: x (B, T, D) or tokens (B, T); z (B, T, Z); e (B, 1, width) the input that is read next; R the steps
that a recorded key-value cache has room for.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vssm.engine import graphs
from vssm.engine.recording import Decoder, Loop, OneShot, Recorder
from vssm.engine.trees import describe, join
from vssm.models import VRNN, Autoregressive
from vssm.nn import State, reserve, trim
from vssm.nn.stack import sinusoids
from vssm.sampling.request import Noise, Options, Result, expand_rows, nothing, portable
from vssm.sampling.slabs import in_slabs, rows_of_slab

__all__ = [
    "read_autoregressive",
    "read_vrnn",
    "sample_autoregressive",
    "sample_recomputed",
    "sample_vrnn",
]

_NOISE_STEPS = 1024  # steps of noise drawn ahead of the loop
_WORTH = 64  # steps from which recording a loop pays within one call
_ROOM = 64  # steps in the smallest recorded key-value cache; the others double it


def sample_autoregressive(
    model: Autoregressive,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
    record: bool,
) -> Result:
    """Algorithms "RNN sampling" and "SSM sampling", and the Transformer with a key-value cache."""
    num = source.num
    if prompt is not None:
        state = read_autoregressive(model, prompt, state, record)
    state = None if state is None else expand_rows(state, num)
    position = 0 if state is None else state.position
    if options.length == 0:
        return *nothing(model, num, source), state
    if record:
        pending: dict[str, Tensor | State] = {"e": model.pending(num, state)}
        if model.config.block == "attention":
            pending["at"] = torch.full((1,), position, device=source.device)
        made = _looped(
            model,
            ("steps", num, options.temperature, options.sample),
            lambda recorder, room: _autoregressive_loop(recorder, model, num, room, options),
            State({**({} if state is None else state.children), **pending}, position),
            lambda at, count: State({"u": source.observation(model, at, count)}),
            options.length,
        )
        if made is not None:
            out, after = made
            return (
                out["x"],
                None,
                State({"stack": after.child("stack"), "last": after["last"]}, after.position),
            )
    xs = []
    for t in range(options.length):
        if t % _NOISE_STEPS == 0:
            u = source.observation(model, position + t, min(_NOISE_STEPS, options.length - t))
        p_x, stack = model.next(num, state)
        if t == 0 and model.config.block == "attention":
            stack = reserve(stack, options.length - 1)
        x = p_x.sample(u[:, t % _NOISE_STEPS, None], options.temperature)
        xs.append(x if options.sample else p_x.mean)
        state = State({"stack": stack, "last": x}, position + t + 1)
    assert state is not None
    return torch.cat(xs, 1), None, trim(state)


def read_autoregressive(
    model: Autoregressive, prompt: Tensor, state: State | None, record: bool = False
) -> State:
    """Returns the state after known data."""
    if (
        model.config.block == "gru"
    ):  # reads step by step in one call: slabs would read one after the other
        return model(prompt, state)[1]
    num = len(prompt)
    rows = rows_of_slab(model, num, prompt.shape[1], False)
    return in_slabs(partial(_read_rows, model, record and rows == num), rows, num, prompt, state)


def _read_rows(model: Autoregressive, record: bool, prompt: Tensor, state: State | None) -> State:
    if record:
        before: dict[str, Tensor | State] = (
            {} if state is None else {"state": portable(model, state)}
        )
        inputs = State({**before, "prompt": prompt})
        made = graphs.attempt(
            model,
            prompt.device,
            ("read", describe(inputs)),
            lambda recorder: OneShot(recorder, model, _autoregressive_tree, inputs, State({})),
            inputs,
            {},
            prompt.shape[1] + (0 if state is None else state.position),
        )
        if made is not None:
            return made.child("state")
    return model(prompt, state)[1]


def _autoregressive_tree(model: Autoregressive, inputs: State) -> State:
    before = inputs.child("state") if "state" in inputs.children else None
    return State({"state": model(inputs["prompt"], before)[1]})


def _looped(
    model: Autoregressive | VRNN,
    key: tuple,
    make: Callable[[Recorder, int], Loop],
    carried: State,
    feed: Callable[[int, int], State],
    length: int,
) -> tuple[State, State] | None:
    """Replays a loop over `length` steps, or returns None if it is to run itself.

    Arguments:
        model: The model.
        key: All that is fixed in the loop, beside the room of its key-value caches.
        make: Records the loop with that room.
        carried: What the first step starts from.
        feed: Returns what the steps from a position on read.
        length: The number of steps.
    """
    end, parts = carried.position + length, []
    while carried.position < end:
        at, room = carried.position, 0
        count = min(end - at, _NOISE_STEPS)
        if model.config.block == "attention":
            room = max(_ROOM, 1 << at.bit_length())
            count = min(count, room - at)
        made = graphs.attempt(
            model,
            carried.device,
            (*key, room),
            lambda recorder, room=room: make(recorder, room),
            carried,
            feed(at, count),
            at_once=bool(parts) or length >= _WORTH,
        )
        if made is None:
            return None
        out, carried = made
        parts.append(out)
    return parts[0] if len(parts) == 1 else join(parts), carried


def _autoregressive_loop(
    recorder: Recorder, model: Autoregressive, num: int, room: int, options: Options
) -> Loop:
    p_x, stack = model.next(1, None)  # for the shapes
    e, last = model.pending(num, None), p_x.mean.expand(num, *p_x.mean.shape[1:])
    if not room:
        carried = State({"e": e, "last": last, "stack": stack.expand(num)})
        return Loop(recorder, partial(_autoregressive_step, options), carried)
    caches = []
    for block in stack.children.values():
        assert isinstance(block, State)
        _, heads, _, size = block["k"].shape
        caches.append(block["k"].new_zeros(2, num, heads, room, size))
    codes = sinusoids(0, room, e.shape[2], e.device, e.dtype)
    at = torch.zeros(1, dtype=torch.int64, device=e.device)
    step = partial(_transformer_step, options, codes)
    return Decoder(recorder, step, State({"e": e, "last": last, "at": at}), caches)


def _autoregressive_step(
    options: Options, model: Autoregressive, carried: State, feed: State
) -> tuple[State, State]:
    w, stack = model.stack.run(carried["e"], carried.child("stack"))
    p_x = model.head(w)
    x = p_x.sample(feed["u"], options.temperature)
    after = State({"e": model.stack.embed(x), "last": x, "stack": stack})
    return after, State({"x": x if options.sample else p_x.mean})


def _transformer_step(
    options: Options,
    codes: Tensor,
    model: Autoregressive,
    carried: State,
    feed: State,
    caches: list[Tensor],
) -> tuple[State, State]:
    p_x = model.decode(carried["e"], caches, carried["at"], codes)
    x = p_x.sample(feed["u"], options.temperature)
    after = State({"e": model.stack.embed(x), "last": x, "at": carried["at"] + 1})
    return after, State({"x": x if options.sample else p_x.mean})


def sample_recomputed(
    model: Autoregressive,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
) -> Result:
    """Algorithm "Transformer sampling": the whole prefix again at every step."""
    num = source.num
    x = None if prompt is None else prompt.expand(num, *prompt.shape[1:])
    position = 0 if x is None else x.shape[1]
    u = source.observation(model, position, options.length)
    xs = []
    for t in range(options.length):
        p_x, stack = model.recompute(num, x)
        x_t = p_x.sample(u[:, t, None], options.temperature)
        xs.append(x_t if options.sample else p_x.mean)
        x = x_t if x is None else torch.cat([x, x_t], 1)
        state = State({"stack": stack, "last": x_t}, position + t + 1)
    if not xs:
        return *nothing(model, num, source), None if x is None else model(x)[1]
    return torch.cat(xs, 1), None, state


def sample_vrnn(
    model: VRNN,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
    record: bool,
) -> Result:
    """The VRNN, step by step: a latent from the prior, x from the latent, both into the recurrence."""
    num = source.num
    if prompt is not None:
        state = read_vrnn(model, prompt.expand(num, *prompt.shape[1:]), state, source, record)
    position = 0 if state is None else state.position
    if options.length == 0:
        return *nothing(model, num, source), state

    def feed(at: int, count: int) -> State:
        u: dict[str, Tensor | State] = {"z": source.latent(model, at, count)}
        if options.sample:
            u["x"] = source.observation(model, at, count)
        return State(u)

    if record:
        made = _looped(
            model,
            ("steps", num, options.temperature, options.sample),
            lambda recorder, _: _vrnn_loop(recorder, model, num, partial(_vrnn_step, options)),
            _vrnn_carried(model, num, state),
            feed,
            options.length,
        )
        if made is not None:
            return made[0]["x"], made[0]["z"], made[1]
    u, parts = feed(position, options.length), []
    for t in range(options.length):
        now = u.map(lambda tensor, t=t: tensor[:, t, None])
        state, out = _vrnn_next(model, model.memory(num, state), state, now, options.temperature)
        parts.append(out)
    out = join(parts)
    return out["x"], out["z"], state


def _vrnn_next(
    model: VRNN, h: Tensor, state: State | None, u: State, temperature: float
) -> tuple[State, State]:
    z = model.prior(h).sample(u["z"], temperature)
    p_x = model.likelihood(h, z)
    x = p_x.sample(u["x"], temperature) if "x" in u.children else p_x.mean
    return model.advance(x, z, state), State({"x": x, "z": z})


def _vrnn_step(options: Options, model: VRNN, carried: State, feed: State) -> tuple[State, State]:
    return _vrnn_next(model, carried["h"], carried, feed, options.temperature)


def read_vrnn(
    model: VRNN, x: Tensor, state: State | None, source: Noise, record: bool = False
) -> State:
    position = 0 if state is None else state.position
    u = source.latent(model, position, x.shape[1])
    if record:
        made = _looped(
            model,
            ("read", len(x)),
            lambda recorder, _: _vrnn_loop(recorder, model, len(x), _vrnn_read_step),
            _vrnn_carried(model, len(x), state),
            lambda at, count: State({"x": x, "u": u}).map(
                lambda t: t.narrow(1, at - position, count)
            ),
            x.shape[1],
        )
        if made is not None:
            return made[1]
    return model(x, lambda t, q_z: q_z.sample(u[:, t, None]), state).state


def _vrnn_read_step(model: VRNN, carried: State, feed: State) -> tuple[State, State]:
    z = model.posterior(carried["h"], feed["x"]).sample(feed["u"])
    return model.advance(feed["x"], z, carried), State({})


def _vrnn_carried(model: VRNN, num: int, state: State | None) -> State:
    return State({"h": model.memory(num, None)}) if state is None else state


def _vrnn_loop(
    recorder: Recorder, model: VRNN, num: int, step: Callable[..., tuple[State, State]]
) -> Loop:
    h = model.memory(1)
    z = model.prior(h).mode
    return Loop(recorder, step, model.advance(model.likelihood(h, z).mean, z).expand(num))
