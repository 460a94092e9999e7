"""The demo, offline: pictures by shipped models, a race, then three models are trained."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import vssm
from vssm.config import Kind, ModelConfig, RunConfig, TrainConfig
from vssm.data import DataConfig, draw, open_data
from vssm.data.storage import check_folder
from vssm.evaluation.report import report
from vssm.evaluation.scores import evaluate_run
from vssm.evaluation.timing import take_times
from vssm.runs import pretrained
from vssm.runs.config import SavedConfig
from vssm.training.loop import train
from vssm.training.progress import Progress

# About two million parameters each, of rows of 28 pixels. Times do not depend on the weights.
_RACERS: dict[Kind, int] = {"vssm": 160, "ssm": 256, "transformer": 192}
_LENGTHS = (28, 112, 448)
_EPOCHS: dict[Kind, int] = {"vssm": 20, "ssm": 15, "transformer": 15}


def demo(out: Path = Path("demo")) -> None:
    """Draws digits, races three models, trains three, writes a report.

    Arguments:
        out: The folder for runs, pictures and the report; an older demo in it is replaced.
    """
    start, folder = time.perf_counter(), out
    check_folder("out", folder)
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "DEMO").is_file():
            raise ValueError(
                f"out={str(folder)!r} is not empty and is not the folder of a demo; give a new one"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "DEMO").write_text("This folder was made by `vssm demo`, which may replace it.\n")

    print("MNIST digits, by models that come with the package:", flush=True)
    _draw_mnist(folder)
    print("\nRace, untrained models of 2 M parameters: one sequence of T rows, ms", flush=True)
    _race()
    print("\nThree small models of 8 x 8 digits, scored on the test set:", flush=True)
    print("              training, s   log p(x), nats   second half given the first")
    size = ModelConfig(features=8, width=96, layers=2, heads=4, latents=12, classes=16)
    for kind, epochs in _EPOCHS.items():
        model = replace(size, kind=kind)
        if kind == "vssm":
            model = replace(model, levels=4, spans=(8, 4, 2, 1))  # whole digits, then their parts
        config = RunConfig(
            data=DataConfig(name="digits"),
            model=model,
            train=TrainConfig(epochs=epochs, batch=64, learning_rate=3e-3),
        )
        began = time.perf_counter()
        train(config, folder / kind, progress=Progress())
        seconds = time.perf_counter() - began
        metrics = evaluate_run(folder / kind, num_samples=20, num_images=359)["metrics"]
        nats = (metrics[f"{part}log_likelihood"] for part in ("", "partial_"))
        print(f"  {kind:12s}{seconds:11.0f}" + "".join(f"{x:17.2f}" for x in nats), flush=True)
    _complete_digits(folder / "vssm")

    page = report([folder / kind for kind in _EPOCHS], folder / "report.html")
    installed = os.path.relpath(Path(sys.executable).with_name("vssm"))
    program = "vssm" if shutil.which("vssm") else shlex.quote(installed)
    print(
        f"\n{time.perf_counter() - start:.0f} seconds in all. The report: {page}\nTry next:\n"
        f"  {program} generate {shlex.quote(str(folder / 'vssm'))} --num 64 --out samples.png\n"
        f"  {program} generate mnist-best-small --num 64 --out one-shot.png\n"
        f"  {program} train mnist --out runs/mnist\n"
        f"  {program} --help"
    )


def _draw_mnist(folder: Path) -> None:
    """Draws digits in one pass, completes upper halves and fills holes."""
    meta = SavedConfig.read(pretrained.find("mnist-best-small")).meta()
    assert meta is not None, "a shipped model describes its data"
    best, any_part = vssm.load("mnist-best-small"), vssm.load("mnist-any-small")
    vssm.generate(best, num=1)  # compiles
    labels = torch.full((16, 28, 38), torch.nan)
    labels[..., 28:] = torch.eye(10)[torch.arange(16) % 10, None]

    def show(name: str, words: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        began = time.perf_counter()
        x = make()
        path = draw(meta, x[..., :28], folder / f"mnist-{name}.png")
        print(f"  {path!s:32s} {words:34s} {time.perf_counter() - began:.2f} s", flush=True)
        return x

    one_shot = partial(vssm.generate, best, num=32, seed=1)
    upper = show("one-shot", "32 digits in one pass", lambda: one_shot().x)[:16, :14]
    lower = partial(vssm.generate, best, length=14, prompt=upper, seed=2)
    words = "16 lower halves anew, in one pass"
    show("completed", words, lambda: torch.cat([upper, lower().x], 1))
    holes = show("labels", "16 digits by label, in one pass", lambda: vssm.fill(any_part, labels))
    holes[:, 7:21, 7:21] = torch.nan
    show("filled", "their middles anew, in one pass", lambda: vssm.fill(any_part, holes))


def _race() -> None:
    """Prints the best time of three calls of every model."""
    models = {
        kind: vssm.build(ModelConfig(kind=kind, features=28, width=width))
        for kind, width in _RACERS.items()
    }
    print("     T" + "".join(f"{kind:>14s}" for kind in models))
    for length in _LENGTHS:
        calls = [partial(vssm.generate, each, num=1, length=length) for each in models.values()]
        times = [min(take_times(call, torch.device("cpu"), repeats=3)) for call in calls]
        print(f"{length:6d}" + "".join(f"{best:14.1f}" for best in times), flush=True)


def _complete_digits(run: Path) -> None:
    """Completes digits of the validation set."""
    model, data = vssm.load(run), open_data(DataConfig(name="digits"))
    prompts = data.valid.batch(slice(0, 16))[:, :4]
    completed = vssm.generate(model, length=4, prompt=prompts, seed=1).x
    draw(data.meta, torch.cat([prompts, completed], 1), run / "completed.png")
