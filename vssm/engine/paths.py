"""Forecasts as one CUDA graph: histories are read and all of their paths are made by one replay.

Histories, time features, seed and first row go to the device in one copy that nobody waits for, so
slabs of as many histories replay one recording, and the next starts before the last is done.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vssm.engine.recording import Recorder
from vssm.models import Variational
from vssm.nn import State
from vssm.sampling.paths import Task, paths_after

__all__ = ["Finish", "PathProgram"]

Finish = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps paths, factor and shift to a result, which must not share their memory."""


class PathProgram:
    """Records `paths_after` for histories of one size."""

    def __init__(self, recorder: Recorder, model: Variational, task: Task) -> None:
        self._task, self._device = task, recorder.device
        with torch.inference_mode(False):
            size = _Parcel(task, recorder.device).words.shape
            self._given = torch.zeros(size, dtype=torch.float64, device=recorder.device)

        def run() -> State:
            paths, factor, shift = paths_after(model, task, *_unpack(task, self._given))
            return State({"x": paths, "factor": factor, "shift": shift})

        self._recording = recorder.record(run)

    def __call__(
        self, x: np.ndarray, clock: np.ndarray | None, seed: int, first: int, finish: Finish
    ) -> Tensor:
        """Makes the paths and returns what `finish` makes of them."""
        parcel = _Parcel(self._task, self._device)
        self._given.copy_(parcel.packed(x, clock, seed, first), non_blocking=True)
        self._recording.replay()
        made = self._recording.outputs
        return finish(made["x"], made["factor"], made["shift"])


class _Parcel:
    """Host memory for two whole numbers, time features and histories, as one vector of words."""

    def __init__(self, task: Task, device: torch.device) -> None:
        known = 2 + task.shape[1] * task.cycles
        length = known + -(-task.shape.numel() * task.dtype.itemsize // 8)
        pinned = device.type == "cuda"
        self.words = torch.empty(length, dtype=torch.float64, device="cpu", pin_memory=pinned)
        # NumPy calls no other threads: to wake them takes longer than to copy.
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


def _unpack(task: Task, given: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Returns histories, time features, seed and first row from the words on the device."""
    known = 2 + task.shape[1] * task.cycles
    seed, first = given[:2].view(torch.int64)
    clock = given[2:known].view(task.shape[1], task.cycles) if task.cycles else None
    x = given[known:].view(task.dtype)[: task.shape.numel()].view(task.shape)
    return x, clock, seed, first
