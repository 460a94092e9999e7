"""Forecasts from and to files: the history of a table, quantiles as CSV or Parquet, and a fan chart."""

import csv
import difflib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vssm.data.table import Table, read_table, select
from vssm.forecasting.forecaster import Forecast, Forecaster
from vssm.storage import write_atomically

__all__ = ["check_quantiles", "draw_fan", "forecast_file", "read_history", "write_quantiles"]

_BANDS = (0.95, 0.8, 0.5)
_MOST_COLUMNS = 12  # in one chart


def read_history(forecaster: Forecaster, path: str | Path, time: str | None = None) -> Table:
    """Returns the columns that a forecaster was trained on, in its order, from a new file.

    Arguments:
        forecaster: What will read them.
        path: A CSV, .npy or Parquet file.
        time: The column of dates; None takes that of training or finds it, "none" leaves dates out.
    """
    path, meta = Path(path), forecaster.meta
    if not path.is_file():
        raise ValueError(f"path={str(path)!r} does not exist; allowed: a CSV, .npy or Parquet file")
    if time is None and (meta.cycles or meta.time == "none"):
        time = meta.time
    table = read_table(path, time, meta.time, "time")
    for column in forecaster.columns:
        if column not in table.names:
            near = difflib.get_close_matches(column, table.names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"{path} has no column of numbers {column!r}, which the run was trained on;"
                f" {hint}available: {', '.join(table.names)}"
            )
    return select(table, forecaster.columns, path)


def check_quantiles(path: str | Path, levels: Sequence[float]) -> None:
    """Raises unless `write_quantiles` can write these levels under this name.

    Example:
        >>> check_quantiles("out.csv", [0.1, 1.5])
        Traceback (most recent call last):
        ValueError: quantiles has 1.5; allowed: numbers from 0 to 1, each once
    """
    if Path(path).suffix not in (".csv", ".parquet"):
        raise ValueError(f"out={str(path)!r} is not allowed; allowed: a name in .csv or .parquet")
    columns = [_column_name(level) for level in levels]
    for level, column in zip(levels, columns, strict=True):
        twice = columns.count(column) > 1
        if twice or not 0 <= level <= 1:
            given = f"{level:g}{' twice' if twice else ''}"
            raise ValueError(f"quantiles has {given}; allowed: numbers from 0 to 1, each once")


def _column_name(level: float) -> str:
    return f"q{level:g}"


def write_quantiles(made: Forecast, path: str | Path, levels: Sequence[float]) -> None:
    """Writes one line for each step and column: step, time where known, column, mean and quantiles.

    Arguments:
        made: The forecast of one series.
        path: A name in .csv or .parquet.
        levels: The quantiles, from 0 to 1, each once.
    """
    path = Path(path)
    check_quantiles(path, levels)
    steps, num = made.mean.shape
    columns: dict[str, np.ndarray] = {"step": np.repeat(np.arange(1, steps + 1), num)}
    if made.times is not None:
        columns["time"] = np.repeat(made.times, num)
    columns["column"] = np.tile(np.array(made.columns), steps)
    columns["mean"] = made.mean.flatten().cpu().numpy()
    for level in levels:
        columns[_column_name(level)] = made.quantile(level).flatten().cpu().numpy()
    if path.suffix == ".csv":
        rows = zip(*(_cells(column) for column in columns.values()), strict=True)
        write_atomically(
            path, lambda file: _write_csv(file, list(columns), [list(row) for row in rows])
        )
        return
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: Parquet needs pyarrow, install it with: pip install 'vssm[forecast]'"
        ) from error
    write_atomically(path, lambda file: parquet.write_table(pyarrow.table(columns), file))


def _cells(column: np.ndarray) -> list:
    if column.dtype == "datetime64[us]":  # all in one form, also where the fraction is zero
        return [date.isoformat(" ", "microseconds") for date in column.tolist()]
    return column.tolist()


def _write_csv(path: Path, header: list[str], rows: list[list]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def draw_fan(made: Forecast, history: Table, path: str | Path, context: int = 96) -> None:
    """Draws the end of the history, the median and the middle 50, 80 and 95 % of the paths, column by column.

    Arguments:
        made: The forecast of one series.
        history: What came before it.
        path: The PNG.
        context: Steps of history to show.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = made.columns[:_MOST_COLUMNS]
    figure = Figure(figsize=(8, 1 + 1.6 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    past = history.values[-context:]
    dated = made.times is not None and history.times is not None
    before = (
        history.times[-len(past) :]
        if dated and history.times is not None
        else np.arange(-len(past), 0)
    )
    ahead = made.times if dated and made.times is not None else np.arange(made.samples.shape[-2])
    for k, axes in enumerate(figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]):
        axes.plot(before, past[:, k], color="black", linewidth=0.8, label="history")
        for band in _BANDS:
            low, high = (made.quantile(q)[:, k].cpu() for q in ((1 - band) / 2, (1 + band) / 2))
            axes.fill_between(
                ahead, low, high, color="tab:blue", alpha=0.25, linewidth=0, label=f"{band:.0%}"
            )
        axes.plot(
            ahead, made.quantile(0.5)[:, k].cpu(), color="tab:blue", linewidth=1, label="median"
        )
        axes.set_ylabel(names[k].replace("$", r"\$"), fontsize=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=6, ncols=5, loc="outside upper center")  # over no line
    if dated:
        figure.autofmt_xdate()
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=100))


def forecast_file(
    forecaster: Forecaster,
    path: str | Path,
    horizon: int | None,
    samples: int,
    seed: int,
    time: str | None = None,
    **options: object,
) -> tuple[Forecast, Table]:
    """Returns the forecast of what comes after the last row of a file, and the file's table."""
    table = read_history(forecaster, path, time)
    history = torch.from_numpy(np.where(np.isfinite(table.values), table.values, np.nan))
    return forecaster.forecast(history, horizon, samples, table.times, seed, **options), table
