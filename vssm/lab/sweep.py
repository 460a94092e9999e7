"""A grid of runs: every kind, learning rate and seed, in this process or on a Ray cluster.

| file | what |
| --- | --- |
| `KIND-lrRATE-seedSEED/` | the run folder of a combination |
| `sweep.json` | `runs`, one row per combination that has ended, and `best`, one entry per kind |

A combination whose run has ended is not run again, one that was begun is taken up at its last checkpoint, and
one that failed is tried again. What stands in the run folders decides; `sweep.json` is written, never read.
"""

import json
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vssm.config import RunConfig
from vssm.runs.folder import RunFolder, claim
from vssm.storage import write_atomically
from vssm.training.loop import train
from vssm.training.progress import Progress, choose_progress

__all__ = ["LEARNING_RATES", "run_all", "sweep"]

LEARNING_RATES = (1e-2, 5e-3, 1e-3, 5e-4, 1e-4)
"""The paper's grid."""
_RETRIES = 3  # of a run whose worker died; it is taken up at its last checkpoint
_PATIENCE = 10.0  # seconds for a cluster to answer


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
    """Trains every combination that has not been trained yet, and says which learning rate is best.

    A run that fails is a row with its reason and does not stop the others.

    Arguments:
        base: The run; its kind, learning rate and seed are replaced.
        folder: Where the run folders and `sweep.json` go, of one sweep at a time; every machine of a cluster
            must see it.
        learning_rates: Highest learning rates.
        seeds: Seeds of the training; the data are the same in all runs.
        kinds: Kinds of models; that of `base` when not given.
        ray_address: A Ray cluster: "auto", "HOST:PORT" or "ray://HOST:PORT", or "local" for one that is
            started on this machine; None trains one run after another in this process. If the process is
            connected to Ray already, that cluster is used.
        progress: What shows how it goes; by default a bar on a terminal, lines elsewhere.
        num_cpus: Cores of a run on Ray.
        num_gpus: GPUs of a run on Ray; by default one where the cluster has any and the device may be one.

    Returns:
        The rows of `sweep.json`: `kind`, `learning_rate`, `seed`, `folder` (inside the sweep's), `status`
        ("finished" or "failed"), `validation_loss` (the best; minus the bound if `train.select` is "bound"),
        `seconds` and `reason`. The best of a kind has the lowest median over seeds, where a run that failed
        counts as infinite.
    """
    grid = _grid(base, learning_rates, seeds, kinds or (base.model.kind,))
    folder = Path(folder).resolve()
    _check(grid, folder, ray_address)
    folder.mkdir(parents=True, exist_ok=True)
    # Another sweep would find runs in use, record them as failed, and write sweep.json over this one's.
    with claim(folder, "sweep folder") or nullcontext():
        return run_all(grid, folder, ray_address, progress, num_cpus, num_gpus)


def run_all(
    configs: Mapping[str, RunConfig],
    folder: str | Path,
    ray_address: str | None = None,
    progress: Progress | None = None,
    num_cpus: float = 1,
    num_gpus: float | None = None,
    finish: Callable[[Path], object] | None = None,
) -> list[dict[str, Any]]:
    """Trains every run that has not been trained yet: what `sweep` does, for any runs.

    Arguments:
        configs: The runs by the names of their folders.
        folder: As in `sweep`.
        ray_address: As in `sweep`.
        progress: As in `sweep`.
        num_cpus: As in `sweep`.
        num_gpus: As in `sweep`.
        finish: Called with the folder of every run that has ended, now or before, where it was trained; one
            that fails makes its run a failed one. On Ray it must be a function of a module.

    Returns:
        The rows of `sweep.json`, as `sweep` does.
    """
    folder = Path(folder).resolve()
    _check(configs, folder, ray_address)
    folder.mkdir(parents=True, exist_ok=True)

    ended = {
        name: row for name, config in configs.items() if (row := _ended(config, folder / name))
    }
    waiting = {
        name: config for name, config in configs.items() if name not in ended or finish is not None
    }
    show = progress or choose_progress()
    show.message(f"sweep {str(folder)!r}: {len(configs)} runs, {len(ended)} of them ended before")
    _write(folder, [ended[name] for name in configs if name in ended])
    if ray_address is None or not waiting:
        rows = (_run(config, folder / name, finish, show) for name, config in waiting.items())
    else:
        rows = _run_on_ray(waiting, folder, ray_address, num_cpus, num_gpus, finish)
    with closing(rows):  # stopped here, tasks on a cluster are stopped too
        for row in rows:
            ended[row["folder"]] = row
            _write(folder, [ended[name] for name in configs if name in ended])
            show.message(f"{len(ended)}/{len(configs)}  {_describe(row)}")
    return [ended[name] for name in configs]


def _grid(
    base: RunConfig, learning_rates: Sequence[float], seeds: Sequence[int], kinds: Sequence[str]
) -> dict[str, RunConfig]:
    """The configs by the names of their folders; the configs check the values."""
    for name, values in (("learning_rates", learning_rates), ("seeds", seeds), ("kinds", kinds)):
        if not values or len(set(values)) < len(values):
            raise ValueError(
                f"{name}={tuple(values)!r} is not allowed; allowed: one or more different values"
            )
    configs = [
        replace(
            base,
            model=replace(base.model, kind=kind),
            train=replace(base.train, learning_rate=float(rate), seed=seed),
        )
        for kind in kinds
        for rate in learning_rates
        for seed in seeds
    ]
    return {f"{c.model.kind}-lr{c.train.learning_rate!r}-seed{c.train.seed}": c for c in configs}


def _check(configs: Mapping[str, RunConfig], folder: Path, ray_address: str | None) -> None:
    """Raises when the runs can not be started like this, before anything is written."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ValueError(
            "sweep was started by torchrun; allowed: one process, with ray_address for many GPUs"
        )
    if ray_address is not None:
        _import_ray()
    for name, config in configs.items():
        RunFolder(folder / name).check_same(config)


def _row(config: RunConfig, folder: Path, **values: Any) -> dict[str, Any]:  # noqa: ANN401
    row = {
        "kind": config.model.kind,
        "learning_rate": config.train.learning_rate,
        "seed": config.train.seed,
    }
    return {**row, "folder": folder.name, **values}


def _ended(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """Returns the row of a run that has ended: `train` writes so to meta.json as the last thing."""
    try:
        facts = json.loads((folder / "meta.json").read_bytes())
        if not facts["ended"]:
            return None
        loss, seconds = facts["best_validation_loss"], facts["seconds"]
        loss = loss if loss is not None and math.isfinite(loss) else None
        if not math.isfinite(seconds):
            return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return _row(
        config, folder, status="finished", validation_loss=loss, seconds=seconds, reason=None
    )


def _run(
    config: RunConfig,
    folder: Path,
    finish: Callable[[Path], object] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Trains from wherever the run is, and returns its row."""
    start = time.monotonic()
    try:
        if _ended(config, folder) is None:
            train(config, folder, (folder / "config.json").exists(), progress or Progress())
        if finish is not None:
            finish(folder)
    except BrokenPipeError:  # of our output
        raise
    except Exception as error:
        return _failed(config, folder, error, time.monotonic() - start)
    row = _ended(config, folder)
    assert row is not None
    return row


def _failed(
    config: RunConfig, folder: Path, error: Exception, seconds: float | None
) -> dict[str, Any]:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    reason = kind + " ".join(str(error).split())
    seconds = None if seconds is None else round(seconds, 3)
    return _row(
        config, folder, status="failed", validation_loss=None, seconds=seconds, reason=reason
    )


def _run_on_ray(
    configs: dict[str, RunConfig],
    folder: Path,
    address: str,
    num_cpus: float,
    num_gpus: float | None,
    finish: Callable[[Path], object] | None,
) -> Generator[dict[str, Any]]:
    """Runs every config as a Ray task and yields rows as they come; left early, it stops the tasks."""
    ray = _import_ray()
    own = not ray.is_initialized()
    if own:
        _connect(ray, address)
    names: dict[Any, str] = {}
    try:
        if num_gpus is None:
            device = next((config.train.device for config in configs.values()), "cpu")
            num_gpus = 1 if device != "cpu" and ray.cluster_resources().get("GPU", 0) else 0
        task = ray.remote(_run).options(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=_RETRIES)
        names = {
            task.remote(config, folder / name, finish): name for name, config in configs.items()
        }
        while names:
            (done,), _ = ray.wait(list(names))
            name = names.pop(done)
            try:
                row = ray.get(done)
            except ray.exceptions.RayError as error:
                row = _failed(configs[name], folder / name, error, None)
            yield row
    finally:
        for task in names:
            ray.cancel(task, force=True)  # a run folder is whole at any moment
        if own:
            ray.shutdown()


def _import_ray() -> Any:  # noqa: ANN401
    try:
        import ray
    except ImportError:
        raise ValueError(
            "ray is not installed; allowed: pip install 'vssm[cluster]', or no --ray-address"
        ) from None
    return ray


def _connect(ray: Any, address: str) -> None:  # noqa: ANN401
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # ours to decide: it is our cluster
        options["include_dashboard"] = False
    try:
        if address not in ("auto", "local"):
            _knock(address)
        ray.init(address, **options)
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"ray_address={address!r} can not be used: {reason}") from None


def _knock(address: str) -> None:
    """Raises where nobody listens: Ray itself asks for minutes."""
    place = urlsplit(f"//{address.removeprefix('ray://')}")
    try:
        host, port = place.hostname, place.port
    except ValueError:  # no number, or none of a port
        host = port = None
    if host is None or port is None:
        raise ValueError("allowed: auto, local, HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host, port), timeout=_PATIENCE).close()
    except OSError as error:
        raise ConnectionError(f"nobody answers there ({error})") from None


def _best(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns, for every kind, the learning rate with the lowest median loss over seeds."""
    losses: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        loss = math.inf if row["validation_loss"] is None else row["validation_loss"]
        losses.setdefault(row["kind"], {}).setdefault(row["learning_rate"], []).append(loss)
    best = {}
    for kind, rates in losses.items():
        rate, loss = min(
            ((r, statistics.median(ls)) for r, ls in rates.items()), key=lambda pair: pair[1]
        )
        if math.isfinite(loss):
            best[kind] = {"learning_rate": rate, "validation_loss": loss}
    return best


def _write(folder: Path, rows: list[dict[str, Any]]) -> None:
    text = json.dumps({"best": _best(rows), "runs": rows}, indent=2, allow_nan=False) + "\n"
    write_atomically(folder / "sweep.json", lambda path: path.write_text(text))


def _describe(row: dict[str, Any]) -> str:
    if row["status"] == "failed":
        return f"{row['folder']} failed: {row['reason']}"
    loss = "not finite" if row["validation_loss"] is None else f"{row['validation_loss']:.2f}"
    return f"{row['folder']}: validation loss {loss} after {row['seconds']:.0f} s"
