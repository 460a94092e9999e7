"""Time series from CSV, .npy or Parquet files, cut into windows of context + horizon rows.

A file is a table of N rows (time) and D columns (`vssm.data.table`). It is split by time: the first
70 % of the rows are for training, the next 10 % for validation, the last 20 % for testing. A window
of validation or test may take its context from the part before, as in use, but never a row of its
horizon.

A row is a step: D values, and the columns that are known in the future too (`given`). Columns are
standardised over the training rows, and those that are made also over the context of their window.

Windows in which a column is missing for more than half of the rows are left out; other gaps are
filled. For models with known="any" missing values stay NaN, and only windows without any value are
left out.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.data.config import DataConfig
from vssm.data.dataset import Data, Device, Index, Split
from vssm.data.files import locate_own
from vssm.data.meta import Meta
from vssm.data.table import (
    Table,
    check_size,
    filled,
    find_columns,
    read_table,
    uneven_dates,
    usual_columns,
)

_LEAST_SPREAD = 0.1  # least deviation of a window, relative to its column: it may be constant


@dataclass(frozen=True, kw_only=True)
class Windows(Split):
    """Holds the windows of a series: x has the rows that they share, (N, D).

    Arguments:
        starts: (M,) the first row of each window.
        length: T, the rows of a window.
        scaled: Context and channels. Each of the first `channels` is standardised by its own mean
            and deviation over the first `context` rows.
    """

    starts: Tensor
    length: int
    scaled: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a window, (T, D)."""
        return self.length, self.x.shape[-1]

    def batch(self, index: Index, device: Device = None, known: Tensor | None = None) -> Tensor:
        """Does what `Split.batch` does, and scales windows by their `known` entries only."""
        x = self._rows(index, device)
        centre, deviation = self._scale(x, known)
        return (x - centre) / deviation

    def scale(
        self, index: Index, device: Device = None, known: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Does what `Split.scale` does, for windows."""
        return self._scale(self._rows(index, device), known)

    def _rows(self, index: Index, device: Device) -> Tensor:
        starts = self.starts[index]
        x = self.x[starts[:, None] + torch.arange(self.length, device=starts.device)]
        return x.to(device=device, non_blocking=True)

    def _scale(self, x: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
        context, channels = self.scaled
        before = x[:, :context, :channels]
        if known is not None:
            before = torch.where(known[:, :context, :channels], before, torch.nan)
        centre = before.nanmean(1, keepdim=True)
        variance = (before - centre).square().nanmean(1, keepdim=True)
        # A window without any value has centre 0 and deviation 1, like its whole column.
        deviation = (variance.nan_to_num(1.0) + _LEAST_SPREAD**2).sqrt()
        rest = (0, x.shape[-1] - channels)
        return F.pad(centre.nan_to_num(0.0), rest), F.pad(deviation, rest, value=1.0)


def open_series(config: DataConfig, missing: bool = False) -> Data:
    """Opens a table file as windows; if values may stay `missing`, they are NaN."""
    import pandas

    options, path = config.series, locate_own(config)
    table = read_table(path, options.time)
    given = find_columns(table, options.given)
    if options.columns is None:
        own = usual_columns(table, given)
    else:
        own = find_columns(table, options.columns)
    names = tuple(table.names[k] for k in (*own, *given))
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"series.columns and series.given name {twice[0]!r} twice; name it once")
    made, always = filled(table, own, options.fill, missing), filled(table, given, options.fill)
    x = np.concatenate([made, always], 1)

    num, window = len(x), options.context + options.horizon
    valid, test = int(0.7 * num), int(0.8 * num)
    bounds = {
        "training": (0, valid),
        "validation": (max(0, valid - options.context), test),
        "test": (max(0, test - options.context), num),
    }
    for part, (first, end) in bounds.items():
        if end - first < window:
            raise ValueError(
                f"{path} has {num} rows, {end - first} of them for {part}, fewer than"
                f" series.context + horizon = {options.context} + {options.horizon} = {window};"
                " make one of them shorter"
            )
    if table.times is not None and (uneven := uneven_dates(table.times)):
        warnings.warn(f"{path}: {uneven}", stacklevel=3)
    for name, column in zip(names, x.T, strict=True):
        if np.isnan(column[:valid]).all():
            raise ValueError(f"{path}: column {name!r} has no value in the {valid} training rows")
    mean, std = (None, None) if options.scale == "none" else _mean_and_std(x[:valid])
    meta = Meta(
        name="series",
        features=len(names),
        length=window,
        suggested_head="gaussian-learned",
        columns=names[: len(own)],
        mean=mean,
        std=std,
        context=options.context,
        windowed="window" if options.scale == "window" else None,
        given_columns=names[len(own) :],
    )
    rows = _rows(meta, x)
    known: Any = pandas.DataFrame(np.isfinite(table.values[:, own]))

    def windows(part: str) -> Windows:
        first, end = bounds[part]
        found = known[first:end].rolling(window).sum().to_numpy()[window - 1 :]
        least = 0 if missing else window / 2
        starts = np.flatnonzero((found >= least).all(1) & (found > 0).any(1))
        if not len(starts):
            raise ValueError(
                f"{path}: no window for {part} of series.context + horizon = {window} rows has"
                f" {'a value' if missing else 'half of the values of every column'}; take fewer"
                " columns, or a file with fewer gaps"
            )
        return _windows(meta, rows[first:end], starts, missing)

    def fit() -> tuple[Split, Split]:
        return windows("training"), windows("validation")

    return Data(config, meta, fit, lambda: windows("test"), [path])


def _mean_and_std(x: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the mean and deviation of each column, by which it is standardised."""
    mean, std = np.nanmean(x, 0), np.nanstd(x, 0)
    std = np.where(std > 1e-12 * np.abs(mean), std, 1.0)  # a constant column becomes zero
    return tuple(mean.tolist()), tuple(std.tolist())


def _rows(meta: Meta, x: np.ndarray) -> Tensor:
    """Returns columns, made and given, as the rows of windows, (N, features)."""
    if meta.mean is not None and meta.std is not None:
        x = (x - np.array(meta.mean)) / np.array(meta.std)
    return torch.from_numpy(x.astype(np.float32))


def _windows(meta: Meta, rows: Tensor, starts: np.ndarray, missing: bool) -> Windows:
    """Returns the windows that begin at these rows."""
    assert meta.columns is not None and meta.context is not None
    scaled = (meta.context, len(meta.columns)) if meta.windowed else (0, 0)
    first = torch.from_numpy(starts)
    return Windows(rows, missing=missing, starts=first, length=meta.length, scaled=scaled)


class TableWindows:
    """Cuts a table with gaps into the windows of training, and puts filled ones together.

    Windows follow each other; the last one ends with the table and may overlap the one before.

    Arguments:
        table: The table; it may have gaps.
        meta: The data that the model was trained on.
    """

    x: Tensor
    """Windows (B, T, features) as the model reads them; zero in gaps."""
    known: Tensor
    """Which of their entries are known."""
    values: np.ndarray
    """The columns of training, (N, D); NaN in gaps."""

    def __init__(self, table: Table, meta: Meta) -> None:
        assert meta.columns is not None
        columns = find_columns(table, meta.columns + meta.given_columns)
        check_size(table, columns)
        values = np.where(np.isfinite(table.values), table.values, np.nan)[:, columns]
        self.values = values[:, : len(meta.columns)]
        num, self._size, self._meta = len(values), meta.length, meta
        if num < self._size:
            raise ValueError(f"{table.path} has {num} rows; a window of training has {self._size}")
        starts = np.array([*range(0, num - self._size, self._size), num - self._size])
        windows = _windows(meta, _rows(meta, values), starts, missing=True)
        x = windows.batch(slice(None))
        self.x, self.known = x.nan_to_num(), ~x.isnan()
        self._starts, self._scale = starts, windows.scale(slice(None))

    def place(self, made: np.ndarray) -> np.ndarray:
        """Returns samples (windows, num, T, features) as tables (num, N, D) in the table's units.

        Known cells are those of the table.
        """
        meta, num, columns = self._meta, made.shape[1], self.values.shape[1]
        x = torch.from_numpy(made[..., :columns]).double()
        centre, deviation = (part[:, None, :, :columns] for part in self._scale)
        x = (x * deviation + centre).numpy()
        if meta.mean is not None and meta.std is not None:
            x = x * meta.std[:columns] + meta.mean[:columns]
        tables = np.broadcast_to(self.values, (num, *self.values.shape)).copy()
        for window, start in zip(x[::-1], self._starts[::-1], strict=True):
            tables[:, start : start + self._size] = window
        return np.where(np.isnan(self.values), tables, self.values)
