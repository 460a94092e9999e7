"""Sampling from a vssm with levels, at once or in chunks: each level is drawn for all steps
together.

The name in a state says what it has read: `trunk` has read only data; `blind` has also run over
empty tokens, one for each step that was generated but not read. With `recondition`, the state
before a chunk reads the chunk once it is generated.

Legend: x (B, T, D) or tokens (B, T); z (B, T, Z); W chunk size.
"""

import torch
from torch import Tensor

from vssm.distributions import Latents
from vssm.models import Ladder
from vssm.nn import State
from vssm.noise import LATENT, OBSERVATION, Noise
from vssm.sampling.request import Options, Result


def sample_ladder(
    model: Ladder, prompt: Tensor | None, state: State | None, source: Noise, options: Options
) -> Result:
    """The algorithms of `vssm.sampling.parallel` for levels of latents."""
    num = source.num
    blind = state is not None and "blind" in state.children
    if prompt is not None:
        state = read_ladder(model, prompt, state)
    trunk = None if state is None else state.child("blind" if blind else "trunk").expand(num)
    position = 0 if state is None else state.position
    xs, zs = [], []
    for first in range(0, options.length, options.chunk):
        width = min(options.chunk, options.length - first)
        x, z, after = _make(model, trunk, position, width, source, options)
        xs.append(x)
        zs.append(z)
        if options.recondition:
            _, after = model.descend(model.decoder.embed(x), None, trunk)
        position, trunk = position + width, after
    assert trunk is not None
    state = State({"trunk" if options.recondition else "blind": trunk}, position)
    return torch.cat(xs, 1), torch.cat(zs, 1), state


def _make(
    model: Ladder, trunk: State | None, position: int, width: int, source: Noise, options: Options
) -> tuple[Tensor, Tensor, State]:
    """Returns x and z of the next steps, and the state of the network after them."""
    u = source.uniform(position, width, model.config.latents, LATENT)
    draws = u.chunk(model.config.levels, -1)
    levels = range(model.config.levels)
    helds = [model.held(level, trunk) for level in levels]
    zs: list[Tensor | None] = [None] * len(draws)

    def draw(level: int, p_z: Latents, query: Tensor) -> Tensor:
        held, span = helds[level], model.rung(level).span
        own = draws[level][:, 0 if held is None else held.shape[1] :: span]
        zs[level] = z = p_z.sample(own, options.temperature)
        return z

    p_x, after = model.descend(model.decoder.blanks(len(u), width), draw, trunk)
    z = torch.cat(
        [model.rung(level).at_steps(zs[level], helds[level], width) for level in levels], -1
    )
    if not options.sample:
        return p_x.mean, z, after
    w = source.uniform(position, width, model.head.noise_size, OBSERVATION)
    return p_x.sample(w, options.temperature), z, after


def read_ladder(model: Ladder, x: Tensor, state: State | None) -> State:
    """Reads known data; a model with levels draws no latents for data."""
    before = None if state is None else state.child("trunk")
    _, trunk = model.descend(model.decoder.embed(x), None, before)
    return State({"trunk": trunk}, trunk.position)
