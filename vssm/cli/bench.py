"""`vssm bench`: how long things take."""

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import tyro

__all__ = ["Bench"]


@dataclass
class Bench:
    """Times the selective scan, training, generation or the paper's Table 1, beside installed peers."""

    what: tyro.conf.Positional[Literal["scan", "train", "generate", "table1"]]
    """What to time."""
    out: Path | None = None
    """Where the JSON goes, for example results/scan_cpu.json; a run that was stopped goes on from it."""
    plot: Path | None = None
    """Where a picture goes, .png or .svg."""
    restart: bool = False
    """Forget what the file holds."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""
    peers: bool = True
    """Time the peers that are installed (not table1)."""
    check: bool = False
    """Measure errors against float64 too (scan on CUDA)."""
    shapes: tuple[str, ...] = ()
    """Problems as BxT or BxTxDxN (scan)."""
    kinds: tuple[str, ...] = ()
    """The models (train, generate, table1); all by default."""
    levels: tuple[int, ...] = ()
    """Add the vssm with so many levels of latents, as vssm_l<L> (train, generate, table1)."""
    batch: int | None = None
    """Sequences in a pass (train, table1)."""
    steps: int | None = None
    """Steps that are timed (train)."""
    batches: tuple[int, ...] = ()
    """Numbers of sequences (generate)."""
    lengths: tuple[int, ...] = ()
    """Numbers of steps in a sequence (generate, table1)."""
    width: int | None = None
    """Width of the models (train, generate, table1)."""
    layers: int | None = None
    """Depth of every stack (train, generate, table1)."""
    repeats: int | None = None
    """How often each call is timed (scan, generate, table1)."""
    seconds_per_point: float | None = None
    """What all calls for one number may take (generate, table1)."""

    def run(self) -> None:
        from vssm import bench

        functions = {
            "scan": bench.main_scan,
            "train": bench.main_train,
            "generate": bench.main_generate,
            "table1": bench.main_table1,
        }
        function = functions[self.what]
        defaults, allowed = Bench(self.what), inspect.signature(function).parameters
        names = [option.name for option in fields(self) if option.name != "what"]
        given = {
            name: getattr(self, name) for name in names if getattr(self, name) != getattr(defaults, name)
        }
        for name, value in given.items():
            if name not in allowed:
                raise ValueError(
                    f"{name}={value!r} does not go with bench {self.what}; allowed: {', '.join(allowed)}"
                )
        function(**given)
