"""Prints how much time each kernel takes in one training step on a CUDA device.

    PYTHONPATH=. python experiments/profile_train.py [--kind vssm] [--batch 1024] [--rows 40]

The step is the trainer's own, for the preset paper-mnist on synthetic rows of the same shape,
replayed as a CUDA graph. `ms` is the time of all launches of a kernel in one step.
"""

import argparse
import tempfile
from dataclasses import replace
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from vssm.config import PRESETS, RunConfig
from vssm.data import DataConfig, SyntheticConfig
from vssm.training.loop import Trainer, train
from vssm.training.progress import Progress
from vssm.training.step import Step

STEPS = 4  # two plain steps, then one that is recorded


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kind", default="vssm")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=40)
    options = parser.parse_args()
    paper = PRESETS["paper-mnist"]
    config = RunConfig(
        data=DataConfig(
            name="synthetic",
            synthetic=SyntheticConfig(length=28, features=28, num=4 * options.batch),
        ),
        model=replace(paper.model, kind=options.kind),
        train=replace(
            paper.train,
            batch=options.batch,
            max_steps=STEPS + 2,
            epochs=100,
            samples=0,
            log_every=STEPS,
        ),
    )
    take = Step.take

    def profiled(steps: Step, step: int) -> None:
        if step != STEPS + 1:
            take(steps, step)
            return
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            take(steps, step)
            torch.cuda.synchronize()
        kernels = sorted(seen.key_averages(), key=lambda k: -k.self_device_time_total)
        total = sum(kernel.self_device_time_total for kernel in kernels) / 1e3
        where = torch.cuda.get_device_name()
        print(f"{options.kind}, batch {options.batch}, {where}: {total:.2f} ms of kernels")
        for kernel in kernels[: options.rows]:
            ms = kernel.self_device_time_total / 1e3
            print(f"{ms:8.3f} ms {100 * ms / total:5.1f} %  {kernel.count:4d} x  {kernel.key[:90]}")

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Step, "take", profiled),
        mock.patch.object(Trainer, "save"),
        mock.patch.object(Trainer, "validate"),
    ):
        train(config, f"{folder}/run", progress=Progress())


if __name__ == "__main__":
    main()
