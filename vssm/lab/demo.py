"""The demo: three small models of 8 x 8 digits, trained, compared, raced and reported, offline."""

import shlex
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import vssm
from vssm.config import Kind, ModelConfig, RunConfig, TrainConfig
from vssm.data import DataConfig, Meta, draw, open_data, read_meta
from vssm.evaluation.scores import evaluate_run
from vssm.lab.bench.timing import wall
from vssm.models import Model
from vssm.report.page import report
from vssm.runs import pretrained
from vssm.runs.results import result, write_result
from vssm.training.loop import train

__all__ = ["demo"]

_EPOCHS: dict[Kind, int] = {"vssm": 20, "ssm": 15, "transformer": 15}
_LENGTHS = (8, 32, 128, 512)
_TOLERANCE = 1e-4


def demo(folder: Path) -> None:
    """Runs everything once, from data to report, and leaves the results in a folder."""
    start = time.perf_counter()
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "DEMO").is_file():
            raise ValueError(f"out={str(folder)!r} is not empty and not a demo's; give a new one")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "DEMO").write_text("This folder was made by `vssm demo`, which may replace it.\n")
    models: dict[str, Model] = {}
    for kind, epochs in _EPOCHS.items():
        print(f"\n== {kind}: train on digits", flush=True)
        size = ModelConfig(
            kind=kind, features=8, width=96, layers=2, heads=4, latents=12, classes=16
        )
        options = TrainConfig(epochs=epochs, batch=64, learning_rate=3e-3)
        config = RunConfig(data=DataConfig(name="digits"), model=size, train=options)
        models[kind] = vssm.load(train(config, folder / kind))

    print("\n== generate", flush=True)
    data = open_data(DataConfig(name="digits"))
    prompts = data.valid.batch(slice(0, 16))[:, :4]
    pictures = _generate(models["vssm"], prompts, data.meta, folder) + _mnist(folder)

    print("\n== race: one sequence, milliseconds", flush=True)
    _race(models, folder)

    print("\n== evaluate on the test set", flush=True)
    for kind in models:
        metrics = evaluate_run(folder / kind, num_samples=20, num_images=359)["metrics"]
        full, half = (metrics[f"{part}log_likelihood"] for part in ("", "partial_"))
        print(f"{kind:12s} log p(x) {full:8.2f} nats    second half given the first {half:8.2f}")
    page = report([folder / kind for kind in models], folder / "results", folder / "report.html")
    print(f"\n{time.perf_counter() - start:.0f} seconds in all. Look at:")
    for path in (page, *pictures):
        print(f"  {path}")
    installed = shlex.quote(str(Path(sys.executable).with_name("vssm")))
    program = "vssm" if shutil.which("vssm") else installed
    print(
        "Try next:\n"
        f"  {program} generate {shlex.quote(str(folder / 'vssm'))} --num 64 --out samples.png\n"
        f"  {program} generate mnist-best-small --num 64 --out one-shot.png\n"
        f"  {program} train mnist --out runs/mnist     (downloads MNIST, or --data-dir FOLDER)\n"
        f"  {program} --help"
    )


def _generate(model: Model, prompts: Tensor, meta: Meta, folder: Path) -> list[Path]:
    """Generates in every way, and checks that chunked and resumed samples equal one shot."""
    whole = vssm.generate(model, num=32, length=8, seed=1)
    chunks = vssm.generate(model, num=32, length=8, seed=1, chunk=3)
    first = vssm.generate(model, num=32, length=5, seed=1)
    rest = vssm.generate(model, length=3, state=first.state)
    resumed = torch.cat([first.x, rest.x], 1)
    for name, x in (("in chunks of 3", chunks.x), ("stopped and resumed", resumed)):
        error = float((x - whole.x).abs().max())
        if error > _TOLERANCE:
            raise AssertionError(f"generating {name} differs from one shot by {error}")
        print(f"{name:24s} = one shot (largest difference {error:.1e})")
    completed = vssm.generate(model, length=4, prompt=prompts, seed=1)
    stepwise = vssm.generate(model, num=32, length=8, seed=1, chunk=1, recondition=True)
    grids = {
        "one-shot": whole.x,
        "completed": torch.cat([prompts, completed.x], 1),
        "re-conditioned": stepwise.x,
    }
    return [draw(meta, x, folder / f"{name}.png") for name, x in grids.items()]


def _mnist(folder: Path) -> list[Path]:
    """Draws MNIST digits with a shipped model, then completes their upper halves."""
    model, meta = vssm.load("mnist-small"), read_meta(pretrained.find("mnist-small"))
    assert meta is not None, "a shipped model describes its data"
    start = time.perf_counter()
    digits = vssm.generate(model, num=32, length=28, seed=1, chunk=1, recondition=True).x
    between = time.perf_counter()
    completed = vssm.generate(model, length=14, prompt=digits[:16, :14], seed=2).x
    print(
        f"32 MNIST digits made row by row in {between - start:.1f} s; the lower halves of 16 of "
        f"them again, in one pass, in {time.perf_counter() - between:.2f} s"
    )
    grids = {
        "mnist-re-conditioned": digits,
        "mnist-completed": torch.cat([digits[:16, :14], completed], 1),
    }
    return [draw(meta, x, folder / f"{name}.png") for name, x in grids.items()]


def _race(models: dict[str, Model], folder: Path) -> None:
    """Prints and keeps the best time of three calls after a warm-up."""
    metrics: dict[str, float] = {}
    print("length  " + "".join(f"{kind:>14s}" for kind in models))
    for length in _LENGTHS:
        line = f"{length:6d}  "
        for kind, model in models.items():
            call = partial(vssm.generate, model, num=1, length=length)
            call()
            best = min(wall(call, torch.device("cpu")) for _ in range(3))
            metrics[f"{kind}_ms_b1_t{length}"] = best
            line += f"{best:14.2f}"
        print(line, flush=True)
    made = result("generate_demo", "vssm demo", {"width": 96, "layers": 2}, metrics)
    (folder / "results").mkdir()
    write_result(folder / "results" / "generate_demo.json", made)
