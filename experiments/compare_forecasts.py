"""Compares forecasters on rolling windows of a test set, all trained on the same split.

    python experiments/compare_forecasts.py --series.path ETTh1.csv.gz --series.separate \\
        --series.patch 24 --series.season 24 --freq h --season 24

Windows of the test part start every `stride` steps. Each forecaster draws `samples` paths of the
horizon of every window. `naive` is the seasonal naive forecast with normal noise: the deviation of
the seasonal differences of the context, times the root of the seasons ahead. DeepAR (GluonTS, its
own defaults) unrolls over a context as long as the horizon, and takes lags from what came before.
A short training leaves our models too sure of themselves, so one number of each, the temperature,
is fitted to the validation part; the scores at temperature 1 are recorded as well.
"""

import json
import logging
import math
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vssm.checks import check_choice, choose_device, whole_number
from vssm.config import KINDS, ModelConfig, RunConfig, TrainConfig
from vssm.data import DataConfig, SeriesConfig
from vssm.data.files import locate_own
from vssm.data.table import Table, filled, read_table, select
from vssm.forecasting.metrics import scores
from vssm.forecasting.model_forecaster import ModelForecaster
from vssm.lab.bench.measure import take_times
from vssm.runs.folder import RunFolder
from vssm.runs.results import result, write_result
from vssm.training.loop import train

__all__ = ["Comparison", "RollingWindows", "best_temperature", "compare", "main", "naive_paths"]

_WINDOWS_PER_PASS = 32
_CALIBRATION = {"windows": 32, "overlap": 4}  # validation parts are short, so windows overlap
_TEMPERATURES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
_DEEPAR_MOST = 200_000  # path steps of a timing; beyond, DeepAR would take minutes

Shape = tuple[int, int, int]
"""Series, paths and steps."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Which forecasters are compared, on which data, and how."""

    series: SeriesConfig = field(default_factory=SeriesConfig)
    """The file, its windows and scale."""
    data_dir: str | None = None
    """Folder with the files; else $VSSM_DATA; else the user cache."""
    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(
            features=1, head="auto", width=64, layers=2, latents=8, classes=16
        )
    )
    """The size of our models; `models` gives their kind. Levels apply to vssm only."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(samples=0, batch=64))
    """How our models are trained, and where everything runs."""
    models: tuple[str, ...] = ("naive", "vssm", "rnn", "ssm", "transformer", "deepar")
    """The forecasters."""
    samples: int = 100
    """Paths of a window."""
    part: Literal["test", "valid"] = "test"
    """Which part is scored: choose settings on valid, report on test."""
    windows: int | None = None
    """The largest number of windows, spread evenly over the part."""
    stride: int | None = None
    """Steps between windows; the horizon by default."""
    season: int = 1
    """Steps of a season."""
    freq: str = "D"
    """The time between steps, for DeepAR, as pandas writes it: h, D, ..."""
    deepar_epochs: int = 20
    """Passes of 50 batches of 32 windows."""
    deepar_context: int | None = None
    """Steps that DeepAR unrolls over before the horizon; by default the horizon, as in GluonTS."""
    calibrate: bool = True
    """Draw our paths at the temperature with the best CRPS on the validation part, and also at 1,
    as <kind>_t1."""
    chunk: int | None = None
    """Also score our vssm re-conditioned after so many steps, as vssm_w<chunk>."""
    shapes: tuple[str, ...] = ("1x100x336",)
    """What is timed: series x paths x steps."""
    runs: Path = Path("runs/forecast")
    """The folder for our runs. A run that has ended is not trained again, a run that was stopped
    continues, and a run with other settings is refused."""
    out: Path | None = None
    """Where the result goes; results/forecast/<data set>.json by default."""


def compare(options: Comparison, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Trains and scores all forecasters, and writes the result after each.

    Arguments:
        options: What is compared.
        show: Called with a line for each forecaster.

    Returns:
        The result as written.
    """
    series = options.series
    for kind in options.models:
        check_choice("models", kind, (*KINDS, "naive", "deepar"))
    if not 1 <= options.season <= series.context:
        raise ValueError(
            f"season={options.season} is not allowed; allowed: 1 to {series.context}, the context"
        )
    for key in ("samples", "deepar_epochs", "windows", "stride", "chunk", "deepar_context"):
        if (value := getattr(options, key)) is not None:
            whole_number(key, value, 1)
    shapes = [_shape(text) for text in options.shapes]
    if series.path is None:
        raise ValueError("series.path is needed: a CSV, .npy or Parquet file")
    path = locate_own(series.path, "timeseries", options.data_dir)
    table = select(read_table(path, series.time), series.columns, path)
    windows = RollingWindows(options, table, filled(table, series.fill, path))
    name = path.name.split(".")[0]
    data = DataConfig(name="series", dir=options.data_dir, series=series)
    runs: dict[str, tuple[Path, RunConfig]] = {}
    for kind in options.models:
        if kind in KINDS:
            levels = {} if kind == "vssm" else {"levels": 1, "spans": ()}  # only vssm has levels
            model = replace(options.model, kind=kind, **levels)
            config = RunConfig(data=data, model=model, train=options.train)
            runs[kind] = options.runs / f"{name}-{kind}", config
    for folder, config in runs.values():  # before any is trained
        RunFolder(folder).check_same(config)
    out = options.out or Path("results/forecast") / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    metrics: dict[str, float | None] = {
        "windows": len(windows.starts),
        "columns": len(table.names),
        "horizon": series.horizon,
        "samples": options.samples,
    }
    settings = {
        "model": options.model.to_dict(),
        "train": vars(options.train),
        "data": vars(series),
        "naive_season": options.season,
        "freq": options.freq,
        "part": options.part,
        "deepar_epochs": options.deepar_epochs,
        "deepar_context": options.deepar_context or series.horizon,
    }
    made = {}
    for kind in options.models:
        if kind == "naive":
            found = {kind: windows.score(naive_paths(windows))}
        elif kind == "deepar":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of GluonTS
                found = {kind: _deepar(windows, shapes)}
        else:
            found = _our_model(kind, windows, *runs[kind], shapes)
        for label, numbers in found.items():
            metrics |= {f"{label}_{key}": value for key, value in numbers.items()}
            show(f"{label}: " + "  ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
        command = f"python experiments/compare_forecasts.py {shlex.join(sys.argv[1:])}"
        made = result(f"forecast {name}", command, settings, metrics)
        write_result(out, made)
    return made


class RollingWindows:
    """The windows that all forecasters are asked about.

    Arguments:
        options: The comparison.
        table: The data, for its dates.
        values: The values of the table without gaps, (N, D).
    """

    def __init__(self, options: Comparison, table: Table | None, values: np.ndarray) -> None:
        series, season = options.series, options.season
        self.options, self.table, self.values = options, table, values
        check_choice("part", options.part, ("test", "valid"))
        first_valid, first_test = int(0.7 * len(values)), int(0.8 * len(values))
        first, end = (first_test, len(values))
        if options.part == "valid":
            first, end = first_valid, first_test
        if first + series.horizon > end or first < series.context:
            raise ValueError(
                f"{series.path} has {len(values)} rows, too few for a window of {options.part}"
            )
        starts = np.arange(first, end - series.horizon + 1, options.stride or series.horizon)
        if options.windows is not None and options.windows < len(starts):
            starts = starts[np.arange(options.windows) * len(starts) // options.windows]
        self.starts = starts
        self.history = np.stack([values[s - series.context : s] for s in starts])
        self.future = torch.from_numpy(np.stack([values[s : s + series.horizon] for s in starts]))
        self.train_rows = rows = values[:first_valid]
        self.mean = torch.from_numpy(rows.mean(0))
        self.std = torch.from_numpy(np.where(rows.std(0) > 0, rows.std(0), 1.0))
        self.naive = torch.from_numpy(np.abs(rows[season:] - rows[:-season]).mean(0)) / self.std

    def score(self, paths: Tensor) -> dict[str, float]:
        """Returns the scores of paths, (W, S, H, D), in the units of the training rows."""
        return scores(paths.double(), self.future, self.mean, self.std, self.naive.clamp_min(1e-6))

    def forecast(self, forecaster: ModelForecaster, **way: Any) -> Tensor:  # noqa: ANN401
        """Returns paths of our model for all windows."""
        horizon, samples = self.options.series.horizon, self.options.samples
        if forecaster.meta.cycles:  # every window has its own dates
            assert self.table is not None and self.table.times is not None
            dates = [self.table.times[s - self.options.series.context : s] for s in self.starts]
            pairs = zip(self.history, dates, strict=True)
            made = [forecaster.forecast(h, horizon, samples, t, **way).samples for h, t in pairs]
            return torch.stack([paths.cpu() for paths in made])
        made = []
        for seed, first in enumerate(range(0, len(self.history), _WINDOWS_PER_PASS)):
            part = self.history[first : first + _WINDOWS_PER_PASS]
            made.append(forecaster.forecast(part, horizon, samples, seed=seed, **way).samples.cpu())
        return torch.cat(made)


def naive_paths(windows: RollingWindows) -> Tensor:
    """Returns paths that repeat the last season, with noise that grows with the seasons ahead."""
    options, season, history = windows.options, windows.options.season, windows.history
    horizon = options.series.horizon
    point = np.tile(history[:, -season:], (1, math.ceil(horizon / season), 1))[:, :horizon]
    change = np.square(history[:, season:] - history[:, :-season]).mean(1, keepdims=True)
    deviation = np.sqrt(change * (np.arange(horizon) // season + 1)[:, None])
    size = (len(point), options.samples, *point.shape[1:])
    noise = np.random.default_rng(options.train.seed).normal(size=size)
    return torch.from_numpy(point[:, None] + deviation[:, None] * noise)


def best_temperature(forecaster: ModelForecaster, windows: RollingWindows) -> float:
    """Returns the temperature whose paths have the best CRPS on windows of the validation part."""
    stride = max(1, windows.options.series.horizon // _CALIBRATION["overlap"])
    options = replace(windows.options, part="valid", windows=_CALIBRATION["windows"], stride=stride)
    valid = RollingWindows(options, windows.table, windows.values)
    crps = {
        t: valid.score(valid.forecast(forecaster, temperature=t))["crps"] for t in _TEMPERATURES
    }
    return min(crps, key=lambda temperature: crps[temperature])


def _our_model(
    kind: str, windows: RollingWindows, folder: Path, config: RunConfig, shapes: list[Shape]
) -> dict[str, dict[str, float]]:
    """Trains one of our models from wherever its run is; returns scores and times by name."""
    options = windows.options
    if not RunFolder(folder).has_ended():
        train(config, folder, resume=(folder / "config.json").exists())
    forecaster = ModelForecaster.load(folder, choose_device(options.train.device))
    calibrate = options.calibrate and options.part == "test"
    temperature = best_temperature(forecaster, windows) if calibrate else 1.0
    ways: dict[str, dict[str, Any]] = {kind: {"temperature": temperature}}
    if temperature != 1:
        ways[f"{kind}_t1"] = {}
    if options.chunk is not None and kind in ("vssm", "tvae"):
        way = {"chunk": options.chunk, "recondition": True, "temperature": temperature}
        ways[f"{kind}_w{options.chunk}"] = way
    made = {
        label: windows.score(windows.forecast(forecaster, **way)) for label, way in ways.items()
    }
    made[kind]["temperature"] = temperature
    made[kind]["train_seconds"] = json.loads((folder / "meta.json").read_text())["seconds"]
    made[kind]["parameters"] = sum(p.numel() for p in forecaster.model.parameters())
    single = _single_series(forecaster)
    context = options.series.context
    dates = np.arange(context).astype("datetime64[h]").astype("datetime64[s]")
    for num, paths, steps in shapes:
        history = np.random.default_rng(0).normal(size=(num, context, len(single.columns)))
        call = partial(single.forecast, history, steps, paths, dates)
        made[kind][f"ms_{num}x{paths}x{steps}"] = _milliseconds(call, forecaster.device)
    return made


def _single_series(forecaster: ModelForecaster) -> ModelForecaster:
    """Returns a forecaster of one series: of the first column where columns are separate."""
    meta = replace(forecaster.meta, horizon=None)
    if meta.separate and meta.columns is not None:
        first = {
            key: value and value[:1] for key in ("mean", "std") if (value := getattr(meta, key))
        }
        meta = replace(meta, columns=meta.columns[:1], **first)
    return ModelForecaster(forecaster.model, meta)


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
) -> Any:  # noqa: ANN401
    """Trains GluonTS's DeepAR, with its own defaults, on the columns of (N, D) as separate series.

    It unrolls over `context` steps before the horizon. `freq` is a step in the letters of pandas
    (h, D, ...). An epoch has `batches` batches of 32 windows. `options` go to `DeepAREstimator`.
    """
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import DeepAREstimator

    from vssm.forecasting.gluonts import entries

    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with torch.random.fork_rng(), warnings.catch_warnings(), TemporaryDirectory() as folder:
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


def _deepar(windows: RollingWindows, shapes: list[Shape]) -> dict[str, float]:
    from vssm.forecasting.gluonts import entries

    options, series = windows.options, windows.options.series
    device = choose_device(options.train.device)
    context, freq = options.deepar_context or series.horizon, options.freq
    seed, began = options.train.seed, time.monotonic()
    build = partial(deepar, windows.train_rows, context, freq=freq, device=str(device))
    predictor: Any = build(horizon=series.horizon, epochs=options.deepar_epochs, seed=seed)
    seconds = time.monotonic() - began
    histories = [entry for s in windows.starts for entry in entries(windows.values[:s], freq)]
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # its paths come from torch's global generator
        made = predictor.predict(histories, num_samples=options.samples)
        paths = np.stack([one.samples for one in made])  # (W D, S, H)
    paths = paths.reshape(len(windows.starts), -1, *paths.shape[1:]).transpose(0, 2, 3, 1)
    numbers = {**windows.score(torch.from_numpy(paths)), "train_seconds": seconds}
    numbers["parameters"] = sum(p.numel() for p in predictor.prediction_net.parameters())
    for num, samples, steps in shapes:
        if num * samples * steps <= _DEEPAR_MOST:
            timed: Any = build(horizon=steps, epochs=1, batches=1)  # time ignores the weights
            batch = entries(np.repeat(windows.values[: windows.starts[0], :1], num, 1), freq)
            ms = _milliseconds(
                lambda p=timed, b=batch, s=samples: list(p.predict(b, num_samples=s)), device
            )
            numbers[f"ms_{num}x{samples}x{steps}"] = ms
    return numbers


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Returns the median of up to five calls after a warm-up, fewer if they take half a minute."""
    return median(take_times(call, device, repeats=5, seconds=30.0))


def _shape(text: str) -> Shape:
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(
            f"shapes={text!r} is not allowed; allowed: SERIESxPATHSxSTEPS, as 1x100x336"
        )
    return int(parts[0]), int(parts[1]), int(parts[2])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the comparison from the command line; a mistake gives one line and exit code 2."""
    import tyro

    try:
        compare(tyro.cli(Comparison, prog="compare_forecasts.py", args=arguments))
    except ValueError as error:
        print(f"vssm: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
