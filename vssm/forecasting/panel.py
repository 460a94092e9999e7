"""Panels: tables of many series, read from and written as pandas DataFrames.

    long    columns unique_id, ds and y, one row for each series and date, as Nixtla has them; other
            columns are covariates. Without unique_id the table is one series.
    wide    a column for each series; the dates are the index or a column

Every series is laid on the grid of dates of its frequency, from its first date to its last. Missing
rows and cells are NaN. A covariate is known in the future, or known in the past only, or static:
one number for each series.

Legend: a series has N dates; F covariates known in the future, then those of the past.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vssm.checks import check_type, shown
from vssm.data.table import LARGEST, usual_step

if TYPE_CHECKING:
    import pandas

_OWN = ("unique_id", "ds", "y")
_COUNTED = ("", "Unnamed: 0")  # the index of rows, where pandas wrote it to a file
_TIME_NAMES = ("ds", "date", "datetime", "time", "timestamp", "index")


@dataclass(frozen=True)
class Columns:
    """The columns of a panel that are not the series themselves."""

    future: tuple[str, ...] = ()
    past: tuple[str, ...] = ()
    static: tuple[str, ...] = ()

    @property
    def moving(self) -> tuple[str, ...]:
        """The covariates that change with the date."""
        return self.future + self.past


@dataclass(frozen=True)
class Series:
    """One series on its grid of dates."""

    id: Any
    dates: Any
    """(N,) a pandas DatetimeIndex."""
    y: np.ndarray
    """(N,) float64, NaN where missing."""
    covariates: np.ndarray
    """(N, F + past) float64, NaN where missing."""
    static: np.ndarray
    """(static,) float64."""

    def before(self, end: int) -> "Series":
        """Returns the first `end` dates."""
        return Series(self.id, self.dates[:end], self.y[:end], self.covariates[:end], self.static)


@dataclass(frozen=True)
class Panel:
    """Series of one frequency, in the order in which the table has them."""

    series: tuple[Series, ...]
    step: "pandas.DateOffset"
    columns: Columns = field(default_factory=Columns)
    wide: bool = False

    @property
    def ids(self) -> list[Any]:
        """The names of the series."""
        return [one.id for one in self.series]

    def next_dates(self, one: Series, num: int) -> Any:  # noqa: ANN401
        """Returns the dates after a series, a pandas DatetimeIndex."""
        import pandas

        return pandas.date_range(one.dates[-1], periods=num + 1, freq=self.step)[1:]

    def to_frame(self, values: Sequence[np.ndarray] | None = None) -> "pandas.DataFrame":
        """Returns a long table with all rows of the grids; `values` replace y."""
        import pandas

        parts = []
        for k, one in enumerate(self.series):
            y = one.y if values is None else values[k]
            table = {"unique_id": [one.id] * len(y), "ds": one.dates, "y": y}
            table |= dict(zip(self.columns.moving, one.covariates.T, strict=True))
            table |= dict(zip(self.columns.static, one.static, strict=True))
            parts.append(pandas.DataFrame(table))
        return pandas.concat(parts, ignore_index=True)


def read_panel(
    df: "pandas.DataFrame",
    freq: Any = None,  # noqa: ANN401
    future: Sequence[str] = (),
    past: Sequence[str] | None = None,
    static: Sequence[str] | None = None,
) -> Panel:
    """Reads a long or a wide table, and checks every cell.

    Arguments:
        df: The table.
        freq: The time from one date to the next, as a pandas frequency; found in the dates if None.
        future: Columns of covariates that are known in the future.
        past: Columns of covariates that are known up to now. By default, in a long table, all other
            columns that change inside a series.
        static: Columns with one number for each series. By default, in a long table, all other
            columns that are constant in each series.

    Example:
        >>> import pandas
        >>> days = pandas.date_range("2024-01-01", periods=4, freq="D")
        >>> panel = read_panel(pandas.DataFrame({"a": [1.0, 2, 3, 4]}, index=days).iloc[[0, 1, 3]])
        >>> panel.ids, panel.series[0].y
        (['a'], array([ 1.,  2., nan,  4.]))
    """
    import pandas

    check_type("df", df, pandas.DataFrame, "a pandas DataFrame")
    named = (*future, *(past or ()), *(static or ()))
    df = _without_named_index(df)
    _check_columns(df, named)
    counted = [c for c in df.columns if c in _COUNTED and df[c].dtype.kind == "i"]
    df = df.drop(columns=counted)
    table, wide = _as_long(df, named)
    table["ds"] = _dates(table)
    others = [c for c in table.columns if c not in _OWN]
    if past is not None and static is not None:  # other columns are not read
        others = list(named)
    for name in ("y", *others):
        table[name] = _numbers(table, name, wide)
    columns = _sort_columns(table, others, tuple(future), past, static)
    if (twice := table.duplicated(["unique_id", "ds"])).any():
        one = table[twice].iloc[0]
        same = (table["unique_id"] == one["unique_id"]) & (table["ds"] == one["ds"])
        first, second, *_ = table.index[same]
        raise ValueError(
            f"series {shown(one['unique_id'])} has the date {day(one['ds'])} twice, in rows"
            f" {first} and {second}; keep one of them"
        )
    groups = {id: rows.sort_values("ds") for id, rows in table.groupby("unique_id", sort=False)}
    step = _step(groups, freq)
    series = tuple(_series(id, rows, step, columns) for id, rows in groups.items())
    return Panel(series, step, columns, wide)


def _without_named_index(df: "pandas.DataFrame") -> "pandas.DataFrame":
    return df.reset_index() if any(name in _OWN for name in df.index.names) else df


def _check_columns(df: "pandas.DataFrame", named: tuple[str, ...]) -> None:
    """Raises unless a table has rows, and has each named column once."""
    if not len(df):
        raise ValueError("the table has no rows; give one row for each date")
    if df.columns.nlevels > 1:
        raise ValueError(
            f"the columns have {df.columns.nlevels} levels, such as {df.columns[-1]}; give each"
            " series one name"
        )
    if (twice := df.columns.duplicated()).any():
        name = df.columns[twice][0]
        raise ValueError(f"the table has two columns called {name!r}; rename one of them")
    for name, what in {"ds": "dates", "y": "values"}.items():
        if "unique_id" in df.columns and name not in df.columns:
            raise ValueError(
                f"the table has a column unique_id and no {what}; name the column of {what} {name}"
            )
    for name in named:
        if name in _OWN:
            raise ValueError(
                f"column {name!r} is part of the series and cannot be a covariate too; leave it out"
            )
        if name not in df.columns:
            raise ValueError(
                f"the table has no column {name!r}; it has {', '.join(map(str, df.columns))}"
            )


def _as_long(df: "pandas.DataFrame", named: tuple[str, ...]) -> tuple["pandas.DataFrame", bool]:
    """Returns a long table, indexed by the rows of `df`, and whether `df` was wide."""
    import pandas

    if {"ds", "y"} <= set(df.columns):
        table = df.reset_index(drop=True)
        if "unique_id" not in df.columns:
            return table.assign(unique_id="y"), False
        nameless = table["unique_id"].isna().to_numpy()
        if nameless.any():
            k = int(nameless.argmax())
            raise ValueError(f"row {k} has no unique_id; give each row the name of its series")
        return table.astype({"unique_id": object}), False  # not categories without rows
    dates, table = _wide_dates(df)
    names = [c for c in table.columns if c not in named]
    if not names:
        raise ValueError("the table has dates and no series; give one column for each series")
    covariates = table[[c for c in named if c in table.columns]]
    parts = [covariates.assign(unique_id=name, ds=dates, y=table[name]) for name in names]
    return pandas.concat(parts), True


def _wide_dates(df: "pandas.DataFrame") -> tuple[Any, "pandas.DataFrame"]:
    """Returns the dates of a wide table, and the table without them."""
    import pandas

    if isinstance(df.index, pandas.DatetimeIndex):
        return pandas.Series(df.index), df.reset_index(drop=True)
    name = next((c for c in df.columns if str(c).lower() in _TIME_NAMES), None)
    name = name or next((c for c in df.columns if _has_dates(df[c])), None)
    if name is None:
        raise ValueError(
            "the table has no dates; give a long one with columns unique_id, ds and y, or a wide"
            f" one with a DatetimeIndex or a column named {' or '.join(_TIME_NAMES[:2])}"
        )
    return df[name].reset_index(drop=True), df.drop(columns=name).reset_index(drop=True)


def _has_dates(column: Any) -> bool:  # noqa: ANN401
    import pandas

    if pandas.api.types.is_numeric_dtype(column):
        return False
    return bool(pandas.to_datetime(column, errors="coerce", format="ISO8601").notna().all())


def _dates(table: "pandas.DataFrame") -> Any:  # noqa: ANN401
    import pandas

    cells = table["ds"]
    if pandas.api.types.is_numeric_dtype(cells):
        raise ValueError("column 'ds' has numbers; give dates, such as 2024-05-01 13:00")
    if isinstance(cells.dtype, pandas.PeriodDtype):
        return cells.dt.to_timestamp()
    if cells.dtype.kind == "M" and not cells.hasnans:
        return cells
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # of pandas 2; pandas 3 raises
            dates: Any = pandas.to_datetime(cells, errors="coerce", format="ISO8601")
    except (ValueError, FutureWarning):
        raise ValueError(
            "the dates have several offsets from UTC; convert them with"
            " pandas.to_datetime(dates, utc=True)"
        ) from None
    if dates.isna().any():
        k = int(dates.isna().to_numpy().argmax())
        given = "missing" if cells.isna().iloc[k] else shown(cells.iloc[k])
        raise ValueError(
            f"series {shown(table['unique_id'].iloc[k])}, row {table.index[k]}: the date is"
            f" {given}; give dates such as 2024-05-01 13:00"
        )
    return dates


def _numbers(table: "pandas.DataFrame", name: str, wide: bool) -> Any:  # noqa: ANN401
    import pandas

    cells = table[name]
    cells = cells.astype(str) if cells.dtype.kind == "M" else cells  # dates are no numbers
    numbers: Any = pandas.to_numeric(cells, errors="coerce")
    numbers = numbers.astype(np.float64)
    wrong = (numbers.isna() & cells.notna()) | (numbers.abs() > LARGEST)
    if wrong.any():
        k = int(wrong.to_numpy().argmax())
        id, cell, number = table["unique_id"].iloc[k], cells.iloc[k], numbers.iloc[k]
        given = shown(cell) if isinstance(cell, str) else str(cell)
        what = "infinite" if np.isinf(number) else f"more than {LARGEST:g}"
        what = "text" if np.isnan(number) else what
        column = id if wide and name == "y" else name
        advice = "give numbers, and nothing (NaN) where one is missing"
        if numbers[table["unique_id"] == id].isna().all():
            advice = "drop it, or name the columns of a long table unique_id, ds and y"
        raise ValueError(
            f"series {shown(id)}, column {shown(column)}, row {table.index[k]}"
            f" ({day(table['ds'].iloc[k])}) is {given}, which is {what}; {advice}"
        )
    return numbers


def day(date: Any) -> str:  # noqa: ANN401
    """Returns a date without the time if that is midnight."""
    return str(date).removesuffix(" 00:00:00")


def _sort_columns(
    table: Any,  # noqa: ANN401
    others: list[str],
    future: tuple[str, ...],
    past: Sequence[str] | None,
    static: Sequence[str] | None,
) -> Columns:
    """Says which covariates are static and which are of the past."""
    free = [c for c in others if c not in (*future, *(past or ()), *(static or ()))]
    constant = table.groupby("unique_id")[free].nunique(dropna=False).le(1).all() if free else {}
    if static is None:
        static = [c for c in free if constant[c]]
    if past is None:
        past = [c for c in free if c not in static]
    for name in static:
        if table[name].isna().any() or table.groupby("unique_id")[name].nunique().gt(1).any():
            raise ValueError(f"column {name!r} is static; give one number for each series")
    return Columns(future, tuple(past), tuple(static))


def _step(groups: dict[Any, "pandas.DataFrame"], freq: Any) -> "pandas.DateOffset":  # noqa: ANN401
    """Returns the step between dates: the given one, or the usual one of the longest series."""
    import pandas
    from pandas.tseries.frequencies import to_offset

    longest = max(groups.values(), key=len)
    dates = longest["ds"].dt.tz_localize(None).to_numpy()
    if freq is None:
        if len(dates) < 3:
            message = "all series have fewer than 3 rows; give freq, such as 'h', 'D' or 'MS'"
            raise ValueError(message)
        return usual_step(dates)
    try:
        step: Any = to_offset(freq)
    except ValueError:
        raise ValueError(
            f"freq={shown(freq)} is unknown; give a pandas frequency, such as 'h', 'D' or 'MS'"
        ) from None
    if not isinstance(freq, str):  # that of a forecaster, which was checked
        return step
    num = len(pandas.date_range(dates[0], dates[-1], freq=step))
    if len(dates) > 2 and num > 2 * len(dates) and (found := usual_step(dates)) != step:
        warnings.warn(
            f"freq={step.freqstr!r} leaves {num - len(dates)} of {num} dates without a row; the"
            f" dates of the table look like {found.freqstr!r}",
            stacklevel=5,
        )
    return step


def _series(id: Any, rows: Any, step: "pandas.DateOffset", columns: Columns) -> Series:  # noqa: ANN401
    """Lays the rows of a series, in order, on its grid of dates."""
    import pandas

    dates = pandas.DatetimeIndex(rows["ds"])
    grid: Any = pandas.date_range(dates[0], dates[-1], freq=step)
    off = ~dates.isin(grid)
    if off.any():
        k = int(off.argmax())
        raise ValueError(
            f"series {shown(id)}, row {rows.index[k]}: the date {day(dates[k])} does not fit the"
            f" frequency {step.freqstr!r} from {day(dates[0])} on; correct it, or give a freq that"
            " fits"
        )
    table = rows.set_index("ds").reindex(grid)
    table = table.loc[table["y"].first_valid_index() :]  # a wide table begins before some series
    static = rows[list(columns.static)].iloc[0].to_numpy(np.float64)
    covariates = table[list(columns.moving)].to_numpy(np.float64)
    return Series(id, table.index, table["y"].to_numpy(), covariates, static)


def read_ahead(
    panel: Panel, horizon: int, future: "pandas.DataFrame | None"
) -> list[np.ndarray] | None:
    """Reads the covariates of the dates after each series, (H, F) each; None if there are none.

    Without unique_id they are the same for all series, with dates as the index or a column.
    """
    import pandas

    names: Any = list(panel.columns.future)
    if not names:
        if future is not None:
            raise ValueError("future is given, but the forecaster has no future_columns; name them")
        return None
    if future is None:
        raise ValueError(f"future is missing; give a table with ds and {', '.join(names)}")
    check_type("future", future, pandas.DataFrame, "a pandas DataFrame")
    table = _without_named_index(future).assign(y=0.0)
    shared = "unique_id" not in table.columns
    if "ds" not in table.columns:
        table["ds"] = _wide_dates(table)[0].to_numpy()
    try:
        found, ahead = read_panel(table, panel.step, names, (), ()), []
    except ValueError as error:
        raise ValueError(f"future: {error}") from None
    own = {one.id: pandas.DataFrame(one.covariates, one.dates, names) for one in found.series}
    for one in panel.series:
        dates = panel.next_dates(one, horizon)
        given = own.get("y" if shared else one.id, pandas.DataFrame(columns=names, dtype=float))
        values = given.reindex(dates).to_numpy()
        if np.isnan(values).any():
            step, column = np.argwhere(np.isnan(values))[0]
            raise ValueError(
                f"future of series {shown(one.id)} has no {names[column]!r} on {day(dates[step])};"
                f" give all {horizon} dates from {day(dates[0])} to {day(dates[-1])}"
            )
        ahead.append(values)
    return ahead


def check_quantiles(quantiles: Sequence[float]) -> dict[str, float]:
    """Returns the quantiles by their names in a table.

    Example:
        >>> check_quantiles([0.1, 1.5])
        Traceback (most recent call last):
        ValueError: quantiles has 1.5; give numbers from 0 to 1, each once
    """
    levels = {}
    check_type("quantiles", quantiles, (list, tuple, np.ndarray), "a list of numbers")
    for level in quantiles:
        number = isinstance(level, (int, float, np.number))
        name = f"{level:g}" if number else shown(level)
        if name in levels or not (number and 0 <= level <= 1):
            twice = " twice" if name in levels else ""
            raise ValueError(f"quantiles has {name}{twice}; give numbers from 0 to 1, each once")
        levels[name] = float(level)
    return levels


def forecast_table(
    forecasts: dict[Any, tuple[Any, np.ndarray]], quantiles: Sequence[float], wide: bool = False
) -> "pandas.DataFrame":
    """Returns the mean and the quantiles of forecasts: the (H,) dates and (S, H) paths by series.

    A long table has the columns unique_id, ds, mean and the quantiles; a wide table has a column
    level for the series, and the dates as index.
    """
    import pandas

    levels = check_quantiles(quantiles)
    tables = {}
    for id, (dates, paths) in forecasts.items():
        found = np.quantile(paths, list(levels.values()), axis=0)
        columns = {"ds": dates, "mean": paths.mean(0), **dict(zip(levels, found, strict=True))}
        tables[id] = pandas.DataFrame(columns)
    if wide:
        return pandas.concat({id: own.set_index("ds") for id, own in tables.items()}, axis=1)
    table = pandas.concat(tables, names=["unique_id"])
    return table.reset_index(level=0).reset_index(drop=True)
