"""`Data`, an opened data set, and how its sequences are divided and checked.

Random choices (the validation set, binarisation, synthetic data) are made from the raw bits of
Philox with the key (seed, stream). Unlike numpy's distributions, these bits are the same in all
versions.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vssm.data.config import DataConfig
from vssm.data.meta import Meta
from vssm.data.split import Split

SPLIT, BINARIZE_TRAIN, BINARIZE_TEST, SYNTHETIC_TRAIN, SYNTHETIC_TEST, DIGITS, ARRAYS = range(7)
PART = 1 << 22  # values that are looked at together
_DIGESTED = 4096  # sequences


@dataclass
class Data:
    """Holds an opened data set; its splits are read when first asked for.

    Arguments:
        config: The options it was opened with.
        meta: What generation needs to know.
        read_fit: Reads the training and validation splits.
        read_test: Reads the test split.
        files: The files it comes from; empty if it is computed or part of a package.
    """

    config: DataConfig
    meta: Meta
    read_fit: Callable[[], tuple[Split, Split]]
    read_test: Callable[[], Split]
    files: tuple[Path, ...] = ()

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

    def test(self) -> Split:
        """Reads and returns the sequences to report on; training never calls this."""
        return self.read_test()


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
    kept, held = (
        dataclasses.replace(split, **{k: v if v is None else v[index] for k, v in parts.items()})
        for index in hold_out(len(split), seed, stream=stream)
    )
    return kept, held


def split_at_random(config: DataConfig, meta: Meta, whole: Split, files: Sequence[Path]) -> Data:
    """Returns sequences as data: a tenth for testing, a tenth of the others for validation."""
    rest, test = divided(whole, config.seed, ARRAYS)
    return Data(config, meta, lambda: divided(rest, config.seed), lambda: test, tuple(files))


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
