"""Sampling of many paths from each history, for a vssm or tvae: one history is read once for all of
them.

    q_omega(z_t | x_{1:C})    once for each history: logits of its steps and of the steps to come
    z_{1:C+T}, x_{C+1:C+T}    for each of S paths, from noise of its own, all steps at once

Paths share the logits. They do not share the latents of the history: the law of the future given
the history averages over these latents too, so paths that shared one draw of them would be too
close to each other.

Path s of the history with row r reads the noise of fork s of row r, as after `State.repeat(S)`.

Legend: B histories, S paths of each, C steps of a history, T new steps; x (B, C, D); z (B S, C + T,
Z); paths (B, S, T, D).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vssm.data.scale import Scale
from vssm.distributions import Latents
from vssm.models import Ladder, Model, Variational, first_weight
from vssm.nn import State
from vssm.noise import fork
from vssm.sampling.parallel import draw
from vssm.sampling.request import Noise

__all__ = ["Task", "divided", "paths_after", "paths_from"]

# What is made at a time: paths and, where their steps are made all at once, steps times width of
# the model. On a GPU that takes some milliseconds and gigabytes: more would not make it busier.
_MOST_PATHS = {"cpu": 2**12, "cuda": 2**16}
_MOST_NUMBERS = {"cpu": 2**25, "cuda": 6 * 2**24}


class Task(NamedTuple):
    """What is fixed in a recording."""

    shape: torch.Size
    """Of the histories, (B, C, channels)."""
    dtype: torch.dtype
    """Theirs: float32 or float64."""
    cycles: int
    """Columns of the time features."""
    scale: Scale
    """That of the histories, on the device of the model."""
    samples: int
    """S, paths of each."""
    length: int
    """T, new steps."""
    temperature: float
    """As for `generate`."""
    at_once: int
    """Paths of each that are made at a time."""


def divided(model: Model, num: int, samples: int, length: int) -> tuple[int, int]:
    """Returns how many histories are forecast at a time, and how many paths of each.

    Arguments:
        model: The model.
        num: Histories.
        samples: Paths of each.
        length: Steps of a path that are in memory at once, those of its history among them.
    """
    most = _most_paths(model, length)
    slabs = -(-num // max(1, most // samples))
    slab = -(-num // slabs)
    return slab, min(samples, max(1, most // slab))


def _most_paths(model: Model, length: int) -> int:
    kind = first_weight(model).device.type
    most = _MOST_PATHS[kind]
    if isinstance(model, Variational | Ladder):
        most = min(most, _MOST_NUMBERS[kind] // model.config.width // length)
    return most


def paths_after(
    model: Variational, task: Task, x: Tensor, clock: Tensor | None, seed: Tensor, first: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns paths after histories, (B, S, T, D), and the factor and shift of their units.

    Arguments:
        model: The model.
        task: Sizes, scale and temperature.
        x: The histories in the units of the data, (B, C, channels), on the device of the model.
        clock: Time features, (C, cycles), in float64.
        seed: Names the paths, ().
        first: The row of the first history, (); the others follow.
    """
    factor, shift = task.scale.units(x.double(), first)
    prompt = task.scale.steps(x.double(), factor, shift, clock)
    model.head.validate(prompt, values=False)
    row = fork(first + torch.arange(len(x), device=x.device), task.samples).flatten()
    own = Noise(seed.expand(len(row)), row)
    q_z, _ = model.partial_posterior(prompt, empty=task.length)
    known, temperature = prompt.shape[1], task.temperature
    paths = _paths_on(model, q_z.raw, None, 0, known, own, task.at_once, temperature)
    if task.scale.far:
        return paths, factor, shift
    return paths, factor.to(paths), shift.to(paths)


def paths_from(
    model: Variational, state: State, samples: int, length: int, temperature: float = 1.0
) -> Tensor:
    """Returns paths that go on from a state of `observe`, (B, S, T, D).

    Arguments:
        model: The model.
        state: The state of B S rows, those of a history next to each other, each with latents of
            its own.
        samples: S, paths of each history.
        length: T, new steps.
        temperature: As for `generate`.
    """
    # The partial posterior has read the same in all rows of a history.
    first = torch.arange(0, state.batch, samples, device=state.device)
    q_z, _ = model.partial_posterior(empty=length, state=state.child("partial").select(first))
    own = Noise(state["seed"], state["row"])
    at_once = min(samples, max(1, _most_paths(model, length) // len(first)))
    return _paths_on(
        model, q_z.raw, state.child("decoder"), state.position, 0, own, at_once, temperature
    )


def _paths_on(
    model: Variational,
    logits: Tensor,
    state: State | None,
    position: int,
    known: int,
    own: Noise,
    at_once: int,
    temperature: float,
) -> Tensor:
    """Returns the paths of every history, (B, S, T, D), some of each at a time.

    Arguments:
        model: The model.
        logits: Those of `known` steps of the histories and of the new steps, (B, known + T, Z, N).
        state: That of the decoder before them, of B S rows.
        position: Of the first of these steps.
        known: The steps of the histories among them.
        own: The noise of all paths.
        at_once: Paths of each history that are made at a time.
        temperature: As for `generate`.
    """
    batch, length = logits.shape[0], logits.shape[1] - known
    index = torch.arange(own.num, device=logits.device).view(batch, -1)
    parts = []
    for first in range(0, index.shape[1], at_once):
        rows = index[:, first : first + at_once].flatten()
        source = own if len(rows) == own.num else Noise(own.seed[rows], own.row[rows])
        before = (
            state
            if state is None or source is own
            else state.map(lambda leaf, rows=rows: leaf[rows])
        )
        u = source.latent(model, position, known + length).unflatten(0, (batch, -1))
        w = source.observation(model, position + known, length)
        z = draw(Latents(logits[:, None]), u, known, temperature)
        made, _ = model.decoder(z.flatten(0, 1), before)
        parts.append(model.head(made[:, known:]).sample(w, temperature).unflatten(0, (batch, -1)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
