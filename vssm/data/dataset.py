"""`Data`, an opened data set, and its splits for training, validation and testing.

M sequences of T steps with D features are kept as (M, T, D), or (M, T) for tokens, in the smallest
type that holds them (8-bit images stay 8-bit). A batch of them is float32 or int64.

Random choices (the validation set, binarisation, synthetic data) are made from the raw bits of
Philox with the key (seed, stream). Unlike numpy's distributions, these bits are the same in all
versions.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.data.config import DataConfig
from vssm.data.meta import Meta

PART = 1 << 22  # values that are looked at together
_DIGESTED = 4096  # sequences

Device = torch.device | str | None
Index = Tensor | np.ndarray | Sequence[int] | slice
"""(B,) positions in a split, on the CPU or where its sequences are, or a slice."""


class Stream(IntEnum):
    """What random bits are for; the numbers fix the splits of old runs."""

    SPLIT, BINARIZE_TRAIN, BINARIZE_TEST, SYNTHETIC_TRAIN, SYNTHETIC_TEST, DIGITS, ARRAYS = range(7)


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

    def batch(self, index: Index, device: Device = None, known: Tensor | None = None) -> Tensor:
        """Returns the sequences at `index` as a model reads them.

        Arguments:
            index: Which sequences.
            device: Where the batch goes; by default it stays where `x` is.
            known: Which entries of the result are known: windows of series are scaled by these.

        Returns:
            (B, T, D) float32, or (B, T) int64 for tokens. NaN where a value is missing.
        """
        x = self.x[index].to(device=device, non_blocking=True)
        if x.dim() == 2:
            return x.long()
        x = x.float() if self.maximum == 1 else x.float() / self.maximum
        if self.classes and self.labels is not None:
            labels = F.one_hot(self.labels[index].to(x.device), self.classes).float()
            x = torch.cat([x, labels[:, None].expand(-1, x.shape[1], -1)], -1)
        return x

    def scale(self, index: Index, device: Device, known: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the centre and deviation that a batch is standardised by, (B, 1, D) each."""
        ones = torch.ones(len(self.x[index]), 1, known.shape[-1], device=device)
        return ones - 1, ones

    def real(self, index: Index, device: Device = None) -> Tensor | None:
        """Returns how many steps of the sequences at `index` are real, (B,); None if all are."""
        if self.lengths is None:
            return None
        return self.lengths[index].to(device=device, non_blocking=True)

    def take(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Returns the sequences at `index`, and their lengths if they differ."""
        index = index.to(self.x.device)
        return self.batch(index, device), self.real(index, device)

    def to(self, device: torch.device | str) -> "Split":
        """Returns this split on `device`."""
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved = {name: own.to(device) for name, own in parts.items() if isinstance(own, Tensor)}
        return dataclasses.replace(self, **moved)


@dataclass
class Data:
    """Holds an opened data set; its splits are read when first asked for.

    Arguments:
        config: The options it was opened with.
        meta: The metadata, which generation needs.
        read_fit: Reads the training and validation splits.
        test: Reads the sequences to report on; training never calls it.
        files: The files it comes from; empty if it is computed or part of a package.
    """

    config: DataConfig
    meta: Meta
    read_fit: Callable[[], tuple[Split, Split]]
    test: Callable[[], Split]
    files: Sequence[Path] = ()

    def __repr__(self) -> str:
        return f"Data({self.meta.name!r}, features={self.meta.features}, length={self.meta.length})"

    @cached_property
    def _fit(self) -> tuple[Split, Split]:
        return self.read_fit()

    @property
    def train(self) -> Split:
        """The sequences to fit."""
        return self._fit[0]

    @property
    def valid(self) -> Split:
        """The sequences to choose by; never part of `train`."""
        return self._fit[1]


def random_bits(seed: int, stream: int, num: int) -> np.ndarray:
    """Returns `num` random uint64 words, fixed by (seed, stream) on every machine and version."""
    return np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(num)


def hold_out(
    num: int, seed: int, fraction: float = 0.1, stream: int = Stream.SPLIT
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices kept and the indices held out, a `fraction` of `num`, each ascending."""
    order = np.argsort(random_bits(seed, stream, num), kind="stable")
    cut = round(fraction * num)
    return np.sort(order[cut:]), np.sort(order[:cut])


def divided(split: Split, seed: int, stream: int = Stream.SPLIT) -> tuple[Split, Split]:
    """Returns nine tenths of the sequences of a split, and the tenth that is held out."""
    parts = {name: getattr(split, name) for name in ("x", "labels", "lengths")}
    kept, held = (
        dataclasses.replace(split, **{k: v if v is None else v[index] for k, v in parts.items()})
        for index in hold_out(len(split), seed, stream=stream)
    )
    return kept, held


def split_at_random(config: DataConfig, meta: Meta, whole: Split, files: Sequence[Path]) -> Data:
    """Returns sequences as data: a tenth for testing, a tenth of the others for validation."""
    rest, test = divided(whole, config.seed, Stream.ARRAYS)
    return Data(config, meta, lambda: divided(rest, config.seed), lambda: test, files)


def on_device(split: Split, device: torch.device) -> Split:
    """Returns a split on a GPU if it takes less than a quarter of its free memory."""
    if device.type == "cuda" and split.x.nbytes < torch.cuda.mem_get_info(device)[0] // 4:
        return split.to(device)
    return split


def in_parts(split: Split, index: Tensor | None = None) -> Iterator[Tensor]:
    """Gives the sequences of a split at `index`, or all, in batches of bounded memory."""
    index = torch.arange(len(split), device="cpu") if index is None else index
    for some in index.split(max(1, PART // max(1, math.prod(split.shape)))):
        yield split.batch(some)


def digest(split: Split) -> list[float]:
    """Returns three numbers that tell data sets apart, on any machine.

    They are means over sequences that are spread evenly: of the values, of their squares, and of
    the values weighted by their place.
    """
    num = min(_DIGESTED, len(split))
    sums, done = torch.zeros(3, dtype=torch.float64), 0
    for part in in_parts(split, torch.arange(num, device="cpu") * len(split) // max(1, num)):
        x = part.reshape(-1).double().nan_to_num()
        place = torch.arange(done, done + len(x), dtype=torch.float64, device=x.device)
        sums += torch.stack([x.sum(), (x * x).sum(), (x * place).sum()]).cpu()
        done += len(x)
    sums[2] /= max(1, done - 1)  # so that the last value weighs 1
    return (sums / max(1, done)).tolist()


def is_grey(split: Split) -> bool:
    """Says whether some values are neither 0 nor 1, and no Bernoulli distribution suits them.

    Example:
        >>> [is_grey(Split(torch.tensor([[[value, 1.0]]]))) for value in (0.0, 0.5)]
        [False, True]
    """
    return any(bool(((x != 0) & (x != 1) & (x == x)).any()) for x in in_parts(split))
