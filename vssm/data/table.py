"""Tables of numbers and dates from CSV, .npy or Parquet files: N rows (time) and D columns.

The first line of a CSV file is a header unless it begins with a number, a date, true or false. A
column of true and false is read as 1 and 0. Columns without any number are left out with a warning.
So are columns of numbers called `date`, `time` or `index`, unless the user asks for them.
"""

import csv
import difflib
import io
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vssm.data.config import SeriesConfig
from vssm.data.dates import plain_dates
from vssm.data.files import DAMAGED_NPY, read_bytes

__all__ = ["Table", "fill_gaps", "filled", "find_column", "left_out", "read_table", "select"]

Frame = Any  # a pandas.DataFrame
Column = Any  # a pandas.Series

_TIME_NAMES = {"", "date", "datetime", "time", "timestamp", "index"}


@dataclass(frozen=True)
class Table:
    """Holds the columns of numbers of a file, and the dates of its rows."""

    names: tuple[str, ...]
    values: np.ndarray
    """(N, D) float64, NaN where a value is missing."""
    times: np.ndarray | None
    """(N,) datetime64[s], or [us] if seconds are too coarse; ascending."""
    time: str | None
    """The name of the column of dates."""
    frame: Frame
    """All columns of the file."""


def read_table(
    path: Path, time: str | None = None, usual: str | None = None, option: str = "series.time"
) -> Table:
    """Reads a CSV, .npy or Parquet file.

    Arguments:
        path: The file.
        time: The column of dates; None finds it by its name or contents, "none" leaves dates out.
        usual: The column of dates to look for first.
        option: What `time` is called on the command line.
    """
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".parquet", ".pq")):
        frame = _read_parquet(path)
    else:
        frame = _read_npy(path) if name.endswith(".npy") else _read_csv(path)
    if not len(frame):
        raise ValueError(f"{path} has no rows")
    if (twice := frame.columns.duplicated()).any():
        name = frame.columns[twice][0]
        raise ValueError(f"{path} has two columns called {name!r}; rename one of them")
    numbers = {name: _numbers(cells, path) for name, cells in frame.items()}
    numeric = {str(name): values for name, values in numbers.items() if values is not None}
    if not numeric:
        raise ValueError(
            f"{path} has no column of numbers; expected numbers with a decimal point, such as 3.5,"
            " in cells separated by commas, semicolons or tabs"
        )
    texts = [name for name in frame if name not in numeric]
    time = None if time == "none" else _time_column(frame[texts], time, usual, option, path)
    times = None if time is None else _times(frame[time], option, path)
    return Table(tuple(numeric), np.stack([*numeric.values()], 1), times, time, frame)


def _read_csv(path: Path) -> Frame:
    import pandas

    content = read_bytes(path)
    if b"\0" in content:
        raise ValueError(f"{path} has zero bytes, as UTF-16 has; save the file as UTF-8")
    text = content.decode("utf-8-sig", errors="replace").lstrip("\r\n")
    # A comma beside another separator is a decimal comma or part of a name.
    first = io.StringIO(text).readline()
    delimiter = next((d for d in "\t;" if d in re.sub('"[^"]*"', "", first)), ",")
    reader = csv.reader([first], delimiter=delimiter, skipinitialspace=True)
    names = [name.strip() for name in next(reader, [])] or [""]
    start: Column = pandas.Series(names[:1])
    number: Column = pandas.to_numeric(start, "coerce")
    value = number.notna()[0] or names[0].lower() in ("true", "false")
    header = not value and np.isnat(_dates(start)[0])
    style: dict[str, Any] = {
        "sep": delimiter,
        "header": 0 if header else None,
        "index_col": False,
        "skipinitialspace": True,
        "na_values": ["?", "na", "none"],
        "float_precision": "round_trip",
        "low_memory": False,
    }
    try:
        with warnings.catch_warnings():  # of a first line that is shorter than others
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            frame: Frame = pandas.read_csv(io.StringIO(text), **style)
    except (ValueError, pandas.errors.ParserWarning) as error:
        raise ValueError(f"{path} is no table: {' '.join(str(error).split())}") from None
    frame.columns = names if header else [str(k) for k in range(frame.shape[1])]
    return frame


def _read_npy(path: Path) -> Frame:
    import pandas

    try:
        values = np.lib.format.read_array(io.BytesIO(read_bytes(path)), allow_pickle=False)
    except DAMAGED_NPY as error:
        raise ValueError(f"{path} is no plain .npy array, or it is damaged") from error
    if values.ndim not in (1, 2) or values.dtype.kind not in "fiub":
        raise ValueError(
            f"{path} holds {values.dtype} of shape {values.shape}; expected numbers (rows, columns)"
        )
    frame: Frame = pandas.DataFrame(values)
    return frame.set_axis([str(k) for k in frame], axis=1)


def _read_parquet(path: Path) -> Frame:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: Parquet needs pyarrow, install it with: pip install 'vssm[forecast]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            return file.read().to_pandas(ignore_metadata=True, date_as_object=False)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _numbers(cells: Column, path: Path) -> np.ndarray | None:
    """Returns a column as float64; None if it has no number, as columns of dates and words."""
    import pandas

    if cells.dtype.kind == "M":
        return None
    numbers: Column = pandas.to_numeric(cells, errors="coerce")
    found = numbers.to_numpy(np.float64, na_value=np.nan)
    if not np.isfinite(found).any():
        return None
    words = np.isnan(found) & cells.notna().to_numpy()
    if words.any():
        row = int(words.argmax())
        cell = str(cells.iloc[row])
        raise ValueError(f"{path}: row {row + 1}, column {cells.name!r}: {cell!r} is not a number")
    return found


def _dates(cells: Column) -> np.ndarray:
    """Returns a column as datetime64 in UTC, NaT where a cell holds no date."""
    import pandas

    if cells.dtype.kind not in "MO":
        return np.full(len(cells), np.datetime64("NaT"))
    dates: Column = pandas.to_datetime(cells, errors="coerce", format="ISO8601", utc=True)
    return plain_dates(dates.dt.tz_localize(None).to_numpy())


def _time_column(
    texts: Frame, time: str | None, usual: str | None, option: str, path: Path
) -> str | None:
    """Returns the name of the column of dates, if there is one."""
    if time is not None and time not in texts:
        there = ", ".join(map(repr, texts)) or "none"
        raise ValueError(f"{option}: {path} has no column of dates {time!r}; available: {there}")
    if time is not None or usual in texts:
        return time or usual
    for name in texts:
        if name.strip().lower() in _TIME_NAMES:
            return name
    for name, cells in texts.items():
        dates = _dates(cells)
        if cells.dtype.kind == "M" or (dates[1:] > dates[:-1]).all():  # no NaT is later or earlier
            return str(name)
    return None


def _times(cells: Column, option: str, path: Path) -> np.ndarray:
    """Returns the cells as dates in seconds or microseconds, if they ascend."""
    times, advice = _dates(cells), f"--{option} none leaves dates out"
    if (missing := np.isnat(times)).any():
        row = int(missing.argmax())
        cell = "" if cells.isna().iloc[row] else str(cells.iloc[row])
        raise ValueError(
            f"{path}: row {row + 1}, column {cells.name!r}: {cell!r} is no date; expected ISO 8601,"
            f" such as 2016-07-01 13:00, in every row ({advice})"
        )
    if (late := times[1:] <= times[:-1]).any():
        k = int(late.argmax()) + 1
        what = "is there twice" if times[k] == times[k - 1] else f"comes after {times[k - 1]}"
        raise ValueError(
            f"{path}: row {k + 1}, column {cells.name!r}: {times[k]} {what}; dates must ascend by a"
            f" microsecond or more ({advice})"
        )
    return times


def left_out(table: Table, options: SeriesConfig) -> str | None:
    """Says which columns are left out although the user may expect them; None if there are none."""
    if options.columns is not None:
        return None
    words = [
        name
        for name, cells in table.frame.items()
        if name not in (*table.names, table.time)
        and str(name).strip().lower() not in _TIME_NAMES
        and np.isnat(_dates(cells[:1]))[0]
    ]
    if words:
        return (
            f"columns without numbers are left out: {', '.join(map(repr, words))}; numbers need a"
            " decimal point"
        )
    timed = [name for name in table.names if name.strip().lower() in _TIME_NAMES - {""}]
    advice = "is left out because of its name; --series.columns NAMES takes it"
    return f"column {timed[0]!r} of numbers {advice}" if timed else None


def select(
    table: Table, columns: tuple[str, ...] | None, path: Path, given: tuple[str, ...] = ()
) -> Table:
    """Returns the table with some of its columns of numbers.

    None selects all columns of numbers except the `given` ones and those named like dates.
    """
    apart = [find_column(table, column, path) for column in given]
    if columns is None:
        timed = [k for k, name in enumerate(table.names) if name.strip().lower() in _TIME_NAMES]
        index = [k for k in range(len(table.names)) if k not in timed + apart]
        if not index:
            raise ValueError(
                f"{path} has no column of numbers besides {', '.join(table.names)};"
                " choose with --series.columns"
            )
    else:
        index = [find_column(table, column, path) for column in columns]
        if twice := [table.names[k] for k in index if index.count(k) > 1]:
            raise ValueError(f"series.columns {', '.join(columns)} has {twice[0]!r} twice")
        if both := [table.names[k] for k in apart if k in index]:
            raise ValueError(f"{both[0]!r} is in series.columns and in series.given; use one")
    names = tuple(table.names[k] for k in index)
    return replace(table, names=names, values=table.values[:, index])


def find_column(table: Table, column: str, path: Path) -> int:
    """Returns the index of the column of numbers with this name."""
    if column in table.names:
        return table.names.index(column)
    near = difflib.get_close_matches(column, table.names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"{path} has no column of numbers {column!r}; {hint}available: {', '.join(table.names)}"
    )


def filled(table: Table, fill: str | None, path: Path, missing: bool = False) -> np.ndarray:
    """Returns the values (N, D) with all gaps filled; if they may stay `missing`, as NaN."""
    known = np.isfinite(table.values)
    if fill is None and not known.all() and not missing:
        row, column = np.argwhere(~known)[0]
        raise ValueError(
            f"{path}: row {row + 1}, column {table.names[column]!r} is missing or not finite"
            f" ({(~known).sum()} such values in all);"
            " fill them with --series.fill zero, previous or linear, or learn from the others with"
            " --model.known any"
        )
    if not table.names:
        return table.values
    values = fill_gaps(table.values, known, fill)
    if (large := np.nanmax(np.abs(values), 0)).max() > 1e30:
        column = table.names[large.argmax()]
        raise ValueError(f"{path}: column {column!r} has values up to {large.max():g}; scale it")
    return values


def fill_gaps(values: np.ndarray, known: np.ndarray, fill: str | None) -> np.ndarray:
    """Returns values (N, D) with the unknown ones filled, as `SeriesConfig.fill` says; else NaN.

    A gap at the start takes the first known value, unless gaps are filled with zeros.
    """
    import pandas

    frame: Frame = pandas.DataFrame(np.where(known, values, np.nan))
    if fill == "zero":
        frame = frame.fillna(0.0)
    elif fill == "previous":
        frame = frame.ffill().bfill()
    elif fill == "linear":
        frame = frame.interpolate(limit_direction="both")
    return frame.to_numpy()
