"""Commands of the lab: `vssm demo`, `sweep`, `reproduce` and `bench`."""

import inspect
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vssm.cli.options import RunOptions

__all__ = ["Bench", "Demo", "Reproduce", "Sweep"]


@dataclass
class Demo:
    """Draws digits, races three models, trains three, writes a report."""

    out: Path = Path("demo")
    """The folder for runs, pictures and the report; an older demo in it is replaced."""

    def run(self) -> None:
        from vssm.lab.demo import demo

        demo(self.out)


@dataclass
class Sweep(RunOptions):
    """Trains over a grid of learning rates, seeds and kinds."""

    out: Path = Path("runs/sweep")
    """The folder for the runs and sweep.json; finished runs in it are skipped."""
    kinds: tuple[str, ...] = ()
    """The models; only model.kind by default."""
    learning_rates: tuple[float, ...] = (1e-2, 5e-3, 1e-3, 5e-4, 1e-4)
    """The learning rates; the paper's grid by default."""
    seeds: tuple[int, ...] = (0,)
    """The seeds, each 0 to 2^63 - 1."""
    ray_address: str | None = None
    """Run side by side on a Ray cluster: auto, local, or an address."""

    def run(self) -> None:
        from vssm.lab.sweep import sweep

        config, kinds = self.run_config(), self.kinds or None
        rows = sweep(config, self.out, self.learning_rates, self.seeds, kinds, self.ray_address)
        for row in rows:
            loss, reason = row["validation_loss"], row["reason"] or ""
            shown = "" if loss is None else f"  validation loss {loss:.3f}"
            print(f"{row['folder']}: {row['status']}{shown}  {reason}".rstrip())
        print(f"table: {self.out / 'sweep.json'}")
        failed = sum(row["status"] == "failed" for row in rows)
        if failed:
            raise ValueError(f"{failed} of {len(rows)} runs failed; their reasons are above")


@dataclass
class Reproduce:
    """Repeats the paper's experiments; skips those that are done."""

    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """The data set: mnist, cifar10, or digits (small only)."""
    scale: str = "paper"
    """paper, or small: minutes on a CPU."""
    out: Path | None = None
    """The folder for runs and figures; runs/reproduce-DATA by default."""
    results: Path | None = None
    """The folder for results: results/paper by default, OUT/results at the small scale."""
    kinds: tuple[str, ...] = ("transformer", "ssm", "vssm")
    """The models; tvae, rnn and vrnn are known too."""
    learning_rates: tuple[float, ...] | None = None
    """The grid, the paper's by default; a single rate is used without a search."""
    seeds: tuple[int, ...] | None = None
    """The seeds, 0 to 4 by default (0 at the small scale)."""
    epochs: float | None = None
    """Passes over the training set, 200 by default."""
    grid_epochs: float | None = None
    """A shorter training for the grid."""
    finalists: int = 1
    """Best rates of a shorter grid that are trained to the end before one is chosen."""
    ray_address: str | None = None
    """Run side by side on a Ray cluster: auto, local, or an address."""
    data_dir: str | None = None
    """Folder with the data; else $VSSM_DATA; else the user cache."""

    def run(self) -> None:
        from vssm.lab.reproduce import folders, reproduce

        reproduce(**vars(self))
        _, results = folders(self.data, self.scale, self.out, self.results)
        print(f"all done; for a page of the results: vssm report {shlex.quote(str(results))}")


@dataclass
class Bench:
    """Times the scan, training or generation."""

    what: tyro.conf.Positional[Literal["scan", "train", "generate"]]
    """What to time."""
    out: Path | None = None
    """Where the JSON goes, such as results/scan_cpu.json; the same command continues from it."""
    restart: bool = False
    """Start anew instead of continuing from the file."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""
    shapes: tuple[str, ...] = ()
    """Problems as BxT or BxTxDxN (scan)."""
    kinds: tuple[str, ...] = ()
    """The models; all by default (train, generate)."""
    levels: tuple[int, ...] = ()
    """Add the vssm with so many levels of latents, as vssm_l<L> (train, generate)."""
    batch: int | None = None
    """Sequences in a pass (train)."""
    steps: int | None = None
    """Steps that are timed (train)."""
    batches: tuple[int, ...] = ()
    """Numbers of sequences (generate)."""
    lengths: tuple[int, ...] = ()
    """Numbers of steps in a sequence (generate)."""
    width: int | None = None
    """Width of the models (not scan)."""
    layers: int | None = None
    """Depth of every stack (not scan)."""
    repeats: int | None = None
    """How often each call is timed (not train)."""
    seconds_per_point: float | None = None
    """Seconds that all calls for one number may take (generate)."""

    def run(self) -> None:
        from vssm.lab import bench

        function = getattr(bench, f"main_{self.what}")
        allowed = inspect.signature(function).parameters
        defaults = vars(Bench(self.what))
        given = {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if getattr(self, option.name) != defaults[option.name]
        }
        for name, value in given.items():
            if name not in allowed:
                raise ValueError(
                    f"{name}={value!r} does not go with bench {self.what}; "
                    f"allowed: {', '.join(allowed)}"
                )
        function(**given)
