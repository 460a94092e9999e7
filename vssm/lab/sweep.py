"""A grid of runs: every kind, learning rate and seed, in this process or on a Ray cluster.

| file | what |
| --- | --- |
| `KIND-lrRATE-seedSEED/` | the run folder of a combination |
| `sweep.json` | `runs`, one row per combination that has ended, and `best`, one entry per kind |

A run that has ended is not repeated, a run that was stopped continues from its last checkpoint, and
a run that failed is tried again. The run folders decide; `sweep.json` is written but never read.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vssm.config import RunConfig
from vssm.runs.folder import RunFolder, claim
from vssm.storage import write_atomically
from vssm.training.loop import train
from vssm.training.progress import Progress, choose_progress

__all__ = ["LEARNING_RATES", "check_values", "run_all", "run_name", "sweep"]

LEARNING_RATES = (1e-2, 5e-3, 1e-3, 5e-4, 1e-4)
"""The paper's grid."""
_RETRIES = 3  # of a run whose worker died; it continues from its last checkpoint


def sweep(
    base: RunConfig,
    folder: str | Path,
    learning_rates: Sequence[float] = LEARNING_RATES,
    seeds: Sequence[int] = (0,),
    kinds: Sequence[str] | None = None,
    ray_address: str | None = None,
    progress: Progress | None = None,
    num_cpus: float = 1,
    num_gpus: float | None = None,
) -> list[dict[str, Any]]:
    """Trains every combination that has not been trained yet, and finds the best learning rate.

    A run that fails becomes a row with its reason and does not stop the others.

    Arguments:
        base: The run; its kind, learning rate and seed are replaced.
        folder: Where the run folders and `sweep.json` go. Only one sweep may use it at a time, and
            every machine of a cluster must see it.
        learning_rates: Highest learning rates.
        seeds: Seeds of the training; the data are the same in all runs.
        kinds: Kinds of models; the kind of `base` when not given.
        ray_address: A Ray cluster: "auto", "HOST:PORT" or "ray://HOST:PORT", or "local" to start
            one on this machine. None trains one run after another in this process. If the process
            is connected to Ray already, that cluster is used.
        progress: What shows the progress; by default a bar on a terminal, lines elsewhere.
        num_cpus: Cores of a run on Ray.
        num_gpus: GPUs of a run on Ray; by default one, if the cluster has GPUs and the device of
            the runs is not the CPU.

    Returns:
        The rows of `sweep.json`: `kind`, `learning_rate`, `seed`, `folder` (inside the sweep's),
        `status` ("finished" or "failed"), `validation_loss` (the best; minus the bound if
        `train.select` is "bound"), `seconds` and `reason`. The best rate of a kind has the lowest
        median over seeds, where a failed run counts as infinite.
    """
    kinds = kinds or (base.model.kind,)
    check_values(learning_rates=learning_rates, seeds=seeds, kinds=kinds)
    configs: dict[str, RunConfig] = {}
    for kind in kinds:
        for rate in map(float, learning_rates):
            for seed in seeds:
                model = replace(base.model, kind=kind)
                options = replace(base.train, learning_rate=rate, seed=seed)
                configs[run_name(kind, rate, seed)] = replace(base, model=model, train=options)
    folder = Path(folder).resolve()
    _check(configs, folder, ray_address)
    folder.mkdir(parents=True, exist_ok=True)
    # Another sweep would find runs in use, record them as failed, and overwrite sweep.json.
    with claim(folder, "sweep folder") or nullcontext():
        return run_all(configs, folder, ray_address, progress, num_cpus, num_gpus)


def run_all(
    configs: Mapping[str, RunConfig],
    folder: Path,
    ray_address: str | None = None,
    progress: Progress | None = None,
    num_cpus: float = 1,
    num_gpus: float | None = None,
    finish: Callable[[Path], object] | None = None,
) -> list[dict[str, Any]]:
    """Trains the runs that have not been trained yet; `configs` has them by folder name.

    Options and rows are those of `sweep`. `finish` is called with the folder of every run that has
    ended, now or before, on the machine that trained it; if it raises, the run counts as failed. On
    Ray it must be a function of a module.
    """
    _check(configs, folder, ray_address)
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: _ended_row(config, folder / name) for name, config in configs.items()}
    ended = {name: row for name, row in found.items() if row}
    waiting = {name: configs[name] for name in configs if name not in ended or finish is not None}
    show = progress or choose_progress()
    show.message(f"sweep {str(folder)!r}: {len(configs)} runs, {len(ended)} of them ended before")
    _write(folder, ended, configs)
    if ray_address is None:
        rows = (run_one(config, folder / name, finish, show) for name, config in waiting.items())
    else:
        rows = _run_on_ray(waiting, folder, ray_address, num_cpus, num_gpus, finish)
    with closing(rows):  # if stopped here, tasks on a cluster are stopped too
        for row in rows:
            ended[row["folder"]] = row
            _write(folder, ended, configs)
            loss = row["validation_loss"]
            told = f"validation loss {'not finite' if loss is None else f'{loss:.2f}'}"
            told = f"failed: {row['reason']}" if row["status"] == "failed" else told
            show.message(f"{len(ended)}/{len(configs)}  {row['folder']}: {told}")
    return [ended[name] for name in configs]


def run_name(kind: str, rate: float, seed: int) -> str:
    """Returns the name of the folder of a run."""
    return f"{kind}-lr{rate!r}-seed{seed}"


def run_one(
    config: RunConfig,
    folder: Path,
    finish: Callable[[Path], object] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
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


def check_values(**options: Sequence[Any]) -> None:
    """Raises `ValueError` for an option that is empty or names a value twice."""
    for name, values in options.items():
        if not values or len(set(values)) < len(values):
            raise ValueError(
                f"{name}={tuple(values)!r} is not allowed; allowed: one or more different values"
            )


def _check(configs: Mapping[str, RunConfig], folder: Path, ray_address: str | None) -> None:
    """Raises, before anything is written, when the runs can not be started."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ValueError(
            "sweep was started by torchrun; start one process, and use ray_address for many GPUs"
        )
    if ray_address is not None and find_spec("ray") is None:
        raise ValueError(
            "ray is not installed; pip install 'vssm[cluster]', or leave out --ray-address"
        )
    for name, config in configs.items():
        RunFolder(folder / name).check_same(config)


def _row(config: RunConfig, folder: Path, **values: Any) -> dict[str, Any]:  # noqa: ANN401
    options = {"learning_rate": config.train.learning_rate, "seed": config.train.seed}
    return {"kind": config.model.kind, **options, "folder": folder.name, **values}


def _ended_row(config: RunConfig, folder: Path) -> dict[str, Any] | None:
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


def _failed_row(
    config: RunConfig, folder: Path, error: Exception, seconds: float | None
) -> dict[str, Any]:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    reason = kind + " ".join(str(error).split())
    measured = {"validation_loss": None, "seconds": seconds, "reason": reason}
    return _row(config, folder, status="failed", **measured)


def _run_on_ray(
    configs: dict[str, RunConfig],
    folder: Path,
    address: str,
    num_cpus: float,
    num_gpus: float | None,
    finish: Callable[[Path], object] | None,
) -> Generator[dict[str, Any]]:
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
        if num_gpus is None:
            wants_gpu = any(config.train.device != "cpu" for config in configs.values())
            num_gpus = 1 if wants_gpu and ray.cluster_resources().get("GPU", 0) else 0
        task = ray.remote(run_one)
        task = task.options(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=_RETRIES)
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


def _write(folder: Path, ended: Mapping[str, dict[str, Any]], order: Mapping[str, object]) -> None:
    rows = [ended[name] for name in order if name in ended]
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
    text = json.dumps({"best": best, "runs": rows}, indent=2, allow_nan=False) + "\n"
    write_atomically(folder / "sweep.json", lambda path: path.write_text(text))
