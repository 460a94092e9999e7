"""`vssm train`: one run."""

import os
import shlex
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
        from vssm.data import read_meta
        from vssm.runs import RunFolder

        folder = self.resume or self.out or Path("runs") / f"{self.name}-{self.model.kind}"
        if self.resume is None and os.environ.get("RANK", "0") == "0":  # the first of several starts the run
            RunFolder(folder).check_new()  # before all that takes time
        from vssm.train import train

        if self.resume is not None:
            usual = Train(resume=self.resume)
            unused = [f.name for f in fields(self) if getattr(self, f.name) != getattr(usual, f.name)]
            if unused:
                print(
                    f"note: --resume keeps the run's own settings, not {', '.join(unused)}", file=sys.stderr
                )
        started, pasted = self.resume is not None, shlex.quote(str(folder))  # as a shell reads it
        try:
            if self.resume is not None:
                train(None, folder, resume=True)
            else:
                config = self.run_config()
                started = not (folder / "config.json").exists()  # else it is another run's, and refused
                train(config, folder)
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
            if started and (folder / "config.json").exists() and not RunFolder(folder).has_ended():
                print(f"to go on from the last checkpoint: vssm train --resume {pasted}", file=sys.stderr)
            raise
        # With several machines the folder may be on another.
        meta = read_meta(folder) if (folder / "config.json").exists() else None
        table = meta is not None and meta.columns is not None
        first = f"forecast {pasted} --path FILE" if table else f"generate {pasted}"
        print(f"run: {folder}\nnext: vssm {first}   vssm evaluate {pasted}   vssm report {pasted}")
