"""`vssm evaluate`: how good a run is."""

import filecmp
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vssm.cli.display import ProgressBar, show_metrics
from vssm.evaluation.result import check_result_path, keep_result
from vssm.evaluation.scores import UnwrittenResult, evaluate_run
from vssm.runs.folder import RunFolder
from vssm.runs.pretrained import find

__all__ = ["Evaluate", "own_copy"]


@dataclass
class Evaluate:
    """Measures a run on test data: likelihoods, sample quality, times."""

    run_folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """A run folder, or the name of a shipped model, which is copied to runs/NAME."""
    num_samples: int = 100
    """K, the latent draws of each likelihood estimate."""
    max_sequences: int | None = None
    """Use only so many test sequences, spread evenly over the set."""
    num_images: int = 10_000
    """Generated images for each Fréchet distance; 0 for no distances."""
    dials: bool = False
    """Measure quality against time as well, over chunk sizes and passes (vssm, tvae)."""
    particles: bool = False
    """Estimate likelihoods by a particle filter as well: closer, and slower (vssm, tvae, vrnn)."""
    known: tuple[str, ...] = ()
    """For models with --model.known any: also measure how well unknown entries are made, if these
    are known: prefix, random:P (each unknown with probability P), block:N, hole:N."""
    passes: int = 1
    """Passes in which these entries are made."""
    splits: str = "test"
    """What to measure on: test, or valid while the test set stays closed."""
    quick: bool = False
    """Take at most 64 sequences, 10 draws and 256 images; their classifier is trained the first
    time."""
    batch: int | None = None
    """Sequences of a pass; by default a number that suits the device."""
    result: Path | None = None
    """Keep the result, with how the training went, in this file too:
    results/quality/DATA_NAME.json."""
    data_dir: str | None = None
    """Folder with the data files, if they are not where they were in training."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""

    def run(self) -> None:
        if self.result is not None:
            check_result_path(self.result)
            if self.splits != "test":
                raise ValueError(f"splits={self.splits!r} can not be kept with result; use 'test'")
        folder = own_copy(self.run_folder)
        if RunFolder(folder).is_in_training():
            if self.result is not None:  # weights, log and samples would be of different moments
                raise ValueError(
                    f"{str(folder)!r} is still being trained; leave out result until it has ended"
                )
            note = f"{str(folder)!r} is still being trained: its best weights so far"
            print(f"note: {note}", file=sys.stderr)
        title = f"{folder}: {self.splits} set"
        options = {k: v for k, v in vars(self).items() if k not in ("run_folder", "result")}
        try:
            with ProgressBar() as bar:
                result = evaluate_run(folder, **options, progress=bar.show)
        except UnwrittenResult as error:
            show_metrics(title, error.result["metrics"])
            raise
        show_metrics(title, result["metrics"])
        name = "eval.json" if self.splits == "test" else "eval_valid.json"
        print(f"written: {folder / name}")
        if self.result is not None:
            keep_result(folder, self.result, self.device, self.data_dir)
            print(f"kept: {self.result}")


def own_copy(folder: Path) -> Path:
    """Returns a folder that may be written to: the folder of a shipped model is copied first."""
    shipped = find(str(folder))
    if shipped == folder:
        return folder
    copy = Path("runs") / folder.name
    if not copy.exists():
        shutil.copytree(shipped, copy)
    weights = "weights.safetensors"
    if not filecmp.cmp(shipped / weights, copy / weights, shallow=False):
        raise ValueError(
            f"{str(copy)!r} is there and no copy of the shipped {folder.name!r}; "
            f"evaluate {copy} itself, or rename it"
        )
    return copy
