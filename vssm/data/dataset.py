"""What every data set is once opened: `Data`, with splits (`Split`) and metadata (`Meta`).

M sequences of T steps with D features are kept as (M, T, D), or (M, T) for tokens, in the smallest type
that holds them (8-bit images stay 8-bit) and become what a model reads, float32 or int64, batch by batch.

Random choices (the validation set, binarisation, synthetic data) are made from the raw bits of Philox with
the key (seed, stream): unlike numpy's distributions, those bits never change between numpy versions.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from vssm.data.config import DataConfig
from vssm.storage import read_object

_PART = 1 << 22  # values of sequences that are looked at together, once
LEAST_SPREAD = (
    0.1  # of a window, in deviations of its column: a constant context must not divide by zero
)

SPLIT, BINARIZE_TRAIN, BINARIZE_TEST, SYNTHETIC_TRAIN, SYNTHETIC_TEST, DIGITS, ARRAYS = range(7)


def random_bits(seed: int, stream: int, num: int) -> np.ndarray:
    """Returns `num` random uint64 words, fixed by (seed, stream) on every machine and version."""
    return np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(num)


def hold_out(
    num: int, seed: int, fraction: float = 0.1, stream: int = SPLIT
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices kept and the indices held out, a `fraction` of `num`, each in ascending order.

    Example:
        >>> kept, held = hold_out(20, seed=0)
        >>> len(kept), len(held), sorted([*kept.tolist(), *held.tolist()]) == list(range(20))
        (18, 2, True)
    """
    order = np.argsort(random_bits(seed, stream, num), kind="stable")
    cut = round(fraction * num)
    return np.sort(order[cut:]), np.sort(order[:cut])


def spread(
    x: Tensor, centre: str = "window", season: int = 1, least: Tensor | float = LEAST_SPREAD**2
) -> tuple[Tensor, Tensor]:
    """Returns the centres of every window, (B, P, D), and its deviation, (B, 1, D), a tenth at least.

    Arguments:
        x: The contexts of windows, (B, C, D).
        centre: "window" for the mean, with the deviation from it; "last" for the last value, with the
            deviation that a random walk of the same steps has after the C of them.
        season: P, steps of a season, each with a centre of its own (`in_season`); C is P at least, and what
            it has beyond whole seasons, at the start, does not count.
        least: Added to the variance, (D,) or (B, 1, D); that of data that is standardised by column.

    Example:
        >>> mean, deviation = spread(torch.tensor([[[1.0], [3.0]], [[5.0], [5.0]]]))
        >>> mean.flatten().tolist(), [round(d, 3) for d in deviation.flatten().tolist()]
        ([2.0, 5.0], [1.005, 0.1])
    """
    x = x[:, x.shape[1] % season :].unflatten(1, (-1, season))  # (B, seasons, P, D)
    if centre == "last":
        middle, variance = x[:, -1], x.diff(dim=1).square().sum(1)
    else:
        middle = x.mean(1)
        variance = (x - middle[:, None]).square().mean(1)
    return middle, (variance.mean(1, keepdim=True) + least).sqrt()


def in_season(centre: Tensor, first: int, num: int) -> Tensor:
    """Returns the centres (B, P, D) of `num` steps, (B, num, D), from step `first` after the context on.

    Example:
        >>> in_season(torch.tensor([[[0.0], [1.0], [2.0]]]), -1, 5).flatten().tolist()
        [2.0, 0.0, 1.0, 2.0, 0.0]
    """
    if centre.shape[1] == 1:
        return centre.expand(-1, num, -1)
    return centre[:, torch.arange(first, first + num, device=centre.device) % centre.shape[1]]


@dataclass(frozen=True)
class Split:
    """Holds the sequences of one split in memory, on the CPU or a device.

    Arguments:
        x: (M, T, D) uint8 or float32, or (M, T) tokens in a small integer type. The windows of a series
            are a view of the (N, D) rows that they share.
        labels: (M,) int64 classes, or None.
        maximum: The stored value that stands for 1; a batch is divided by it.
        rows: Which sequences of x count, by number; all by default.
        scaled: Context, channels, centre and season of windows: each of the first `channels` is standardised
            by its own centre and deviation over the first `context` steps.
        patch: Rows that are joined to one step, last.
        lengths: (M,) int64, the steps of each sequence that are real, where the rest is padding of zeros.
    """

    x: Tensor
    labels: Tensor | None = None
    maximum: int = 1
    rows: Tensor | None = None
    scaled: tuple[int, int, str, int] | None = None
    patch: int = 1
    lengths: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x if self.rows is None else self.rows)

    def parts(self, index: Tensor | None = None) -> Iterator[Tensor]:
        """Gives the sequences at `index`, or all, in batches of no more memory than is needed."""
        index = torch.arange(len(self), device="cpu") if index is None else index
        width = self.batch(slice(0, 1)).numel()
        for some in index.split(max(1, _PART // max(1, width))):
            yield self.batch(some)

    def digest(self) -> list[float]:
        """Returns three numbers by which other data are told apart; they hold for any machine.

        Means over 4,096 sequences at most, spread evenly: of the values, of their squares, and of the
        values weighed by where they are.

        Example:
            >>> x = torch.arange(12.0).reshape(2, 3, 2)
            >>> Split(x).digest() == Split(x.flip(1)).digest()
            False
        """
        num = min(4096, len(self))
        sums, done = torch.zeros(3, dtype=torch.float64), 0
        for part in self.parts(torch.arange(num, device="cpu") * len(self) // max(1, num)):
            x = part.reshape(-1).double()
            place = torch.arange(done, done + len(x), dtype=torch.float64, device=x.device)
            sums += torch.stack([x.sum(), (x * x).sum(), (x * place).sum()]).cpu()
            done += len(x)
        sums[2] /= max(1, done - 1)  # so that the last value weighs 1
        return (sums / max(1, done)).tolist()

    def batch(
        self,
        index: Tensor | np.ndarray | Sequence[int] | slice,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Returns the sequences at `index` as a model reads them.

        Arguments:
            index: (B,) positions in the split (a tensor on the CPU or on the device of `x`), or a slice.
            device: Where the batch goes; by default where `x` is.

        Returns:
            (B, T, D) float32, or (B, T) int64 for tokens.
        """
        x = self.x[index if self.rows is None else self.rows[index]]
        if device is not None:
            x = x.to(device, non_blocking=True)
        if x.dim() == 2:
            return x.long()
        x = x.float() if self.maximum == 1 else x.float() / self.maximum
        if self.scaled is not None:
            context, channels, centre, season = self.scaled
            middle, deviation = spread(x[:, :context, :channels], centre, season)
            middle = in_season(middle, -context, x.shape[1])
            x = torch.cat([(x[..., :channels] - middle) / deviation, x[..., channels:]], -1)
        return x if self.patch == 1 else x.unflatten(1, (-1, self.patch)).flatten(2)

    def real(
        self,
        index: Tensor | np.ndarray | Sequence[int] | slice,
        device: torch.device | str | None = None,
    ) -> Tensor | None:
        """Returns how many steps of the sequences at `index` are real, (B,); None where all are."""
        if self.lengths is None:
            return None
        lengths = self.lengths[index if self.rows is None else self.rows[index]]
        return lengths if device is None else lengths.to(device, non_blocking=True)

    @property
    def filled(self) -> float:
        """The share of the steps that are real."""
        return (
            1.0 if self.lengths is None else float(self.lengths.double().mean()) / self.x.shape[1]
        )

    def to(self, device: torch.device | str) -> "Split":
        """Returns this split on `device`; overlapping windows stay a view of the rows they share."""
        x = self._memory.to(device).as_strided(self.x.shape, self.x.stride())
        parts = {name: getattr(self, name) for name in ("labels", "rows", "lengths")}
        moved = {name: None if part is None else part.to(device) for name, part in parts.items()}
        return dataclasses.replace(self, x=x, **moved)

    @property
    def nbytes(self) -> int:
        """Bytes that `to` moves for `x`."""
        return self._memory.nbytes

    @property
    def _memory(self) -> Tensor:
        """The elements that `x` covers, once each, as a vector."""
        reach = sum(
            (size - 1) * stride for size, stride in zip(self.x.shape, self.x.stride(), strict=True)
        )
        return self.x.as_strided((reach + 1,), (1,))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Meta:
    """Describes sequences well enough to show or decode generated ones without the data.

    Example:
        >>> meta = Meta(name="text", features=3, length=4, suggested_head="categorical", vocabulary="abc")
        >>> meta.decode(meta.encode("cab")), Meta.from_json(meta.to_json()) == meta
        ('cab', True)
    """

    name: str
    features: int
    """D, or the number of different tokens."""
    length: int
    """T."""
    suggested_head: str
    levels: int | None = None
    """Number of equally spaced values in [0, 1] that x can take (256 for 8-bit images)."""
    image_shape: tuple[int, int, int] | None = None
    """Height, width, channels; a step is one row, channels last within a pixel."""
    vocabulary: str | None = None
    """Token k is character k; None with 256 byte tokens."""
    columns: tuple[str, ...] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    context: int | None = None
    """Rows of a window that are known."""
    horizon: int | None = None
    """Rows of a window that are forecast."""
    patch: int = 1
    """Rows of a series in one step."""
    windowed: str | None = None
    """What each window is centred by, after its columns by `mean` and `std`: "window", "last" or nothing."""
    season: int = 1
    """Rows of a season, each of which is centred by its own kind."""
    separate: bool = False
    """Whether each column is a series of its own."""
    cycles: tuple[str, ...] = ()
    """Cycles of the calendar whose phase, as sine and cosine, are the last channels of a step."""
    time: str | None = None
    """The column of dates; none where they were left out."""
    fill: str | None = None
    """How missing values were filled."""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as a dictionary that `json` can write."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Meta":
        """Returns the metadata that `to_json` gave, also after a trip through a JSON file.

        Raises a ValueError that names the field where one is missing or can not be.
        """
        if not isinstance(fields, dict):
            raise ValueError(
                f"data_meta={fields!r} is not allowed; allowed: the fields of a run's data"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(f"metadata of data has unknown fields: {', '.join(unknown)}")
        for name in ("name", "features", "length", "suggested_head"):
            if name not in fields:
                raise ValueError(f"metadata of data has no {name}")
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()
        }
        meta = cls(**values)
        meta._check()
        return meta

    def _check(self) -> None:
        """Raises unless all fields are of their types and fit each other; a file may hold anything."""
        for name in ("features", "length", "patch", "season", "levels", "context", "horizon"):
            value, optional = getattr(self, name), name in ("levels", "context", "horizon")
            if not (_is_whole(value) or (optional and value is None)):
                self._refuse(name, "a whole number >= 1")
        for name in ("name", "suggested_head", "vocabulary", "time", "fill"):
            value, optional = getattr(self, name), name not in ("name", "suggested_head")
            if not (isinstance(value, str) or (optional and value is None)):
                self._refuse(name, "text")
        if self.windowed not in (None, "window", "last"):
            self._refuse("windowed", "None, window, last")
        if not isinstance(self.separate, bool):
            self._refuse("separate", "True, False")
        shape = self.image_shape
        if shape is not None and not (
            isinstance(shape, tuple) and len(shape) == 3 and all(map(_is_whole, shape))
        ):
            self._refuse("image_shape", "height, width, channels")
        for name in ("columns", "cycles"):
            value = getattr(self, name)
            texts = isinstance(value, tuple) and all(isinstance(text, str) for text in value)
            if not (texts or (name == "columns" and value is None)):
                self._refuse(name, "a list of names")
        self._check_columns()

    def _check_columns(self) -> None:
        """Raises unless what is known of columns is of their number, and that of the features."""
        if (self.mean is None) != (self.std is None):
            self._refuse("std" if self.std is None else "mean", "mean and std, or neither")
        num = None if self.columns is None else len(self.columns)
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value is None:
                continue
            if not (isinstance(value, tuple) and all(map(_is_finite, value)) and len(value) == num):
                self._refuse(name, f"{num or 0} finite numbers, one for each of columns")
            if name == "std" and min(value, default=1) <= 0:
                self._refuse(name, "numbers > 0")
        if num is None:
            return
        features = self.patch * ((1 if self.separate else num) + 2 * len(self.cycles))
        if self.features != features:
            self._refuse(
                "features",
                f"{features}, for {num} columns, patch={self.patch} and cycles={self.cycles}",
            )

    def _refuse(self, name: str, allowed: str) -> NoReturn:
        raise ValueError(
            f"data_meta.{name}={getattr(self, name)!r} is not allowed; allowed: {allowed}"
        )

    def differing(self, other: "Meta") -> Iterator[str]:
        """Gives the names of the fields in which two differ, but for rounding and for how they were read.

        Example:
            >>> meta = Meta(name="text", features=2, length=4, suggested_head="categorical", vocabulary="ab")
            >>> list(meta.differing(dataclasses.replace(meta, vocabulary="ac")))
            ['vocabulary']
        """
        for field in dataclasses.fields(self):
            if field.name in ("time", "fill"):
                continue
            one, two = getattr(self, field.name), getattr(other, field.name)
            if (
                field.name in ("mean", "std")
                and one is not None
                and two is not None
                and len(one) == len(two)
            ):
                largest = max(map(abs, (*one, *two)), default=0.0)
                if all(
                    math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9 * largest)
                    for a, b in zip(one, two, strict=True)
                ):
                    continue
            if one != two:
                yield field.name

    def to_image(self, x: Tensor) -> Tensor:
        """Returns sequences of rows (B, T, D) as images (B, T, width, channels), clamped to [0, 1]."""
        if self.image_shape is None:
            raise ValueError(f"data set {self.name!r} has no images")
        return x.detach().float().clamp(0, 1).reshape(*x.shape[:2], *self.image_shape[1:])

    def encode(self, text: str) -> Tensor:
        """Returns the tokens (T,) of a text."""
        if self.suggested_head != "categorical":
            raise ValueError(f"data set {self.name!r} has no text")
        if self.vocabulary is None:
            return torch.tensor(list(text.encode()), dtype=torch.long, device="cpu")
        position = {character: k for k, character in enumerate(self.vocabulary)}
        if unknown := sorted(set(text) - set(position)):
            raise ValueError(
                f"text has characters outside the vocabulary: {unknown}; it is {self.vocabulary!r}"
            )
        return torch.tensor(
            [position[character] for character in text], dtype=torch.long, device="cpu"
        )

    def decode(self, tokens: Tensor) -> str:
        """Returns the text of one sequence of tokens (T,); bytes that are no UTF-8 become U+FFFD."""
        if self.suggested_head != "categorical":
            raise ValueError(f"data set {self.name!r} has no text")
        if self.vocabulary is None:
            return bytes(tokens.tolist()).decode(errors="replace")
        return "".join(self.vocabulary[k] for k in tokens.tolist())

    def to_rows(self, x: Tensor) -> Tensor:
        """Returns steps (..., T, patch x channels) of a series as its rows, (..., T x patch, channels)."""
        return x if self.patch == 1 else x.unflatten(-1, (self.patch, -1)).flatten(-3, -2)


def read_meta(folder: str | Path) -> Meta | None:
    """Returns what the config.json of a folder says of its data; that of a model alone says nothing."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{str(folder)!r} has no config.json; allowed: the folder of a run or a model"
        )
    values = read_object(path)
    return Meta.from_json(values["data_meta"]) if "data_meta" in values else None


def steps_left(meta: Meta | None, known: int, option: str = "length") -> int:
    """Returns how many steps a sequence as long as the training data's has after those that are known.

    Arguments:
        meta: What the data were; None where nobody knows, which gives 28.
        known: The steps of prompt and state.
        option: What the message calls the number that can be given instead.
    """
    if meta is None:
        return 28
    if known >= meta.length:
        raise ValueError(
            f"nothing is left of the training data's {meta.length} steps after {known}; "
            f"allowed: {option} of 1 or more"
        )
    return meta.length - known


class Data:
    """Holds an opened data set; the splits are read when first asked for.

    Arguments:
        config: The options it was opened with.
        meta: What generation needs to know.
        fit: Reads the training and validation splits.
        test: Reads the test split.
        files: The files it comes from; empty when it is computed or part of a package.
        checksum: Whether the content is compared with a published checksum, in words.
    """

    def __init__(
        self,
        config: DataConfig,
        meta: Meta,
        fit: Callable[[], tuple[Split, Split]],
        test: Callable[[], Split],
        files: Sequence[Path] = (),
        checksum: str = "none published",
    ) -> None:
        self.config = config
        self.meta = meta
        self.files = tuple(files)
        self.checksum = checksum
        self._read_fit = fit
        self._read_test = test

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
    """Returns `num` sequences as data: a tenth is the test set, and a tenth of the others validation.

    Arguments:
        config: The options; `config.seed` fixes the splits.
        meta: What generation needs to know.
        num: How many sequences there are.
        read: Returns the sequences at some indices, in ascending order.
        files: The files that they come from.
    """
    rest, test = hold_out(num, config.seed, stream=ARRAYS)

    def fit() -> tuple[Split, Split]:
        train, valid = hold_out(len(rest), config.seed)
        return read(rest[train]), read(rest[valid])

    return Data(config, meta, fit, lambda: read(test), files)
