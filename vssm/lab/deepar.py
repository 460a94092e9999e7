"""GluonTS's DeepAR, the peer that our forecasters are compared with."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vssm.forecasting.gluonts import entries

if TYPE_CHECKING:
    from gluonts.model.predictor import Predictor

__all__ = ["deepar"]


def deepar(
    values: np.ndarray,
    context: int,
    horizon: int,
    freq: str,
    epochs: int,
    batches: int = 50,
    seed: int = 0,
    device: str = "cpu",
    **options: Any,  # noqa: ANN401
) -> "Predictor":
    """Trains GluonTS's DeepAR, with its own defaults, on the columns of (N, D) as separate series.

    It unrolls over `context` steps before the horizon. `freq` is a step in the letters of pandas
    (h, D, ...). An epoch has `batches` batches of 32 windows. `options` go to `DeepAREstimator`.
    """
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import DeepAREstimator

    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with (
        torch.random.fork_rng(),
        _kept_numpy_state(),
        warnings.catch_warnings(),
        TemporaryDirectory() as folder,
    ):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - GluonTS draws its windows from numpy's global state
        estimator = DeepAREstimator(
            freq=freq,
            prediction_length=horizon,
            context_length=context,
            num_batches_per_epoch=batches,
            trainer_kwargs={
                "max_epochs": epochs,
                "accelerator": "gpu" if device.startswith("cuda") else "cpu",
                "devices": 1,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "default_root_dir": folder,
                "logger": False,
            },
            **options,
        )
        return estimator.train(ListDataset(entries(values, freq), freq=freq))


@contextmanager
def _kept_numpy_state() -> Iterator[None]:
    """Leaves numpy's global random state as it was."""
    state = np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002
