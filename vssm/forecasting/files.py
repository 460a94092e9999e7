"""Tables of series from and to files: CSV or Parquet."""

from pathlib import Path
from typing import Any

from vssm.data.storage import write_atomically


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
        reason = str(error).splitlines()[0].removeprefix("Error tokenizing data. C error: ")
        raise ValueError(
            f"{str(path)!r} is not a table: {reason}; give a Parquet file, or a CSV file whose"
            " first line has the names of the columns"
        ) from None


def write_forecast(table: Any, path: str | Path) -> None:  # noqa: ANN401
    """Writes a table of `Forecaster.predict` as CSV or Parquet; a wide one becomes long."""
    import pandas

    if isinstance(table.columns, pandas.MultiIndex):
        ids = list(dict.fromkeys(table.columns.get_level_values(0)))
        table = pandas.concat({id: table[id] for id in ids}, names=["unique_id"]).reset_index()
    if Path(path).suffix == ".csv":
        write_atomically(path, lambda file: table.to_csv(file, index=False))
        return
    try:
        write_atomically(path, lambda file: table.to_parquet(file, engine="pyarrow", index=False))
    except ImportError as error:
        raise ValueError(
            f"{path}: Parquet needs pyarrow, install it with: pip install 'vssm[forecast]'"
        ) from error
