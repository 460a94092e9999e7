"""Tables of numbers and dates from CSV, .npy or Parquet files: N rows (time) and D columns.

In CSV, the first line is a header when no cell of it is a number, true or false, when a word of it stands
over dates, or when it numbers the columns after an empty cell, as pandas does. A column of true and false is
read as 1 and 0. A column without any number (dates, names) is left out with a warning, unless it is that of
the dates, and so is one with a name such as `date`, `time` or `index`, unless it is asked for.
"""

import csv
import difflib
import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from vssm.data.config import SeriesConfig
from vssm.data.dates import plain_dates
from vssm.data.files import DAMAGED_NPY, check_unpacked, read_bytes

__all__ = ["Table", "fill_gaps", "filled", "left_out", "read_table", "select"]

_TIME_NAMES = {"", "date", "datetime", "time", "timestamp", "index"}
_MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}
_MOST_NAMED = 5  # columns in a note, beside the one that it is about
_PARQUET_ROWS = 1024  # unpacked at once: a row of text can be large
_FLAGS = {"true": 1.0, "false": 0.0}


@dataclass(frozen=True)
class Table:
    """Holds columns of numbers: `values` (N, D) float64 with NaN where missing, and where rows come from."""

    names: tuple[str, ...]
    values: np.ndarray
    places: list[str]
    """What to call each row in a message: its line in a CSV file, else its number."""
    times: np.ndarray | None = None
    """The dates of the rows, (N,) datetime64[s], or [us] where seconds are too coarse, ascending."""
    time: str | None = None
    """The name of the column of dates."""
    texts: dict[str, Sequence[object]] = field(default_factory=dict)
    """The cells of other columns without numbers."""
    positions: Sequence[int] = ()
    """Where in the file each column is, from 0."""


def left_out(table: Table, options: SeriesConfig) -> str | None:
    """Says which columns hold no numbers, where the user may think that they do."""
    if options.columns is not None:  # others are not wanted
        return None
    names = [
        name
        for name, cells in table.texts.items()
        if not isinstance(cells, np.ndarray)  # dates by their type
        and name.strip().lower() not in _TIME_NAMES
        and not (
            options.time == "none" and _date(cells[0]) is not None
        )  # dates that are not wanted
    ]
    if not names:
        timed = [
            name for name in table.names if name.strip() and name.strip().lower() in _TIME_NAMES
        ]
        note = "of numbers is left out, by its name; --series.columns NAMES takes it"
        return f"column {timed[0]!r} {note}" if timed else None
    odd = {name: _odd_cell(table.texts[name]) for name in names}
    name = max(
        names, key=lambda name: any(map(str.isdigit, odd[name][1]))
    )  # more likely meant as numbers
    place, cell = odd[name]
    others = [repr(other) for other in names if other != name]
    if len(others) > _MOST_NAMED:
        others = [*others[: _MOST_NAMED - 1], f"{len(others) - _MOST_NAMED + 1} more"]
    more = f" (and so {'are' if len(others) > 1 else 'is'} {', '.join(others)})" if others else ""
    if _number(cell) is None:
        why = f"{table.places[place]} has {cell!r}, which is no number"
    elif _has_numbers(table.texts[name]):
        why = "it is text"
    else:
        why = "all of its values are missing or not finite"
    allowed = "; allowed: a decimal point" if "," in cell else ""
    return f"column {name!r} is left out{more}: {why}{allowed}"


def _odd_cell(cells: Sequence[object]) -> tuple[int, str]:
    """Returns the first cell of a column of text that is neither missing nor a number, and where it is."""
    texts = ["" if cell is None else str(cell) for cell in cells]
    return next(((k, text) for k, text in enumerate(texts) if _number(text) is None), (0, texts[0]))


def _has_numbers(cells: Sequence[object]) -> bool:
    numbers = (_number(str(cell)) for cell in cells)
    return any(number is not None and np.isfinite(number) for number in numbers)


def read_table(
    path: Path, time: str | None = None, usual: str | None = None, option: str = "series.time"
) -> Table:
    """Returns the columns of a CSV, .npy or Parquet file that hold numbers, and the dates of its rows.

    Arguments:
        path: The file.
        time: The column of dates; None finds it by its name or contents, "none" leaves dates out.
        usual: The column of dates to look for first.
        option: What `time` is called on the command line.
    """
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".parquet", ".pq")):
        table = _read_parquet(path)
    else:
        table = _read_npy(path) if name.endswith(".npy") else _read_csv(path)
    if not table.places:
        raise ValueError(f"{path} has no rows")
    for k, name in enumerate(table.names):
        if name and name in table.names[:k]:
            raise ValueError(
                f"{path}: column {name!r} is there twice; allowed: a name for each column"
            )
    numeric = np.flatnonzero(np.isfinite(table.values).any(0))
    if not len(numeric):
        raise ValueError(
            f"{path} has no column of numbers; allowed: numbers with a decimal point, such as 3.5, in cells"
            " that commas, semicolons or tabs separate"
        )
    dates = None if time == "none" else _time_column(table, time, usual, option, path)
    texts = {name: cells for name, cells in table.texts.items() if name != dates}
    for k, name in enumerate(table.names):
        if k not in numeric and name not in table.texts:  # all of it is missing
            texts[name] = table.values[:, k].tolist()
    return Table(
        tuple(table.names[k] for k in numeric),
        table.values[:, numeric],
        table.places,
        None if dates is None else _times(table.texts[dates], dates, table.places, option, path),
        dates,
        texts,
        [table.positions[k] if table.positions else k for k in numeric.tolist()],
    )


def _time_column(
    table: Table, time: str | None, usual: str | None, option: str, path: Path
) -> str | None:
    if time is None and usual in table.texts:
        return usual
    if time is not None:
        if time not in table.texts:
            there = ", ".join(map(repr, table.texts)) or "none"
            raise ValueError(
                f"{option}: {time!r} is no column of dates in {path}; available: {there}"
            )
        return time
    named = [name for name in table.texts if name.strip().lower() in _TIME_NAMES]
    typed = [
        name
        for name, cells in table.texts.items()
        if isinstance(cells, np.ndarray)
        or (name.isdecimal() and _date(cells[0]) is not None)  # no name at all
        or _in_order(cells)
    ]
    return next(iter([*named, *typed]), None)


def _in_order(cells: Sequence[object]) -> bool:
    """Says whether cells are dates, each after the one before: then that is what they are for."""
    if _date(cells[0]) is None or _date(cells[-1]) is None:  # most texts
        return False
    dates = [date for date in map(_date, cells) if date is not None]
    return len(dates) == len(cells) and all(a < b for a, b in pairwise(dates))


def _times(
    cells: Sequence[object], name: str, places: list[str], option: str, path: Path
) -> np.ndarray:
    """Returns dates (N,) in seconds or microseconds, once they are in order."""
    if isinstance(cells, np.ndarray):
        times = plain_dates(cells)
        if np.isnat(times).any():
            odd = int(np.isnat(times).argmax())
            raise ValueError(
                f"{path}: {places[odd]}, column {name!r} has no date; allowed: one for each row, or"
                f" --{option} none to leave dates out"
            )
    else:
        dates = [_date(cell) for cell in cells]
        if None in dates:
            odd = dates.index(None)
            raise ValueError(
                f"{path}: {places[odd]}, column {name!r}: {cells[odd]!r} is no date; allowed: ISO 8601, as"
                f" 2016-07-01 13:00, or --{option} none to leave dates out"
            )
        times = plain_dates(np.array(dates, "datetime64[us]"))
    steps = np.diff(times).astype(np.int64)
    if (steps <= 0).any():
        late = int((steps <= 0).argmax()) + 1
        what = "is there twice" if not steps[late - 1] else f"comes after {times[late - 1]}"
        raise ValueError(
            f"{path}: {places[late]}, column {name!r}: {times[late]} {what}; allowed: each date once and in"
            f" order, a microsecond or more apart, or --{option} none to leave dates out"
        )
    return times


def _date(cell: object) -> datetime | None:
    try:
        date = datetime.fromisoformat(str(cell).strip())
        return date if date.tzinfo is None else date.astimezone(UTC).replace(tzinfo=None)
    except (ValueError, OverflowError):  # before year 1 or after 9999 in UTC
        return None


def _read_csv(path: Path) -> Table:
    content = read_bytes(path)
    if b"\0" in content:
        raise ValueError(f"{path} has bytes of zero, as UTF-16 has; allowed: a file saved as UTF-8")
    # Only names can hold other characters than ASCII, and a name with U+FFFD does no harm.
    text = content.decode("utf-8-sig", errors="replace")
    if "\ufffd" in text:
        line = text[: text.index("\ufffd")].count("\n") + 1
        warnings.warn(f"{path}: line {line} has characters that are no UTF-8", stacklevel=2)
    first = text.lstrip("\r\n").partition("\n")[0]
    # A comma beside another separator is a decimal comma or part of a name, and what is in quotes is a name.
    unquoted = re.sub('"[^"]*"', "", first)
    delimiter = next((d for d in "\t;" if d in unquoted), ",")
    rows = _csv_rows(text, delimiter, path)
    if not rows:
        raise ValueError(f"{path} is empty")

    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise ValueError(
                f"{path}: line {line} has {len(row)} cells, the first line has {width}"
            )
    names = tuple(map(str, range(width)))
    if _is_header(rows[0][1], rows[1][1] if len(rows) > 1 else ()):
        names = tuple(name.strip() for name in rows.pop(0)[1])

    columns, texts = [], {}
    for name, column in zip(names, zip(*(row for _, row in rows), strict=True), strict=False):
        numbers = [_number(cell) for cell in column]
        if None in numbers and None not in (flags := [_flag(cell) for cell in column]):
            numbers = flags
        odd = next((k for k, number in enumerate(numbers) if number is None), None)
        if odd is not None and any(
            number is not None and np.isfinite(number) for number in numbers
        ):
            raise ValueError(
                f"{path}: line {rows[odd][0]}, column {name!r}: {column[odd]!r} is not a number"
            )
        if odd is not None:
            texts[name] = column
        columns.append(np.full(len(rows), np.nan) if odd is not None else np.array(numbers))
    values = np.stack(columns, 1) if columns else np.empty((0, width))
    return Table(names, values, [f"line {line}" for line, _ in rows], texts=texts)


def _is_header(first: Sequence[str], second: Sequence[str]) -> bool:
    """Says whether the first line of a file has names."""
    cells = [_number(cell) for cell in first]
    flagged = any(cell.strip().lower() in _FLAGS for cell in first)
    if (
        None in cells
        and not flagged
        and not any(cell is not None and np.isfinite(cell) for cell in cells)
    ):
        return True
    over_dates = any(
        name.strip()[:1].isalpha() and _number(cell) is None and _date(cell) is not None
        for name, cell in zip(first, second, strict=False)
    )
    counted = (
        len(first) > 1
        and not first[0].strip()
        and [*first[1:]] == [str(k) for k in range(len(first) - 1)]
    )
    return over_dates or (counted and bool(second) and bool(second[0].strip()))


def _csv_rows(text: str, delimiter: str, path: Path) -> list[tuple[int, list[str]]]:
    """Returns the rows of a CSV text that are not empty, each with its line.

    A cell ends on the line where it begins: a quote that is not closed would take all lines to the next one.
    """
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    rows, line, error = [], 0, None
    while True:
        line += 1
        try:
            row = next(reader, None)
        except csv.Error as caught:
            row, error = None, caught
        if reader.line_num > line or "unexpected end" in str(error):
            raise ValueError(
                f"{path}: line {line} has a quote that is not closed on it; allowed: a whole cell in quotes,"
                ' with "" for a quote inside, and no line break'
            )
        if error is not None:
            raise ValueError(f"{path}: line {line}: {error}") from error
        if row is None:
            return rows
        if row:
            rows.append((line, row))


def _number(cell: str) -> float | None:
    """Returns the number in a cell, NaN when it says that there is none, None when it is something else."""
    try:
        return float(cell)
    except ValueError:
        return float("nan") if cell.strip().lower() in _MISSING else None


def _flag(cell: str) -> float | None:
    """Returns 1 or 0 for true or false, NaN for a cell that is missing, None for anything else."""
    text = cell.strip().lower()
    return float("nan") if text in _MISSING else _FLAGS.get(text)


def _read_npy(path: Path) -> Table:
    try:
        values = np.lib.format.read_array(io.BytesIO(read_bytes(path)), allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path} is no plain .npy array: {str(error).splitlines()[0]}") from error
    except DAMAGED_NPY as error:
        raise ValueError(f"{path} is no plain .npy array: its header is damaged") from error
    if values.ndim not in (1, 2) or values.dtype.kind not in "fiub":
        raise ValueError(
            f"{path} holds {values.dtype} of shape {values.shape}, expected numbers of shape (N, D)"
        )
    values = (values if values.ndim == 2 else values[:, None]).astype(np.float64)
    return Table(tuple(map(str, range(values.shape[1]))), values, _row_places(len(values)))


def _read_parquet(path: Path) -> Table:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: Parquet needs pyarrow, install it with: pip install 'vssm[forecast]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            check_unpacked(8 * file.metadata.num_rows * file.metadata.num_columns, path)
            batches, size = [], 0  # the header may be wrong, and says nothing of long texts
            for batch in file.iter_batches(_PARQUET_ROWS):
                size += batch.nbytes
                check_unpacked(size, path)
                batches.append(batch)
            table = pyarrow.Table.from_batches(batches, file.schema_arrow)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    types = pyarrow.types
    numeric = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean)
    words = (types.is_string, types.is_large_string, types.is_string_view, types.is_dictionary)
    names, columns, texts, positions = [], [], {}, []
    for k, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        kind = column.type
        if types.is_timestamp(kind) or types.is_date(kind):
            texts[name] = column.to_numpy()
        elif any(test(kind) for test in numeric):
            names.append(name)
            positions.append(k)
            # Not all whole numbers of 64 bits are floats; those of a CSV file are rounded, too.
            columns.append(column.cast(pyarrow.float64(), safe=False).to_numpy())
        elif any(test(kind) for test in words):
            texts[name] = column.to_pylist()
        else:  # lists, durations, ...: named among what is left out
            texts[name] = [str(kind)] * table.num_rows
    values = np.stack(columns, 1) if columns else np.empty((table.num_rows, 0))
    return Table(
        tuple(names), values, _row_places(table.num_rows), texts=texts, positions=positions
    )


def _row_places(num: int) -> list[str]:
    return [f"row {k}" for k in range(1, num + 1)]


def select(table: Table, columns: tuple[str, ...] | None, path: Path) -> Table:
    """Returns the table with the columns asked for, by name or position in the file.

    All but those of times when none are.
    """
    if columns is None:
        index = [k for k, name in enumerate(table.names) if name.strip().lower() not in _TIME_NAMES]
        if not index:
            raise ValueError(
                f"{path} has no column of numbers besides {', '.join(table.names)};"
                " choose with --series.columns"
            )
    else:
        index = [_find(table, column, path) for column in columns]
        for k, name in enumerate(table.names):
            if index.count(k) > 1:
                raise ValueError(
                    f"series.columns {', '.join(columns)} has {name!r} twice; allowed: each column once"
                )
    names = tuple(table.names[k] for k in index)
    return Table(names, table.values[:, index], table.places, table.times, table.time)


def _find(table: Table, column: str, path: Path) -> int:
    """Returns the index in a table of the column that has this name, or else this position in the file."""
    if column in table.names:
        return table.names.index(column)
    named = column == table.time or column in table.texts
    if column.isdecimal() and not named and int(column) in table.positions:
        return table.positions.index(int(column))
    near = difflib.get_close_matches(column, table.names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"series.columns: {column!r} is no column of numbers in {path};"
        f" {hint}available: {', '.join(table.names)}"
    )


def filled(table: Table, fill: str | None, path: Path) -> np.ndarray:
    """Returns the values (N, D), all finite; a gap at the start takes the first value known."""
    known = np.isfinite(table.values)
    if fill is None and not known.all():
        row, column = np.argwhere(~known)[0]
        raise ValueError(
            f"{path}: {table.places[row]}, column {table.names[column]!r} is missing or not finite"
            f" ({(~known).sum()} such values in all);"
            " fill them with --series.fill zero, previous or linear"
        )
    values = fill_gaps(table.values, known, fill)
    if (large := np.abs(values).max(0)).max() > 1e30:
        column = table.names[large.argmax()]
        raise ValueError(
            f"{path}: column {column!r} has values up to {large.max():g}, the most is 1e30"
        )
    return values


def fill_gaps(values: np.ndarray, known: np.ndarray, fill: str | None) -> np.ndarray:
    """Returns values (N, D) with the unknown ones filled, as `SeriesConfig.fill` says."""
    if known.all():
        return values
    if fill == "zero":
        return np.where(known, values, 0.0)
    steps = np.arange(len(known))
    if fill == "previous":
        last = np.maximum.accumulate(np.where(known, steps[:, None], known.argmax(0)))
        return np.take_along_axis(values, last, 0)
    return np.stack(
        [np.interp(steps, steps[k], v[k]) for k, v in zip(known.T, values.T, strict=True)], 1
    )
