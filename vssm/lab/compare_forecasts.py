"""Compares forecasters on rolling windows of a test set, all trained in the same run on the same split.

    python -m vssm.lab.compare_forecasts --series.path ETTh1.csv.gz --series.separate --series.patch 24 \\
        --series.season 24 --freq h --season 24

Windows of the test part start every `stride` steps; each forecaster draws `samples` paths of the horizon of
every window. `naive` is the seasonal naive forecast with normal noise: the deviation of the seasonal
differences of the context, times the root of the seasons ahead. DeepAR (GluonTS, its own defaults) unrolls
over a context of the length of the horizon and also reads what came before: it takes lags from there. A short
training leaves our models too sure of themselves: one number each, the temperature, is fitted to the
validation part, and the scores at temperature 1 stand beside.
"""

import json
import math
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vssm.checks import check_choice, choose_device, whole_number
from vssm.config import ModelConfig, RunConfig, TrainConfig
from vssm.data import DataConfig, SeriesConfig
from vssm.data.files import locate_own
from vssm.data.table import Table, filled, read_table, select
from vssm.forecasting.forecaster import Forecaster
from vssm.forecasting.metrics import scores
from vssm.runs.folder import RunFolder
from vssm.runs.results import result, write_result
from vssm.training.loop import train

__all__ = ["Comparison", "compare", "main"]

_OURS = ("vssm", "tvae", "rnn", "vrnn", "ssm", "transformer")
_PEERS = ("naive", "deepar")
_WINDOWS_PER_PASS = 32
_CALIBRATION_WINDOWS = 32
_CALIBRATION_OVERLAP = (
    4  # validation parts are short: windows that start every quarter of a horizon
)
_TEMPERATURES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
_DEEPAR_MOST = 200_000  # path steps of a timing; beyond, DeepAR would take minutes


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Which forecasters are compared, on what, and how."""

    series: SeriesConfig = field(default_factory=SeriesConfig)
    """The file, its windows and scale."""
    data_dir: str | None = None
    """Folder with the files; else $VSSM_DATA; else the user cache."""
    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(
            features=1, head="auto", width=64, layers=2, latents=8, classes=16
        )
    )
    """The size of our models; their kind is taken from `models`. Levels are for vssm."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(samples=0, batch=64))
    """How our models are trained, and where everything runs."""
    models: tuple[str, ...] = ("naive", "vssm", "rnn", "ssm", "transformer", "deepar")
    """The forecasters."""
    samples: int = 100
    """Paths of a window."""
    part: Literal["test", "valid"] = "test"
    """Which part the windows are of: choose settings on valid, report on test."""
    windows: int | None = None
    """At most so many windows, spread evenly over the part."""
    stride: int | None = None
    """Steps between windows; the horizon by default."""
    season: int = 1
    """Steps of a season."""
    freq: str = "D"
    """What a step is, for DeepAR, in the letters of pandas: h, D, ..."""
    deepar_epochs: int = 20
    """Passes of 50 batches of 32 windows."""
    deepar_context: int | None = None
    """Steps that DeepAR unrolls over before the horizon; as many as the horizon by default, as in GluonTS."""
    calibrate: bool = True
    """Draw our paths of the test part at the temperature with the best CRPS on the validation part, and also
    at 1, as <kind>_t1."""
    chunk: int | None = None
    """Our vssm also re-conditioned after so many steps, as vssm_w<chunk>."""
    shapes: tuple[str, ...] = ("1x100x336",)
    """What is timed: series x paths x steps."""
    runs: Path = Path("runs/forecast")
    """The folder for our runs: one that has ended is not trained again, one that was stopped goes on, and one
    with other settings is refused."""
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
    for kind in options.models:
        check_choice("models", kind, (*_OURS, *_PEERS))
    if options.season < 1 or options.season > options.series.context:
        raise ValueError(
            f"season={options.season} is not allowed; allowed: 1 to {options.series.context}, the context"
        )
    whole_number("samples", options.samples, 1)
    whole_number("deepar_epochs", options.deepar_epochs, 1)
    for key in ("windows", "stride", "chunk", "deepar_context"):
        if (value := getattr(options, key)) is not None:
            whole_number(key, value, 1)
    shapes = [_shape(text) for text in options.shapes]
    data = DataConfig(name="series", dir=options.data_dir, series=options.series)
    if options.series.path is None:
        raise ValueError("series.path is needed: a CSV, .npy or Parquet file")
    path = locate_own(options.series.path, "timeseries", options.data_dir)
    table = select(read_table(path, options.series.time), options.series.columns, path)
    task = _Task(options, table, filled(table, options.series.fill, path))
    name = path.name.split(".")[0]
    runs = {
        kind: _Run(
            options.runs / f"{name}-{kind}",
            RunConfig(data=data, model=_model(kind, options), train=options.train),
        )
        for kind in options.models
        if kind in _OURS
    }
    for run in runs.values():  # before any is trained
        RunFolder(run.folder).check_same(run.config)
    out = options.out or Path("results/forecast") / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    metrics: dict[str, float | None] = {
        "windows": len(task.starts),
        "columns": len(table.names),
        "horizon": options.series.horizon,
        "samples": options.samples,
    }
    made = {}
    for kind in options.models:
        for label, numbers in _forecaster(kind, task, runs.get(kind), shapes).items():
            metrics |= {f"{label}_{key}": value for key, value in numbers.items()}
            show(f"{label}: " + "  ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
        settings = {
            "model": options.model.to_dict(),
            "train": vars(options.train),
            "data": vars(options.series),
            "naive_season": options.season,
            "freq": options.freq,
            "part": options.part,
            "deepar_epochs": options.deepar_epochs,
            "deepar_context": options.deepar_context or options.series.horizon,
        }
        command = f"python -m vssm.lab.compare_forecasts {shlex.join(sys.argv[1:])}"
        made = result(f"forecast {name}", command, settings, metrics)
        write_result(out, made)
    return made


class _Run(NamedTuple):
    folder: Path
    config: RunConfig

    def finish(self) -> None:
        """Trains from wherever the run is."""
        if not RunFolder(self.folder).has_ended():
            train(self.config, self.folder, resume=(self.folder / "config.json").exists())


class _Task:
    """The windows that all forecasters are asked about."""

    def __init__(self, options: Comparison, table: Table, values: np.ndarray) -> None:
        series = options.series
        self.options, self.table, self.values = options, table, values
        self.train_rows = int(0.7 * len(values))
        check_choice("part", options.part, ("test", "valid"))
        first, end = int(0.8 * len(values)), len(values)
        if options.part == "valid":
            first, end = self.train_rows, first
        last = end - series.horizon
        if last < first or first < series.context:
            raise ValueError(
                f"{series.path} has {len(values)} rows, too few for a window of {options.part}"
            )
        starts = np.arange(first, last + 1, options.stride or series.horizon)
        if options.windows is not None and options.windows < len(starts):
            starts = starts[np.arange(options.windows) * len(starts) // options.windows]
        self.starts = starts
        self.history = np.stack([values[s - series.context : s] for s in starts])
        self.future = torch.from_numpy(np.stack([values[s : s + series.horizon] for s in starts]))
        rows, season = values[: self.train_rows], options.season
        self.mean = torch.from_numpy(rows.mean(0))
        std = rows.std(0)
        self.std = torch.from_numpy(np.where(std > 0, std, 1.0))
        self.naive = torch.from_numpy(np.abs(rows[season:] - rows[:-season]).mean(0)) / self.std

    def score(self, paths: Tensor) -> dict[str, float]:
        return scores(paths.double(), self.future, self.mean, self.std, self.naive.clamp_min(1e-6))


def _forecaster(
    kind: str, task: _Task, run: _Run | None, shapes: list[tuple[int, int, int]]
) -> dict[str, dict[str, float]]:
    """Returns the scores and times of a forecaster, and of its variants, by name."""
    options = task.options
    if kind == "naive":
        return {kind: task.score(_naive(task))}
    if kind == "deepar":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # GluonTS's own
            return {kind: _deepar(task, shapes)}
    assert run is not None
    run.finish()
    forecaster = Forecaster.load(run.folder, choose_device(options.train.device))
    temperature = (
        _calibrated(forecaster, task) if options.calibrate and options.part == "test" else 1.0
    )
    variants: dict[str, dict[str, Any]] = {kind: {"temperature": temperature}, f"{kind}_t1": {}}
    if temperature == 1:
        variants = {kind: {}}
    if options.chunk is not None and kind in ("vssm", "tvae"):
        ways = {"chunk": options.chunk, "recondition": True, "temperature": temperature}
        variants[f"{kind}_w{options.chunk}"] = ways
    made = {label: task.score(_rolled(forecaster, task, ways)) for label, ways in variants.items()}
    made[kind]["temperature"] = temperature
    made[kind]["train_seconds"] = json.loads((run.folder / "meta.json").read_text())["seconds"]
    made[kind]["parameters"] = sum(p.numel() for p in forecaster.model.parameters())
    one = _first_column(forecaster)
    for series, paths, steps in shapes:
        history = np.random.default_rng(0).normal(
            size=(series, options.series.context, len(one.columns))
        )
        dates = np.arange(history.shape[1]).astype("datetime64[h]").astype("datetime64[s]")
        made[kind][f"ms_{series}x{paths}x{steps}"] = _milliseconds(
            lambda h=history, s=steps, p=paths, t=dates: one.forecast(h, s, p, t).samples.cpu()
        )
    return made


def _model(kind: str, options: Comparison) -> ModelConfig:
    """Returns the model of a kind; levels are for vssm."""
    return replace(
        options.model, kind=kind, **({} if kind == "vssm" else {"levels": 1, "spans": ()})
    )


def _calibrated(forecaster: Forecaster, task: _Task) -> float:
    """Returns the temperature whose paths have the best CRPS on windows of the validation part."""
    stride = max(1, task.options.series.horizon // _CALIBRATION_OVERLAP)
    options = replace(task.options, part="valid", windows=_CALIBRATION_WINDOWS, stride=stride)
    valid = _Task(options, task.table, task.values)
    found = {
        t: valid.score(_rolled(forecaster, valid, {"temperature": t}))["crps"]
        for t in _TEMPERATURES
    }
    return min(found, key=found.__getitem__)


def _rolled(forecaster: Forecaster, task: _Task, ways: dict[str, Any]) -> Tensor:
    horizon, samples = task.options.series.horizon, task.options.samples
    if forecaster.meta.cycles:  # every window has dates of its own
        times, context = task.table.times, task.options.series.context
        assert times is not None
        dates = [times[s - context : s] for s in task.starts]
        pairs = zip(task.history, dates, strict=True)
        made = (forecaster.forecast(h, horizon, samples, t, **ways).samples for h, t in pairs)
        return torch.stack([paths.cpu() for paths in made])
    parts = [
        task.history[k : k + _WINDOWS_PER_PASS]
        for k in range(0, len(task.history), _WINDOWS_PER_PASS)
    ]
    made = (
        forecaster.forecast(h, horizon, samples, seed=k, **ways).samples
        for k, h in enumerate(parts)
    )
    return torch.cat([paths.cpu() for paths in made])


def _first_column(forecaster: Forecaster) -> Forecaster:
    """Returns a forecaster of one series: of the first column where columns are apart."""
    meta = forecaster.meta
    if not meta.separate or meta.columns is None:
        return Forecaster(forecaster.model, replace(meta, horizon=None))
    ends = {
        key: None if (value := getattr(meta, key)) is None else value[:1] for key in ("mean", "std")
    }
    return Forecaster(
        forecaster.model, replace(meta, columns=meta.columns[:1], horizon=None, **ends)
    )


def _naive(task: _Task) -> Tensor:
    options, season = task.options, task.options.season
    horizon = options.series.horizon
    last = task.history[:, -season:]
    point = np.tile(last, (1, math.ceil(horizon / season), 1))[:, :horizon]
    deviation = np.sqrt(
        np.square(task.history[:, season:] - task.history[:, :-season]).mean(1, keepdims=True)
    )
    ahead = np.sqrt(np.arange(horizon) // season + 1)[:, None]
    noise = np.random.default_rng(options.train.seed).normal(
        size=(len(point), options.samples, *point.shape[1:])
    )
    return torch.from_numpy(point[:, None] + (deviation * ahead)[:, None] * noise)


def _deepar(task: _Task, shapes: list[tuple[int, int, int]]) -> dict[str, float]:
    from vssm.forecasting.gluonts import deepar, entries

    options, series = task.options, task.options.series
    rows = task.values[: task.train_rows]
    settings = (options.freq, options.deepar_epochs)
    began = time.monotonic()
    device = str(choose_device(options.train.device))
    seed = options.train.seed
    context = options.deepar_context or series.horizon
    predictor = deepar(rows, context, series.horizon, *settings, seed=seed, device=device)
    seconds = time.monotonic() - began
    histories = [entry for s in task.starts for entry in entries(task.values[:s], options.freq)]
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # its paths come from torch's global generator
        made = predictor.predict(histories, num_samples=options.samples)
        paths = np.stack([one.samples for one in made])  # type: ignore[attr-defined]  # (W D, S, H)
    paths = paths.reshape(len(task.starts), -1, *paths.shape[1:]).transpose(0, 2, 3, 1)
    numbers = {**task.score(torch.from_numpy(paths)), "train_seconds": seconds}
    network = predictor.prediction_net  # type: ignore[attr-defined]
    numbers["parameters"] = sum(p.numel() for p in network.parameters())
    for num, samples, steps in shapes:
        if num * samples * steps <= _DEEPAR_MOST:  # its time does not depend on its weights
            timed = deepar(rows, context, steps, options.freq, 1, batches=1, device=device)
            batch = entries(np.repeat(task.values[: task.starts[0], :1], num, 1), options.freq)
            numbers[f"ms_{num}x{samples}x{steps}"] = _milliseconds(
                lambda p=timed, b=batch, s=samples: list(p.predict(b, num_samples=s))
            )
    return numbers


def _milliseconds(call: Callable[[], object]) -> float:
    """Returns the median time of up to five calls, after one to warm up; one call if it takes seconds."""
    times = []
    for _ in range(6):
        began = time.perf_counter()
        call()  # whose paths end on the CPU, so that nothing is left to wait for
        times.append(1000 * (time.perf_counter() - began))
        if sum(times) > 30_000:
            break
    return median(times[1:] or times)


def _shape(text: str) -> tuple[int, int, int]:
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(
            f"shapes={text!r} is not allowed; allowed: SERIESxPATHSxSTEPS, as 1x100x336"
        )
    return int(parts[0]), int(parts[1]), int(parts[2])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the comparison that the arguments describe; a mistake gives one line and exit code 2."""
    import tyro

    try:
        compare(tyro.cli(Comparison, prog="python -m vssm.lab.compare_forecasts", args=arguments))
    except ValueError as error:
        print(f"vssm: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
