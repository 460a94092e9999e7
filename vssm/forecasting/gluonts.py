"""GluonTS: a run as a `Predictor` of it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vssm.forecasting.model_forecaster import ModelForecaster

if TYPE_CHECKING:
    from gluonts.model.predictor import Predictor

__all__ = ["entries", "predictor"]

_SERIES_PER_PASS = 64


def predictor(
    run: str | Path | ModelForecaster,
    prediction_length: int | None = None,
    num_samples: int = 100,
    device: str = "cpu",
) -> "Predictor":
    """Returns a run as a GluonTS predictor, to put where another one was.

    A run with `--series.separate` forecasts any series, each in its own scale: a `target` is (N,).
    Any other run forecasts its own D columns: a `target` is (D, N).

    Arguments:
        run: A run folder of data set series, or a `ModelForecaster`.
        prediction_length: H; by default the horizon of training.
        num_samples: Paths of every series.
        device: Where to run.

    Example:
        from gluonts.evaluation import make_evaluation_predictions

        made = predictor("runs/etth1")
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

    forecaster = run if isinstance(run, ModelForecaster) else ModelForecaster.load(run, device)
    length = prediction_length or forecaster.meta.horizon
    if length is None:
        raise ValueError("prediction_length is needed: the model does not know its horizon")
    paths = num_samples

    class RunPredictor(Predictor):
        def predict(
            self,
            dataset: Any,  # noqa: ANN401
            num_samples: int | None = None,
            **_: Any,  # noqa: ANN401
        ) -> Iterator[SampleForecast]:
            rest, seeds = iter(dataset), count()
            while entries := list(islice(rest, _SERIES_PER_PASS)):
                made = _forecasts(
                    forecaster, entries, self.prediction_length, num_samples or paths, seeds
                )
                for entry, samples in zip(entries, made, strict=True):
                    yield SampleForecast(
                        samples, forecast_start(entry), item_id=entry.get("item_id")
                    )

    return RunPredictor(prediction_length=length)


def _forecasts(
    forecaster: ModelForecaster,
    entries: list[dict[str, Any]],
    horizon: int,
    paths: int,
    seeds: Iterator[int],
) -> list[np.ndarray]:
    """Returns the paths of each entry, (S, H), or (S, H, D) of entries with several columns.

    Entries of one length are forecast together. Each call of the forecaster takes the next seed, or
    their first series would share noise.
    """
    import pandas

    meta, own = forecaster.meta, forecaster
    if meta.separate:  # any series, also of columns that the run never saw, in its own scale
        meta = replace(meta, columns=("target",), mean=None, std=None)
        own = ModelForecaster(forecaster.model, meta)
    groups: dict[object, list[int]] = {}  # entries of one length; with dates, one entry
    histories, centres, widths = [], [], []
    for k, entry in enumerate(entries):
        target = np.asarray(entry["target"], np.float64)
        history = target.reshape(-1, target.shape[-1]).T
        if history.shape[1] != len(own.columns):
            allowed = "(N,)" if len(own.columns) == 1 else f"({len(own.columns)}, N)"
            raise ValueError(f"target has shape {target.shape}; allowed for this run: {allowed}")
        centres.append(float(np.nanmean(history)) if meta.separate else 0.0)
        widths.append((float(np.nanstd(history)) or 1.0) if meta.separate else 1.0)
        histories.append((history - centres[k]) / widths[k])
        groups.setdefault(k if meta.cycles else len(history), []).append(k)
    made: dict[int, np.ndarray] = {}
    for group in groups.values():
        x, times = np.stack([histories[k] for k in group]), None
        if meta.cycles:
            start = entries[group[0]]["start"]
            days = pandas.period_range(start, periods=x.shape[1], freq=start.freq)
            times = days.to_timestamp().to_numpy()
        found = own.forecast(x, horizon, paths, times, seed=next(seeds)).samples.cpu().numpy()
        for k, samples in zip(group, found, strict=True):
            samples = samples * widths[k] + centres[k]
            made[k] = samples[..., 0] if np.ndim(entries[k]["target"]) == 1 else samples
    return [made[k] for k in range(len(entries))]


def entries(values: np.ndarray, freq: str) -> list[dict[str, Any]]:
    """Returns the columns of (N, D) as GluonTS has them; series start in the year 2000."""
    import pandas

    start = pandas.Period("2000-01-01", freq=freq)
    return [
        {"start": start, "target": column.astype(np.float32), "item_id": str(k)}
        for k, column in enumerate(values.T)
    ]
