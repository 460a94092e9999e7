"""Time series from CSV, .npy or Parquet files, cut into windows of context + horizon steps.

A file is a table of N rows (time) and D columns. It is split by time: the first 70 % of the rows are for
training, the next 10 % for validation, the last 20 % for testing. A window of validation or test may take its
context from the part before, as in use, but never a step of its horizon. Columns are standardised by
their mean and standard deviation over the training rows, and each window by those of its context.

    joint       a step is (x_1, ..., x_D, phases), one window for each start
    separate    a step is (x_d, phases), one window for each start and column

With `patch` = P, P rows follow each other in one step, T = (context + horizon) / P. The states
of a Mamba block settle over empty tokens; with a season a step they need not keep a cycle going.

The phases are sine and cosine of the time in each cycle of the calendar (day, week, year). A window in which
a column is missing for more than half of the steps is left out; other gaps are filled. Dates that are not
evenly apart are warned of. `vssm.data.table` reads the files.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vssm.data.config import DataConfig
from vssm.data.dataset import Data, Meta, Split
from vssm.data.dates import plain_dates, uneven_dates
from vssm.data.files import locate_own
from vssm.data.table import Table, filled, left_out, read_table, select

_CYCLES = {"day": 86_400, "week": 604_800, "year": 31_556_952}  # seconds


def open_series(config: DataConfig) -> Data:
    """Opens a table file as windows."""
    options = config.series
    if options.path is None:
        raise ValueError("series.path is needed: a CSV, .npy or Parquet file")
    path = locate_own(options.path, "timeseries", config.dir)
    whole = read_table(path, options.time)
    table = select(whole, options.columns, path)
    values = filled(table, options.fill, path)
    known = np.isfinite(table.values)

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
                f"{path} has {num} rows, {end - first} of them for {part}, fewer than series.context"
                f" + horizon = {options.context} + {options.horizon} = {window}; allowed: less of either"
            )

    for note in (
        left_out(whole, options),
        None if table.times is None else uneven_dates(table.times),
    ):
        if note is not None:
            warnings.warn(f"{path}: {note}", stacklevel=3)
    windowed = options.scale if options.scale in ("window", "last") else None
    mean, std = None, None
    if options.scale != "none":
        mean, std = values[:valid].mean(0), values[:valid].std(0)
        std = np.where(std > 1e-12 * np.abs(mean), std, 1.0)  # a constant column becomes zero
        values = (values - mean) / std
    cycles = _cycles(table, valid, path) if options.time_features else ()
    clock = phases(table.times, cycles) if table.times is not None else np.empty((num, 0))

    def windows(part: str) -> Split:
        first, end = bounds[part]
        own, there, phase = values[first:end], known[first:end], clock[first:end]
        series = own.T[..., None] if options.separate else own[None]  # (series, rows, channels)
        there = there.T[..., None] if options.separate else there[None]
        steps = np.concatenate([series, np.broadcast_to(phase, (len(series), *phase.shape))], -1)
        x = torch.from_numpy(steps.astype(np.float32)).flatten(0, 1)
        scaled = (
            None
            if windowed is None
            else (options.context, series.shape[-1], windowed, options.season)
        )
        if there.all() and not options.separate:
            x = x.unfold(0, window, options.stride).transpose(1, 2)
            return Split(x, scaled=scaled, patch=options.patch)
        rows = _whole_windows(there, window, options.stride)
        if not len(rows):
            raise ValueError(
                f"{path}: no window for {part} of series.context + horizon = {window} steps has half of the"
                " values of every column; allowed: fewer columns, or a file with fewer gaps"
            )
        x = x.unfold(0, window, 1).transpose(1, 2)
        return Split(x, rows=rows, scaled=scaled, patch=options.patch)

    def fit() -> tuple[Split, Split]:
        return windows("training"), windows("validation")

    meta = Meta(
        name="series",
        features=options.patch * ((1 if options.separate else len(table.names)) + 2 * len(cycles)),
        length=window // options.patch,
        suggested_head="gaussian-learned",
        columns=table.names,
        mean=None if mean is None else tuple(mean.tolist()),
        std=None if std is None else tuple(std.tolist()),
        context=options.context,
        horizon=options.horizon,
        patch=options.patch,
        windowed=windowed,
        season=options.season,
        separate=options.separate,
        cycles=cycles,
        time="none" if options.time == "none" else table.time,
        fill=options.fill,
    )
    return Data(config, meta, fit, lambda: windows("test"), [path])


def _whole_windows(known: np.ndarray, window: int, stride: int) -> torch.Tensor:
    """Returns the first rows of windows whose channels are all known for half of the steps.

    Arguments:
        known: (series, rows, channels); windows stay within a series, whose rows follow each other.
        window: Steps of a window.
        stride: Rows between two windows.
    """
    num, rows, _ = known.shape
    counts = np.concatenate([np.zeros((num, 1, known.shape[2]), int), known.cumsum(1)], 1)
    starts = np.arange(0, rows - window + 1, stride)
    whole = (2 * (counts[:, starts + window] - counts[:, starts]) >= window).all(
        -1
    )  # (series, starts)
    series, index = np.nonzero(whole)
    return torch.from_numpy(series * rows + starts[index])


def _cycles(table: Table, rows: int, path: Path) -> tuple[str, ...]:
    """Returns the cycles that the training rows go through twice, in steps of less than half of them."""
    if table.times is None:
        raise ValueError(f"series.time_features needs dates; {path} has no column of dates")
    seconds = (table.times[:rows] - table.times[0]) / np.timedelta64(1, "s")
    step, reach = np.median(np.diff(seconds)), seconds[-1]
    found = tuple(
        name for name, period in _CYCLES.items() if 2 * step < period and reach >= 2 * period
    )
    if not found:
        raise ValueError(
            f"series.time_features: {path} has steps of {step:g} s over {reach:.12g} s, which hold no whole"
            f" {', '.join(_CYCLES)} twice"
        )
    return found


def phases(times: np.ndarray, cycles: Sequence[str]) -> np.ndarray:
    """Returns sine and cosine of the time within each cycle, (..., 2 x cycles), between -1/2 and 1/2.

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
