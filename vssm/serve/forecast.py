"""POST /v1/forecast: forecasts of raw histories by a saved `vssm.forecasting.Forecaster`."""

from typing import Annotated, Any, ClassVar

import numpy as np
import pandas
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from vssm.checks import shown
from vssm.forecasting.forecaster import Forecaster
from vssm.forecasting.panel import check_quantiles
from vssm.serve.calls import Call, Calls
from vssm.serve.errors import Refused, invalid
from vssm.serve.models import ServedForecaster
from vssm.serve.schema import examples
from vssm.serve.settings import Settings


def _check_rows(value: object) -> object:
    """Raises unless the value is a list of flat rows; the forecaster checks the columns."""
    rows: list[Any] = value if isinstance(value, list) else [None]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            message = 'input should be a list of rows such as {"ds": "2026-01-31", "y": 1.5}'
            raise PydanticCustomError("rows", message)
        for name, cell in row.items():
            if not isinstance(cell, str | int | float | None):
                message = "row {number}: {name} should be a number, a text or null"
                raise PydanticCustomError("rows", message, {"number": number, "name": name[:64]})
    return value


_ROWS = {"type": "array", "items": {"type": "object"}}
_Rows = Annotated[list[dict[str, Any]], BeforeValidator(_check_rows), WithJsonSchema(_ROWS)]


class ForecastRequest(BaseModel):
    model_config: ClassVar[ConfigDict] = examples(
        {
            "history": [
                {"unique_id": "shop 1", "ds": "2026-01-30", "y": 12.5},
                {"unique_id": "shop 1", "ds": "2026-01-31", "y": None},
            ],
            "quantiles": [0.1, 0.5, 0.9],
        }
    )
    model: str | None = Field(
        None, description="One of the forecasters of /v1/models; by default the first."
    )
    history: _Rows = Field(
        description="Rows with ds (a date), y (null where missing), unique_id if there are several "
        "series, and the covariates of the training."
    )
    future: _Rows | None = Field(
        None, description="Rows with ds, unique_id and the covariates of the dates to come."
    )
    samples: Annotated[int, Field(ge=1)] = Field(200, description="Sample paths of each series.")
    quantiles: list[float] = Field([0.1, 0.5, 0.9], description="From 0 to 1, each once.")
    paths: bool = Field(False, description="Return the sample paths instead of their quantiles.")


def plan_forecast(
    ask: ForecastRequest, forecasters: list[ServedForecaster], limits: Settings
) -> tuple[str, Calls]:
    """Returns the name of the forecaster and the calls of a request, or refuses it."""
    found = [one for one in forecasters if ask.model in (None, one.name)]
    if not found:
        message = "no forecaster is served; start the server with vssm serve FORECASTER_FOLDER"
        if names := ", ".join(one.name for one in forecasters):
            message = f"model={shown(ask.model)} is not a forecaster; use {names}"
        raise Refused(404, "unknown_model", message, "model")
    served = found[0]
    if (rows := len(ask.history) + len(ask.future or ())) > limits.max_cells:
        message = f"{rows} rows are too many; send at most {limits.max_cells}"
        raise Refused(422, "too_many", message, "history")
    series = len({str(row.get("unique_id")) for row in ask.history})
    cells = series * ask.samples * served.forecaster.horizon
    if cells > 16 * limits.max_cells:
        message = f"series times samples times steps is {cells}; ask for at most"
        raise Refused(422, "too_many", f"{message} {16 * limits.max_cells}", "samples")
    try:
        check_quantiles(ask.quantiles)
    except ValueError as error:
        raise invalid(str(error), "quantiles") from None
    return served.name, _calls(served, ask, limits)


def _calls(served: ServedForecaster, ask: ForecastRequest, limits: Settings) -> Calls:
    return (yield Call(served.name, lambda: (_forecast(served.forecaster, ask, limits), None)))


def _forecast(own: Forecaster, ask: ForecastRequest, limits: Settings) -> list[dict[str, Any]]:
    """Returns the rows of the answer; raises `ValueError` for bad columns, dates or values."""
    try:
        df = _table(ask.history, "history", own, limits)
        future = None if ask.future is None else _table(ask.future, "future", own, limits)
        if not ask.paths:
            made = own.predict(df, ask.samples, tuple(ask.quantiles), future)
        else:
            made = own.predict(df, 1, (0.5,), future)  # for the dates
            made = made.drop(columns=["mean", "0.5"])
            paths = own.predict_samples(df, ask.samples, future)
            made["paths"] = np.moveaxis(paths, 1, 2).reshape(len(made), -1).tolist()
    except (TypeError, KeyError, OverflowError) as error:  # what pandas says of odd cells
        raise ValueError(f"history or future is not a table of series: {error}") from None
    made["ds"] = made["ds"].map(lambda date: date.isoformat())
    return made.to_dict(orient="records")


def _table(
    rows: list[dict[str, Any]], name: str, own: Forecaster, limits: Settings
) -> pandas.DataFrame:
    df = pandas.DataFrame(rows)
    for column in ("ds", "y") if name == "history" else ("ds",):
        if column not in df:
            raise ValueError(f"{name} has no column {column!r}; give it in every row")
    # Two distant dates would fill the memory with missing rows between them.
    dates = pandas.to_datetime(df["ds"], errors="coerce", format="ISO8601")
    if dates.min() + limits.max_cells * own.panel_.step < dates.max():
        raise ValueError(f"{name} spans more than {limits.max_cells} steps; send its last part")
    return df
