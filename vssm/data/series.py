"""Time series from CSV, .npy or Parquet files, cut into windows of context + horizon rows.

A file is a table of N rows (time) and D columns (`vssm.data.table`). It is split by time: the first
70 % of the rows are for training, the next 10 % for validation, the last 20 % for testing. A window
of validation or test may take its context from the part before, as in use, but never a row of its
horizon. Columns are standardised over the training rows, and each window over its context.

    joint       a step is (x_1, ..., x_D, phases), one window for each start
    separate    a step is (x_d, phases), one window for each start and column

With `patch` = P, a step holds P rows, T = (context + horizon) / P. The states of a Mamba block
settle while it reads empty tokens; if a step is a season, they need not keep a cycle going.

The phases are sine and cosine of the time in each cycle of the calendar (day, week, year). Windows
in which a column is missing for more than half of the rows are left out; other gaps are filled. For
models with known="any" missing values stay NaN, and only windows without any value are left out.

Columns that are known in the future too (`given`) come after the others, and the phases last. They
are standardised over the training rows only.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vssm.data.config import DataConfig
from vssm.data.dataset import Data
from vssm.data.dates import plain_dates, uneven_dates
from vssm.data.files import locate_own
from vssm.data.meta import Meta
from vssm.data.scale import centre_of_steps, window_scale, window_scale_of_known
from vssm.data.split import Index, Split
from vssm.data.table import Table, filled, left_out, read_table, select

_CYCLES = {"day": 86_400, "week": 604_800, "year": 31_556_952}  # seconds


@dataclass(frozen=True)
class Windows(Split):
    """Holds the windows of a series, a view of the (N, D) rows that they share.

    Arguments:
        rows: The numbers of the windows of x that count; all by default.
        scaled: Context, channels, centre and season. Each of the first `channels` is standardised
            by its own centre and deviation over the first `context` rows.
        patch: Rows that are joined to one step, last.
        given: How many of the channels, the last ones, are given; they stay last in a step of many
            rows.
    """

    rows: Tensor | None = None
    scaled: tuple[int, int, str, int] | None = None
    patch: int = 1
    given: int = 0

    def __len__(self) -> int:
        return len(self.x if self.rows is None else self.rows)

    def batch(
        self,
        index: Index,
        device: torch.device | str | None = None,
        known: Tensor | None = None,
    ) -> Tensor:
        """Does what `Split.batch` does, and scales windows by their `known` entries only."""
        x = super().batch(self._numbers(index), device)
        if self.scaled is not None:
            context, channels, *_ = self.scaled
            centres, deviation = self._scale(x, known)
            centres = centre_of_steps(centres, -context, x.shape[1])
            x = torch.cat([(x[..., :channels] - centres) / deviation, x[..., channels:]], -1)
        if self.patch > 1:
            parts = x.split([x.shape[2] - self.given, self.given], -1)
            x = torch.cat([part.unflatten(1, (-1, self.patch)).flatten(2) for part in parts], -1)
        return x

    def deviation(self, index: Index, device: torch.device | str, known: Tensor) -> Tensor:
        """Returns what the features of a batch were divided by, (B, 1, D), for the same `known`."""
        deviation = super().deviation(self._numbers(index), device, known)
        if self.scaled is not None:
            x = super().batch(self._numbers(index), device)
            own = self._scale(x, known)[1].repeat(1, 1, self.patch)
            deviation[..., : own.shape[-1]] = own
        return deviation

    def _numbers(self, index: Index) -> Index:
        return index if self.rows is None else self.rows[index]

    def _scale(self, x: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the centres and the deviation of windows of rows."""
        assert self.scaled is not None
        context, channels, centre, season = self.scaled
        x = x[:, :context, :channels]
        if known is not None:
            known = known[..., : self.patch * channels].unflatten(-1, (self.patch, -1))
            x = torch.where(known.flatten(1, 2)[:, :context], x, torch.nan)
        scale = window_scale_of_known if self.missing else window_scale
        return scale(x, centre, season)


def open_series(config: DataConfig, missing: bool = False) -> Data:
    """Opens a table file as windows; if values may stay `missing`, they are NaN."""
    options = config.series
    if options.path is None:
        raise ValueError("series.path is needed: a CSV, .npy or Parquet file")
    path = locate_own(options.path, "timeseries", config.dir)
    whole = read_table(path, options.time)
    table = select(whole, options.columns, path, options.given)
    given = select(whole, options.given, path)
    values, known = filled(table, options.fill, path, missing), np.isfinite(table.values)
    always = filled(given, options.fill, path)

    num, window = len(values), options.context + options.horizon
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
    uneven = None if table.times is None else uneven_dates(table.times)
    for note in filter(None, (left_out(whole, options), uneven)):
        warnings.warn(f"{path}: {note}", stacklevel=3)

    for name, column in zip(table.names, values.T, strict=True):
        if np.isnan(column[:valid]).all():
            raise ValueError(f"{path}: column {name!r} has no value in the {valid} training rows")
    mean = std = given_mean = given_std = None
    if options.scale != "none":
        values, mean, std = _standardised(values, valid)
        always, given_mean, given_std = _standardised(always, valid)
    cycles = _cycles(table, valid, path) if options.time_features else ()
    clock = phases(table.times, cycles) if table.times is not None else np.empty((num, 0))
    beside = np.concatenate([always, clock], 1)
    channels = 1 if options.separate else len(table.names)
    windowed = options.scale if options.scale in ("window", "last") else None
    scaled = None if windowed is None else (options.context, channels, windowed, options.season)

    def windows(part: str) -> Windows:
        own = slice(*bounds[part])
        x, there, known_too = values[own], known[own], beside[own]
        if options.separate:  # (series, rows, channels)
            x, there = x.T[..., None], there.T[..., None]
        else:
            x, there = x[None], there[None]
        x = np.concatenate([x, np.broadcast_to(known_too, (len(x), *known_too.shape))], -1)
        rows = torch.from_numpy(x.astype(np.float32)).flatten(0, 1)
        shared: dict[str, Any] = {"scaled": scaled, "patch": options.patch, "missing": missing}
        shared["given"] = beside.shape[1] if missing else always.shape[1]
        if there.all() and not options.separate:
            return Windows(rows.unfold(0, window, options.stride).transpose(1, 2), **shared)
        starts = _window_starts(there, window, options.stride, 0.0 if missing else 0.5)
        if not len(starts):
            raise ValueError(
                f"{path}: no window for {part} of series.context + horizon = {window} rows has"
                f" {'a value' if missing else 'half of the values of every column'}; take fewer"
                " columns, or a file with fewer gaps"
            )
        return Windows(rows.unfold(0, window, 1).transpose(1, 2), rows=starts, **shared)

    def fit() -> tuple[Split, Split]:
        return windows("training"), windows("validation")

    meta = Meta(
        name="series",
        features=options.patch * (channels + beside.shape[1]),
        length=window // options.patch,
        suggested_head="gaussian-learned",
        columns=table.names,
        mean=mean,
        std=std,
        context=options.context,
        horizon=options.horizon,
        patch=options.patch,
        windowed=windowed,
        season=options.season,
        separate=options.separate,
        cycles=cycles,
        given_columns=given.names,
        given_mean=given_mean if given.names else None,
        given_std=given_std if given.names else None,
        cycles_given=missing and bool(cycles),
        time="none" if options.time == "none" else table.time,
        fill=options.fill,
    )
    return Data(config, meta, fit, lambda: windows("test"), [path])


def _standardised(
    values: np.ndarray, rows: int
) -> tuple[np.ndarray, tuple[float, ...], tuple[float, ...]]:
    """Returns values (N, D) standardised by the first rows, and the mean and deviation of these."""
    mean, std = np.nanmean(values[:rows], 0), np.nanstd(values[:rows], 0)
    std = np.where(std > 1e-12 * np.abs(mean), std, 1.0)  # a constant column becomes zero
    return (values - mean) / std, tuple(mean.tolist()), tuple(std.tolist())


def _window_starts(known: np.ndarray, window: int, stride: int, share: float) -> torch.Tensor:
    """Returns the first rows of the windows in which a share of every channel is known.

    With a share of 0, one known value is enough. `known` is (series, rows, channels). Windows stay
    within a series, and the rows of the series follow each other.
    """
    num, rows, channels = known.shape
    counts = np.concatenate([np.zeros((num, 1, channels), int), known.cumsum(1)], 1)
    starts = np.arange(0, rows - window + 1, stride)
    found = counts[:, starts + window] - counts[:, starts]
    enough = (found >= share * window).all(-1) & (found > 0).any(-1)
    series, index = np.nonzero(enough)
    return torch.from_numpy(series * rows + starts[index])


def _cycles(table: Table, rows: int, path: Path) -> tuple[str, ...]:
    """Returns the cycles that the training rows go through twice, in steps below half a cycle."""
    if table.times is None:
        raise ValueError(f"series.time_features needs dates; {path} has no column of dates")
    seconds = (table.times[:rows] - table.times[0]) / np.timedelta64(1, "s")
    step, reach = np.median(np.diff(seconds)), seconds[-1]
    found = tuple(name for name, period in _CYCLES.items() if 2 * step < period <= reach / 2)
    if not found:
        raise ValueError(
            f"series.time_features: {path} has steps of {step:g} s over {reach:.12g} s, which hold"
            f" no whole {', '.join(_CYCLES)} twice"
        )
    return found


def phases(times: np.ndarray, cycles: Sequence[str]) -> np.ndarray:
    """Returns sine and cosine of the time within each cycle, (..., 2 x cycles), in [-1/2, 1/2].

    Example:
        >>> night = np.array(["2020-01-01T03:00"], "datetime64[s]")
        >>> phases(night, ["day"]).round(3).tolist()
        [[0.354, 0.354]]
    """
    times = plain_dates(times)
    second = 1 if times.dtype == "datetime64[s]" else 10**6
    periods = [_CYCLES[cycle] * second for cycle in cycles]
    angles = [2 * np.pi * (times.astype(np.int64) % period) / period for period in periods]
    parts = [part / 2 for angle in angles for part in (np.sin(angle), np.cos(angle))]
    return np.stack(parts, -1) if parts else np.empty((*times.shape, 0))
