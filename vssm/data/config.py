"""Options of the data sets: small frozen dataclasses that the command line and run folders share."""

import difflib
import os
from dataclasses import dataclass, field
from typing import Literal

NAMES = ("digits", "mnist", "cifar10", "images", "text", "series", "arrays", "synthetic")


def _check_one_of(option: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{option} {value!r} is not one of {', '.join(map(str, allowed))}")


def _check_at_least(option: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):  # config.json may hold anything
        raise ValueError(f"{option} {value!r} is not allowed; allowed: a whole number >= {least}")
    if value < least:
        raise ValueError(f"{option} {value} is too small, the least is {least}")


def _check_flag(option: str, value: object) -> None:
    if not isinstance(value, bool):  # "no" would count as True
        raise ValueError(f"{option} {value!r} is not allowed; allowed: True, False")


def _check_path(option: str, value: object) -> None:
    if value is not None and not isinstance(value, str | os.PathLike):
        raise ValueError(f"{option} {value!r} is not allowed; allowed: a path")


@dataclass(frozen=True, kw_only=True)
class SeriesConfig:
    """Options of time series: which file and columns, and how windows are cut."""

    path: str | None = None
    """CSV, .npy or Parquet file (CSV and .npy also .gz), as given or inside the data folder."""

    columns: tuple[str, ...] | None = None
    """Names, or positions in the file from 0 (the dates count), of the columns to use; all columns of numbers
    when not given."""

    context: int = 96
    """Steps of a window that are known."""

    horizon: int = 96
    """Steps of a window that are forecast."""

    stride: int = 1
    """Steps between the starts of two windows."""

    patch: int = 1
    """Rows that make one step of the model, a season for example; divides context and horizon."""

    fill: Literal["zero", "previous", "linear"] | None = None
    """How to fill missing values (previous: the value before; linear: between neighbours, of which one may be
    in the horizon of a window)."""

    scale: Literal["window", "last", "column", "none"] = "window"
    """Standardise each column by its mean and deviation over the training part, and each window by those of
    its context too: a level that was never seen is then no surprise. With last, the centre of a window is the
    last value of its context, as suits prices. Or by column only, or not at all."""

    season: int = 1
    """Rows of a season. Each window is then centred hour by hour, say: by the mean (with last: the last) of
    the rows of its context that are whole seasons away, so that the model learns what differs from them."""

    separate: bool = False
    """One model for all columns, each a series of its own; else the columns of a row are one step."""

    time: str | None = None
    """Column of dates (ISO 8601), found by its name or contents if not given; none leaves dates out."""

    time_features: bool = False
    """Add the phase of the day, the week and the year as channels, as far as the dates resolve them."""

    def __post_init__(self) -> None:
        if self.columns is not None:
            object.__setattr__(self, "columns", tuple(self.columns))  # a list when read from JSON
        if isinstance(self.scale, bool):  # as configs of earlier runs have it
            object.__setattr__(self, "scale", "column" if self.scale else "none")
        _check_path("series.path", self.path)
        _check_flag("series.separate", self.separate)
        _check_flag("series.time_features", self.time_features)
        _check_at_least("series.context", self.context, 1)
        _check_at_least("series.horizon", self.horizon, 1)
        _check_at_least("series.stride", self.stride, 1)
        _check_at_least("series.patch", self.patch, 1)
        _check_at_least("series.season", self.season, 1)
        if self.season > self.context:
            raise ValueError(
                f"series.season {self.season} is longer than series.context {self.context}"
            )
        if self.season > 1 and self.scale not in ("window", "last"):
            raise ValueError(f"series.season {self.season} needs series.scale window or last")
        for name in ("context", "horizon"):
            if getattr(self, name) % self.patch:
                raise ValueError(
                    f"series.{name} {getattr(self, name)} is no multiple of series.patch {self.patch}"
                )
        _check_one_of("series.fill", self.fill, (None, "zero", "previous", "linear"))
        _check_one_of("series.scale", self.scale, ("window", "last", "column", "none"))
        if self.time_features and self.time == "none":
            raise ValueError("series.time_features needs dates, which series.time none leaves out")


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Options of text: which file, what a token is and how long a sequence is."""

    path: str | None = None
    """UTF-8 file (also .gz), as given or inside the data folder; tinyshakespeare when not given."""

    unit: Literal["char", "byte"] = "char"
    """What one token is."""

    length: int = 256
    """Tokens in a sequence."""

    def __post_init__(self) -> None:
        _check_path("text.path", self.path)
        _check_one_of("text.unit", self.unit, ("char", "byte"))
        _check_at_least("text.length", self.length, 1)


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Options of images of your own."""

    path: str | None = None
    """Folder of image files, grey or RGB, all of one size; as given or inside the data folder."""

    def __post_init__(self) -> None:
        _check_path("images.path", self.path)


@dataclass(frozen=True, kw_only=True)
class ArraysConfig:
    """Options of sequences of your own."""

    path: str | None = None
    """.npy file of x (sequences, steps, features), or of images as uint8 or (images, height, width, 1 or 3);
    or .npz file of x and, where sequences are of different lengths, lengths; as given or inside the data
    folder."""

    def __post_init__(self) -> None:
        _check_path("arrays.path", self.path)


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Options of synthetic sequences."""

    length: int = 64
    """Steps in a sequence."""

    features: int = 8
    """Values in a step."""

    num: int = 1000
    """Sequences in the training set, validation included; the test set has a fifth as many."""

    def __post_init__(self) -> None:
        _check_at_least("synthetic.length", self.length, 1)
        _check_at_least("synthetic.features", self.features, 1)
        _check_at_least("synthetic.num", self.num, 10)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data set, where it lies and how it is split."""

    name: str = "digits"
    """One of digits, mnist, cifar10, images, text, series, arrays, synthetic."""

    dir: str | None = None
    """Folder with the data files; else $VSSM_DATA; else the user cache, filled by downloads."""

    seed: int = 0
    """Fixes which tenth of the training set is validation, binarisation, synthetic data and the test set of
    images and arrays."""

    binarize: bool = False
    """Replace grey images (digits, mnist) once by black and white draws, fixed by the seed."""

    series: SeriesConfig = field(default_factory=SeriesConfig)
    """Options of data set series."""

    text: TextConfig = field(default_factory=TextConfig)
    """Options of data set text."""

    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Options of data set images."""

    arrays: ArraysConfig = field(default_factory=ArraysConfig)
    """Options of data set arrays."""

    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    """Options of data set synthetic."""

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            near = difflib.get_close_matches(self.name, NAMES, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"data set {self.name!r} is unknown; {hint}known: {', '.join(NAMES)}")
        _check_path("dir", self.dir)
        _check_flag("binarize", self.binarize)
        if (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not 0 <= self.seed < 2**64
        ):
            raise ValueError(
                f"seed={self.seed} (--split-seed) is not allowed; allowed: 0 to 2^64 - 1"
            )
        if self.binarize and self.name not in ("digits", "mnist"):
            raise ValueError(f"binarize is for grey images (digits, mnist), not for {self.name!r}")
