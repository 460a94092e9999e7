"""Sampling of many paths from each history, for a vssm or tvae: one history is read once for all of them.

    q_omega(z_t | x_{1:C}), h_C          once a history: logits of the steps to come, state of the decoder
    z, x                                 for each of S paths, from noise of its own, for all steps at once

Path s of the history with row r reads the noise of row r S + s, as after `State.repeat(S)`.

On a GPU, reading and all that follows is one CUDA graph from the second call of the same sizes on. Histories,
seed and first row go there in one copy that nobody waits for, so slabs of as many histories replay one
recording, and the next starts before the last is done. Until a replay starts the device has nothing to do, so
what comes before it is little.

Legend: B histories, S paths of each, T new steps; x (B, C, D); z (B S, T, Z); paths (B, S, T, D).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vssm import graphs
from vssm.data.scale import Scale
from vssm.distributions import Latents
from vssm.models import Ladder, Model, Variational
from vssm.nn import State
from vssm.ops.streams import Beside
from vssm.recording import Recorder
from vssm.sampling.request import Noise
from vssm.weights import first_weight

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
    """Returns how many histories are forecast at a time, of all as many, and how many paths of each."""
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
    model: Variational, task: Task, x: Tensor, clock: Tensor | None, seed: int, first: int, finish: Finish
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
    """Returns paths that go on from a state of `observe`, (B, S, T, D)."""
    q_z, _ = model.partial_posterior(empty=length, state=state.child("partial"))
    own = _own(state["seed"], state["row"], samples)
    at_once = min(samples, max(1, _most_paths(model, length) // state.batch))
    return _paths_on(model, q_z.raw, state.child("decoder"), own, at_once, temperature)


def _paths_on(
    model: Variational, logits: Tensor, state: State, own: Noise, at_once: int, temperature: float
) -> Tensor:
    """Returns the paths of every history, (B, S, T, D), some of each at a time.

    Arguments:
        model: The model.
        logits: Those of the new steps, (B, T, Z, N).
        state: That of the decoder, of B rows.
        own: The noise of all paths.
        at_once: Paths of each history that are made at a time.
        temperature: As for `generate`.
    """
    batch, length = logits.shape[:2]
    seed, row = own.seed.view(batch, -1), own.row.view(batch, -1)
    parts = []
    for first in range(0, row.shape[1], at_once):
        some = slice(first, first + at_once)
        source = Noise(seed[:, some].flatten(), row[:, some].flatten())
        u, w = (noise(model, state.position, length) for noise in (source.latent, source.observation))
        e = _embedded(model, logits, u, temperature)
        parts.append(_decoded(model, e, state, w, temperature).unflatten(0, (batch, -1)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _read_on(model: Variational, prompt: Tensor, source: Noise, task: Task) -> Tensor:
    """Reads histories and makes paths after them; the partial posterior goes over both at once."""
    known, samples, length, temperature = prompt.shape[1], task.samples, task.length, task.temperature
    if task.at_once < samples:
        q_z, _ = model.partial_posterior(prompt, empty=length)
        _, state = model.decoder(Latents(q_z.raw[:, :known]).sample(source.latent(model, 0, known)))
        own = _own(source.seed, source.row, samples)
        return _paths_on(model, q_z.raw[:, known:], state, own, task.at_once, temperature)
    # Reading is many short kernels of few rows: what all paths need takes their time, not its own.
    drawing = Beside(prompt.device, "drawing")
    with drawing.stream:
        own = _own(source.seed, source.row, samples)
        u, w = own.latent(model, known, length), own.observation(model, known, length)
    q_z, _ = model.partial_posterior(prompt, empty=length)
    reading = Beside(prompt.device, "reading")
    with reading.stream:
        z = Latents(q_z.raw[:, :known]).sample(source.latent(model, 0, known))
        _, state = model.decoder(z)
    drawing.join()
    e = _embedded(model, q_z.raw[:, known:], u, temperature)
    reading.join()
    return _decoded(model, e, state, w, temperature).unflatten(0, (-1, samples))


def _own(seed: Tensor, row: Tensor, samples: int) -> Noise:
    """Returns the noise of all paths of histories."""
    rows = State({"seed": seed, "row": row}).repeat(samples)
    return Noise(rows["seed"], rows["row"])


def _embedded(model: Variational, logits: Tensor, u: Tensor, temperature: float) -> Tensor:
    """Draws latents of paths and returns what the decoder reads, (B S, T, width).

    Arguments:
        model: The model.
        logits: Those of the new steps, (B, T, Z, N): one row serves all paths of a history.
        u: Noise, (B S, T, Z).
        temperature: As for `generate`.
    """
    z = Latents(logits[:, None]).sample(u.unflatten(0, (len(logits), -1)), temperature)
    return model.decoder.embed(z.flatten(0, 1))


def _decoded(model: Variational, e: Tensor, state: State, w: Tensor, temperature: float) -> Tensor:
    """Decodes paths, (B S, T, D), that start from a state of B rows, with the noise w."""
    # One state serves all paths of a history without being copied.
    start = state if model.config.block == "mamba" else state.repeat(len(e) // state.batch)
    made, _ = model.decoder.run(e, start, last=False)
    return model.head(made).sample(w, temperature)


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
    source = Noise(seed.expand(num), first + torch.arange(num, device=given.device))
    paths = _read_on(model, prompt, source, task)
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
