"""`vssm sweep`: a grid of runs."""

from dataclasses import dataclass
from pathlib import Path

from vssm.cli.options import RunOptions
from vssm.lab.sweep import sweep


@dataclass(frozen=True, kw_only=True)
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

    def run(self) -> None:
        config, kinds = self.run_config(), self.kinds or None
        rows = sweep(config, self.out, self.learning_rates, self.seeds, kinds)
        print(f"table: {self.out / 'sweep.json'}")
        failed = sum(row["status"] == "failed" for row in rows)
        if failed:
            raise ValueError(f"{failed} of {len(rows)} runs failed; their reasons are above")
