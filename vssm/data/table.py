"""Tables of numbers and dates from CSV, .npy or Parquet files: N rows (time) and D columns.

pandas reads them, and knows the calendar: months, quarters, years and business days.

The first line of a CSV file is a header unless it begins with a number, a date, true or false. A
column of true and false is read as 1 and 0. Columns without any number are left out with a warning.
So are columns of numbers called `date`, `time` or `index`, unless the user asks for them.

Messages count rows from 0, after the header, as pandas and `vssm.forecasting` do.
"""

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from vssm.checks import name_allowed
from vssm.data.files import read_bytes, read_numpy

Frame = Any  # a pandas.DataFrame
Column = Any  # a pandas.Series

LARGEST = 1e30  # number in a table: models compute in float32

_TIME_NAMES = {"", "date", "datetime", "time", "timestamp", "index"}
_GAP = 1.5  # steps; two dates that are further apart have a gap between them


@dataclass(frozen=True)
class Table:
    """Holds the columns of numbers of a file, and the dates of its rows."""

    path: Path
    """The file, for messages."""
    names: tuple[str, ...]
    values: np.ndarray
    """(N, D) float64, NaN where a value is missing."""
    times: np.ndarray | None
    """(N,) datetime64[us], ascending."""
    time: str | None
    """The name of the column of dates."""
    frame: Frame
    """All columns of the file."""


def read_table(path: Path, time: str | None = None) -> Table:
    """Reads a CSV, .npy or Parquet file.

    `time` names the column of dates; None finds it by its name or contents, "none" leaves dates
    out.
    """
    frame = _read_frame(path)
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
    if time is None:
        time = _time_column(frame[texts])
    elif time not in (*texts, "none"):
        choices = name_allowed(time, (*texts, "none"))
        raise ValueError(f"{path} has no column of dates {time!r}; {choices}")
    times = None if time in (None, "none") else _times(frame[time], path)
    time = None if times is None else time
    return Table(path, tuple(numeric), np.stack([*numeric.values()], 1), times, time, frame)


def _read_frame(path: Path) -> Frame:
    import pandas

    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".npy"):
        values = read_numpy(path)
        if values.ndim not in (1, 2) or values.dtype.kind not in "fiub":
            found = f"{values.dtype} of shape {values.shape}"
            raise ValueError(f"{path} holds {found}; expected numbers (rows, columns)")
        return pandas.DataFrame(values).rename(columns=str)
    content = read_bytes(path)
    try:
        if name.endswith((".parquet", ".pq")):
            try:
                from pyarrow import parquet
            except ImportError:
                raise ValueError("Parquet needs pyarrow: pip install 'vssm[forecast]'") from None
            frame = parquet.read_table(io.BytesIO(content))
            return frame.to_pandas(ignore_metadata=True, date_as_object=False)
        with warnings.catch_warnings():  # of a first line that is shorter than others
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            return _read_csv(content)
    except (OSError, ValueError, pandas.errors.ParserWarning) as error:
        reason = " ".join(str(error).split()).removeprefix("Error tokenizing data. C error: ")
        raise ValueError(f"{path} cannot be read: {reason}") from None


def _read_csv(content: bytes) -> Frame:
    import pandas

    if b"\0" in content:
        raise ValueError("it has zero bytes, as UTF-16 has; save the file as UTF-8")
    text = content.decode("utf-8-sig", errors="replace").lstrip("\r\n")
    if not text.strip():
        raise ValueError("it is empty; expected a line of names and rows of numbers")
    # A comma beside another separator is a decimal comma or part of a name.
    first = re.sub('"[^"]*"', "", text.partition("\n")[0])
    separator = next((mark for mark in "\t;" if mark in first), ",")
    style: Any = {"sep": separator, "skipinitialspace": True, "header": None}
    line = pandas.read_csv(io.StringIO(text), nrows=1, dtype=str, keep_default_na=False, **style)
    names: Column = line.iloc[0].str.strip()
    number: Column = pandas.to_numeric(names[:1], errors="coerce")
    value = number.notna()[0] or names[0].lower() in ("true", "false")
    header = not value and np.isnat(_dates(names[:1])[0])
    style |= {"header": 0 if header else None, "index_col": False, "low_memory": False}
    style |= {"na_values": ["?", "na", "none"], **exact_numbers()}
    frame: Frame = pandas.read_csv(io.StringIO(text), **style)
    return frame.set_axis(names, axis=1) if header else frame.rename(columns=str)


def exact_numbers() -> dict[str, Any]:
    """Returns the options with which pandas reads every digit of a number: none since 3.1."""
    import pandas

    version = tuple(map(int, pandas.__version__.split(".")[:2]))
    return {"float_precision": "round_trip"} if version < (3, 1) else {}


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
        raise ValueError(
            f"{path}: row {row}, column {cells.name!r}: {cell!r} is not a number; correct it, or"
            " leave the cell empty"
        )
    return found


def _dates(cells: Column) -> np.ndarray:
    """Returns a column as datetime64[us] in UTC, NaT where a cell holds no date."""
    import pandas

    if cells.dtype.kind not in "MO":
        return np.full(len(cells), np.datetime64("NaT", "us"))
    dates: Column = pandas.to_datetime(cells, errors="coerce", format="ISO8601", utc=True)
    return dates.dt.tz_localize(None).to_numpy().astype("datetime64[us]")


def _time_column(texts: Frame) -> str | None:
    """Returns the name of the column of dates, if there is one."""
    for name, cells in texts.items():
        dates = _dates(cells)
        in_order = cells.dtype.kind == "M" or (dates[1:] > dates[:-1]).all()  # NaT is in no order
        if name.strip().lower() in _TIME_NAMES or in_order:
            return str(name)
    return None


def _times(cells: Column, path: Path) -> np.ndarray:
    """Returns the cells as dates; raises unless they ascend."""
    times = _dates(cells)
    missing, late = np.isnat(times), np.r_[False, times[1:] <= times[:-1]]
    for row in np.flatnonzero(missing | late):
        cell = "" if cells.isna().iloc[row] else str(cells.iloc[row])
        what = f"comes after {str(cells.iloc[row - 1])!r}; dates must ascend"
        if missing[row]:
            what = "is not a date; expected ISO 8601, such as 2016-07-01 13:00, in every row"
        elif times[row] == times[row - 1]:
            what = "is there twice"
        raise ValueError(
            f"{path}: row {row}, column {cells.name!r}: {cell!r} {what}"
            " (--series.time none leaves dates out)"
        )
    return times


def find_columns(table: Table, columns: Sequence[str]) -> list[int]:
    """Returns the indices of columns of numbers by name; commas may separate names, too.

    Example:
        >>> table = Table(Path("x"), ("a", "b, c", "d"), np.zeros((1, 3)), None, None, None)
        >>> find_columns(table, ["b, c", "d,a"])
        [1, 2, 0]
    """
    wanted: list[str] = []
    for part in columns:
        wanted += [part] if part in table.names else map(str.strip, part.split(","))
    for name in wanted:
        if name not in table.names:
            choices = name_allowed(name, table.names)
            raise ValueError(f"{table.path} has no column of numbers {name!r}; {choices}")
    return [table.names.index(name) for name in wanted]


def usual_columns(table: Table, given: Sequence[int]) -> list[int]:
    """Returns the columns of numbers that are neither given nor named like dates.

    Warns of columns that are left out although the user may expect them.
    """
    timed = [k for k, name in enumerate(table.names) if name.strip().lower() in _TIME_NAMES]
    index = [k for k in range(len(table.names)) if k not in (*timed, *given)]
    if not index:
        raise ValueError(
            f"{table.path} has no column of numbers besides {', '.join(table.names)};"
            " choose with --series.columns"
        )
    words = [name for name in table.frame if name not in (*table.names, table.time, *_TIME_NAMES)]
    words = [name for name in words if np.isnat(_dates(table.frame[name][:1]))[0]]
    if words:
        note = f"columns without numbers are left out: {', '.join(map(repr, words))}"
        warnings.warn(f"{table.path}: {note}; numbers need a decimal point", stacklevel=4)
    elif timed and table.names[timed[0]]:
        note = f"column {table.names[timed[0]]!r} of numbers is left out because of its name"
        warnings.warn(f"{table.path}: {note}; --series.columns NAMES includes it", stacklevel=4)
    return index


def check_size(table: Table, index: Sequence[int]) -> None:
    """Raises for a number that is too large to compute with."""
    size = np.abs(table.values[:, index])
    for row, column in np.argwhere((size > LARGEST) & (size < np.inf)):
        raise ValueError(
            f"{table.path}: row {row}, column {table.names[index[column]]!r} is"
            f" {table.values[row, index[column]]:g}; use numbers up to {LARGEST:g}"
        )


def filled(
    table: Table, index: Sequence[int], fill: str | None, missing: bool = False
) -> np.ndarray:
    """Returns columns (N, D) with gaps filled as `SeriesConfig.fill` says, or NaN if `missing`.

    A gap at the start takes the first known value, unless gaps are filled with zeros.
    """
    import pandas

    values = table.values[:, index]
    known = np.isfinite(values)
    check_size(table, index)
    if fill is None and not known.all() and not missing:
        row, column = np.argwhere(~known)[0]
        raise ValueError(
            f"{table.path}: row {row}, column {table.names[index[column]]!r} is missing or not"
            f" finite ({(~known).sum()} such values in all);"
            " fill them with --series.fill zero, previous or linear, or learn from the others with"
            " --model.known any"
        )
    frame: Frame = pandas.DataFrame(np.where(known, values, np.nan))
    if fill == "zero":
        frame = frame.fillna(0.0)
    elif fill == "previous":
        frame = frame.ffill().bfill()
    elif fill == "linear":
        frame = frame.interpolate(limit_direction="both")
    return frame.to_numpy()


def uneven_dates(times: np.ndarray) -> str | None:
    """Says where the first gap or extra date is; None if all dates are one usual step apart.

    Example:
        >>> print(uneven_dates(np.array(["2024-05-01", "2024-05-02", "2024-05-05"], "M8[s]")))
        dates are uneven: 2024-05-05T00:00:00 comes right after 2024-05-02T00:00:00
    """
    import pandas

    due = pandas.DatetimeIndex(times[:-1]) + usual_step(times)
    odd = due.to_numpy() != times[1:]
    if not odd.any():
        return None
    last, date = times[odd.argmax() :][:2].astype("datetime64[s]")
    return f"dates are uneven: {date} comes right after {last}"


def usual_step(times: np.ndarray) -> Any:  # noqa: ANN401
    """Returns the step of the longest run of dates without a gap, as an offset of pandas."""
    import pandas
    from pandas.tseries.frequencies import to_offset
    from pandas.tseries.offsets import BusinessDay

    times = times.astype("datetime64[us]")
    steps = np.diff(times)
    ends = np.flatnonzero(steps > _GAP * np.median(steps)) + 1
    run: Any = pandas.DatetimeIndex(max(np.split(times, ends), key=len))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of text, which pandas 4 gives up
        step: Any = to_offset(pandas.infer_freq(run)) if len(run) > 2 else None
    months = np.diff(run.year * 12 + run.month)
    if step is None and len(set(run.day)) == 1 and len(set(months)) == 1 and months[0]:
        step = pandas.DateOffset(months=int(months[0]))  # the 15th of each month, say
    if step is None:
        values, counts = np.unique(steps, return_counts=True)
        most = values[counts.argmax()].item()
        # Since pandas 3, a day is not 24 hours.
        step = to_offset(f"{most.days}D" if most == timedelta(most.days) else most)
    weekdays = np.is_busday(times.astype("datetime64[D]")).all()
    return BusinessDay() if step == to_offset("D") and weekdays and len(times) > 5 else step
