"""Scores `vssm.Forecaster` with its defaults beside our rnn and the seasonal naive forecast.

    python experiments/forecast_defaults.py ETTh1
    python experiments/forecast_defaults.py air --kinds vssm rnn ssm

| data set | what | horizon | windows of the test |
| --- | --- | --- | --- |
| ETTh1 | hourly, rows split into 12, 4 and 4 months as ProbTS does | 96 | 30, the last 4 months |
| exchange_rate | daily, the last fifth is the test | 96 | 15 |
| air | AirPassengers, 144 months (Box and Jenkins, 1970) | 12 | 3 |
| months | 12 made-up monthly series with trend and season | 12 | 3 |
| promotion | 60 made-up daily series with gaps and a promotion that is known ahead | 14 | 2 |

Training sees what comes before the test windows, and chooses when to stop on the newest part of
that. `crps` is ProbTS's: the mean over the quantiles 0.1 ... 0.9 of twice the pinball loss over the
sum of |y|, averaged over windows. `scaled_crps` is in deviations of the series. For `promotion` the
law is known, so the scores of paths drawn from it are given too, as `truth`.
"""

import os
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import pandas
import torch
import tyro

from vssm import Forecaster
from vssm.forecasting.backtest import naive_paths
from vssm.runs.results import result, write_result

AIR = """112 118 132 129 121 135 148 148 136 119 104 118 115 126 141 135 125 149 170 170 158 133 114
140 145 150 178 163 172 178 199 199 184 162 146 166 171 180 193 181 183 218 230 242 209 191 172 194
196 196 236 235 229 243 264 272 237 211 180 201 204 188 235 227 234 264 302 293 259 229 203 229 242
233 267 269 270 315 364 347 312 274 237 278 284 277 317 313 318 374 413 405 355 306 271 306 315 301
356 348 355 422 465 467 404 347 305 336 340 318 362 348 363 435 491 505 404 359 310 337 360 342 406
396 420 472 548 559 463 407 362 405 417 391 419 461 472 535 622 606 508 461 390 432"""
HORIZONS = {"ETTh1": 96, "exchange_rate": 96, "air": 12, "months": 12, "promotion": 14}
WINDOWS = {"ETTh1": 30, "exchange_rate": 15, "air": 3, "months": 3, "promotion": 2}
NOISE, EFFECT = 0.2, 0.6  # of log sales in `promotion`


def load(name: str) -> pandas.DataFrame:
    """Returns a data set as a table."""
    folder = Path(os.environ.get("VSSM_DATA", "data")) / "timeseries"
    if name == "ETTh1":
        return pandas.read_csv(folder / "ETTh1.csv.gz", index_col=0, parse_dates=True)[
            : 20 * 30 * 24
        ]
    if name == "exchange_rate":
        table = pandas.read_csv(folder / "exchange_rate.txt.gz", header=None).add_prefix("rate")
        return table.set_index(pandas.date_range("1990-01-01", periods=len(table), freq="D"))
    if name == "air":
        months = pandas.date_range("1949-01-01", periods=144, freq="MS")
        return pandas.DataFrame({"passengers": np.array(AIR.split(), float)}, index=months)
    rng = np.random.default_rng(0)
    if name == "months":
        t = np.arange(120)
        made = {
            f"series{k}": (50 + 30 * rng.random() + rng.normal(0.2, 0.2) * t)
            * (1 + 0.3 * rng.random() * np.sin(2 * np.pi * (t / 12 + rng.random())))
            + 2 * rng.normal(size=120).cumsum() / 3
            for k in range(12)
        }
        return pandas.DataFrame(made, index=pandas.date_range("2010-01-01", periods=120, freq="MS"))
    tables = []
    for k in range(60):
        num = int(rng.integers(120, 240))
        days = pandas.date_range(end="2024-06-30", periods=num, freq="D")
        table = pandas.DataFrame({"unique_id": f"shop{k}", "ds": days})
        table["promotion"] = (rng.random(num) < 0.25).astype(float)
        week = 0.3 * np.sin(2 * np.pi * (days.dayofweek + rng.integers(7)) / 7)
        table["mean"] = 3 + rng.normal() + week + EFFECT * table["promotion"]
        table["y"] = np.exp(table["mean"] + NOISE * rng.normal(size=num))
        table.loc[rng.random(num) < 0.2, "y"] = np.nan
        tables.append(table)
    return pandas.concat(tables, ignore_index=True)


def probts_crps(paths: torch.Tensor, y: torch.Tensor, window: torch.Tensor) -> float:
    """Returns ProbTS's CRPS of paths (W, S, H), the mean over groups of windows."""
    levels = torch.arange(1, 10, dtype=paths.dtype) / 10
    gap = y - torch.quantile(paths, levels, dim=1)
    pinball = torch.maximum(levels.view(-1, 1, 1) * gap, (levels.view(-1, 1, 1) - 1) * gap)
    loss, size = torch.nan_to_num(2 * pinball.mean(0)).sum(1), torch.nan_to_num(y).abs().sum(1)
    return float(
        np.mean([float(loss[window == w].sum() / size[window == w].sum()) for w in window.unique()])
    )


def score(
    data: str,
    /,
    kinds: tuple[str, ...] = ("vssm", "rnn"),
    max_steps: int = 1000,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Scores forecasters on a data set.

    Arguments:
        data: ETTh1, exchange_rate, air, months or promotion.
        kinds: The models.
        max_steps: The most training steps; 1000 is the default of a Forecaster.
        seed: Of training and paths.
        out: Where the result goes; results/forecast/DATA_defaults.json by default.
    """
    torch.set_num_threads(1)
    table, horizon = load(data), HORIZONS[data]
    metrics: dict[str, float] = {}
    config: dict[str, object] = {}
    ways = {kind: {"kind": kind} for kind in kinds}
    if data == "promotion":
        ways["vssm"] = {"future_columns": ["promotion"], "past_columns": [], "static_columns": []}
        ways["vssm_without"] = {"past_columns": [], "static_columns": []}
        if "rnn" in ways:
            ways["rnn"] |= ways["vssm_without"]
    for name, way in ways.items():
        own = Forecaster(horizon, max_steps=max_steps, seed=seed, **way)
        began = time.process_time()
        made = own.backtest(table, WINDOWS[data])
        cpu = time.process_time() - began
        y = torch.stack(
            [
                torch.from_numpy(made.windows.panel.series[k].y[cut : cut + horizon].copy())
                for k, cut in made.cuts.tolist()
            ]
        )
        ends = made.windows.lengths[made.cuts[:, 0]] - made.cuts[:, 1]

        def add(
            name: str,
            paths: torch.Tensor,
            row: dict,
            y: torch.Tensor = y,
            ends: torch.Tensor = ends,
        ) -> None:
            metrics[f"{name}_crps_h{horizon}"] = probts_crps(paths, y, ends)
            for key, value in row.items():
                key = "scaled_crps" if key == "crps" else key
                metrics[f"{name}_{key}_h{horizon}"] = float(value)

        add(name, made.paths, made.table.loc[own.kind].to_dict())
        metrics.update({f"{name}_steps": own.steps_, f"{name}_train_seconds": own.seconds_})
        metrics[f"{name}_cpu_seconds"] = cpu
        one = made.windows.panel.replace(made.windows.panel.series[:1])
        if not own.future_columns:
            frame = one.to_frame()
            own.predict_samples(frame)
            times = []
            for _ in range(5):
                began = time.perf_counter()
                own.predict_samples(frame)
                times.append(1000 * (time.perf_counter() - began))
            metrics[f"{name}_ms_1x200x{horizon}"] = float(np.median(times))
        config[name] = {"layout": vars(own.layout_), "calibrated": own.calibration_ is not None}
        if f"naive_crps_h{horizon}" not in metrics:
            naive = naive_paths(made.windows, made.cuts, 200)
            add("naive", naive, made.table.loc["seasonal naive"].to_dict())
        if data == "promotion" and f"truth_crps_h{horizon}" not in metrics:
            mean = torch.stack(
                [
                    torch.from_numpy(
                        table.loc[
                            table["unique_id"] == made.windows.panel.ids[k], "mean"
                        ].to_numpy()[-(made.windows.panel.series[k].y.shape[0]) :][
                            cut : cut + horizon
                        ]
                    )
                    for k, cut in made.cuts.tolist()
                ]
            )
            noise = torch.randn(200, 1, generator=torch.Generator().manual_seed(0)).double()
            add("truth", (mean[:, None] + NOISE * noise).exp(), {})
        print(name, {k: round(v, 4) for k, v in metrics.items() if k.startswith(name)}, flush=True)
        command = f"python experiments/forecast_defaults.py {shlex.join(sys.argv[1:])}"
        config.update(max_steps=max_steps, seed=seed, windows=WINDOWS[data])
        place = out or Path("results/forecast") / f"{data}_defaults.json"
        write_result(place, result(f"forecast {data} defaults", command, config, metrics))


if __name__ == "__main__":
    tyro.cli(score)
