"""Sampling step by step: transformer, ssm, rnn and vrnn.

Legend: x (B, T, D) or tokens (B, T); z (B, T, Z); u uniform noise.
"""

import torch
from torch import Tensor

from vssm.models import VRNN, Autoregressive
from vssm.nn import State, reserve, trim
from vssm.noise import LATENT, OBSERVATION, Noise
from vssm.sampling.request import Options, Result, rows_of_slab
from vssm.sampling.slabs import in_slabs

_NOISE_STEPS = 1024  # steps of noise that are drawn ahead of the loop


def sample_autoregressive(
    model: Autoregressive,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
) -> Result:
    """Algorithms "RNN sampling" and "SSM sampling", and the Transformer with a key-value cache."""
    num = source.num
    if prompt is not None:
        state = read_autoregressive(model, prompt, state)
    state = None if state is None else state.expand(num)
    position, u = 0 if state is None else state.position, torch.empty(0)
    xs = []
    for t in range(options.length):
        if t % _NOISE_STEPS == 0:
            ahead = min(_NOISE_STEPS, options.length - t)
            u = source.uniform(position + t, ahead, model.head.noise_size, OBSERVATION)
        p_x, stack = model.next(num, state)
        if t == 0 and model.config.block == "attention":
            stack = reserve(stack, options.length - 1)
        x = p_x.sample(u[:, t % _NOISE_STEPS, None], options.temperature)
        xs.append(x if options.sample else p_x.mean)
        state = State({"stack": stack, "last": x}, position + t + 1)
    assert state is not None
    return torch.cat(xs, 1), None, trim(state)


def read_autoregressive(model: Autoregressive, x: Tensor, state: State | None) -> State:
    """Reads known data, and returns the state after it."""

    def run(x: Tensor, state: State | None) -> State:
        return model(x, state)[1]

    if model.config.block == "gru":  # reads step by step: slabs would only take longer
        return run(x, state)
    return in_slabs(run, rows_of_slab(model, len(x), x.shape[1], False), len(x), x, state)


def sample_recomputed(
    model: Autoregressive, prompt: Tensor | None, source: Noise, options: Options
) -> Result:
    """Algorithm "Transformer sampling": reads the whole prefix again at every step."""
    num = source.num
    x = None if prompt is None else prompt.expand(num, *prompt.shape[1:])
    position, state = 0 if x is None else x.shape[1], None
    u = source.uniform(position, options.length, model.head.noise_size, OBSERVATION)
    xs = []
    for t in range(options.length):
        p_x, stack = model.recompute(num, x)
        x_t = p_x.sample(u[:, t, None], options.temperature)
        xs.append(x_t if options.sample else p_x.mean)
        x = x_t if x is None else torch.cat([x, x_t], 1)
        state = State({"stack": stack, "last": x_t}, position + t + 1)
    return torch.cat(xs, 1), None, state


def sample_vrnn(
    model: VRNN, prompt: Tensor | None, state: State | None, source: Noise, options: Options
) -> Result:
    """The VRNN: a latent from the prior, x from the latent, both into the recurrence."""
    num = source.num
    if prompt is not None:
        state = read_vrnn(model, prompt.expand(num, *prompt.shape[1:]), state, source)
    position = 0 if state is None else state.position
    u, w = source.uniform(position, options.length, model.config.latents, LATENT), None
    if options.sample:
        w = source.uniform(position, options.length, model.head.noise_size, OBSERVATION)
    xs, zs = [], []
    for t in range(options.length):
        h, w_t = model.memory(num, state), None if w is None else w[:, t, None]
        x, z, state = next_vrnn(model, h, state, u[:, t, None], w_t, options.temperature)
        xs.append(x)
        zs.append(z)
    return torch.cat(xs, 1), torch.cat(zs, 1), state


def next_vrnn(
    model: VRNN, h: Tensor, state: State | None, u: Tensor, w: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, State]:
    """Makes one step from the noise u of z and w of x; without w, x is the mean of the head."""
    z = model.prior(h).sample(u, temperature)
    p_x = model.likelihood(h, z)
    x = p_x.mean if w is None else p_x.sample(w, temperature)
    return x, z, model.advance(x, z, state)


def read_vrnn(model: VRNN, x: Tensor, state: State | None, source: Noise) -> State:
    """Reads known data: draws the latent of every step from its posterior."""
    position = 0 if state is None else state.position
    u = source.uniform(position, x.shape[1], model.config.latents, LATENT)
    return model(x, lambda t, q_z: q_z.sample(u[:, t, None]), state).state
