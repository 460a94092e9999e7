"""The loops of models that generate step by step, as an engine records them.

Legend: e (B, 1, width) the embedded input that is read next; u, w uniform noise; R the steps that a
recorded key-value cache has room for.
"""

from collections.abc import Callable

import torch

from vssm.engine.fused import decode_step
from vssm.engine.recording import Decoder, Loop, Recorder
from vssm.models import VRNN, Autoregressive
from vssm.nn import State
from vssm.nn.stack import sinusoids
from vssm.sampling.request import Options
from vssm.sampling.stepwise import next_vrnn

__all__ = ["Feed", "autoregressive_loop", "vrnn_loop", "vrnn_reading_loop"]

Feed = Callable[[int, int], State]
"""Returns what a number of steps from a position on read, each (B, T, ...)."""


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
