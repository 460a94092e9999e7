"""A panel whose law is known: does a `Forecaster` use a promotion that is known ahead?

    python experiments/forecast_panel.py
    python experiments/forecast_panel.py --law counts --out results/forecast/counts.json

500 made-up daily series of 120 to 240 days, 20 % of their cells missing. The logarithm of sales is
a level of the shop, plus its week, plus 0.6 on days of a promotion (a quarter of the days, at
random), plus normal noise of 0.2. Two windows of 14 days of each series are the test. With
`--law counts`, sales are small whole numbers instead, a third of them zero: negative binomial with
the same logarithm of the mean less 2.5, and a shape of 3.

| name | what |
| --- | --- |
| truth | paths of the law itself |
| regression | log sales on promotion and day of the week, least squares (not for counts) |
| vssm, vssm_without | `vssm.Forecaster` with its defaults, told of the promotion or not |
| naive | the last week, with normal noise |

`crps` is the mean CRPS of a value over the mean of all values, `coverage80` the share of values
between the quantiles 0.1 and 0.9.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas
import torch
import tyro
from scipy.stats import nbinom, norm

from vssm import Forecaster
from vssm.forecasting.backtest import Backtest, naive_paths
from vssm.forecasting.metrics import crps
from vssm.runs.results import result, write_result

HORIZON, WINDOWS, PATHS = 14, 2, 200
NOISE, EFFECT, MISSING = 0.2, 0.6, 0.2
LESS, SHAPE = 2.5, 3  # of counts


@dataclass(frozen=True)
class Options:
    """The size of the panel, and where the result goes."""

    law: Literal["lognormal", "counts"] = "lognormal"
    """Of sales."""
    series: int = 500
    """How many series."""
    max_steps: int = 1000
    """Of training; 1000 is the default of a Forecaster."""
    seed: int = 0
    """Of the panel, of weights and of paths."""
    out: Path = Path("results/forecast/panel.json")
    """The result."""


def sales(law: str, mean: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Returns sales, from the mean of their logarithm and normal noise."""
    if law == "lognormal":
        return np.exp(mean + NOISE * noise)
    rate = np.exp(mean - LESS)
    return nbinom.ppf(norm.cdf(noise), SHAPE, SHAPE / (SHAPE + rate))


def make(num: int, seed: int, law: str) -> pandas.DataFrame:
    """Returns the panel, long, with the mean of log sales as a column of its own."""
    rng = np.random.default_rng(seed)
    tables = []
    for k in range(num):
        length = int(rng.integers(120, 241))
        days: Any = pandas.date_range(end="2024-06-30", periods=length, freq="D")
        table = pandas.DataFrame({"unique_id": f"shop{k}", "ds": days})
        table["promotion"] = (rng.random(length) < 0.25).astype(float)
        week = 0.3 * np.sin(2 * np.pi * (days.dayofweek + rng.integers(7)) / 7)
        table["mean"] = 3 + rng.normal() + week + EFFECT * table["promotion"]
        table["y"] = sales(law, table["mean"].to_numpy(), rng.normal(size=length))
        table.loc[rng.random(length) < MISSING, "y"] = np.nan
        tables.append(table)
    return pandas.concat(tables, ignore_index=True)


def regression_paths(own: pandas.DataFrame, cut: pandas.Timestamp, noise: np.ndarray) -> np.ndarray:
    """Returns paths (S, H) of one shop from `cut` on, by least squares on what came before."""
    inputs = np.column_stack([own["promotion"], pandas.get_dummies(own["ds"].dt.dayofweek)])
    inputs, days, y = inputs.astype(float), own["ds"].to_numpy(), np.log(own["y"].to_numpy())
    past = (days < cut) & np.isfinite(y)
    weight = np.linalg.lstsq(inputs[past], y[past], rcond=None)[0]
    spread = np.std(y[past] - inputs[past] @ weight)
    ahead = inputs[days >= cut][:HORIZON] @ weight
    return np.exp(ahead + spread * noise)


def score(paths: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Returns the CRPS relative to the mean value, and the coverage, of paths (W, S, H)."""
    there = y.isfinite()
    low, high = torch.quantile(paths, torch.tensor([0.1, 0.9]).to(paths), dim=1)
    inside = (y >= low) & (y <= high)
    error = crps(paths[..., None], y[..., None])[..., 0]
    return {
        "crps": float(error[there].mean() / y[there].mean()),
        "coverage80": float(inside[there].double().mean()),
    }


def main(options: Options) -> None:
    """Scores all forecasters and writes the result."""
    torch.set_num_threads(1)
    table = make(options.series, options.seed, options.law)
    seen = table.drop(columns="mean")
    shops = {name: own.reset_index(drop=True) for name, own in table.groupby("unique_id")}
    ways = {"vssm": {"future_columns": ["promotion"]}, "vssm_without": {"past_columns": []}}
    metrics: dict[str, float] = {}

    def add(name: str, made: Backtest, paths: torch.Tensor) -> None:
        series = made.windows.panel.series
        pairs = [(series[k], cut) for k, cut in made.cuts.tolist()]
        y = torch.stack([torch.from_numpy(one.y[cut : cut + HORIZON]) for one, cut in pairs])
        for key, value in score(paths, y).items():
            metrics[f"{name}_{key}_h{HORIZON}"] = value
        print(f"{name:14} crps {metrics[f'{name}_crps_h{HORIZON}']:.4f}", flush=True)

    for name, way in ways.items():
        forecaster = Forecaster(
            HORIZON, "D", max_steps=options.max_steps, seed=options.seed, static_columns=[], **way
        )
        given = seen if name == "vssm" else seen.drop(columns="promotion")
        made = forecaster.backtest(given, WINDOWS, PATHS)
        add(name, made, made.paths)
        metrics[f"{name}_train_seconds"] = forecaster.seconds_
        if name == "vssm":
            noise = np.random.default_rng(options.seed).normal(size=(PATHS, HORIZON))
            paths: dict[str, list[np.ndarray]] = {"truth": []}
            if options.law == "lognormal":
                paths["regression"] = []
            for k, cut in made.cuts.tolist():
                one = made.windows.panel.series[k]
                own, day = shops[one.id], one.dates[cut]
                mean = own.loc[own["ds"] >= day, "mean"].to_numpy()[:HORIZON]
                paths["truth"].append(sales(options.law, mean, noise))
                if options.law == "lognormal":
                    paths["regression"].append(regression_paths(own, day, noise))
            for other, found in paths.items():
                add(other, made, torch.from_numpy(np.stack(found)))
            add("naive", made, naive_paths(made.windows, made.cuts, PATHS))
    against = metrics[f"vssm_crps_h{HORIZON}"]
    metrics["vssm_over_truth"] = against / metrics[f"truth_crps_h{HORIZON}"]
    metrics["without_over_with"] = metrics[f"vssm_without_crps_h{HORIZON}"] / against
    command = f"python experiments/forecast_panel.py {shlex.join(sys.argv[1:])}".strip()
    config = {"law": options.law, "series": options.series, "max_steps": options.max_steps}
    config["seed"] = options.seed
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(options.out, result(f"forecast {options.out.stem}", command, config, metrics))
    print({key: round(metrics[key], 3) for key in ("vssm_over_truth", "without_over_with")})


if __name__ == "__main__":
    main(tyro.cli(Options))
