"""`vssm bench`: how long things take."""

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import tyro

__all__ = ["Bench"]


@dataclass
class Bench:
    """Times the selective scan, training, generation, forecasts or the paper's Table 1, beside peers."""

    what: tyro.conf.Positional[Literal["scan", "train", "generate", "forecast", "table1"]]
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
    """Time the peers that are installed (scan, train, generate)."""
    check: bool = False
    """Measure errors against float64 too (scan on CUDA)."""
    shapes: tuple[str, ...] = ()
    """Problems as BxT or BxTxDxN (scan)."""
    kinds: tuple[str, ...] = ()
    """The models (train, generate, table1: all by default; forecast: vssm and rnn)."""
    levels: tuple[int, ...] = ()
    """Add the vssm with so many levels of latents, as vssm_l<L> (train, generate, table1)."""
    batch: int | None = None
    """Sequences in a pass (train, table1)."""
    steps: int | None = None
    """Steps that are timed (train)."""
    batches: tuple[int, ...] = ()
    """Numbers of sequences (generate)."""
    lengths: tuple[int, ...] = ()
    """Numbers of steps in a sequence (generate, table1), or horizons (forecast)."""
    series: int | None = None
    """Series that are forecast at once (forecast)."""
    paths: int | None = None
    """Sample paths of each (forecast)."""
    patches: tuple[int, ...] = ()
    """Points in a step of the models (forecast)."""
    context: int | None = None
    """Points of history (forecast)."""
    width: int | None = None
    """Width of the models (not scan)."""
    layers: int | None = None
    """Depth of every stack (not scan)."""
    repeats: int | None = None
    """How often each call is timed (not train)."""
    seconds_per_point: float | None = None
    """What all calls for one number may take (generate, forecast, table1)."""

    def run(self) -> None:
        from vssm.lab import bench

        functions = {
            "scan": bench.main_scan,
            "train": bench.main_train,
            "generate": bench.main_generate,
            "forecast": bench.main_forecast,
            "table1": bench.main_table1,
        }
        function = functions[self.what]
        defaults, allowed = Bench(self.what), inspect.signature(function).parameters
        names = [option.name for option in fields(self) if option.name != "what"]
        given = {
            name: getattr(self, name)
            for name in names
            if getattr(self, name) != getattr(defaults, name)
        }
        for name, value in given.items():
            if name not in allowed:
                raise ValueError(
                    f"{name}={value!r} does not go with bench {self.what}; allowed: {', '.join(allowed)}"
                )
        function(**given)
