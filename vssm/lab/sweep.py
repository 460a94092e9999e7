"""`vssm sweep`: every kind, learning rate and seed, and the best learning rate of each kind.

| file | what |
| --- | --- |
| `KIND-lrRATE-seedSEED/` | the run folder of a combination |
| `sweep.json` | `runs`, one row per combination that has ended, and `best`, one entry per kind |

`sweep.json` is written after each run and never read: see `vssm.lab.grid`.
"""

import json
import math
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from vssm.config import RunConfig
from vssm.data.storage import write_atomically
from vssm.lab.grid import LEARNING_RATES, check_grid, grid_configs, run_grid
from vssm.runs.folder import claim
from vssm.training.progress import Progress, choose_progress

__all__ = ["sweep"]


def sweep(
    base: RunConfig,
    folder: str | Path,
    learning_rates: Sequence[float] = LEARNING_RATES,
    seeds: Sequence[int] = (0,),
    kinds: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Trains every combination that has not been trained yet, and finds the best learning rate.

    A run that fails becomes a row with its reason and does not stop the others.

    Arguments:
        base: The run; its kind, learning rate and seed are replaced.
        folder: Where the run folders and `sweep.json` go. Only one sweep may use it at a time.
        learning_rates: Highest learning rates.
        seeds: Seeds of the training; the data are the same in all runs.
        kinds: Kinds of models; the kind of `base` when not given.
        progress: What shows the progress; by default a bar on a terminal, lines elsewhere.

    Returns:
        The rows of `sweep.json`: `kind`, `learning_rate`, `seed`, `folder` (inside the sweep's),
        `status` ("finished" or "failed"), `validation_loss` (the best; minus the bound if
        `train.select` is "bound"), `seconds` and `reason`. The best rate of a kind has the lowest
        median over seeds, where a failed run counts as infinite.
    """
    configs = grid_configs(base, kinds or (base.model.kind,), learning_rates, seeds)
    folder = Path(folder).resolve()
    check_grid(configs, folder)
    folder.mkdir(parents=True, exist_ok=True)
    show, ended = progress or choose_progress(), {}
    # Another sweep would find runs in use, record them as failed, and overwrite sweep.json.
    with claim(folder, "sweep folder") or nullcontext():
        for row in run_grid(configs, folder, show):
            ended[row["folder"]] = row
            done = [ended[name] for name in configs if name in ended]
            text = json.dumps({"best": _best(done), "runs": done}, indent=2, allow_nan=False)
            write_atomically(folder / "sweep.json", lambda path, t=text: path.write_text(f"{t}\n"))
    return [ended[name] for name in configs]


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the rate with the lowest median loss of each kind, if that is finite."""
    losses: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        loss = math.inf if row["validation_loss"] is None else row["validation_loss"]
        losses.setdefault(row["kind"], {}).setdefault(row["learning_rate"], []).append(loss)
    best = {}
    for kind, rates in losses.items():
        medians = {rate: statistics.median(values) for rate, values in rates.items()}
        rate = min(medians, key=lambda rate: medians[rate])
        if math.isfinite(medians[rate]):
            best[kind] = {"learning_rate": rate, "validation_loss": medians[rate]}
    return best
