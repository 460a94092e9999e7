"""`Split`, the sequences for training, validation or testing, and the batches that a model reads.

M sequences of T steps with D features are kept as (M, T, D), or (M, T) for tokens, in the smallest
type that holds them (8-bit images stay 8-bit). A batch of them is float32 or int64.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Index = Tensor | np.ndarray | Sequence[int] | slice
"""(B,) positions in a split, on the CPU or where its sequences are, or a slice."""


@dataclass(frozen=True)
class Split:
    """Holds sequences in memory, on the CPU or a device.

    Arguments:
        x: (M, T, D) uint8 or float32, or (M, T) tokens in a small integer type.
        labels: (M,) int64 classes, or None.
        maximum: The stored value that stands for 1; a batch is divided by it.
        lengths: (M,) int64, the real steps of each sequence if others are padding of zeros.
        classes: Number of classes that are added to every step, one-hot; 0 to add none.
        missing: Whether values may be NaN.
    """

    x: Tensor
    labels: Tensor | None = None
    maximum: int = 1
    lengths: Tensor | None = None
    classes: int = 0
    missing: bool = False

    def __len__(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sequence as it is stored, (T, D) or (T,)."""
        return self.x.shape[1:]

    @property
    def filled(self) -> float:
        """The share of the steps that are real."""
        if self.lengths is None:
            return 1.0
        return float(self.lengths.double().mean()) / self.shape[0]

    def batch(
        self,
        index: Index,
        device: torch.device | str | None = None,
        known: Tensor | None = None,
    ) -> Tensor:
        """Returns the sequences at `index` as a model reads them.

        Arguments:
            index: Which sequences.
            device: Where the batch goes; by default it stays where `x` is.
            known: Which entries of the result are known: windows of series are scaled by these.

        Returns:
            (B, T, D) float32, or (B, T) int64 for tokens. NaN where a value is missing.
        """
        x = self.x[index]
        if device is not None:
            x = x.to(device, non_blocking=True)
        if x.dim() == 2:
            return x.long()
        x = x.float() if self.maximum == 1 else x.float() / self.maximum
        if self.classes:
            assert self.labels is not None
            labels = F.one_hot(self.labels[index].to(x.device), self.classes).float()
            x = torch.cat([x, labels[:, None].expand(-1, x.shape[1], -1)], -1)
        return x

    def scale(
        self, index: Index, device: torch.device | str, known: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the centre and deviation that a batch is standardised by, (B, 1, D) each."""
        ones = torch.ones(len(self.x[index]), 1, known.shape[-1], device=device)
        return ones - 1, ones

    def real(self, index: Index, device: torch.device | str | None = None) -> Tensor | None:
        """Returns how many steps of the sequences at `index` are real, (B,); None if all are."""
        if self.lengths is None:
            return None
        lengths = self.lengths[index]
        return lengths if device is None else lengths.to(device, non_blocking=True)

    def take(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Returns the sequences at `index`, and their lengths if they differ."""
        index = index.to(self.x.device)
        return self.batch(index, device), self.real(index, device)

    def to(self, device: torch.device | str) -> "Split":
        """Returns this split on `device`."""
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved = {name: own.to(device) for name, own in parts.items() if isinstance(own, Tensor)}
        return dataclasses.replace(self, **moved)
