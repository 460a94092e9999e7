"""GluonTS: a fitted `Forecaster` as a GluonTS `Predictor`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vssm.forecasting.forecaster import Forecaster

if TYPE_CHECKING:
    from gluonts.model.predictor import Predictor


def predictor(forecaster: Forecaster | str | Path, num_samples: int = 100) -> "Predictor":
    """Returns a forecaster as a GluonTS predictor, which can replace any other predictor.

    It forecasts any series that has the frequency of its training, each `target` (N,) on its own.

    Arguments:
        forecaster: A fitted `Forecaster` without covariates, or the folder of a saved one.
        num_samples: Paths of every series.

    Example:
        from gluonts.evaluation import make_evaluation_predictions

        made = predictor("forecasters/etth1")
        forecasts, actual = make_evaluation_predictions(test, made, num_samples=100)
    """
    try:
        from gluonts.dataset.util import forecast_start
        from gluonts.model.forecast import SampleForecast
        from gluonts.model.predictor import Predictor
    except ImportError as error:
        raise ValueError(
            "predictor needs GluonTS, install it with: pip install 'vssm[forecast]'"
        ) from error

    own = forecaster if isinstance(forecaster, Forecaster) else Forecaster.load(forecaster)
    columns = own.panel_.columns
    if columns.moving or columns.static:
        names = ", ".join(columns.moving + columns.static)
        raise ValueError(f"this forecaster reads the covariates {names}; use predict instead")
    paths = num_samples

    class ForecasterPredictor(Predictor):
        def predict(
            self,
            dataset: Any,  # noqa: ANN401
            num_samples: int | None = None,
            **_: Any,  # noqa: ANN401
        ) -> Iterator[SampleForecast]:
            entries = list(dataset)
            made = own.predict_samples(_long_table(entries, own), num_samples or paths)
            for entry, samples in zip(entries, made, strict=True):
                yield SampleForecast(samples, forecast_start(entry), item_id=entry.get("item_id"))

    return ForecasterPredictor(prediction_length=own.horizon)


def _long_table(entries: list[dict[str, Any]], own: Forecaster) -> Any:  # noqa: ANN401
    """Returns the targets of entries as a table; series are numbered, since ids may repeat."""
    import pandas

    parts = []
    for k, entry in enumerate(entries):
        y = np.asarray(entry["target"], np.float64)
        if y.ndim != 1:
            raise ValueError(f"target of entry {k} has shape {y.shape}; give one series, (N,)")
        first = entry["start"].to_timestamp()
        dates = pandas.date_range(first, periods=len(y), freq=own.panel_.step)
        parts.append(pandas.DataFrame({"unique_id": k, "ds": dates, "y": y}))
    return pandas.concat(parts, ignore_index=True)
