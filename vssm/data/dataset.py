"""`Data`, an opened data set, and `Split`, its part for training, validation or testing.

M sequences of T steps with D features are kept as (M, T, D), or (M, T) for tokens, in the smallest
type that holds them (8-bit images stay 8-bit). Batch by batch they become what a model reads,
float32 or int64.

Random choices (the validation set, binarisation, synthetic data) are made from the raw bits of
Philox with the key (seed, stream). Unlike numpy's distributions, these bits are the same in all
versions.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.data.config import DataConfig
from vssm.data.meta import Meta

SPLIT, BINARIZE_TRAIN, BINARIZE_TEST, SYNTHETIC_TRAIN, SYNTHETIC_TEST, DIGITS, ARRAYS = range(7)
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
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        parts["x"] = self._memory
        moved = {name: own.to(device) for name, own in parts.items() if isinstance(own, Tensor)}
        moved["x"] = moved["x"].as_strided(self.x.shape, self.x.stride())
        return dataclasses.replace(self, **moved)

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


class Data:
    """Holds an opened data set; its splits are read when first asked for.

    Arguments:
        config: The options it was opened with.
        meta: What generation needs to know.
        fit: Reads the training and validation splits.
        test: Reads the test split.
        files: The files it comes from; empty if it is computed or part of a package.
    """

    def __init__(
        self,
        config: DataConfig,
        meta: Meta,
        fit: Callable[[], tuple[Split, Split]],
        test: Callable[[], Split],
        files: Sequence[Path] = (),
    ) -> None:
        self.config: DataConfig = config
        self.meta: Meta = meta
        self.files: tuple[Path, ...] = tuple(files)
        self._read_fit, self._read_test = fit, test

    def __repr__(self) -> str:
        return f"Data({self.meta.name!r}, features={self.meta.features}, length={self.meta.length})"

    @cached_property
    def _fit(self) -> tuple[Split, Split]:
        return self._read_fit()

    @property
    def train(self) -> Split:
        """The sequences to fit."""
        return self._fit[0]

    @property
    def valid(self) -> Split:
        """The sequences to choose by; never part of `train`."""
        return self._fit[1]

    def test(self) -> Split:
        """Reads and returns the sequences to report on; training never calls this."""
        return self._read_test()


def random_bits(seed: int, stream: int, num: int) -> np.ndarray:
    """Returns `num` random uint64 words, fixed by (seed, stream) on every machine and version."""
    return np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(num)


def hold_out(
    num: int, seed: int, fraction: float = 0.1, stream: int = SPLIT
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices kept and the indices held out, a `fraction` of `num`, each ascending."""
    order = np.argsort(random_bits(seed, stream, num), kind="stable")
    cut = round(fraction * num)
    return np.sort(order[cut:]), np.sort(order[:cut])


def divided(split: Split, seed: int, stream: int = SPLIT) -> tuple[Split, Split]:
    """Returns nine tenths of the sequences of a split, and the tenth that is held out."""
    parts = {name: getattr(split, name) for name in ("x", "labels", "lengths")}
    parts = {name: own for name, own in parts.items() if own is not None}
    kept, held = (
        dataclasses.replace(split, **{name: own[index] for name, own in parts.items()})
        for index in hold_out(len(split), seed, stream=stream)
    )
    return kept, held


def split_at_random(config: DataConfig, meta: Meta, whole: Split, files: Sequence[Path]) -> Data:
    """Returns sequences as data: a tenth for testing, a tenth of the others for validation."""
    rest, test = divided(whole, config.seed, ARRAYS)
    return Data(config, meta, lambda: divided(rest, config.seed), lambda: test, files)
