"""A grid of runs, trained one after another in this process.

A run that has ended is not repeated, a run that was stopped continues from its last checkpoint, and
a run that failed is tried again. Only the run folders decide, so a grid can be killed at any time.
"""

import json
import math
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vssm.checks import check_choice
from vssm.config import KINDS, RunConfig
from vssm.runs.folder import RunFolder
from vssm.training.loop import train
from vssm.training.progress import Progress

__all__ = ["LEARNING_RATES", "check_grid", "grid_configs", "run_grid"]

LEARNING_RATES = (1e-2, 5e-3, 1e-3, 5e-4, 1e-4)
"""The paper's grid."""

Row = dict[str, Any]
"""`kind`, `learning_rate`, `seed`, `folder` (its name), `status` ("finished" or "failed"),
`validation_loss` (the best one), `seconds` and `reason`."""
Finish = Callable[[Path], object]


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
    """Raises `ValueError`, before anything is written, when the runs can not be started."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ValueError("a grid of runs was started by torchrun; start it without")
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
    ended = {name: row for name, c in configs.items() if (row := _ended_row(c, folder / name))}
    progress.message(f"{folder}: {len(configs)} runs, {len(ended)} of them ended before")
    if finish is None:
        yield from ended.values()
        configs = {name: config for name, config in configs.items() if name not in ended}
    for done, (name, config) in enumerate(configs.items(), start=1):
        row = _run_one(config, folder / name, finish, progress)
        yield row
        loss = row["validation_loss"]
        told = f"validation loss {'not finite' if loss is None else f'{loss:.2f}'}"
        told = f"failed: {row['reason']}" if row["status"] == "failed" else told
        progress.message(f"{done}/{len(configs)}  {name}: {told}")


def _run_one(config: RunConfig, folder: Path, finish: Finish | None, progress: Progress) -> Row:
    """Trains a run from wherever it is, and returns its row."""
    start = time.monotonic()
    try:
        if _ended_row(config, folder) is None:
            train(config, folder, (folder / "config.json").exists(), progress)
        if finish is not None:
            finish(folder)
    except BrokenPipeError:  # nobody reads our output any more
        raise
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = kind + " ".join(str(error).split())
        seconds = round(time.monotonic() - start, 3)
        return _row(config, folder, "failed", None, seconds, reason)
    row = _ended_row(config, folder)
    assert row is not None
    return row


def _row(
    config: RunConfig,
    folder: Path,
    status: str,
    loss: float | None,
    seconds: float,
    reason: str | None = None,
) -> Row:
    return {
        "kind": config.model.kind,
        "learning_rate": config.train.learning_rate,
        "seed": config.train.seed,
        "folder": folder.name,
        "status": status,
        "validation_loss": loss,
        "seconds": seconds,
        "reason": reason,
    }


def _ended_row(config: RunConfig, folder: Path) -> Row | None:
    """Returns the row of a run that has ended, which `train` records in meta.json at the end."""
    try:
        facts = json.loads((folder / "meta.json").read_bytes())
        loss, seconds = facts["best_validation_loss"], float(facts["seconds"])
        loss = float(loss) if loss is not None and math.isfinite(loss) else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if not facts["ended"]:
        return None
    return _row(config, folder, "finished", loss, seconds)
