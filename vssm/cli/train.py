"""`vssm train`: one run."""

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import tyro

from vssm.cli.options import RunOptions
from vssm.data.storage import check_folder
from vssm.runs.folder import RunFolder
from vssm.training.loop import train


@dataclass(frozen=True, kw_only=True)
class Train(RunOptions):
    """Trains a model and keeps everything about it in a run folder."""

    out: Path | None = None
    """The run folder; runs/DATA-KIND by default."""
    resume: Path | None = None
    """Continue the run in this folder, with its own settings."""
    typed: tyro.conf.Suppress[tuple[str, ...]] = ()
    """The data set and the flags on the command line."""

    @classmethod
    def default(cls, arguments: list[str]) -> Self:
        flags = [word.partition("=")[0] for word in arguments if word.startswith("--")]
        data = [word for word in arguments[:1] if not word.startswith("--")]
        return replace(super().default(arguments), typed=(*data, *flags))

    def run(self) -> None:
        folder = self.resume or self.out or Path("runs") / f"{self.name}-{self.model.kind}"
        first = os.environ.get("RANK", "0") == "0"  # of several processes
        if self.resume is None and first:
            RunFolder(folder).check_new()  # before anything that takes time
            check_folder("out", folder)
        ignored = ", ".join(word for word in self.typed if word != "--resume")
        if self.resume is not None and ignored:
            note = f"--resume keeps the run's own settings and ignores {ignored}"
            print(f"note: {note}", file=sys.stderr)
        quoted = shlex.quote(str(folder))
        config = self.run_config() if self.resume is None else None
        try:
            train(config, folder, resume=config is None)
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
            if first and (folder / "config.json").exists() and not RunFolder(folder).has_ended():
                command = f"vssm train --resume {quoted}"
                print(f"to go on from the last checkpoint: {command}", file=sys.stderr)
            raise
        following = (f"vssm {word} {quoted}" for word in ("generate", "evaluate", "report"))
        print(f"run: {folder}\nnext: {'   '.join(following)}")
