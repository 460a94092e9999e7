"""A grid of runs, trained one after another in this process or side by side on a Ray cluster.

A run that has ended is not repeated, a run that was stopped continues from its last checkpoint, and
a run that failed is tried again. Only the run folders decide, so a grid can be killed at any time.
"""

import json
import math
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
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
_RETRIES = 3  # of a run whose worker died; it continues from its last checkpoint

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


def check_grid(configs: Mapping[str, RunConfig], folder: Path, ray_address: str | None) -> None:
    """Raises `ValueError`, before anything is written, when the runs can not be started."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ValueError(
            "a grid of runs was started by torchrun; start one process, and use Ray for many GPUs"
        )
    if ray_address is not None and find_spec("ray") is None:
        raise ValueError(
            "ray is not installed; pip install 'vssm[cluster]', or leave out --ray-address"
        )
    for name, config in configs.items():
        RunFolder(folder / name).check_same(config)


def run_grid(
    configs: Mapping[str, RunConfig],
    folder: Path,
    ray_address: str | None,
    progress: Progress,
    finish: Finish | None = None,
) -> Generator[Row]:
    """Trains the runs that have not ended yet; yields the row of each run as soon as it is known.

    Closing the generator stops the runs on a cluster.

    Arguments:
        configs: The runs by the names of their folders.
        folder: Where the run folders go; every machine of a cluster must see it.
        ray_address: A Ray cluster, or None for this process.
        progress: What shows the progress.
        finish: Called with the folder of every run that has ended, now or before, on the machine
            that trained it. If it raises, the run counts as failed. On Ray it must be picklable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = {name: row for name, c in configs.items() if (row := _ended_row(c, folder / name))}
    progress.message(f"{folder}: {len(configs)} runs, {len(ended)} of them ended before")
    if finish is None:
        yield from ended.values()
        configs = {name: config for name, config in configs.items() if name not in ended}
    if ray_address is None:
        rows = (run_one(c, folder / name, finish, progress) for name, c in configs.items())
    else:
        rows = _run_on_ray(configs, folder, ray_address, finish)
    with closing(rows):  # which stops the tasks of a cluster
        for done, row in enumerate(rows, start=1):
            yield row
            loss = row["validation_loss"]
            told = f"validation loss {'not finite' if loss is None else f'{loss:.2f}'}"
            told = f"failed: {row['reason']}" if row["status"] == "failed" else told
            progress.message(f"{done}/{len(configs)}  {row['folder']}: {told}")


def run_one(
    config: RunConfig, folder: Path, finish: Finish | None, progress: Progress | None = None
) -> Row:
    """Trains a run from wherever it is, and returns its row."""
    start = time.monotonic()
    try:
        if _ended_row(config, folder) is None:
            train(config, folder, (folder / "config.json").exists(), progress or Progress())
        if finish is not None:
            finish(folder)
    except BrokenPipeError:  # nobody reads our output any more
        raise
    except Exception as error:
        return _failed_row(config, folder, error, round(time.monotonic() - start, 3))
    row = _ended_row(config, folder)
    assert row is not None
    return row


def _row(config: RunConfig, folder: Path, **values: Any) -> Row:  # noqa: ANN401
    options = {"learning_rate": config.train.learning_rate, "seed": config.train.seed}
    return {"kind": config.model.kind, **options, "folder": folder.name, **values}


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
    measured = {"validation_loss": loss, "seconds": seconds, "reason": None}
    return _row(config, folder, status="finished", **measured)


def _failed_row(config: RunConfig, folder: Path, error: Exception, seconds: float | None) -> Row:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    reason = kind + " ".join(str(error).split())
    measured = {"validation_loss": None, "seconds": seconds, "reason": reason}
    return _row(config, folder, status="failed", **measured)


def _run_on_ray(
    configs: Mapping[str, RunConfig], folder: Path, address: str, finish: Finish | None
) -> Generator[Row]:
    """Runs every config as a Ray task and yields rows as they come; stops the tasks when closed."""
    ray: Any = import_module("ray")  # an extra, and untyped
    own = not ray.is_initialized()
    if own:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address == "local":  # a cluster of our own reports nothing
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options["include_dashboard"] = False
        try:
            ray.init(address, **options)
        except (OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"ray_address={address!r} can not be used: {reason}") from None
    names: dict[Any, str] = {}
    try:
        wants_gpu = any(config.train.device != "cpu" for config in configs.values())
        num_gpus = 1 if wants_gpu and ray.cluster_resources().get("GPU", 0) else 0
        task = ray.remote(run_one).options(num_cpus=1, num_gpus=num_gpus, max_retries=_RETRIES)
        for name, config in configs.items():
            names[task.remote(config, folder / name, finish)] = name
        while names:
            (done,), _ = ray.wait(list(names))
            name = names.pop(done)
            try:
                yield ray.get(done)
            except ray.exceptions.RayError as error:
                yield _failed_row(configs[name], folder / name, error, None)
    finally:
        for task in names:
            ray.cancel(task, force=True)  # a run folder is whole at any moment
        if own:
            ray.shutdown()
