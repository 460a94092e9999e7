"""`vssm reproduce`: the paper's experiments."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

__all__ = ["Reproduce"]


@dataclass
class Reproduce:
    """Repeats the paper's experiments, piece by piece: what is done already is skipped."""

    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """The data set: mnist, cifar10, or digits (small only)."""
    scale: str = "paper"
    """paper, or small: minutes on a CPU."""
    out: Path | None = None
    """The folder for runs and figures; runs/reproduce-DATA by default."""
    results: Path | None = None
    """The folder for results: results/paper by default, OUT/results at the small scale."""
    kinds: tuple[str, ...] = ("transformer", "ssm", "vssm")
    """The models; tvae, rnn and vrnn are there too."""
    learning_rates: tuple[float, ...] | None = None
    """The grid, the paper's by default; a single one is taken as it is."""
    seeds: tuple[int, ...] | None = None
    """The seeds, 0 to 4 by default (0 at the small scale)."""
    epochs: float | None = None
    """Passes over the training set, 200 by default."""
    grid_epochs: float | None = None
    """A shorter training for the grid."""
    finalists: int = 1
    """Best rates of a shorter grid that are trained to the end before one is chosen."""
    minutes: float | None = None
    """Stop with a checkpoint after so long; the same command goes on."""
    ray_address: str | None = None
    """Run side by side on a Ray cluster: auto, local, or an address."""
    data_dir: str | None = None
    """Folder with the data; else $VSSM_DATA; else the user cache."""

    def run(self) -> None:
        from vssm.lab.reproduce import folders, reproduce

        left = reproduce(**vars(self))
        if left:
            print(f"left: {', '.join(left)}")
        else:
            _, results = folders(self.data, self.scale, self.out, self.results)
            print(f"all done; for a page of the results: vssm report {shlex.quote(str(results))}")
