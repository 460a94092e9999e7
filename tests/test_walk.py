"""How much code a reader has to follow: the files that run in one call, and their lines."""

import multiprocessing
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

import vssm
from tests.tiny_runs import tiny
from vssm.runs.folder import RunFolder
from vssm.training.distributed import World
from vssm.training.loop import Trainer
from vssm.training.progress import Progress

PACKAGE = Path(vssm.__file__).parent


@contextmanager
def recorded():
    """Collects the files of the package whose functions run inside the `with` block."""
    files = set()
    sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename))
    try:
        yield files
    finally:
        sys.setprofile(None)
        files.intersection_update(map(str, PACKAGE.rglob("*.py")))


def training_step(folder):
    """Returns the files that a training step runs through, with their lines."""
    run = RunFolder(folder)
    trainer = Trainer(tiny("vssm"), run, World(torch.device("cpu")), Progress(), resume=False)
    trainer.steps.take(1)
    with recorded() as files:
        trainer.steps.take(2)
    run.close()
    return {file: len(Path(file).read_text().splitlines()) for file in files}


def test_training_step_is_short(tmp_path):
    """A step of a plain vssm on a CPU, in a new process: other tests may leave hooks behind."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        lengths = pool.apply(training_step, (tmp_path / "run",))
    for file in sorted(lengths):
        print(f"{lengths[file]:5d} {Path(file).relative_to(PACKAGE)}")
    print(f"{len(lengths)} files, {sum(lengths.values())} lines")
    assert str(PACKAGE / "objectives" / "__init__.py") in lengths
    assert len(lengths) <= 16
    assert sum(lengths.values()) <= 3500
