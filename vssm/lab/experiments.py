"""The results of the paper's experiments, from the files that `vssm reproduce` keeps."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vssm.config import KINDS

__all__ = ["DATA_SETS", "read_results", "scored_runs", "summary"]

DATA_SETS = ("mnist", "cifar10", "digits")
_NUMBERS = (int, float, type(None))
_SUMMARY = ("log_likelihood", "partial_log_likelihood", "generate_ms_b1", "train_seconds")
_ENVELOPE = ("name", "date", "command", "machine", "config", "metrics")
Result = dict[str, Any]


def read_results(paths: Iterable[Path]) -> list[Result]:
    """Reads result files and adds its own `path` to each; raises for a damaged one."""
    results = []
    for path in sorted(paths):
        try:
            found = json.loads(path.read_bytes())
            if lacking := [key for key in _ENVELOPE if key not in found]:
                raise ValueError(f"it has no {lacking[0]!r}")
            if wrong := [k for k, v in found["metrics"].items() if type(v) not in _NUMBERS]:
                raise ValueError(f"metric {wrong[0]} is not a number")
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} is damaged: {error}; remove it") from None
        results.append({**found, "path": path})
    return results


def scored_runs(folder: Path, data: str) -> dict[str, list[Result]]:
    """Returns the scored runs of a data set by kind, in the order of seeds."""
    found: dict[str, list[Result]] = {}
    for result in read_results(folder.glob(f"{data}_*_seed[0-9]*.json")):
        found.setdefault(result["config"]["model"]["kind"], []).append(result)
    seed = lambda run: run["config"]["train"]["seed"]  # noqa: E731
    return {kind: sorted(found[kind], key=seed) for kind in KINDS if kind in found}


def summary(results: Path, data: str) -> str:
    """Writes the main metrics of a data set as a table: the mean over seeds of each model."""
    import pandas as pd

    runs = [(kind, run) for kind, own in scored_runs(results, data).items() for run in own]
    rows = [[kind, *(run["metrics"].get(name) for name in _SUMMARY)] for kind, run in runs]
    table: Any = pd.DataFrame(rows, columns=pd.Index(["model", *_SUMMARY]))
    means = table.set_index("model").astype(float).groupby("model", sort=False).mean()
    return means.round(2).to_string()
