"""How the training of a run went, for its result."""

from collections.abc import Sequence
from pathlib import Path

from vssm.runs.folder import read_log


def validations(folder: Path) -> tuple[dict[str, float | None], dict[str, list[float | None]]]:
    """Returns the best validation of a run, and the bound on log p(x) of every validation.

    A run with `validate_partial` also has the bound of the second half given the first.
    """
    lines = [line for line in read_log(folder) if line["split"] == "valid"]
    for line in lines:
        terms = line["reconstruction"], line["kl"]
        line["elbo"] = None if None in terms else terms[0] - terms[1]
    kept = [line for line in lines if line.get("best")]  # the last of them has the best weights
    names = {"validation_loss": "loss", "validation_elbo": "elbo", "best_epoch": "epoch"}
    facts = {name: kept[-1][own] if kept else None for name, own in names.items()}
    curve = {"epoch": [line["epoch"] for line in lines]}
    curve["validation_elbo"] = _rounded([line["elbo"] for line in lines])
    if any("partial_elbo" in line for line in lines):
        curve["validation_partial_elbo"] = _rounded([line.get("partial_elbo") for line in lines])
    return facts, curve


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 3) for value in values]
