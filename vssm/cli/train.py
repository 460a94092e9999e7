"""`vssm train`: one run."""

import sys
from dataclasses import dataclass, fields
from pathlib import Path

from vssm.cli.options import RunOptions

__all__ = ["Train"]


@dataclass
class Train(RunOptions):
    """Trains a model and keeps everything about it in a run folder."""

    out: Path | None = None
    """The run folder; runs/DATA-KIND by default."""
    resume: Path | None = None
    """Go on with the run in this folder, with its own settings."""

    def run(self) -> None:
        from vssm.train import train

        if self.resume is not None:
            usual = Train(resume=self.resume)
            unused = [f.name for f in fields(self) if getattr(self, f.name) != getattr(usual, f.name)]
            if unused:
                print(
                    f"note: --resume keeps the run's own settings, not {', '.join(unused)}", file=sys.stderr
                )
            folder = train(None, self.resume, resume=True)
        else:
            folder = train(self.run_config(), self.out or Path("runs") / f"{self.name}-{self.model.kind}")
        print(f"run: {folder}\nnext: vssm generate {folder}   vssm evaluate {folder}   vssm report {folder}")
