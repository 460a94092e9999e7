"""`vssm train`: one run."""

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
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
        from vssm.runs.folder import RunFolder

        folder = self.resume or self.out or Path("runs") / f"{self.name}-{self.model.kind}"
        if (
            self.resume is None and os.environ.get("RANK", "0") == "0"
        ):  # the first of several starts the run
            RunFolder(folder).check_new()  # before all that takes time
        from vssm.training.loop import train

        if self.resume is not None and (ignored := self._ignored()):
            unused = ", ".join(ignored)
            print(
                f"note: --resume keeps the run's own settings and ignores {unused}", file=sys.stderr
            )
        started, pasted = self.resume is not None, shlex.quote(str(folder))  # as a shell reads it
        try:
            if self.resume is not None:
                train(None, folder, resume=True)
            else:
                config = self.run_config()
                started = not (
                    folder / "config.json"
                ).exists()  # else it is another run's, and refused
                train(config, folder)
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
            if started and (folder / "config.json").exists() and not RunFolder(folder).has_ended():
                print(
                    f"to go on from the last checkpoint: vssm train --resume {pasted}",
                    file=sys.stderr,
                )
            raise
        # With several machines the folder may be on another.
        meta = read_meta(folder) if (folder / "config.json").exists() else None
        table = meta is not None and meta.columns is not None
        first = f"forecast {pasted} --path FILE" if table else f"generate {pasted}"
        print(f"run: {folder}\nnext: vssm {first}   vssm evaluate {pasted}   vssm report {pasted}")

    def _ignored(self) -> list[str]:
        """Returns the options, as they are typed, that a run which goes on does not use."""
        given = [] if self.preset is None else ["--preset", self.preset]
        usual = Train.default([self.name, *given, *(["--smoke"] if self.smoke else [])])
        plain = self.name == (usual if given else Train()).name
        return ([] if plain else [self.name]) + [
            flag for flag in _differing(self, usual) if flag not in ("--name", "--resume")
        ]


def _differing(given: object, usual: object, prefix: str = "") -> Iterator[str]:
    """Yields the flags of options that are not the usual ones."""
    assert is_dataclass(given)
    for name in (field.name for field in fields(given)):
        value, other = getattr(given, name), getattr(usual, name)
        flag = name.replace("_", "-")
        if is_dataclass(value):
            yield from _differing(value, other, f"{prefix}{flag}.")
        elif value != other:
            yield f"--{prefix}no-{flag}" if value is False else f"--{prefix}{flag}"
