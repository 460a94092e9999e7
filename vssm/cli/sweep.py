"""`vssm sweep`: a grid of runs."""

from dataclasses import dataclass
from pathlib import Path

from vssm.cli.options import RunOptions

__all__ = ["Sweep"]


@dataclass
class Sweep(RunOptions):
    """Trains over a grid of learning rates, seeds and kinds; what is done already is skipped."""

    out: Path = Path("runs/sweep")
    """The folder for the runs and sweep.json."""
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

        rows = sweep(
            self.run_config(),
            self.out,
            self.learning_rates,
            self.seeds,
            self.kinds or None,
            self.ray_address,
        )
        for row in rows:
            loss = (
                ""
                if row["validation_loss"] is None
                else f"  validation loss {row['validation_loss']:.3f}"
            )
            print(f"{row['folder']}: {row['status']}{loss}  {row['reason'] or ''}".rstrip())
        print(f"table: {self.out / 'sweep.json'}")
        failed = sum(row["status"] == "failed" for row in rows)
        if failed:
            raise ValueError(f"{failed} of {len(rows)} runs failed, as said above")
