"""Tables of numbers and dates from CSV, .npy or Parquet files: N rows (time) and D columns.

The first line of a CSV file is a header if none of its cells is a number, true or false, if one of
its words stands above dates, or if it counts the columns after an empty cell, as pandas writes it.
A column of true and false is read as 1 and 0. Columns without any number are left out with a
warning. So are columns of numbers called `date`, `time` or `index`, unless the user asks for them.
"""

import difflib
import io
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vssm.data.config import SeriesConfig
from vssm.data.dates import plain_dates
from vssm.data.files import DAMAGED_NPY, read_bytes

__all__ = ["Table", "fill_gaps", "filled", "find_column", "left_out", "read_table", "select"]

Columns = list[tuple[str, np.ndarray]]  # float64 numbers, datetime64 dates, or objects

_TIME_NAMES = {"", "date", "datetime", "time", "timestamp", "index"}
_MISSING = {"", "na", "n/a", "nan", "nat", "<na>", "null", "none", "?"}


@dataclass(frozen=True)
class Table:
    """Holds the columns of numbers of a file, and the dates of its rows."""

    names: tuple[str, ...]
    values: np.ndarray
    """(N, D) float64, NaN where a value is missing."""
    places: list[str]
    """The name of each row in messages: its line in a CSV file, else its number."""
    times: np.ndarray | None = None
    """(N,) datetime64[s], or [us] if seconds are too coarse; ascending."""
    time: str | None = None
    """The name of the column of dates."""
    others: dict[str, np.ndarray] = field(default_factory=dict)
    """The columns that are neither numbers nor the dates."""
    positions: tuple[int, ...] = ()
    """Where in the file each column is, from 0."""


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
        columns, places = _read_parquet(path)
    else:
        columns, places = _read_npy(path) if name.endswith(".npy") else _read_csv(path)
    if not places:
        raise ValueError(f"{path} has no rows")
    names = [name for name, _ in columns]
    for name in names:
        if name and names.count(name) > 1:
            raise ValueError(f"{path} has two columns called {name!r}; rename one of them")
    numeric = [
        k
        for k, (_, cells) in enumerate(columns)
        if cells.dtype == float and np.isfinite(cells).any()
    ]
    if not numeric:
        raise ValueError(
            f"{path} has no column of numbers; expected numbers with a decimal point, such as 3.5,"
            " in cells separated by commas, semicolons or tabs"
        )
    others = dict(column for k, column in enumerate(columns) if k not in numeric)
    time = None if time == "none" else _time_column(others, time, usual, option, path)
    times = None if time is None else _times(others.pop(time), time, places, option, path)
    values = np.stack([columns[k][1] for k in numeric], 1)
    return Table(
        tuple(names[k] for k in numeric), values, places, times, time, others, tuple(numeric)
    )


def _time_column(
    columns: dict[str, np.ndarray], time: str | None, usual: str | None, option: str, path: Path
) -> str | None:
    """Returns the name of the column of dates, if there is one."""
    texts = {name: cells for name, cells in columns.items() if cells.dtype != float}
    if time is not None and time not in texts:
        there = ", ".join(map(repr, texts)) or "none"
        raise ValueError(f"{option}: {path} has no column of dates {time!r}; available: {there}")
    if time is not None or usual in texts:
        return time or usual
    named = [name for name in texts if name.strip().lower() in _TIME_NAMES]
    dated = [
        name
        for name, cells in texts.items()
        if cells.dtype.kind == "M" or _ascend(cells) or (name.isdecimal() and _date(cells[0]))
    ]
    return next(iter(named + dated), None)


def _ascend(cells: np.ndarray) -> bool:
    """Says whether all cells are dates, each later than the one before."""
    if _date(cells[0]) is None:  # saves time: most columns of text hold no date
        return False
    dates = [date for cell in cells if (date := _date(cell)) is not None]
    return len(dates) == len(cells) and all(a < b for a, b in pairwise(dates))


def _times(cells: np.ndarray, name: str, places: list[str], option: str, path: Path) -> np.ndarray:
    """Returns the cells as dates in seconds or microseconds, if they ascend."""
    if cells.dtype.kind != "M":
        dates = np.array([_date(cell) for cell in cells], "datetime64[us]")
    else:
        dates = cells
    times = plain_dates(dates)
    advice = f"--{option} none leaves dates out"
    if (missing := np.isnat(times)).any():
        k = int(missing.argmax())
        cell = "" if _is_missing(cells[k]) else cells[k]
        raise ValueError(
            f"{path}: {places[k]}, column {name!r}: {cell!r} is no date; expected ISO 8601, such as"
            f" 2016-07-01 13:00, in every row ({advice})"
        )
    if (late := times[1:] <= times[:-1]).any():
        k = int(late.argmax()) + 1
        what = "is there twice" if times[k] == times[k - 1] else f"comes after {times[k - 1]}"
        raise ValueError(
            f"{path}: {places[k]}, column {name!r}: {times[k]} {what}; dates must ascend by a"
            f" microsecond or more ({advice})"
        )
    return times


def _date(cell: object) -> datetime | None:
    """Returns a date in UTC; None if the cell holds none."""
    try:
        date = datetime.fromisoformat(str(cell).strip())
        return date if date.tzinfo is None else date.astimezone(UTC).replace(tzinfo=None)
    except (ValueError, OverflowError):  # UTC may be before the year 1 or after 9999
        return None


def _number(cell: object) -> float | None:
    """Returns the number in a cell, NaN if the cell is missing, None if it holds something else."""
    if _is_missing(cell):
        return float("nan")
    try:
        return float(cell)  # type: ignore[arg-type]
    except ValueError:
        return None


def _is_missing(cell: object) -> bool:
    return str(cell).strip().lower() in _MISSING


def _read_csv(path: Path) -> tuple[Columns, list[str]]:
    import pandas

    content = read_bytes(path)
    if b"\0" in content:
        raise ValueError(f"{path} has zero bytes, as UTF-16 has; save the file as UTF-8")
    # Only names hold characters beyond ASCII, and U+FFFD in a name does no harm.
    text = content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    if "\ufffd" in text:
        line = text[: text.index("\ufffd")].count("\n") + 1
        warnings.warn(f"{path}: line {line} has characters that are not UTF-8", stacklevel=2)
    # A comma beside another separator is a decimal comma or part of a name.
    first = re.sub('"[^"]*"', "", text.lstrip("\n").partition("\n")[0])
    delimiter = next((d for d in "\t;" if d in first), ",")
    lines = _row_lines(text, delimiter, path)
    style: dict[str, Any] = {"sep": delimiter, "header": None, "skipinitialspace": True}
    head = pandas.read_csv(io.StringIO(text), nrows=2, dtype=str, keep_default_na=False, **style)
    names, *second = head.to_numpy().tolist()
    header = _is_header(names, second[0] if second else [])
    names = [name.strip() for name in names] if header else [str(k) for k in range(len(names))]
    places = [f"line {line}" for line in lines[header:]]
    if not places:
        return [], places
    style |= {"skiprows": lines[0]} if header else {}
    style |= {"na_values": ["?", "na", "none"], "float_precision": "round_trip"}
    frame = pandas.read_csv(io.StringIO(text), low_memory=False, **style)
    columns = []
    for name, (_, cells) in zip(names, frame.items(), strict=True):
        if pandas.api.types.is_numeric_dtype(cells):  # or of true and false
            columns.append((name, cells.to_numpy(np.float64)))
            continue
        numbers = [_number(cell) for cell in cells]
        if None not in numbers:
            columns.append((name, np.array(numbers, np.float64)))
            continue
        if any(number is not None and np.isfinite(number) for number in numbers):
            k = numbers.index(None)
            raise ValueError(f"{path}: {places[k]}, column {name!r}: {cells[k]!r} is not a number")
        columns.append((name, cells.to_numpy(object)))
    return columns, places


def _row_lines(text: str, delimiter: str, path: Path) -> list[int]:
    """Returns the number of each line that is not empty; all of them must have as many cells.

    A quoted cell must end on its line: an unclosed quote would swallow lines up to the next one.
    """
    quoted = re.compile(rf'(^|{delimiter}) *"(?:[^"]|"")*"')
    opened = re.compile(rf'(^|{delimiter}) *"')
    blank = " " if delimiter == "\t" else " \t"
    lines, width = [], 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip(blank):
            continue
        plain = quoted.sub(r"\1", line) if '"' in line else line
        if '"' in plain and opened.search(plain):
            raise ValueError(
                f"{path}: line {number} has a quote that is not closed; write a quote inside a"
                ' quoted cell as "", and no line break'
            )
        cells = plain.count(delimiter) + 1
        width = width or cells
        if cells != width:
            raise ValueError(
                f"{path}: line {number} has {cells} cells, but the first line has {width}"
            )
        lines.append(number)
    if not lines:
        raise ValueError(f"{path} is empty")
    return lines


def _is_header(first: list[str], second: list[str]) -> bool:
    """Says whether the first line of a file holds names."""
    numbers = [_number(cell) for cell in first]
    flags = any(cell.strip().lower() in ("true", "false") for cell in first)
    words_only = None in numbers and not any(n is not None and np.isfinite(n) for n in numbers)
    above_date = any(
        name.strip()[:1].isalpha() and _number(cell) is None and _date(cell) is not None
        for name, cell in zip(first, second, strict=False)
    )
    counted = len(first) > 1 and ["", *map(str, range(len(first) - 1))] == [
        c.strip() for c in first
    ]
    return (words_only and not flags) or above_date or (counted and bool(second and second[0]))


def _read_npy(path: Path) -> tuple[Columns, list[str]]:
    try:
        values = np.lib.format.read_array(io.BytesIO(read_bytes(path)), allow_pickle=False)
    except DAMAGED_NPY as error:
        raise ValueError(f"{path} is no plain .npy array, or it is damaged") from error
    if values.ndim not in (1, 2) or values.dtype.kind not in "fiub":
        raise ValueError(
            f"{path} holds {values.dtype} of shape {values.shape}; expected numbers (rows, columns)"
        )
    values = (values if values.ndim == 2 else values[:, None]).astype(np.float64)
    return [(str(k), column) for k, column in enumerate(values.T)], _row_places(len(values))


def _read_parquet(path: Path) -> tuple[Columns, list[str]]:
    import pandas

    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: Parquet needs pyarrow, install it with: pip install 'vssm[forecast]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            table = file.read()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    columns = []
    for name, cells in table.to_pandas(ignore_metadata=True, date_as_object=False).items():
        if isinstance(cells.dtype, pandas.DatetimeTZDtype):
            cells = cells.dt.tz_convert(None)
        array = cells.to_numpy()
        if array.dtype.kind != "M":
            with suppress(ValueError, TypeError):  # words, lists and the like stay as they are
                array = array.astype(np.float64)
        columns.append((str(name), array))
    return columns, _row_places(table.num_rows)


def _row_places(num: int) -> list[str]:
    return [f"row {k}" for k in range(1, num + 1)]


def left_out(table: Table, options: SeriesConfig) -> str | None:
    """Says which columns are left out although the user may expect them; None if there are none."""
    if options.columns is not None:
        return None
    notes, advice = [], ""
    for name, cells in table.others.items():
        dates = cells.dtype.kind == "M" or (options.time == "none" and _date(cells[0]) is not None)
        if dates or name.strip().lower() in _TIME_NAMES:
            continue
        k = next((k for k, cell in enumerate(cells) if not _is_missing(cell)), None)
        why = "all values are missing" if k is None else f"{table.places[k]} has {str(cells[k])!r}"
        notes.append(f"{name!r} ({why})")
        if k is not None and "," in str(cells[k]):
            advice = "; write numbers with a decimal point"
    if notes:
        return f"columns without numbers are left out: {', '.join(notes)}{advice}"
    timed = [name for name in table.names if name.strip().lower() in _TIME_NAMES - {""}]
    advice = "is left out because of its name; --series.columns NAMES takes it"
    return f"column {timed[0]!r} of numbers {advice}" if timed else None


def select(
    table: Table, columns: tuple[str, ...] | None, path: Path, given: tuple[str, ...] = ()
) -> Table:
    """Returns the table with some of its columns, by name or by position in the file.

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
    return Table(names, table.values[:, index], table.places, table.times, table.time)


def find_column(table: Table, column: str, path: Path, by_position: bool = True) -> int:
    """Returns the index of the column with this name, or else with this position in the file."""
    if column in table.names:
        return table.names.index(column)
    named = column == table.time or column in table.others
    if by_position and column.isdecimal() and not named and int(column) in table.positions:
        return table.positions.index(int(column))
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
            f"{path}: {table.places[row]}, column {table.names[column]!r} is missing or not finite"
            f" ({(~known).sum()} such values in all);"
            " fill them with --series.fill zero, previous or linear, or learn from the others with"
            " --model.known any"
        )
    if not table.names:
        return table.values
    if fill is None:
        values = np.where(known, table.values, np.nan)
    else:
        values = fill_gaps(table.values, known, fill)
    if (large := np.nanmax(np.abs(values), 0)).max() > 1e30:
        column = table.names[large.argmax()]
        raise ValueError(f"{path}: column {column!r} has values up to {large.max():g}; scale it")
    return values


def fill_gaps(values: np.ndarray, known: np.ndarray, fill: str | None) -> np.ndarray:
    """Returns values (N, D) with the unknown ones filled, as `SeriesConfig.fill` says.

    A gap at the start takes the first known value, unless gaps are filled with zeros.
    """
    if fill == "zero":
        return np.where(known, values, 0.0)
    steps = np.arange(len(known))
    if fill == "previous":
        last = np.maximum.accumulate(np.where(known, steps[:, None], known.argmax(0)))
        return np.take_along_axis(values, last, 0)
    return np.stack(
        [np.interp(steps, steps[k], v[k]) for k, v in zip(known.T, values.T, strict=True)], 1
    )
