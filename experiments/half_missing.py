"""Trains on MNIST with half of all pixels missing, beside the same training on whole images.

    python experiments/half_missing.py --data-dir DATA --steps 10000

Each pixel of the training images is missing with probability 1/2, once and for all. Labels are
given. Both models are scored on whole test images that neither has seen: log p(x | label) in nats,
by importance sampling. Writes results/fill/mnist_half.json.
"""

import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import tyro

import vssm
from vssm.data import open_data
from vssm.data.config import DataConfig
from vssm.runs.results import result, write_result

SETTINGS = (
    "--labels --model.known any --model.head gaussian --model.width 128 --model.layers 2 "
    "--model.window 28 --model.levels 8 --model.spans 28 28 14 7 4 2 1 1 --model.latents 16 "
    "--model.classes 32 --train.batch 256 --train.epochs 500 --train.learning-rate 2e-3 "
    "--train.clip 0.3 --train.ema 0.9995 --train.validate-every 10 --train.num-valid 1000 "
    "--train.samples 0"
)  # those of experiments/mnist_any.sh
PIXELS, CLASSES = 28, 10


def write_arrays(folder: Path, data_dir: str | None) -> None:
    """Writes whole.npz and half.npz, the training images with their labels."""
    train = open_data(DataConfig(name="mnist", dir=data_dir)).train
    x = train.batch(slice(None)).numpy()
    missing = np.random.default_rng(0).random(x.shape, dtype=np.float32) < 0.5
    folder.mkdir(parents=True, exist_ok=True)
    labels = np.asarray(train.labels)
    np.savez(folder / "whole.npz", x=x, labels=labels)
    np.savez(folder / "half.npz", x=np.where(missing, np.float32("nan"), x), labels=labels)


def nats(run: Path, x: torch.Tensor, num_samples: int, device: torch.device) -> float:
    """Returns the mean log p(x | label) of images with their labels, (B, 28, 38)."""
    model, total = vssm.load(run).to(device).eval(), 0.0
    for first in range(0, len(x), 100):
        part = x[first : first + 100].to(device)
        total += float(vssm.log_likelihood(model, part, num_samples, rows=first).sum())
    return total / len(x)


def main(
    data_dir: str | None = None,
    steps: int = 10_000,
    num: int = 2_000,
    num_samples: int = 20,
    work: Path = Path("runs/half_missing"),
    out: Path = Path("results/fill/mnist_half.json"),
) -> None:
    """Trains both models at the same time and scores them.

    Arguments:
        data_dir: Folder with MNIST; else $VSSM_DATA.
        steps: Of training.
        num: Test images that are scored.
        num_samples: K of the importance sampling.
        work: Folder for the arrays and the runs; runs that ended are not trained again.
        out: Where the result goes.
    """
    write_arrays(work, data_dir)
    trainings = {}
    for name in ("whole", "half"):
        command = f"{sys.executable} -m vssm train "
        if (work / name).exists():
            command += f"--resume {work / name}"
        else:
            command += f"arrays --arrays.path {work / name}.npz {SETTINGS} "
            command += f"--train.max-steps {steps} --out {work / name}"
        trainings[name] = subprocess.Popen(shlex.split(command))
    for name, training in trainings.items():
        if training.wait() != 0:
            sys.exit(f"the training of {name} failed")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    test = open_data(DataConfig(name="mnist", dir=data_dir, labels=True)).test()
    x = test.batch(slice(0, num))
    metrics: dict[str, float] = {"num": len(x), "num_samples": num_samples, "steps": steps}
    for name in trainings:
        metrics[f"vssm_nats_{name}"] = nats(work / name, x, num_samples, device)
    metrics["gap"] = metrics["vssm_nats_whole"] - metrics["vssm_nats_half"]
    print(metrics)
    command = shlex.join(["python", *sys.argv])
    write_result(out, result("mnist_half", command, {"settings": SETTINGS}, metrics))


if __name__ == "__main__":
    tyro.cli(main)
