"""Options of the data sets: frozen dataclasses that the command line and run folders share."""

from dataclasses import dataclass, field
from typing import Literal

from vssm.checks import check_choice, check_number

NAMES = ("digits", "mnist", "cifar10", "images", "text", "series", "arrays", "synthetic")


@dataclass(frozen=True, kw_only=True)
class SeriesConfig:
    """Options of time series: which file and columns, and how windows are cut."""

    path: str | None = None
    """CSV, .npy or Parquet file (CSV and .npy also .gz), as given or inside the data folder."""
    columns: tuple[str, ...] | None = None
    """Columns to use, by name; 0, 1, ... in a file without names. All columns of numbers if not
    given."""
    given: tuple[str, ...] = ()
    """Columns that are known in the future too, such as price,holiday. They are read, and never
    generated or scored; for models with known="any"."""
    context: int = 96
    """Rows of a window that are known."""
    horizon: int = 96
    """Rows of a window that are forecast."""
    fill: Literal["zero", "previous", "linear"] | None = None
    """How to fill missing values: with zero, with the value before (previous), or on a line between
    the two neighbours (linear), one of which may lie in the horizon of a window. Models with
    known="any" need no filling: they learn from the values that are there."""
    scale: Literal["window", "column", "none"] = "window"
    """How to standardise. column: each column by its mean and deviation over the training part.
    window: also each window by its context, so that a level that training never saw does no harm.
    none: not at all."""
    time: str | None = None
    """Column of dates (ISO 8601), whose order is checked. By default it is found by its name or
    contents; none leaves dates out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", tuple(self.given))  # JSON has lists
        if self.columns is not None:
            object.__setattr__(self, "columns", tuple(self.columns))
        check_number("series.context", self.context, 1, whole=True)
        check_number("series.horizon", self.horizon, 1, whole=True)
        if self.fill is not None:
            check_choice("series.fill", self.fill, ("zero", "previous", "linear"))
        check_choice("series.scale", self.scale, ("window", "column", "none"))


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Options of text: which file, what a token is and how long a sequence is."""

    path: str | None = None
    """UTF-8 file (also .gz), as given or inside the data folder; tinyshakespeare if not given."""
    unit: Literal["char", "byte"] = "char"
    """What one token is."""
    length: int = 256
    """Tokens in a sequence."""

    def __post_init__(self) -> None:
        check_choice("text.unit", self.unit, ("char", "byte"))
        check_number("text.length", self.length, 1, whole=True)


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Options of your own images."""

    path: str | None = None
    """Folder of image files, grey or RGB, all of one size; as given or inside the data folder."""


@dataclass(frozen=True, kw_only=True)
class ArraysConfig:
    """Options of your own sequences."""

    path: str | None = None
    """.npy file of x (sequences, steps, features), or of images: uint8, or (images, height, width,
    1 or 3). Or .npz file of x, with lengths if sequences differ in length, and labels if they have
    classes. As given or inside the data folder."""


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
        check_number("synthetic.length", self.length, 1, whole=True)
        check_number("synthetic.features", self.features, 1, whole=True)
        check_number("synthetic.num", self.num, 10, whole=True)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data set, where it is and how it is split."""

    name: str = "digits"
    """One of digits, mnist, cifar10, images, text, series, arrays, synthetic."""
    dir: str | None = None
    """Folder with the data files; else $VSSM_DATA; else the user cache, filled by downloads."""
    seed: int = 0
    """Fixes the validation set, binarisation, synthetic data, and the test set of your own data."""
    binarize: bool = False
    """Replace grey images (digits, mnist) once by black and white draws, fixed by the seed."""
    labels: bool = False
    """Add the class of a sequence to every step, one-hot, as given features: for models with
    known="any", and digits, mnist, cifar10, and arrays that have labels."""
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
        check_choice("data set", self.name, NAMES)
        check_number("seed (--split-seed)", self.seed, 0, below=2**64, whole=True)
        if self.binarize and self.name not in ("digits", "mnist"):
            raise ValueError(f"binarize is for grey images (digits, mnist), not for {self.name!r}")
        if self.labels and self.name not in ("digits", "mnist", "cifar10", "arrays"):
            raise ValueError(
                f"data set {self.name!r} has no labels; use labels with digits, mnist, cifar10 or"
                " arrays"
            )
