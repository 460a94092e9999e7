"""Time series from CSV, .npy or Parquet files, cut into windows of context + horizon steps.

A file is a table of N rows (time) and D columns. It is split by time: the first 70 % of the rows are for
training, the next 10 % for validation, the last 20 % for testing. A window of validation or test may take its
context from the part before, as in use, but never a step of its horizon. Columns are standardised by
their mean and standard deviation over the training rows.

In CSV, the first line is a header when no cell of it is a number. A column without any number (dates,
names) is left out, and so is one with a name such as `date`, `time` or `index`, unless it is asked for.
"""

import csv
import difflib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vssm.data.config import DataConfig
from vssm.data.dataset import Data, Meta, Split
from vssm.data.files import locate_own, read_bytes

_TIME_NAMES = {"", "date", "datetime", "time", "timestamp", "index"}
_MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}


@dataclass(frozen=True)
class Table:
    """Holds columns of numbers: `values` (N, D) float64 with NaN where missing, and where rows come from."""

    names: tuple[str, ...]
    values: np.ndarray
    places: list[str]
    """What to call each row in a message: its line in a CSV file, else its number."""


def open_series(config: DataConfig) -> Data:
    """Opens a table file as windows."""
    options = config.series
    if options.path is None:
        raise ValueError("series.path is needed: a CSV, .npy or Parquet file")
    path = locate_own(options.path, "timeseries", config.dir)
    table = _select(read_table(path), options.columns, path)
    values = _filled(table, options.fill, path)

    if (large := np.abs(values).max(0)).max() > 1e30:
        column = table.names[large.argmax()]
        raise ValueError(f"{path}: column {column!r} has values up to {large.max():g}, the most is 1e30")

    num, window = len(values), options.context + options.horizon
    valid, test = int(0.7 * num), int(0.8 * num)
    rows = {
        "training": values[:valid],
        "validation": values[max(0, valid - options.context) : test],
        "test": values[max(0, test - options.context) :],
    }
    for part, own in rows.items():
        if len(own) < window:
            raise ValueError(
                f"{path} has {num} rows, {len(own)} of them for {part}, fewer than series.context"
                f" + horizon = {options.context} + {options.horizon} = {window}"
            )

    mean, std = None, None
    if options.scale:
        mean, std = rows["training"].mean(0), rows["training"].std(0)
        std = np.where(std > 1e-12 * np.abs(mean), std, 1.0)  # a constant column becomes zero
        rows = {part: (own - mean) / std for part, own in rows.items()}

    def windows(part: str) -> Split:
        x = torch.from_numpy(rows[part].astype(np.float32))
        return Split(x.unfold(0, window, options.stride).transpose(1, 2))

    def fit() -> tuple[Split, Split]:
        return windows("training"), windows("validation")

    meta = Meta(
        name="series",
        features=len(table.names),
        length=window,
        suggested_head="gaussian-learned",
        columns=table.names,
        mean=None if mean is None else tuple(mean.tolist()),
        std=None if std is None else tuple(std.tolist()),
        context=options.context,
        horizon=options.horizon,
    )
    return Data(config, meta, fit, lambda: windows("test"), [path])


def read_table(path: Path) -> Table:
    """Returns the columns of a CSV, .npy or Parquet file that hold numbers."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".parquet", ".pq")):
        table = _read_parquet(path)
    else:
        table = _read_npy(path) if name.endswith(".npy") else _read_csv(path)
    if not table.places:
        raise ValueError(f"{path} has no rows")
    numeric = np.flatnonzero(np.isfinite(table.values).any(0))
    if not len(numeric):
        raise ValueError(f"{path} has no column of numbers")
    return Table(tuple(table.names[k] for k in numeric), table.values[:, numeric], table.places)


def _read_csv(path: Path) -> Table:
    # Only names can hold other characters than ASCII, and a name with U+FFFD does no harm.
    text = read_bytes(path).decode("utf-8-sig", errors="replace")
    first = text.lstrip("\r\n").partition("\n")[0]
    # A comma beside another separator is a decimal comma or part of a name.
    delimiter = next((d for d in "\t;" if d in first), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    try:
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ValueError(f"{path}: line {reader.line_num}: {error}") from error
    if not rows:
        raise ValueError(f"{path} is empty")

    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise ValueError(f"{path}: line {line} has {len(row)} cells, the first line has {width}")
    names = tuple(map(str, range(width)))
    cells = [_number(cell) for cell in rows[0][1]]
    if None in cells and not any(cell is not None and np.isfinite(cell) for cell in cells):
        names = tuple(name.strip() for name in rows.pop(0)[1])

    columns = []
    for name, column in zip(names, zip(*(row for _, row in rows), strict=True), strict=False):
        numbers = [_number(cell) for cell in column]
        odd = next((k for k, number in enumerate(numbers) if number is None), None)
        if odd is not None and any(number is not None and np.isfinite(number) for number in numbers):
            raise ValueError(f"{path}: line {rows[odd][0]}, column {name!r}: {column[odd]!r} is not a number")
        columns.append(np.full(len(rows), np.nan) if odd is not None else np.array(numbers))
    values = np.stack(columns, 1) if columns else np.empty((0, width))
    return Table(names, values, [f"line {line}" for line, _ in rows])


def _number(cell: str) -> float | None:
    """Returns the number in a cell, NaN when it says that there is none, None when it is something else."""
    try:
        return float(cell)
    except ValueError:
        return float("nan") if cell.strip().lower() in _MISSING else None


def _read_npy(path: Path) -> Table:
    try:
        values = np.lib.format.read_array(io.BytesIO(read_bytes(path)), allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path} is no plain .npy array: {str(error).splitlines()[0]}") from error
    if values.ndim not in (1, 2) or values.dtype.kind not in "fiub":
        raise ValueError(
            f"{path} holds {values.dtype} of shape {values.shape}, expected numbers of shape (N, D)"
        )
    values = values.reshape(len(values), -1).astype(np.float64)
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
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    names, columns = [], []
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type
        if any(
            test(kind)
            for test in (pyarrow.types.is_integer, pyarrow.types.is_floating, pyarrow.types.is_decimal)
        ):
            names.append(name)
            columns.append(column.cast(pyarrow.float64()).to_numpy())
    values = np.stack(columns, 1) if columns else np.empty((table.num_rows, 0))
    return Table(tuple(names), values, _row_places(table.num_rows))


def _row_places(num: int) -> list[str]:
    return [f"row {k}" for k in range(1, num + 1)]


def _select(table: Table, columns: tuple[str, ...] | None, path: Path) -> Table:
    """Returns the table with the columns asked for, by name or position; without times when none are."""
    available = ", ".join(table.names)
    if columns is None:
        index = [k for k, name in enumerate(table.names) if name.strip().lower() not in _TIME_NAMES]
        if not index:
            raise ValueError(
                f"{path} has no column of numbers besides {available}; choose with --series.columns"
            )
    else:
        index = []
        for column in columns:
            if column in table.names:
                index.append(table.names.index(column))
            elif column.isdecimal() and int(column) < len(table.names):
                index.append(int(column))
            else:
                near = difflib.get_close_matches(column, table.names, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(
                    f"series.columns: {column!r} is no column of numbers in {path};"
                    f" {hint}available: {available}"
                )
    return Table(tuple(table.names[k] for k in index), table.values[:, index], table.places)


def _filled(table: Table, fill: str | None, path: Path) -> np.ndarray:
    """Returns the values (N, D), all finite; a gap at the start takes the first value known."""
    known = np.isfinite(table.values)
    if known.all():
        return table.values
    if fill is None:
        row, column = np.argwhere(~known)[0]
        raise ValueError(
            f"{path}: {table.places[row]}, column {table.names[column]!r} is missing or not finite"
            f" ({(~known).sum()} such values in all);"
            " fill them with --series.fill zero, previous or linear"
        )
    if fill == "zero":
        return np.where(known, table.values, 0.0)
    steps = np.arange(len(known))
    if fill == "previous":
        last = np.maximum.accumulate(np.where(known, steps[:, None], known.argmax(0)))
        return np.take_along_axis(table.values, last, 0)
    return np.stack(
        [np.interp(steps, steps[k], v[k]) for k, v in zip(known.T, table.values.T, strict=True)], 1
    )
