"""`Split`: the sequences of one part of a data set, for training, validation or testing.

M sequences of T steps with D features are kept as (M, T, D), or (M, T) for tokens, in the smallest
type that holds them (8-bit images stay 8-bit). Batch by batch they become what a model reads,
float32 or int64.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Index", "Split"]

PART = 1 << 22  # values in a part of a split

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

    def take(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Returns the sequences at `index`, and their lengths if they differ."""
        index = index.to(self.x.device)
        return self.batch(index, device), self.real(index, device)

    def real(self, index: Index, device: torch.device | str | None = None) -> Tensor | None:
        """Returns how many steps of the sequences at `index` are real, (B,); None if all are."""
        if self.lengths is None:
            return None
        lengths = self.lengths[index]
        return lengths if device is None else lengths.to(device, non_blocking=True)

    def deviation(self, index: Index, device: torch.device | str, known: Tensor) -> Tensor:
        """Returns what the features of a batch were divided by, (B, 1, D), for the same `known`."""
        return torch.ones(len(self.x[index]), 1, known.shape[-1], device=device)

    @property
    def filled(self) -> float:
        """The share of the steps that are real."""
        if self.lengths is None:
            return 1.0
        return float(self.lengths.double().mean()) / self.x.shape[1]

    def parts(self, index: Tensor | None = None) -> Iterator[Tensor]:
        """Gives the sequences at `index`, or all, in batches of bounded memory."""
        index = torch.arange(len(self), device="cpu") if index is None else index
        width = self.batch(slice(0, 1)).numel()
        for some in index.split(max(1, PART // max(1, width))):
            yield self.batch(some)

    def digest(self) -> list[float]:
        """Returns three numbers that tell data sets apart, on any machine.

        They are means over at most 4,096 sequences, spread evenly: of the values, of their squares,
        and of the values weighted by their place.
        """
        num = min(4096, len(self))
        sums, done = torch.zeros(3, dtype=torch.float64), 0
        for part in self.parts(torch.arange(num, device="cpu") * len(self) // max(1, num)):
            x = part.reshape(-1).double().nan_to_num()
            place = torch.arange(done, done + len(x), dtype=torch.float64, device=x.device)
            sums += torch.stack([x.sum(), (x * x).sum(), (x * place).sum()]).cpu()
            done += len(x)
        sums[2] /= max(1, done - 1)  # so that the last value weighs 1
        return (sums / max(1, done)).tolist()

    def is_grey(self) -> bool:
        """Says whether some values are neither 0 nor 1, and no Bernoulli distribution suits them.

        Example:
            >>> [Split(torch.tensor([[[value, 1.0]]])).is_grey() for value in (0.0, 0.5)]
            [False, True]
        """
        return any(bool(((x != 0) & (x != 1) & (x == x)).any()) for x in self.parts())

    def placed(self, device: torch.device) -> "Split":
        """Returns this split on a GPU if it takes less than a quarter of its free memory."""
        if device.type == "cuda" and self.nbytes < torch.cuda.mem_get_info(device)[0] // 4:
            return self.to(device)
        return self

    def to(self, device: torch.device | str) -> "Split":
        """Returns this split on `device`; windows stay a view of the rows that they share."""
        x = self._memory.to(device).as_strided(self.x.shape, self.x.stride())
        others = [field.name for field in dataclasses.fields(self) if field.name != "x"]
        parts = {name: getattr(self, name) for name in others}
        moved = {name: own.to(device) for name, own in parts.items() if isinstance(own, Tensor)}
        return dataclasses.replace(self, x=x, **moved)

    @property
    def nbytes(self) -> int:
        """Bytes that `to` moves for `x`."""
        return self._memory.nbytes

    @property
    def _memory(self) -> Tensor:
        """The elements that `x` covers, once each, as a vector."""
        steps = zip(self.x.shape, self.x.stride(), strict=True)
        reach = sum((size - 1) * stride for size, stride in steps)
        return self.x.as_strided((reach + 1,), (1,))
