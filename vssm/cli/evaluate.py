"""`vssm evaluate`: how good a run is."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vssm.cli.display import ProgressBar, show_metrics
from vssm.cli.folders import own_copy

__all__ = ["Evaluate"]


@dataclass
class Evaluate:
    """Measures a run on the test set: likelihoods, sample quality, generation times."""

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
    splits: str = "test"
    """What to measure on: test, or valid while the test set stays closed."""
    quick: bool = False
    """Take at most 64 sequences, 10 draws and 256 images; their classifier is trained the first time."""
    batch: int | None = None
    """Sequences of a pass; what suits the device by default."""
    result: Path | None = None
    """Keep the result, with how the training went, in this file too: results/quality/DATA_NAME.json."""
    data_dir: str | None = None
    """Folder with the data files, if they are not where they were in training."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""

    def run(self) -> None:
        from vssm.evaluation.result import check_result_path, keep_result
        from vssm.evaluation.scores import UnwrittenResult, evaluate_run
        from vssm.runs.folder import RunFolder

        if self.result is not None:
            check_result_path(self.result)
            if self.splits != "test":
                raise ValueError(
                    f"splits={self.splits!r} is not allowed with result; allowed: 'test'"
                )
        folder = own_copy(self.run_folder)
        if RunFolder(folder).is_in_training():
            if (
                self.result is not None
            ):  # it would have weights, log and samples of different moments
                raise ValueError(
                    f"result is not for {str(folder)!r}, which is still being trained; "
                    "allowed: once that has ended or was stopped"
                )
            print(
                f"note: {str(folder)!r} is still being trained: its best weights so far",
                file=sys.stderr,
            )
        title = f"{folder}: {self.splits} set"
        try:
            with ProgressBar() as bar:
                result = evaluate_run(
                    folder,
                    num_samples=self.num_samples,
                    max_sequences=self.max_sequences,
                    num_images=self.num_images,
                    dials=self.dials,
                    particles=self.particles,
                    splits=self.splits,
                    quick=self.quick,
                    batch=self.batch,
                    data_dir=self.data_dir,
                    device=self.device,
                    progress=bar.show,
                )
        except UnwrittenResult as error:
            show_metrics(title, error.result["metrics"])
            raise
        except (KeyboardInterrupt, SystemExit):
            if any(folder.glob("eval*.part-*.json")):
                note = "what was found so far is kept; the same command goes on from there"
                print(f"note: {note}", file=sys.stderr)
            raise
        show_metrics(title, result["metrics"])
        written = folder / ("eval.json" if self.splits == "test" else "eval_valid.json")
        if written.is_file():  # else better weights came in the meantime, which is said
            print(f"written: {written}")
        if self.result is not None:
            keep_result(folder, self.result, self.device, self.data_dir)
            print(f"kept: {self.result}")
