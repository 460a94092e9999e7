"""The table of forecasters: all models on the same windows of seven data sets.

    python experiments/forecast_table.py --jobs 14 --minutes 8
    python experiments/forecast_table.py --data national_illness --models vssm rnn naive
    python experiments/forecast_table.py --data seattle co2 employment   # sets that decided nothing

The protocol is that of ProbTS (microsoft/ProbTS): ETT has 12, 4 and 4 months for training,
validation and test, the others 70, 10 and 20 %. The first window starts where the test part starts,
the next ones a stride later: 96 steps, or the horizon if that is shorter. `crps` is the mean over
the quantiles 0.1 ... 0.9 of twice the pinball loss over the sum of |y|, all columns of a window
together, averaged over windows, of 100 paths. All models may use all rows before the test part.

| model | what |
| --- | --- |
| vssm, rnn, ... | `vssm.Forecaster` with its defaults |
| naive | the last season, with normal noise (`vssm.forecasting.backtest`) |
| deepar, patchtst, tft, autoets, autotheta | see `forecast_peers.py` |

Three more sets come inside packages of PyPI, and no choice was made on them: the daily weather of
Seattle and the monthly employment of the United States (vega_datasets), and the weekly carbon
dioxide of Mauna Loa, with gaps (statsmodels).

A task is one model on one data set and horizon, in one process on one core. It writes one file into
`--work`, so a run that was stopped goes on where it was. `--peer-seconds` ends the training of a
peer, or its forecasts if it is not trained; a result says so with `cut`. All times are of the CPU,
so other work on the machine counts little.
Missing packages and tasks that fail are named, and left out.
"""

import json
import math
import multiprocessing
import os
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
import tyro
from forecast_peers import CLASSICAL, GLUON, LEVELS, classical_quantiles, train_gluon

from vssm import Forecaster
from vssm.data.storage import write_atomically
from vssm.forecasting.backtest import naive_paths
from vssm.forecasting.fitting import season_of
from vssm.forecasting.windows import Layout
from vssm.runs.results import result, write_result

HORIZONS: dict[str, tuple[int, ...]] = {
    "ETTh1": (96, 336),
    "ETTh2": (96, 336),
    "ETTm1": (96, 336),
    "ETTm2": (96, 336),
    "weather": (96, 336),
    "exchange_rate": (96, 336),
    "national_illness": (24, 60),
    "seattle": (28,),
    "co2": (26,),
    "employment": (12,),
}
UNTOUCHED = ("seattle", "co2", "employment")
FREQUENCIES = {"ETTh": "h", "ETTm": "15min", "weather": "10min", "exchange_rate": "D"}
MODELS = ("naive", "vssm", "rnn", "deepar", "autoets", "autotheta", "patchtst", "tft")
PATHS = 100


@dataclass(frozen=True)
class Options:
    """What is compared."""

    data: tuple[str, ...] = tuple(name for name in HORIZONS if name not in UNTOUCHED)
    """The data sets."""
    models: tuple[str, ...] = MODELS
    """The forecasters, also ssm, transformer, tvae and vrnn; those that come first start first."""
    jobs: int = 1
    """Tasks at once, one CPU thread each."""
    minutes: float = 600.0
    """After so many minutes tasks are stopped, and the table is made of what is there."""
    max_steps: int = 1000
    """Of our models; 1000 is the default of a Forecaster."""
    peer_seconds: float = math.inf
    """The most CPU seconds of training of a peer, or of forecasts of autoets and autotheta."""
    seed: int = 0
    """Of weights, batches and paths."""
    work: Path = Path("runs/forecast_table")
    """Where the tasks write."""
    out: Path = Path("results/forecast")
    """Where the results go, one file for each data set."""


@dataclass(frozen=True)
class Test:
    """The windows of one data set and horizon."""

    table: pandas.DataFrame
    """Wide, up to the end of the last window."""
    begin: int
    """The row where the first window starts."""
    num: int
    stride: int
    horizon: int
    freq: str

    @property
    def starts(self) -> np.ndarray:
        """The first row of each window."""
        return self.begin + self.stride * np.arange(self.num)

    @property
    def season(self) -> int:
        """Steps of a season, as `Forecaster` chooses it."""
        step = pandas.tseries.frequencies.to_offset(self.freq)
        return season_of(step, [self.begin])

    def truth(self) -> np.ndarray:
        """Returns what came, (W, H, D)."""
        values = self.table.to_numpy(float)
        return np.stack([values[start : start + self.horizon] for start in self.starts])


def benchmark(name: str) -> tuple[pandas.DataFrame, str]:
    """Returns a data set of ProbTS, wide, and its frequency."""
    folder = Path(os.environ.get("VSSM_DATA", "data")) / "timeseries"
    if name == "exchange_rate":
        table = pandas.read_csv(folder / "exchange_rate.txt.gz", header=None).add_prefix("rate")
    else:
        table = pandas.read_csv(folder / f"{name}.csv.gz", index_col=0, encoding_errors="replace")
    freq = next((v for k, v in FREQUENCIES.items() if name.startswith(k)), "W-TUE")
    # the steps are taken as even, as ProbTS does; only the first date is used
    first = "1990-01-01" if name == "exchange_rate" else table.index[0]
    table.index = pandas.date_range(first, periods=len(table), freq=freq)
    return table, freq


def packaged(name: str) -> tuple[pandas.DataFrame, str]:
    """Returns a data set that a package carries, wide, and its frequency."""
    package = "statsmodels" if name == "co2" else "vega_datasets"
    folder = Path(str(find_spec(package).submodule_search_locations[0]))  # type: ignore[union-attr,index]
    if name == "co2":
        weeks = pandas.read_csv(folder / "datasets/co2/co2.csv", index_col=0)
        weeks.index = pandas.to_datetime(weeks.index.astype(str))
        return weeks.asfreq("W-SAT"), "W-SAT"
    file, freq = {"seattle": ("seattle-weather", "D"), "employment": ("us-employment", "MS")}[name]
    table: Any = pandas.read_csv(folder / "_data" / f"{file}.csv", index_col=0, parse_dates=True)
    columns = ["temp_max", "temp_min", "wind"] if name == "seattle" else list(table.columns)
    return table[columns].asfreq(freq), freq


def load(name: str, horizon: int) -> Test:
    """Returns the windows of a data set."""
    table, freq = packaged(name) if name in UNTOUCHED else benchmark(name)
    if name.startswith("ETT"):
        month = 30 * 24 * (4 if name.startswith("ETTm") else 1)
        begin, end = 16 * month, 20 * month
    else:
        begin, end = len(table) - int(0.2 * len(table)), len(table)
    stride = min(96, horizon)
    num = math.ceil((end - begin - horizon) / stride)
    end = begin + (num - 1) * stride + horizon
    return Test(table.iloc[:end].astype(float), begin, num, stride, horizon, freq)


def scores(quantiles: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Returns ProbTS's CRPS, and the coverage of the 80 % interval.

    Arguments:
        quantiles: 0.1 ... 0.9, (9, W, H, D).
        y: What came, (W, H, D); NaN where it is missing.
    """
    gap = y - quantiles
    level = LEVELS[:, None, None, None]
    loss = np.nansum(2 * np.maximum(level * gap, (level - 1) * gap).mean(0), (1, 2))
    inside = (y >= quantiles[0]) & (y <= quantiles[-1])
    crps = float((loss / np.nansum(np.abs(y), (1, 2))).mean())
    return {"crps": crps, "coverage80": float(inside[np.isfinite(y)].mean())}


def ours(test: Test, kind: str, options: Options) -> dict[str, float]:
    """Scores a `Forecaster`, and times 200 paths of one series."""
    forecaster = Forecaster(
        test.horizon, test.freq, kind, max_steps=options.max_steps, seed=options.seed
    )
    began = time.process_time()
    forecaster.fit(test.table.iloc[: test.begin])
    spent = time.process_time() - began
    # what `backtest` does after its fit, which could not be timed apart from it
    made = forecaster._roll(forecaster._read(test.table), test.num, PATHS, test.stride)
    one = test.table.iloc[: test.begin, :1]
    found = scores(_quantiles(made.paths.numpy(), test), test.truth())
    found |= {"train_cpu_seconds": spent, "steps": forecaster.steps_}
    return found | _timed(lambda: forecaster.predict_samples(one, 200), test)


def _quantiles(paths: np.ndarray, test: Test) -> np.ndarray:
    """Returns quantiles (9, W, H, D) of paths (D W, S, H), columns first."""
    found = np.quantile(paths, LEVELS, axis=1)
    return found.reshape(9, -1, test.num, test.horizon).transpose(0, 2, 3, 1)


def _timed(call: Any, test: Test) -> dict[str, float]:  # noqa: ANN401
    """Returns the CPU milliseconds of 200 paths of one series, the median of three calls."""
    call()
    times = []
    for _ in range(3):
        began = time.process_time()
        call()
        times.append(1000 * (time.process_time() - began))
    return {f"ms_1x200x{test.horizon}": float(np.median(times))}


def naive(test: Test, _: str, options: Options) -> dict[str, float]:
    """Scores the seasonal naive forecast of `Forecaster.backtest`."""
    from vssm.forecasting.panel import read_panel
    from vssm.forecasting.windows import GivenScale, Windows

    panel = read_panel(test.table, test.freq)
    context = max(3 * test.season, 2 * test.horizon)
    layout = Layout(test.horizon, test.season, 1, context)
    windows = Windows(panel, layout, GivenScale.of(panel, 1))
    cuts = torch.cartesian_prod(torch.arange(len(panel.series)), torch.from_numpy(test.starts))
    paths = [naive_paths(windows, part, PATHS).numpy() for part in cuts.split(256)]
    return scores(_quantiles(np.concatenate(paths), test), test.truth())


def classical(test: Test, name: str, options: Options) -> dict[str, float]:
    """Scores a model of statsforecast on the windows that it reaches."""
    quantiles, done = classical_quantiles(
        name, test.table, test.starts, test.horizon, test.season, options.peer_seconds
    )
    found = scores(quantiles[:, done], test.truth()[done])
    return found | {"windows": int(done.sum()), "cut": int(not done.all())}


def gluon(test: Test, name: str, options: Options) -> dict[str, float]:
    """Trains a model of GluonTS and scores it; times 200 paths of DeepAR."""
    forecast, found = train_gluon(
        name,
        test.table,
        test.begin,
        test.horizon,
        test.freq,
        options.seed,
        options.peer_seconds,
    )
    made = [[one.quantile(float(q)) for q in LEVELS] for one in forecast(test.starts, PATHS)]
    quantiles = np.array(made).reshape(-1, test.num, 9, test.horizon)
    found |= scores(quantiles.transpose(2, 1, 3, 0), test.truth())
    if name == "deepar":
        found |= _timed(lambda: forecast(np.array([test.begin]), 200, 1), test)
    return found


def run_task(data: str, horizon: int, model: str, path: Path, options: Options) -> None:
    """Scores one model and writes what was found, or why nothing was."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    score = gluon if model in GLUON else classical if model in CLASSICAL else ours
    score = naive if model == "naive" else score
    try:
        found: dict[str, Any] = score(load(data, horizon), model, options)
        found["cpu_seconds"] = time.process_time()  # of this process: training and forecasts
    except Exception:  # one model that fails must not stop the others
        found = {"error": traceback.format_exc(limit=-3)}
    text = json.dumps(found, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda own: own.write_text(text))


def run_all(tasks: Sequence[tuple[str, int, str]], options: Options) -> None:
    """Runs tasks in processes until all have ended or the time is up."""
    deadline = time.monotonic() + 60 * options.minutes
    waiting = [task for task in tasks if not _done(_path(task, options))]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vssm.forecasting.forecaster"])  # a task starts at once
    running: dict[tuple[str, int, str], Any] = {}
    while (waiting or running) and time.monotonic() < deadline:
        while waiting and len(running) < options.jobs:
            task = waiting.pop(0)
            own = context.Process(target=run_task, args=(*task, _path(task, options), options))
            own.start()
            running[task] = own
        for task, own in list(running.items()):
            if own.is_alive():
                continue
            del running[task]
            path = _path(task, options)
            found = json.loads(path.read_text()) if path.is_file() else {"error": "it died"}
            text = found.get("error") or f"crps {found['crps']:.4f}"
            print(*task, text, f"({len(waiting) + len(running)} left)", flush=True)
        time.sleep(0.2)
    for task, own in running.items():
        own.terminate()
        print(*task, "stopped: the time is up", flush=True)


def _path(task: tuple[str, int, str], options: Options) -> Path:
    return options.work / "-".join(map(str, task)) / "scores.json"


def _done(path: Path) -> bool:
    return path.is_file() and "error" not in json.loads(path.read_text())


def collect(options: Options) -> None:
    """Writes a result for each data set, and prints the table with mean ranks."""
    command = f"python experiments/forecast_table.py {shlex.join(sys.argv[1:])}"
    rows, shown = {}, options.models
    for data in options.data:
        metrics: dict[str, float] = {}
        for horizon in HORIZONS[data]:
            row = {}
            for model in shown:
                path = _path((data, horizon, model), options)
                if not _done(path):
                    continue
                row[model] = found = json.loads(path.read_text())
                for key, value in found.items():
                    suffix = "" if key.startswith("ms_") else f"_h{horizon}"
                    metrics[f"{model}_{key}{suffix}"] = value
            rows[data, horizon] = row
        if metrics:
            config = {"horizons": HORIZONS[data], "paths": PATHS, "seed": options.seed}
            config |= {"max_steps": options.max_steps, "peer_seconds": str(options.peer_seconds)}
            made = result(f"forecast {data}", command, config, metrics)
            options.out.mkdir(parents=True, exist_ok=True)
            write_result(options.out / f"{data}.json", made)
    print(f"\n{'CRPS, coverage of 80 %':24}" + "".join(f"{model:>14}" for model in shown))
    ranks: dict[str, list[int]] = {model: [] for model in shown}
    for (data, horizon), row in rows.items():
        cells = ""
        order = sorted(row, key=lambda model: row[model]["crps"])
        for model in shown:
            if model in row:
                ranks[model].append(order.index(model) + 1)
                own = row[model]
                cells += f"{own['crps']:>9.4f} {100 * own['coverage80']:3.0f}%"
            else:
                cells += f"{'-':>14}"
        print(f"{data + ' ' + str(horizon):24}{cells}")
    means = {model: f"{np.mean(rank):.2f}" if rank else "-" for model, rank in ranks.items()}
    print(f"{'mean rank':24}" + "".join(f"{means[model]:>14}" for model in shown))


def main(options: Options) -> None:
    """Runs the tasks, then writes the results and prints the table."""
    tasks = [
        (data, HORIZONS[data][k], model)
        for model in options.models
        for k in (1, 0)
        for data in options.data
        if k < len(HORIZONS[data])
    ]
    run_all(tasks, options)
    collect(options)


if __name__ == "__main__":
    main(tyro.cli(Options))
