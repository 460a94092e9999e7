"""Samples many paths after each history, for a vssm or tvae that reads each history once.

    q_omega(z_t | x_{1:C})    once for each history: logits of its steps and of the steps to come
    z_{1:C+T}, x_{C+1:C+T}    for each of S paths, from noise of its own, all steps at once

Paths share the logits. They do not share the latents of the history: the law of the future given
the history averages over these latents too, so paths that shared one draw of them would be too
close to each other.

Path s of the history with row r reads the noise of fork s of row r, as after `State.repeat(S)`.

Legend: B histories, S paths of each, C steps of a history, T new steps; x (B, C, D); z (B S, C + T,
Z); paths (B, S, T, D).
"""

from collections.abc import Hashable
from typing import NamedTuple

import torch

from vssm.distributions import Latents
from vssm.forecasting.scale import Scale
from vssm.models import Ladder, Model, Variational, first_weight
from vssm.nn import State
from vssm.noise import fork
from vssm.sampling.parallel import draw
from vssm.sampling.request import Noise

__all__ = ["Task", "divided", "paths_after"]

# How many paths to make at a time, and how many steps times width if steps are made at once. On a
# GPU that takes some milliseconds and gigabytes: more would not make it busier.
_MOST_PATHS = {"cpu": 2**12, "cuda": 2**16}
_MOST_NUMBERS = {"cpu": 2**25, "cuda": 6 * 2**24}


class Task(NamedTuple):
    """What to make after each history."""

    scale: Scale
    """The scale of the histories, on the device of the model."""
    samples: int
    """S, paths of each."""
    length: int
    """T, new steps."""
    temperature: float
    """As for `generate`."""
    at_once: int
    """Paths of each history that are made at a time."""


def divided(model: Model, num: int, samples: int, length: int) -> tuple[int, int]:
    """Returns how many histories to forecast at a time, and how many paths of each.

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


def paths_after(model: Model, task: Hashable, given: State) -> State:
    """Returns paths `x` (B, S, T, D) after histories, and the `factor` and `shift` of their units.

    Arguments:
        model: A vssm or tvae without levels.
        task: What to make.
        given: On the device of the model, the histories `x` (B, C, channels) in the units of the
            data; `seed` (1,), which names the paths; `first` (1,), the row of the first history;
            and `clock`, time features (C, cycles) in float64, if the model has some.
    """
    assert isinstance(model, Variational) and isinstance(task, Task)
    x, first = given["x"].double(), given["first"]
    factor, shift = task.scale.units(x, first)
    clock = given["clock"] if "clock" in given.children else None
    prompt = task.scale.steps(x, factor, shift, clock)
    model.head.validate(prompt, values=False)
    row = fork(first + torch.arange(len(x), device=x.device), task.samples).flatten()
    own = Noise(given["seed"].expand(len(row)), row)
    q_z, _ = model.partial_posterior(prompt, empty=task.length)
    known, parts = prompt.shape[1], []
    index = torch.arange(own.num, device=x.device).view(len(x), -1)
    for start in range(0, task.samples, task.at_once):
        rows = index[:, start : start + task.at_once].flatten()
        source = own if len(rows) == own.num else Noise(own.seed[rows], own.row[rows])
        u = source.latent(model, 0, known + task.length).unflatten(0, (len(x), -1))
        w = source.observation(model, known, task.length)
        z = draw(Latents(q_z.raw[:, None]), u, known, task.temperature)
        made, _ = model.decoder(z.flatten(0, 1))
        made = model.head(made[:, known:]).sample(w, task.temperature)
        parts.append(made.unflatten(0, (len(x), -1)))
    paths = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if not task.scale.far:
        factor, shift = factor.to(paths), shift.to(paths)
    return State({"x": paths, "factor": factor, "shift": shift})
