"""`vssm sweep`: every kind, learning rate and seed, and the best learning rate of each kind.

| file | what |
| --- | --- |
| `KIND-lrRATE-seedSEED/` | the run folder of a combination |
| `sweep.json` | `runs`, one row per combination that has ended, and `best`, one entry per kind |

`sweep.json` is written after each run and never read. Only the run folders decide, so a sweep can
be killed at any time: a run that has ended is not repeated, a run that was stopped continues from
its last checkpoint, and a run that failed is tried again.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from vssm.checks import check_choice
from vssm.config import KINDS, RunConfig
from vssm.data.storage import write_atomically
from vssm.runs.folder import RunFolder, claim
from vssm.training.loop import train
from vssm.training.progress import Progress, choose_progress

LEARNING_RATES = (1e-2, 5e-3, 1e-3, 5e-4, 1e-4)
"""The paper's grid."""

Row = dict[str, Any]
Finish = Callable[[Path], object]


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


def _best(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Returns the rate with the lowest median loss of each kind, if that is finite."""
    losses: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        loss = math.inf if row["validation_loss"] is None else row["validation_loss"]
        losses.setdefault((row["kind"], row["learning_rate"]), []).append(loss)
    best: dict[str, dict[str, float]] = {}
    for (kind, rate), values in losses.items():
        median = statistics.median(values)
        if median < best.get(kind, {}).get("validation_loss", math.inf):
            best[kind] = {"learning_rate": rate, "validation_loss": median}
    return best


def grid_configs(
    base: RunConfig, kinds: Sequence[str], learning_rates: Sequence[float], seeds: Sequence[int]
) -> dict[str, RunConfig]:
    """Returns the runs of a grid by the names of their folders; each is checked."""
    given = {"kinds": kinds, "learning_rates": learning_rates, "seeds": seeds}
    for name, values in given.items():
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name}={tuple(values)!r} must be one or more different values")
    for kind in kinds:
        check_choice("kind", kind, KINDS)
    return {
        f"{kind}-lr{rate!r}-seed{seed}": replace(
            base,
            model=replace(base.model, kind=kind),
            train=replace(base.train, learning_rate=rate, seed=seed),
        )
        for kind in kinds
        for rate in map(float, learning_rates)
        for seed in seeds
    }


def check_grid(configs: Mapping[str, RunConfig], folder: Path) -> None:
    """Raises `ValueError`, before anything is written, when the runs cannot be started."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ValueError("torchrun cannot start a grid of runs; start it without torchrun")
    for name, config in configs.items():
        RunFolder(folder / name).check_same(config)


def run_grid(
    configs: Mapping[str, RunConfig],
    folder: Path,
    progress: Progress,
    finish: Finish | None = None,
) -> Generator[Row]:
    """Trains the runs that have not ended yet; yields the row of each run as soon as it is known.

    Arguments:
        configs: The runs by the names of their folders.
        folder: Where the run folders go.
        progress: What shows the progress.
        finish: Called with the folder of every run that has ended, now or before. If it raises,
            the run counts as failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = [name for name in configs if _outcome(folder / name)]
    progress.message(f"{folder}: {len(configs)} runs, {len(ended)} of them ended before")
    for done, name in enumerate(dict.fromkeys([*ended, *configs]), start=1):
        row = _run_one(configs[name], folder / name, finish, progress)
        yield row
        loss = row["validation_loss"]
        outcome = f"validation loss {'not finite' if loss is None else f'{loss:.2f}'}"
        outcome = f"failed: {row['reason']}" if row["status"] == "failed" else outcome
        progress.message(f"{done}/{len(configs)}  {name}: {outcome}")


def _run_one(config: RunConfig, folder: Path, finish: Finish | None, progress: Progress) -> Row:
    """Trains a run from wherever it is, and returns its row."""
    start, status, reason = time.monotonic(), "finished", None
    try:
        if _outcome(folder) is None:
            train(config, folder, (folder / "config.json").exists(), progress)
        if finish is not None:
            finish(folder)
        outcome = _outcome(folder)
        assert outcome is not None
    except BrokenPipeError:  # nobody reads our output any more
        raise
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        status, reason = "failed", kind + " ".join(str(error).split())
        outcome = None, round(time.monotonic() - start, 3)
    return {
        "kind": config.model.kind,
        "learning_rate": config.train.learning_rate,
        "seed": config.train.seed,
        "folder": folder.name,
        "status": status,
        "validation_loss": outcome[0],
        "seconds": outcome[1],
        "reason": reason,
    }


def _outcome(folder: Path) -> tuple[float | None, float] | None:
    """Returns the best loss and the seconds of a run that has ended, as `train` records them."""
    try:
        facts = json.loads((folder / "meta.json").read_bytes())
        loss, seconds = facts["best_validation_loss"], float(facts["seconds"])
        loss = float(loss) if loss is not None and math.isfinite(loss) else None
        return (loss, seconds) if facts["ended"] else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
