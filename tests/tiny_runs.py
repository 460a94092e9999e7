"""Small trainings for the tests of training, run folders and many processes."""

import json
import signal

import numpy as np
import pytest
import torch

from tests.conftest import small_config
from vssm.config import ModelConfig, RunConfig, TrainConfig
from vssm.data import DataConfig, SeriesConfig, SyntheticConfig
from vssm.training.loop import train
from vssm.training.progress import Progress

DATA = DataConfig(
    name="synthetic", synthetic=SyntheticConfig(length=5, features=3, num=41)
)  # 37 and 4
TIMES = ("seconds", "tokens_per_second")
OPTIONS = {
    "epochs": 4,
    "batch": 12,
    "learning_rate": 1e-2,
    "warmup": 0.1,
    "log_every": 1,
    "samples": 0,
}


def tiny(kind="rnn", data=DATA, **options):
    """Four epochs of three steps; every step is a log point and every log point a checkpoint."""
    options = TrainConfig(**{**OPTIONS, "checkpoint_minutes": 0.0, **options})
    return RunConfig(
        data=data, model=small_config(kind, width=8, layers=1, sigma=0.3), train=options
    )


PARTS = {"width": 8, "layers": 1, "latents": 4, "classes": 5, "levels": 2}
FEW = {"max_steps": 2, "batch": 8, "samples": 4, "log_every": 1, "checkpoint_minutes": 0.0}


def any_part(data, **options):
    """A short training of a model with known="any"."""
    model = ModelConfig(features=1, head="auto", known="any", **PARTS)
    return RunConfig(data=data, model=model, train=TrainConfig(**{**FEW, **options}))


def gaps(folder, rows=200, **options):
    """A table of two columns with gaps, of a price and of a day of the week."""
    random = np.random.default_rng(1)
    lines = ["day,sold,rain,price,weekday"]
    for day in range(rows):
        date = np.datetime64("2024-01-01") + day
        sold, rain = (f"{v:.3f}" for v in 10 + 3 * random.normal(size=2))
        sold, rain = "" if day % 5 == 3 else sold, "" if 30 <= day < 40 else rain
        lines.append(f"{date},{sold},{rain},{5 + day % 2},{day % 7}")
    (folder / "gaps.csv").write_text("\n".join(lines))
    options = {"context": 8, "horizon": 4, "columns": ("sold", "rain"), **options}
    series = SeriesConfig(path=str(folder / "gaps.csv"), **options)
    return DataConfig(name="series", series=series)


class StopAt(Progress):
    """Ends a training after a step, as Ctrl-C would."""

    def __init__(self, last):
        self.last, self.messages = last, []

    def step(self, step):
        if step == self.last:
            raise KeyboardInterrupt

    def message(self, text):
        self.messages.append(text)


class SignalAt(Progress):
    """Sends this process a signal after a step."""

    def __init__(self, last, number):
        self.last, self.number, self.messages = last, number, []

    def step(self, step):
        if step == self.last:
            signal.raise_signal(self.number)

    def message(self, text):
        self.messages.append(text)


def run(config, folder, resume=False, progress=None):
    """Trains on one thread, which is quickest here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(config, folder, resume, progress or Progress())
    finally:
        torch.set_num_threads(threads)


def stopped(config, folder, step):
    """A run folder as an interruption after a step leaves it."""
    with pytest.raises(KeyboardInterrupt):
        run(config, folder, progress=StopAt(step))
    return folder


def log(folder, split=None):
    """The log without its times."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    lines = [line for line in lines if split in (None, line["split"])]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def newest(folder):
    return max((folder / "checkpoint").glob("step-????????"))


def result(folder):
    """What two equal trainings share: the bytes of all tensors, and the log."""
    files = [folder / "weights.safetensors", *sorted(newest(folder).glob("*.safetensors"))]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files} | {
        "log": log(folder)
    }
