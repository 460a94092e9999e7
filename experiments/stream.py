"""Follows a sensor point by point: time and memory per point stay constant along the stream.

    python experiments/stream.py --points 10000

A small vssm is trained on the first part of a synthetic sensor (a noisy wave with a slowly changing
period). It then reads the rest one point at a time and forecasts every 1,000 points. The training
is too short for good forecasts; the script shows the cost of a point.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tyro

from vssm.config import ModelConfig, RunConfig, TrainConfig
from vssm.data import DataConfig, SeriesConfig
from vssm.forecasting import ModelForecaster
from vssm.training import train
from vssm.training.progress import Progress


def follow(
    points: int = 10_000, every: int = 1000, kind: str = "vssm", steps: int = 20
) -> list[tuple[float, float]]:
    """Prints and returns the milliseconds per point and the peak memory in MiB, part by part."""
    rng = np.random.default_rng(0)
    phase = np.cumsum(0.2 + 0.05 * np.sin(np.arange(points + 1000) / 500))
    sensor = (20 + 5 * np.sin(phase) + rng.normal(size=len(phase)) / 2)[:, None]
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "sensor.npy", sensor[:1000])
        series = SeriesConfig(path=f"{folder}/sensor.npy", context=64, horizon=32)
        model = ModelConfig(
            kind=kind, features=1, head="auto", width=32, layers=1, heads=2, latents=4, classes=8
        )
        options = TrainConfig(max_steps=steps, batch=32, samples=0, num_valid=32, device="cpu")
        config = RunConfig(
            data=DataConfig(name="series", series=series), model=model, train=options
        )
        forecaster = ModelForecaster.load(train(config, Path(folder) / "run", progress=Progress()))
    stream = forecaster.stream(sensor[900:1000])
    stream.observe(sensor[999])  # compiles what is compiled at first use
    made = []
    for first in range(1000, 1000 + points, every):
        began = time.perf_counter()
        for point in sensor[first : first + every]:
            stream.observe(point)
        milliseconds = 1000 * (time.perf_counter() - began) / every
        ahead = stream.forecast(samples=100)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
            2**20 if sys.platform == "darwin" else 2**10
        )
        made.append((milliseconds, memory))
        interval = [float(ahead.quantile(level)[0, 0]) for level in (0.1, 0.9)]
        print(
            f"{first - 1000 + every:>6} points: {milliseconds:.2f} ms per point, peak memory"
            f" {memory:.0f} MiB, state of {stream.position} steps, next value in"
            f" {interval[0]:.1f} .. {interval[1]:.1f} (80 %)",
            flush=True,
        )
    return made


if __name__ == "__main__":
    tyro.cli(follow)
