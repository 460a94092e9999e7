"""Running sums of the loss terms, kept on the device so that no step waits for it."""

import math

import torch
from torch import Tensor

from vssm.objectives import Terms

__all__ = ["Tally", "TrainingStopped"]

_STREAK = 10  # bad steps in a row that stop a run


class TrainingStopped(ValueError):
    """Raised when a training cannot go on; its last checkpoint is good."""


class Tally:
    """Sums the terms of good steps, and counts the steps that were skipped because they were not finite."""

    names = (*Terms._fields, "gradient_norm")

    def __init__(self, device: torch.device) -> None:
        float64 = {"dtype": torch.float64, "device": device}
        self.sums, self.culprit = torch.zeros(2, len(self.names), **float64)
        self.step, self.taken, self.skipped, self.streak, self.stopped = torch.zeros(5, **float64)

    def add(self, values: Tensor, finite: Tensor) -> None:
        """Adds one step: its values in the order of `names`, and whether all are finite.

        All tensors change in place, so that a CUDA graph of this can be replayed.
        """
        values = values.double()
        self.step += 1
        self.sums += values.masked_fill(~finite, 0.0)
        self.culprit.copy_(torch.where(finite, self.culprit, values))
        self.taken += finite
        self.skipped += ~finite
        self.streak.copy_((self.streak + 1) * ~finite)
        self.stopped += ((self.streak == _STREAK) & (self.stopped == 0)) * self.step

    def fetch(self, clear: bool = True) -> tuple[dict[str, float], int, int]:
        """Waits for the device; returns the means since the last clearing, steps skipped, and the streak.

        Raises `TrainingStopped` when ten steps in a row were not finite.
        """
        counts = torch.stack([self.taken, self.skipped, self.streak, self.stopped])
        *numbers, taken, skipped, streak, stopped = torch.cat(
            [self.sums, self.culprit, counts]
        ).tolist()
        sums, culprit = numbers[: len(self.names)], numbers[len(self.names) :]
        if stopped:
            bad = [n for n, v in zip(self.names, culprit, strict=True) if not math.isfinite(v)]
            term = (*bad[1:], *bad)[0]  # a part of the loss says more than the loss
            raise TrainingStopped(
                f"step {stopped:.0f}: {term} is not finite, for the tenth step in a row"
            )
        if clear:
            self.sums.zero_()
            self.taken.zero_()
        means = {n: s / taken if taken else math.nan for n, s in zip(self.names, sums, strict=True)}
        return means, int(skipped), int(streak)

    def pending(self) -> list[float]:
        """Returns the sums of the steps that are not in the log yet, and how many they are."""
        return [*self.sums.tolist(), float(self.taken)]

    def restore(self, step: int, skipped: float, streak: float, pending: list[float]) -> None:
        """Continues from a checkpoint."""
        for target, value in ((self.step, step), (self.skipped, skipped), (self.streak, streak)):
            target.fill_(value)
        self.sums.copy_(torch.tensor(pending[:-1], dtype=torch.float64))
        self.taken.fill_(pending[-1])
