"""`vssm evaluate`: how good a run is."""

import filecmp
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vssm.cli.display import ProgressBar, show_metrics
from vssm.evaluation.scores import EvaluateOptions, UnwrittenResult, evaluate_run
from vssm.runs.config import refuse_forecaster
from vssm.runs.pretrained import find


@dataclass(frozen=True, kw_only=True)
class Evaluate(EvaluateOptions):
    """Measures a run on test data: likelihoods, sample quality, times."""

    run_folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """A run folder, or the name of a shipped model, which is copied to runs/NAME."""

    def run(self) -> None:
        folder = own_copy(self.run_folder)
        options = asdict(self)
        del options["run_folder"]
        title = f"{folder}: {self.splits} set"
        try:
            with ProgressBar() as bar:
                result = evaluate_run(folder, bar.show, **options)
        except UnwrittenResult as error:
            show_metrics(title, error.result["metrics"])
            raise
        show_metrics(title, result["metrics"])
        name = "eval.json" if self.splits == "test" else "eval_valid.json"
        print(f"written: {folder / name}")


def own_copy(folder: Path) -> Path:
    """Returns a folder that may be written to: the folder of a shipped model is copied first."""
    refuse_forecaster(folder)
    shipped = find(str(folder))
    if shipped == folder:
        return folder
    copy = Path("runs") / folder.name
    if not copy.exists():
        shutil.copytree(shipped, copy)
    weights = "weights.safetensors"
    if not filecmp.cmp(shipped / weights, copy / weights, shallow=False):
        raise ValueError(
            f"{str(copy)!r} exists and is not a copy of the shipped {folder.name!r}; "
            f"evaluate {copy} itself, or rename it"
        )
    return copy
