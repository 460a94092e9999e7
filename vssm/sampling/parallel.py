"""Sampling in parallel: vssm and tvae, at once, in chunks, or by passes towards the stepwise
sample.

A chunk is made in S passes, all with the same noise:

    pass 1            z_t ~ q_omega(z_t | past, ∅, ..., ∅)                 x = f(z), one shot
    pass s = 2 ... S  z_t ~ q_omega(z_t | past, x_{1:t-1} of pass s - 1)   x = f(z), all t at once

Step t of a pass depends on the steps before t of the last pass, so step s is final after pass s at
the latest. S >= W gives the fixed point, which is the step-by-step sample.

Legend: x (B, T, D) or tokens (B, T); z (B, T, Z); C steps of prompt; W chunk size; S passes; ∅
empty token; f the decoder and the observation head.
"""

import torch
from torch import Tensor

from vssm.distributions import Latents
from vssm.models import Variational
from vssm.nn import State
from vssm.noise import LATENT, OBSERVATION, Noise
from vssm.sampling.ahead import posterior_ahead
from vssm.sampling.request import Options, Result

_EMPTY_STEPS = 4096  # empty tokens that one row may run over at once, whatever the chunk size


def sample_variational(
    model: Variational,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
    empty: tuple[Latents, State] | None = None,
) -> Result:
    """Algorithms "VSSM sampling" (one chunk) and "VSSM chunk sampling".

    `empty` is the partial posterior's pass over empty tokens from nothing, if the caller has kept
    it.
    """
    if prompt is not None and options.recondition:
        prompt, state = None, read_variational(model, prompt, state, source)
    if prompt is None and state is None and empty is None:
        empty = model.partial_posterior(empty=empty_steps(options, source.num))  # serves all rows
    partial, decoder = _states_of(state)
    xs, zs = [], []
    for first in range(0, options.length, options.chunk):
        width = min(options.chunk, options.length - first)
        if empty is not None and first + width <= empty[0].raw.shape[1]:
            q_z, ahead = Latents(empty[0].raw[:, first : first + width]), empty[1]
        else:
            q_z, ahead = model.partial_posterior(prompt, empty=width, state=partial)
        x, z, decoder = _make(model, q_z, width, partial, decoder, source, options)
        if options.recondition:
            _, ahead = model.partial_posterior(x, state=_expand(partial, source.num))
        partial, prompt = ahead, None
        xs.append(x)
        zs.append(z)
    assert partial is not None and decoder is not None
    read = "partial" if options.recondition else "blind"
    state = State({read: partial.expand(source.num), "decoder": decoder}, decoder.position)
    return _join(xs), _join(zs), state


def _states_of(state: State | None) -> tuple[State | None, State | None]:
    """Returns the states of the partial posterior, which may be blind, and of the decoder."""
    if state is None:
        return None, None
    return state.child("blind" if "blind" in state.children else "partial"), state.child("decoder")


def _expand(state: State | None, num: int) -> State | None:
    return None if state is None else state.expand(num)


def _make(
    model: Variational,
    q_z: Latents,
    width: int,
    partial: State | None,
    decoder: State | None,
    source: Noise,
    options: Options,
) -> tuple[Tensor, Tensor, State]:
    """Makes a chunk in S passes; returns its new x and z, and the state of the decoder after it."""
    position, length = 0 if decoder is None else decoder.position, q_z.raw.shape[1]
    temperature, known = options.temperature, length - width
    u, w = source.uniform(position, length, model.config.latents, LATENT), None
    if options.sample:
        w = source.uniform(position, length, model.head.noise_size, OBSERVATION)

    def decode(z: Tensor) -> tuple[Tensor, State]:
        p_x, after = model.likelihood(z, decoder)
        return p_x.mean if w is None else p_x.sample(w, temperature), after

    z = draw(q_z, u, known, temperature)
    x, after = decode(z)
    for _ in range(min(options.passes, length) - 1):
        z = posterior_ahead(model, x, _expand(partial, source.num)).sample(u, temperature)
        x, after = decode(z)
    return x[:, known:], z[:, known:], after


def empty_steps(options: Options, num: int) -> int:
    """Returns how many empty tokens one row runs over before all rows are generated from nothing.

    These are the steps of all chunks, unless data comes between the chunks or the pass would take
    more memory than a chunk of all rows.
    """
    if options.recondition or options.length > max(_EMPTY_STEPS, num * options.chunk):
        return min(options.chunk, options.length)
    return options.length


def _join(parts: list[Tensor]) -> Tensor:
    """Joins chunks in memory of their own, which holds no steps of a prompt."""
    if len(parts) > 1:
        return torch.cat(parts, 1)
    alone = parts[0].untyped_storage().nbytes() == parts[0].nbytes
    return parts[0] if alone else parts[0].clone()


def read_variational(model: Variational, x: Tensor, state: State | None, source: Noise) -> State:
    """Reads known data: draws its latents from the partial posterior and feeds the decoder."""
    partial, decoder = _states_of(state)
    q_z, partial = model.partial_posterior(x, state=partial)
    position = 0 if decoder is None else decoder.position
    z = q_z.sample(source.uniform(position, x.shape[1], model.config.latents, LATENT))
    _, decoder = model.likelihood(z, decoder)
    return State({"partial": partial.expand(len(z)), "decoder": decoder}, decoder.position)


def draw(q_z: Latents, u: Tensor, known: int, temperature: float) -> Tensor:
    """Draws z, (..., T, Z); the temperature applies to new steps, not to `known` data."""
    if known == 0 or temperature == 1:
        return q_z.sample(u, temperature)
    old, new = (Latents(part) for part in q_z.logits.tensor_split([known], -3))
    parts = old.sample(u[..., :known, :]), new.sample(u[..., known:, :], temperature)
    return torch.cat(parts, -2)
