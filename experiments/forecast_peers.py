"""The peers of the table of forecasters, each as its own package trains and forecasts it.

| model | package | settings |
| --- | --- | --- |
| deepar, tft | GluonTS | defaults: 100 epochs of 50 batches of 32, a context of one horizon |
| patchtst | GluonTS | defaults, with patches of 16 and a context of 336 steps, as in its paper |
| autoets | statsforecast | each window and column by itself; it takes no season above 24 steps, |
| | | so there MSTL takes the season out and AutoETS forecasts the rest |
| autotheta | statsforecast | each window and column by itself |

No context is shorter than the 96 steps of ProbTS. All contexts are at most a quarter of the rows
before the test part. GluonTS keeps the weights of the epoch with the best training loss. The models
of statsforecast read the last 20 seasons, at most 1,000 steps, and at least two horizons.

A peer may be given a limit in seconds of CPU time, which other work on the machine does not use
up. Training then ends early, and the classical models forecast fewer windows, spread evenly;
`epochs`, `windows` and `cut` say so.
"""

import logging
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas
import torch

__all__ = ["CLASSICAL", "GLUON", "LEVELS", "classical_quantiles", "train_gluon"]

GLUON = ("deepar", "patchtst", "tft")
CLASSICAL = ("autoets", "autotheta")
LEVELS = np.arange(1, 10) / 10
_EPOCHS = 100
_PROBTS_CONTEXT, _PATCHTST_CONTEXT = 96, 336


def classical_quantiles(
    name: str, table: pandas.DataFrame, starts: np.ndarray, horizon: int, season: int, limit: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns quantiles of AutoETS or AutoTheta, (9, W, H, D), and which windows were reached.

    Arguments:
        name: One of `CLASSICAL`.
        table: Wide.
        starts: The first row of each window.
        horizon: H.
        season: Steps of a season.
        limit: Seconds of CPU time after which no further window is begun.
    """
    length = max(min(20 * season, 1000), 2 * horizon)
    values = table.interpolate().to_numpy(float)  # statsforecast takes no missing values
    quantiles = np.empty((9, len(starts), horizon, values.shape[1]))
    done = np.zeros(len(starts), bool)
    deadline = time.process_time() + limit
    for first, step in ((0, 8), (4, 8), (2, 4), (1, 2)):  # any beginning is spread evenly
        for w in range(first, len(starts), step):
            if time.process_time() > deadline:
                return quantiles, done
            for k in range(values.shape[1]):
                y = values[max(0, starts[w] - length) : starts[w], k]
                quantiles[:, w, :, k] = _forecast_one(name, y, horizon, season)
            done[w] = True
    return quantiles, done


def _forecast_one(name: str, y: np.ndarray, horizon: int, season: int) -> np.ndarray:
    """Returns quantiles of what follows one series, (9, H)."""
    from statsforecast.models import MSTL, AutoETS, AutoTheta

    if np.ptp(y) == 0:  # statsforecast refuses a constant
        return np.full((9, horizon), y[-1])
    if name == "autotheta":
        model: Any = AutoTheta(season_length=season)
    elif season > 24:
        model = MSTL(season_length=season, trend_forecaster=AutoETS(model="ZZN"))
    else:
        model = AutoETS(season_length=season)
    made = model.forecast(y=y, h=horizon, level=[20, 40, 60, 80])
    found = [made[f"lo-{level}"] for level in (80, 60, 40, 20)]
    found += [made["mean"]] + [made[f"hi-{level}"] for level in (20, 40, 60, 80)]
    return np.sort(np.where(np.isfinite(found), found, y[-1]), axis=0)  # an AutoETS may diverge


def train_gluon(
    name: str,
    table: pandas.DataFrame,
    begin: int,
    horizon: int,
    freq: str,
    seed: int,
    limit: float,
) -> tuple[Any, dict[str, float]]:
    """Trains a model of GluonTS on the CPU, on the rows before `begin`.

    Arguments:
        name: One of `GLUON`.
        table: Wide.
        begin: The first row that is not trained on.
        horizon: H.
        freq: Of the dates.
        seed: Of weights and batches.
        limit: Seconds of CPU time of the training.

    Returns:
        A function from cuts, the paths of each, and how many columns (all by default), to its
        forecasts of each column after each cut; and the CPU seconds and epochs of the training.
    """
    warnings.simplefilter("ignore")
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import (
        DeepAREstimator,
        PatchTSTEstimator,
        TemporalFusionTransformerEstimator,
    )
    from lightning.pytorch.callbacks import LambdaCallback

    def stop(trainer: Any, *_: Any) -> None:  # noqa: ANN401
        trainer.should_stop |= time.process_time() - began >= limit

    for package in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(package).setLevel(logging.ERROR)
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - GluonTS draws its windows from it
    freq = "ME" if freq == "MS" else freq  # GluonTS has periods, which end with the month
    context = max(horizon, min(_PROBTS_CONTEXT, begin // 4))
    trainer: dict[str, Any] = {"max_epochs": _EPOCHS, "accelerator": "cpu", "devices": 1}
    trainer |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer["callbacks"] = [LambdaCallback(on_train_batch_end=stop)]
    start = pandas.Period(table.index[0], freq=pandas.tseries.frequencies.to_offset(freq))
    columns = table.to_numpy(np.float32).T
    data = ListDataset([{"start": start, "target": y[:begin]} for y in columns], freq=freq)
    with TemporaryDirectory() as folder:
        trainer["default_root_dir"] = Path(folder)
        known = {"prediction_length": horizon, "trainer_kwargs": trainer}
        if name == "deepar":
            estimator: Any = DeepAREstimator(freq=freq, context_length=context, **known)
        elif name == "patchtst":
            context = max(context, min(_PATCHTST_CONTEXT, begin // 4))
            estimator = PatchTSTEstimator(patch_len=16, context_length=context, **known)
        else:
            estimator = TemporalFusionTransformerEstimator(
                freq=freq, context_length=context, **known
            )
        began = time.process_time()
        trained = estimator.train_model(data)
    spent = time.process_time() - began
    found = {"train_cpu_seconds": spent, "epochs": trained.trainer.current_epoch}
    found |= {"context": context, "cut": int(spent >= limit)}

    def forecast(cuts: np.ndarray, paths: int, num: int | None = None) -> list[Any]:
        entries = [{"start": start, "target": y[:cut]} for y in columns[:num] for cut in cuts]
        return list(trained.predictor.predict(ListDataset(entries, freq=freq), num_samples=paths))

    return forecast, found
