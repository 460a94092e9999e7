"""Sampling of many paths from each history, for a vssm or tvae: one history is read once for all of them.

    q_omega(z_t | x_{1:C})               once a history, for its own steps and the steps to come: logits
    z_{1:C+T}, x_{C+1:C+T}               for each of S paths, from noise of its own, for all steps at once

Paths share the logits. They do not share the latents of the history: the law of the future given the history
averages over these latents too, so paths that shared one draw of them would be too close to each other.

Path s of the history with row r reads the noise of fork s of row r, as after `State.repeat(S)`.

On a GPU, reading and all that follows is one CUDA graph from the second call of the same sizes on. Histories,
seed and first row go there in one copy that nobody waits for, so slabs of as many histories replay one
recording, and the next starts before the last is done. Until a replay starts the device has nothing to do, so
what comes before it is little.

Legend: B histories, S paths of each, C steps of a history, T new steps; x (B, C, D); z (B S, C + T, Z);
paths (B, S, T, D).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vssm.data.scale import Scale
from vssm.distributions import Latents
from vssm.engine import graphs
from vssm.engine.recording import Recorder
from vssm.engine.weights import first_weight
from vssm.models import Ladder, Model, Variational
from vssm.nn import State
from vssm.noise import fork
from vssm.sampling.parallel import draw
from vssm.sampling.request import Noise

__all__ = ["Finish", "Task", "divided", "paths_after", "paths_from", "repeat_paths"]

# What is made at a time: paths and, where their steps are made all at once, steps times width of the model.
# On a GPU that takes some milliseconds and gigabytes: more would not make it busier.
_MOST_PATHS = {"cpu": 2**12, "cuda": 2**16}
_MOST_NUMBERS = {"cpu": 2**25, "cuda": 6 * 2**24}

Finish = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Makes a result of paths, factor and shift, which it must not keep."""


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
    model: Variational,
    task: Task,
    x: Tensor,
    clock: Tensor | None,
    seed: int,
    first: int,
    finish: Finish,
) -> Tensor:
    """Returns what `finish` makes of paths after histories, (B, S, T, D), and of their factor and shift.

    Arguments:
        model: The model.
        task: Sizes, scale and temperature.
        x: The histories in the units of the data, (B, C, channels), float32 or float64, on the host.
        clock: Time features, (C, 2 x cycles) in float64, in memory of the host.
        seed: Names the paths.
        first: The row of the first history; the others follow.
        finish: Copies the paths to where they stay.
    """
    device = task.scale.device
    given = x.numpy(), None if clock is None else clock.numpy(), seed, first
    if graphs.usable(device) and type(model) is Variational:
        made = graphs.attempt(
            model, device, ("paths", task), partial(_Program, task, model), finish, None, *given
        )
        if made is not None:
            return made
    words = _Parcel(task, device).packed(*given)
    return finish(*_paths_of(task, words.to(device, non_blocking=True), model))


def repeat_paths(
    model: Model, task: Task, x: np.ndarray, seed: int, finish: Finish, fits: Callable[[], bool]
) -> Tensor | None:
    """Does what `paths_after` does from row 0 on and without dates, in less time; None if it is to find out.

    Arguments:
        model: The model.
        task: What is asked for.
        x: The histories in the units of the data, as many numbers as the task says, in that order.
        seed: Names the paths.
        finish: Copies the paths to where they stay.
        fits: Says whether the histories can be read. It is asked while they are on their way to the device,
            before anything reads them there.
    """
    device = task.scale.device
    if not graphs.usable(device) or type(model) is not Variational:
        return None
    return graphs.again(model, device, ("paths", task), finish, fits, x, None, seed, 0)


def paths_from(
    model: Variational, state: State, samples: int, length: int, temperature: float = 1.0
) -> Tensor:
    """Returns paths that go on from a state of `observe`, (B, S, T, D).

    Arguments:
        model: The model.
        state: The state of B S rows, those of a history next to each other, each with latents of its own.
        samples: S, paths of each history.
        length: T, new steps.
        temperature: As for `generate`.
    """
    first = torch.arange(
        0, state.batch, samples, device=state.device
    )  # all rows of a history read the same
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
        made, _ = model.decoder.run(model.decoder.embed(z.flatten(0, 1)), before, last=False)
        parts.append(model.head(made[:, known:]).sample(w, temperature).unflatten(0, (batch, -1)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _sizes(task: Task) -> tuple[int, int]:
    """Returns where histories begin in what is packed, and its length, in words of 8 bytes."""
    known = 2 + task.shape[1] * task.cycles
    return known, known + -(-task.shape.numel() * task.dtype.itemsize // 8)


class _Parcel:
    """Memory of the host for two whole numbers, time features and histories, as one vector of words."""

    def __init__(self, task: Task, device: torch.device) -> None:
        known, length = _sizes(task)
        pinned = device.type == "cuda"
        self.words = torch.empty(length, dtype=torch.float64, device="cpu", pin_memory=pinned)
        # By NumPy, which calls no other threads: to wake them takes longer than to copy.
        numbers = self.words.numpy()
        self._numbers, self._clock = numbers[:2].view(np.int64), numbers[2:known]
        history = numbers[known:].view(np.float32 if task.dtype == torch.float32 else np.float64)
        self._history = history[: task.shape.numel()].reshape(task.shape)

    def packed(self, x: np.ndarray, clock: np.ndarray | None, seed: int, first: int) -> Tensor:
        """Returns the words, filled."""
        self._numbers[:] = seed, first
        if clock is not None:
            self._clock[:] = clock.reshape(-1)
        self._history[...] = x.reshape(self._history.shape)
        return self.words


def _paths_of(task: Task, given: Tensor, model: Variational) -> tuple[Tensor, Tensor, Tensor]:
    """Returns paths, factor and shift of what was packed and is on the device."""
    shape, scale = task.shape, task.scale
    num, (known, _) = shape[0], _sizes(task)
    seed, first = given[:2].view(torch.int64)
    clock = given[2:known].view(shape[1], task.cycles) if task.cycles else None
    x = given[known:].view(task.dtype)[: shape.numel()].view(shape).double()
    factor, shift = scale.units(x, first)
    prompt = scale.steps(x, factor, shift, clock)
    model.head.validate(prompt, values=False)
    row = fork(first + torch.arange(num, device=given.device), task.samples).flatten()
    own = Noise(seed.expand(len(row)), row)
    q_z, _ = model.partial_posterior(prompt, empty=task.length)
    paths = _paths_on(model, q_z.raw, None, 0, prompt.shape[1], own, task.at_once, task.temperature)
    if scale.far:
        return paths, factor, shift
    return paths, factor.to(paths), shift.to(paths)


class _Program:
    """Records `_paths_of`."""

    def __init__(self, task: Task, model: Variational, recorder: Recorder) -> None:
        self._task, self._device = task, recorder.device
        self._given = torch.zeros(_sizes(task)[1], dtype=torch.float64, device=recorder.device)
        self._recording = recorder.record(model, partial(_paths_tree, task, self._given))
        self._parcel = _Parcel(task, recorder.device)
        self._read = torch.cuda.Event() if recorder.device.type == "cuda" else None

    def __call__(
        self,
        model: Variational,
        finish: Finish,
        fits: Callable[[], bool] | None,
        *given: Any,  # noqa: ANN401
    ) -> Tensor | None:
        # To get memory takes longer than to ask whether the last replay, which has read it, is over.
        own = self._read is None or self._read.query()
        parcel = self._parcel if own else _Parcel(self._task, self._device)
        self._given.copy_(parcel.packed(*given), non_blocking=True)
        try:
            if fits is not None and not fits():
                return None
            self._recording.replay(model)
        finally:
            if own and self._read is not None:
                self._read.record(torch.cuda.current_stream(self._device))
        made = self._recording.outputs
        return finish(made["x"], made["factor"], made["shift"])


def _paths_tree(task: Task, given: Tensor, model: Any) -> State:  # noqa: ANN401
    """Makes paths as they are recorded."""
    x, factor, shift = _paths_of(task, given, model)
    return State({"x": x, "factor": factor, "shift": shift})
