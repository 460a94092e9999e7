"""Fills gaps of series: a vssm beside linear interpolation, a Kalman smoother and CSDI.

    python experiments/fill_series.py ETTh1 --models linear kalman vssm csdi

Windows of 96 rows; the columns are standardised over the training part (ETTh1: 12 months, weather:
the first 70 % of the rows). Test windows follow each other in the test part (4 months; the last
20 %). All models see the same masks:

| mask | what is missing |
| --- | --- |
| random10, random50, random90 | entries, each with this probability |
| block24 | 24 rows, all columns, at a random place of the window |

    crps    2 * pinball loss, mean over the quantiles 0.1 ... 0.9 of 100 samples, summed over the
            missing entries, over the sum of |y|; y in deviations of the training part
    ms_100  100 samples of one window with random50, the median of three calls

| model | what |
| --- | --- |
| linear | a line between the neighbours in a column; every quantile is the same |
| kalman | statsmodels' UnobservedComponents for each column: level, cycle of a day with four |
| | harmonics, AR(1); fitted to the last 1,000 rows of training, then smooths each window, from a |
| | diffuse start or, with few known entries, from the mean and covariance of states in training |
| vssm | known="any" with lines between known entries (`interpolate`), for ETTh1 also between days |
| | (`season`); the sine and cosine of the day are `given` columns, as the smoother is told the |
| | day too; one model for all masks, one pass |
| csdi | pypots' CSDI, with the sizes of its paper (4 layers, 64 channels, 50 diffusion steps) |

A model writes its part into --work, so that a run goes on where it was stopped. The result holds
all parts that are there.
"""

import copy
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas
import torch
import tyro
from tyro.conf import Positional

import vssm
from vssm.data.storage import write_atomically
from vssm.runs.results import result, write_result

WINDOW, DAY = 96, {"ETTh1": 24, "weather": 144}
LEVELS = np.arange(1, 10) / 10
FEW = 24
MASKS = ("random10", "random50", "random90", "block24")
STRIDE = {"ETTh1": 3, "weather": 8}  # rows between two training windows of CSDI
SEASON = {"ETTh1": 24, "weather": 0}  # a day of weather is longer than a window
GIVEN = ("day_sin", "day_cos")
SETTINGS = (
    "--series.scale none --series.time none --series.context 95 --series.horizon 1 "
    "--model.known any --model.window 96 --model.interpolate --model.head {head} "
    "--model.width {width} --model.layers 2 --model.latents 1 --model.classes 32 --train.batch 32 "
    "--train.epochs 10000 --train.validate-every 10000 --train.num-valid 64 "
    "--train.learning-rate 2e-3 --train.ema 0.995 --train.samples 0 --train.max-steps {steps}"
)


class Task:
    """A data set: windows of training, and test windows with what is missing of them."""

    def __init__(self, name: str, part: str = "test", windows: int | None = None) -> None:
        folder = Path(os.environ.get("VSSM_DATA", "data")) / "timeseries"
        table = pandas.read_csv(folder / f"{name}.csv.gz", index_col=0, encoding_errors="replace")
        rows, month = table.to_numpy(float), 30 * 24
        cuts = [12 * month, 16 * month, 20 * month]
        if name == "weather":
            cuts = [int(0.7 * len(rows)), int(0.8 * len(rows)), len(rows)]
        deviation = rows[: cuts[0]].std(0)
        rows = (rows - rows[: cuts[0]].mean(0)) / np.where(deviation > 0, deviation, 1)
        first, last = cuts[:2] if part == "validation" else cuts[1:]
        phase = 2 * np.pi * np.arange(len(rows)) / DAY[name]
        self.day = np.stack([np.sin(phase), np.cos(phase)], 1)
        self.name, self.rows = name, rows[: cuts[0]]
        self.test = _windows(rows[first:last], WINDOW)
        self.test_day = _windows(self.day[first:last], WINDOW)
        end = -(-10 * cuts[0] // 7)  # of which series trains on the first 70 %
        columns = [str(name) for name in table.columns]
        whole = np.concatenate([rows, self.day], 1)[:end]
        self.table = pandas.DataFrame(whole, columns=[*columns, *GIVEN])
        self.known = {mask: _known(mask, self.test.shape) for mask in MASKS}
        if windows is not None:
            places = np.linspace(0, len(self.test) - 1, windows).round().astype(int)
            self.test, self.test_day = self.test[places], self.test_day[places]
            self.known = {mask: known[places] for mask, known in self.known.items()}

    def gappy(self, mask: str) -> np.ndarray:
        """Returns the test windows with NaN where they are missing."""
        return np.where(self.known[mask], self.test, np.nan).astype(np.float32)

    def crps(self, mask: str, quantiles: np.ndarray) -> float:
        """Scores quantiles (9, B, T, D) of the missing entries."""
        missing = ~self.known[mask]
        y, q = self.test[missing], quantiles[:, missing]
        level = LEVELS[:, None]
        loss = 2 * np.maximum(level * (y - q), (level - 1) * (y - q)).mean(0)
        return float(loss.sum() / np.abs(y).sum())


def _windows(rows: np.ndarray, stride: int) -> np.ndarray:
    starts = range(0, len(rows) - WINDOW + 1, stride)
    return np.stack([rows[start : start + WINDOW] for start in starts])


def _known(mask: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns what is known, (B, T, D), the same in every run."""
    draws = np.random.default_rng(MASKS.index(mask))
    if mask.startswith("random"):
        return draws.random(shape) >= int(mask.removeprefix("random")) / 100
    known, size = np.ones(shape, bool), int(mask.removeprefix("block"))
    for row in known:
        start = draws.integers(0, WINDOW - size + 1)
        row[start : start + size] = False
    return known


def median_ms(call: Callable[[], object]) -> float:
    """Returns the median milliseconds of three calls."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def linear(task: Task, _: "Options") -> dict[str, float]:
    """Scores straight lines."""
    found = {}
    for mask in MASKS:
        filled = [
            pandas.DataFrame(window).interpolate(limit_direction="both").fillna(0).to_numpy()
            for window in task.gappy(mask)
        ]
        found[f"crps_{mask}"] = task.crps(mask, np.repeat(np.array(filled)[None], 9, 0))
    return found


def kalman(task: Task, _: "Options") -> dict[str, float]:
    """Scores a structural model of each column, smoothed by the Kalman filter."""
    from scipy.stats import norm
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    def structure(y: np.ndarray) -> Any:  # noqa: ANN401
        cycle = [{"period": DAY[task.name], "harmonics": 4}]
        return UnobservedComponents(y, "llevel", freq_seasonal=cycle, autoregressive=1)

    warnings.simplefilter("ignore")
    began, fitted = time.monotonic(), []
    for column in task.rows[-1000:].T:
        fit = structure(column).fit(disp=False, maxiter=50)
        states = fit.smoothed_state  # their law is where a window starts
        fitted.append((fit.params, states.mean(1), np.cov(states)))
    found = {"train_seconds": time.monotonic() - began}
    z = norm.ppf(LEVELS)[:, None]
    for mask in MASKS:
        quantiles = np.zeros((9, *task.test.shape))
        for b, window in enumerate(task.gappy(mask).astype(float)):
            for d, (column, (params, *start)) in enumerate(zip(window.T, fitted, strict=True)):
                model = structure(column)
                if np.isfinite(column).sum() < FEW:  # a diffuse start would not be settled
                    model.ssm.initialize_known(*start)
                smooth = model.smooth(params)
                design = smooth.model.ssm["design"][0]
                states = smooth.smoothed_state, smooth.smoothed_state_cov
                variance = np.einsum("i,ijt,j->t", design, states[1], design)
                variance += smooth.model.ssm["obs_cov"][0, 0]
                quantiles[:, b, :, d] = design @ states[0] + z * np.sqrt(np.maximum(variance, 0))
        found[f"crps_{mask}"] = task.crps(mask, quantiles)
    return found


def gaps(task: Task, mask: str) -> torch.Tensor:
    """Returns the test windows with NaN where they are missing, and the time of day."""
    return torch.from_numpy(np.concatenate([task.gappy(mask), task.test_day], 2)).float()


def fill_with_vssm(task: Task, options: "Options") -> dict[str, float]:
    """Trains a vssm and scores its samples."""
    folder = options.work / f"{task.name}_vssm"
    measured = options.work / f"{task.name}_vssm_training.json"
    if not (folder / "config.json").exists():
        options.work.mkdir(parents=True, exist_ok=True)
        table = options.work / f"{task.name}.csv"
        task.table.to_csv(table, index=False)
        settings = SETTINGS.format_map(vars(options))
        settings += f" --model.season {SEASON[task.name]} --series.given {' '.join(GIVEN)}"
        arguments = f"series --series.path {table} {settings} {options.more} --out {folder}"
    else:
        arguments = f"--resume {folder}"
    if measured.exists():
        found = json.loads(measured.read_text())
    else:
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "vssm", "train", *shlex.split(arguments)], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found = {"train_seconds": time.monotonic() - began, "train_cpu_seconds": cpu}
        write_atomically(measured, lambda file: file.write_text(json.dumps(found)))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = vssm.Engine(vssm.load(folder).to(device))
    for mask in MASKS:
        parts = []
        for x in gaps(task, mask).to(device).split(1):
            filled = engine.fill(x, num=options.samples, observe="sample", passes=options.passes)
            filled = filled[..., : task.test.shape[2]].cpu().numpy()
            parts.append(np.quantile(filled, LEVELS, axis=1))
        found[f"crps_{mask}"] = task.crps(mask, np.concatenate(parts, 1))
    x = gaps(task, "random50")[:1].to(device)
    found[f"ms_{options.samples}"] = median_ms(
        lambda: engine.fill(x, num=options.samples, observe="sample", passes=options.passes).cpu()
    )
    return found | {"parameters": sum(p.numel() for p in engine.model.parameters())}


def csdi(task: Task, options: "Options") -> dict[str, float]:
    """Trains CSDI and scores its samples."""
    from pypots.imputation import CSDI
    from torch.optim.optimizer import register_optimizer_step_post_hook

    model = CSDI(
        n_steps=WINDOW,
        n_features=task.rows.shape[1],
        n_layers=4,
        n_heads=8,
        n_channels=64,
        d_time_embedding=128,
        d_feature_embedding=16,
        d_diffusion_embedding=128,
        batch_size=options.csdi_batch,
        epochs=options.csdi_epochs,
        device="cuda" if torch.cuda.is_available() else "cpu",
        verbose=True,
    )
    steps = 0

    def stop(*_: object) -> None:
        nonlocal steps
        steps += 1
        if time.process_time() - before >= options.csdi_cpu_seconds:
            model.best_model_dict, model.best_loss = copy.deepcopy(model.model.state_dict()), 0.0
            raise KeyboardInterrupt  # pypots ends its training

    began, before = time.monotonic(), time.process_time()
    hook = register_optimizer_step_post_hook(stop)
    model.fit({"X": _windows(task.rows, STRIDE[task.name]).astype(np.float32)})
    hook.remove()
    found = {"train_seconds": time.monotonic() - began, "train_steps": steps}
    found["train_cpu_seconds"] = time.process_time() - before

    def fill(x: np.ndarray) -> np.ndarray:
        # samples side by side: pypots would loop over them
        copies = {"X": np.repeat(x, options.samples, 0)}
        made = model.predict(copies, n_sampling_times=1)["imputation"]
        return np.quantile(made.reshape(len(x), options.samples, *x.shape[1:]), LEVELS, axis=1)

    model.batch_size = 1000
    for mask in MASKS:
        found[f"crps_{mask}"] = task.crps(mask, fill(task.gappy(mask)))
    return found | {f"ms_{options.samples}": median_ms(lambda: fill(task.gappy("random50")[:1]))}


MODELS = {"linear": linear, "kalman": kalman, "vssm": fill_with_vssm, "csdi": csdi}


class Options:
    """What the models need to know."""

    def __init__(self, **values: Any) -> None:  # noqa: ANN401
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        raise AttributeError(name)


def main(
    data: Positional[Literal["ETTh1", "weather"]],
    models: tuple[str, ...] = tuple(MODELS),
    part: Literal["test", "validation"] = "test",
    steps: int = 1500,
    width: int = 64,
    head: str = "student-t",
    passes: int = 1,
    more: str = "",
    csdi_epochs: int = 100,
    csdi_batch: int = 64,
    csdi_cpu_seconds: float = float("inf"),
    windows: int | None = None,
    samples: int = 100,
    work: Path = Path("runs/fill_series"),
    out: Path | None = None,
) -> None:
    """Scores models on one data set.

    Arguments:
        data: The data set.
        models: linear, kalman, vssm, csdi.
        part: The rows of the windows that are scored; choices are made on validation.
        steps: Training steps of the vssm.
        width: Its width.
        head: Its head.
        passes: Its passes.
        more: More options of its training, as of `vssm train`.
        csdi_epochs: Passes of CSDI over the training windows.
        csdi_batch: Its batch.
        csdi_cpu_seconds: Seconds of CPU time after which its training ends.
        windows: How many windows are scored, spread evenly; all by default. For CSDI on a CPU.
        samples: How many samples of each window are drawn.
        work: Folder for runs and parts.
        out: The result, results/fill/DATA.json by default; none is written for validation.
    """
    known = {key: value for key, value in locals().items() if key not in ("data", "models", "out")}
    options, task = Options(**known), Task(data, part, windows)
    for name in models:
        path = work / f"{data}_{name}_{part}.json"
        if path.exists():
            continue
        found = MODELS[name](task, options)
        work.mkdir(parents=True, exist_ok=True)
        text = json.dumps(found)
        write_atomically(path, lambda file, text=text: file.write_text(text))
        print(name, {key: round(value, 4) for key, value in found.items()}, flush=True)
    if part == "validation":
        return
    parts = {name: work / f"{data}_{name}_{part}.json" for name in MODELS}
    metrics = {
        f"{name}_{key}": value
        for name, path in parts.items()
        if path.exists()
        for key, value in json.loads(path.read_text()).items()
    }
    metrics |= {"windows": len(task.test), "samples": samples}
    config = {key: str(value) for key, value in known.items()}
    made = result(f"fill_{data}", shlex.join(["python", *sys.argv]), config, metrics)
    write_result(out or Path(f"results/fill/{data}.json"), made)


if __name__ == "__main__":
    tyro.cli(main)
