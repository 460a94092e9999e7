"""Forecasts from and to files: the history in a table, quantiles as CSV or Parquet, a fan chart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vssm.data.table import Table, find_column, read_table, select
from vssm.forecasting.charts import Fan, draw_fans, save_figure
from vssm.forecasting.model_forecaster import Forecast, ModelForecaster
from vssm.storage import write_atomically

__all__ = ["check_quantiles", "draw_fan", "forecast_file", "read_frame", "read_history"]
__all__ += ["write_forecast", "write_quantiles"]


def read_history(forecaster: ModelForecaster, path: str | Path, time: str | None = None) -> Table:
    """Reads the columns that a forecaster was trained on, in its order, from a new file.

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
        find_column(table, column, path, by_position=False)
    return select(table, forecaster.columns, path)


def forecast_file(
    forecaster: ModelForecaster,
    path: str | Path,
    horizon: int | None,
    samples: int,
    seed: int,
    time: str | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[Forecast, Table]:
    """Returns the forecast of what comes after the last row of a file, and the file's table."""
    table = read_history(forecaster, path, time)
    return forecaster.forecast(table.values, horizon, samples, table.times, seed, **options), table


def check_quantiles(path: str | Path, levels: Sequence[float]) -> None:
    """Raises unless `write_quantiles` can write these levels to this file.

    Example:
        >>> check_quantiles("out.csv", [0.1, 1.5])
        Traceback (most recent call last):
        ValueError: quantiles has 1.5; allowed: numbers from 0 to 1, each once
    """
    if Path(path).suffix not in (".csv", ".parquet"):
        raise ValueError(f"out={str(path)!r} is not allowed; allowed: a name in .csv or .parquet")
    names = [f"{level:g}" for level in levels]
    for level, name in zip(levels, names, strict=True):
        twice = " twice" if names.count(name) > 1 else ""
        if twice or not 0 <= level <= 1:
            raise ValueError(
                f"quantiles has {name}{twice}; allowed: numbers from 0 to 1, each once"
            )


def write_quantiles(made: Forecast, path: str | Path, levels: Sequence[float]) -> None:
    """Writes one line for each step and column: step, time if known, column, mean and quantiles.

    Arguments:
        made: The forecast of one series.
        path: A name in .csv or .parquet.
        levels: The quantiles, from 0 to 1, each once.
    """
    import pandas

    path = Path(path)
    check_quantiles(path, levels)
    steps, num = made.mean.shape
    table = pandas.DataFrame({"step": np.repeat(np.arange(1, steps + 1), num)})
    date_format = "%Y-%m-%d %H:%M:%S"
    if made.times is not None:
        table["time"] = np.repeat(made.times, num)
        date_format += ".%f" if made.times.dtype == "datetime64[us]" else ""
    table["column"] = list(made.columns) * steps
    table["mean"] = made.mean.flatten().double().cpu().numpy()
    for level in levels:
        table[f"q{level:g}"] = made.quantile(level).flatten().double().cpu().numpy()
    _write(table, path, date_format)


def _write(table: Any, path: Path, date_format: str = "%Y-%m-%d %H:%M:%S") -> None:  # noqa: ANN401
    if path.suffix == ".csv":
        style = {"index": False, "date_format": date_format, "lineterminator": "\r\n"}
        write_atomically(path, lambda file: table.to_csv(file, **style))
        return
    try:
        write_atomically(path, lambda file: table.to_parquet(file, engine="pyarrow", index=False))
    except ImportError as error:
        raise ValueError(
            f"{path}: Parquet needs pyarrow, install it with: pip install 'vssm[forecast]'"
        ) from error


def read_frame(path: str | Path) -> Any:  # noqa: ANN401
    """Returns the table of a CSV or Parquet file as a pandas DataFrame.

    Commas, semicolons or tabs separate the cells of a CSV file; it may be compressed.
    """
    import pandas

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist; give a CSV or Parquet file")
    try:
        if path.suffix == ".parquet":
            return pandas.read_parquet(path)
        first = pandas.read_csv(path, nrows=0, sep="\0", engine="python").columns[0]
        separator = max(",;\t", key=str(first).count)
        return pandas.read_csv(path, sep=separator)
    except (ValueError, ImportError) as error:  # pandas's own errors are ValueErrors
        raise ValueError(f"{str(path)!r} is no table: {str(error).splitlines()[0]}") from None


def write_forecast(table: Any, path: str | Path) -> None:  # noqa: ANN401
    """Writes a table of `Forecaster.predict` as CSV or Parquet; a wide one becomes long."""
    import pandas

    if isinstance(table.columns, pandas.MultiIndex):
        ids = list(dict.fromkeys(table.columns.get_level_values(0)))
        table = pandas.concat({id: table[id] for id in ids}, names=["unique_id"]).reset_index()
    _write(table, Path(path))


def draw_fan(made: Forecast, history: Table, path: str | Path, context: int = 96) -> None:
    """Draws the end of the history, the median, and the middle 50, 80 and 95 % of the paths.

    Arguments:
        made: The forecast of one series.
        history: What came before it.
        path: The PNG.
        context: Steps of history to show.
    """
    past = history.values[-context:]
    before, ahead = np.arange(-len(past), 0), np.arange(made.samples.shape[-2])
    if made.times is not None and history.times is not None:
        before, ahead = history.times[-len(past) :], made.times
    paths = made.samples.cpu().numpy()
    fans = [
        Fan(name, before, past[:, k], [(ahead, paths[..., k])])
        for k, name in enumerate(made.columns)
    ]
    save_figure(draw_fans(fans), path)
