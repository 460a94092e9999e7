"""`Data`, an opened data set, and the random choices that split one.

Random choices (the validation set, binarisation, synthetic data) are made from the raw bits of
Philox with the key (seed, stream). Unlike numpy's distributions, these bits are the same in all
versions.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from vssm.data.config import DataConfig
from vssm.data.meta import Meta
from vssm.data.split import Split

SPLIT, BINARIZE_TRAIN, BINARIZE_TEST, SYNTHETIC_TRAIN, SYNTHETIC_TEST, DIGITS, ARRAYS = range(7)


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


class Data:
    """Holds an opened data set; its splits are read when first asked for.

    Arguments:
        config: The options it was opened with.
        meta: What generation needs to know.
        fit: Reads the training and validation splits.
        test: Reads the test split.
        files: The files it comes from; empty if it is computed or part of a package.
        checksum: Whether the content is compared with a published checksum, in words.
    """

    config: DataConfig
    meta: Meta
    files: tuple[Path, ...]
    checksum: str

    def __init__(
        self,
        config: DataConfig,
        meta: Meta,
        fit: Callable[[], tuple[Split, Split]],
        test: Callable[[], Split],
        files: Sequence[Path] = (),
        checksum: str = "none published",
    ) -> None:
        self.config, self.meta, self.files, self.checksum = config, meta, tuple(files), checksum
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


def split_at_random(
    config: DataConfig,
    meta: Meta,
    num: int,
    read: Callable[[np.ndarray], Split],
    files: Sequence[Path],
) -> Data:
    """Returns `num` sequences as data: a tenth for testing, a tenth of the others for validation.

    The seed fixes the splits. `read` returns the sequences at ascending indices.
    """
    rest, test = hold_out(num, config.seed, stream=ARRAYS)

    def fit() -> tuple[Split, Split]:
        train, valid = hold_out(len(rest), config.seed)
        return read(rest[train]), read(rest[valid])

    return Data(config, meta, fit, lambda: read(test), files)
