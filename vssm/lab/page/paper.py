"""The paper's experiments on the results page: likelihoods, times, verdicts, the grid of learning rates."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vssm.lab.page.figures import KINDS, Result, read_results, scored_runs
from vssm.lab.page.markdown import details, origins, short, table

__all__ = ["DATA_SETS", "SCALES", "experiments"]

DATA_SETS = ("mnist", "cifar10", "digits")
SCALES = {"paper": "The paper's experiments", "small": "The paper's experiments, small"}
_PAPER = (
    'The paper gives its numbers as figures only. In words it claims that the VSSM "competes with '
    'traditional models in terms of generation quality" and "produces decent results in only a fraction '
    'of the time". Likelihoods are in nats a sequence, higher is better, the mean over seeds with their '
    "range in brackets; by importance sampling for models with latents, exact for the others. A particle "
    "filter with as many draws is closer to what these are (`vssm evaluate --particles`). The "
    "second half is given the first. Times are milliseconds for one sequence, and for its second "
    "half given its first, with the version that made the run; they are compared where it is the same.",
    "Pictures show on the left bounds on the validation log-likelihood during training (the ELBO for models "
    "with latents, exact for the others), median and range over seeds, dashed that of the second half given "
    "the first, for models with a run that kept it; in the middle the test set; on the right samples, three "
    "rows from nothing and three that complete the upper half of a test image.",
)
_TRIED = {"config.model.kind": str, "metrics.epochs": float, "metrics.learning_rate": float}
_TRIED |= {"metrics.validation_loss": object}  # or null
_SMALL = "Small models, few steps and fewer learning rates, on a CPU."
_LIKE_PAPER = "Columns are those from above."


def experiments(folder: Path, scale: str, found: Sequence[str], alone: bool = False) -> list[str]:
    """Shows the runs of one scale.

    Arguments:
        folder: What `vssm reproduce` kept of it, if anything.
        scale: A key of `SCALES`.
        found: The data sets that have such runs there.
        alone: Whether no other scale is shown before.

    Returns:
        Parts of the page.
    """
    if scale != "paper" and not folder.is_dir():
        return []
    about = (
        [*_PAPER]
        if scale == "paper"
        else [_SMALL, *_PAPER]
        if alone
        else [f"{_SMALL} {_LIKE_PAPER}"]
    )
    parts = [f"## {SCALES[scale]}", *about]
    if not folder.is_dir():
        parts.append("No run of this scale is committed yet; `vssm reproduce mnist` makes them.")
    if found:
        parts.append(f"![Validation curves, test statistics and samples](pictures/{scale}.png)")
    for data in found:
        parts += _data_set(folder, scale, data)
    return parts


def _data_set(folder: Path, scale: str, data: str) -> list[str]:
    runs = scored_runs(folder, data)
    columns = {
        "seeds": lambda metrics: f"{len(metrics)}",
        "size": lambda metrics: _first(metrics, "parameters", lambda value: f"{value / 1e6:.3g} M"),
        "epochs": lambda metrics: _first(metrics, "epochs", short),
        "rate": lambda metrics: _first(metrics, "learning_rate", lambda value: f"{value:g}"),
        "log p(x)": lambda metrics: _spread(metrics, "log_likelihood", 1),
        "by particles": lambda metrics: _spread(metrics, "log_likelihood_particles", 1),
        "second half": lambda metrics: _spread(metrics, "partial_log_likelihood", 1),
        "half, by particles": lambda metrics: _spread(
            metrics, "partial_log_likelihood_particles", 1
        ),
        "ms": lambda metrics: _spread(metrics, "generate_ms_b1", 2),
        "ms, half": lambda metrics: _spread(metrics, "prompted_ms_b1", 2),
        "training, s": lambda metrics: _spread(metrics, "train_seconds", 0),
    }
    cells = {
        kind: {
            name: cell([result["metrics"] for result in results]) for name, cell in columns.items()
        }
        for kind, results in runs.items()
    }
    shown = [name for name in columns if any(row[name] for row in cells.values())]
    rows = [[kind, *(row[name] or "–" for name in shown)] for kind, row in cells.items()]
    parts = [f"### {data}", table(["model", *shown], rows), *_verdicts(runs), *_grid(folder, data)]
    parts.append(f"![More samples of every model](pictures/{scale}_{data}.png)")
    return [*parts, origins(result for results in runs.values() for result in results)]


def _verdicts(runs: dict[str, list[Result]]) -> list[str]:
    """Says in sentences how the vssm stands to the others."""
    lines = []
    for other in [kind for kind in runs if "vssm" in runs and kind != "vssm"]:
        pair = runs["vssm"], runs[other]
        full, half = (_ahead(*pair, name) for name in ("log_likelihood", "partial_log_likelihood"))
        line = f"- vssm against {other}: {full} nats in full, {half} in the second half"
        own, theirs = (_mean(results, "generate_ms_b1") for results in pair)
        if (
            own
            and theirs
            and len({result.get("commit") for results in pair for result in results}) == 1
        ):
            ratio = theirs / own
            speed = f"{ratio:.1f} times faster" if ratio >= 1 else f"{1 / ratio:.1f} times slower"
            line += f"; {speed} to draw a sequence"
        lines.append(f"{line}.")
    return ["\n".join(lines)] if lines else []


def _grid(folder: Path, data: str) -> list[str]:
    found: dict[tuple[str, float], dict[float, Result]] = {}
    for stage in ("grid", "finals"):
        for result in read_results(folder.glob(f"{stage}/{data}_*_lr*.json"), _TRIED):
            row = result["config"]["model"]["kind"], result["metrics"]["epochs"]
            if row[0] not in KINDS:
                continue
            found.setdefault(row, {})[result["metrics"]["learning_rate"]] = result
    if not found:
        return []
    rates = sorted({rate for results in found.values() for rate in results}, reverse=True)
    rows = []
    for kind, epochs in sorted(found, key=lambda row: (KINDS.index(row[0]), row[1])):
        losses = {
            rate: made["metrics"]["validation_loss"] for rate, made in found[kind, epochs].items()
        }
        finite = {rate: loss for rate, loss in losses.items() if loss is not None}
        best = min(finite, key=lambda rate: finite[rate], default=None)
        cells = []
        for rate in rates:
            text = (
                ""
                if rate not in losses
                else "diverged"
                if rate not in finite
                else f"{finite[rate]:.1f}"
            )
            cells.append(f"**{text}**" if rate == best and text else text)
        rows.append([kind, short(epochs), *cells])
    about = (
        "Validation loss of the grid of learning rates, seed 0; the lowest is taken, of the longest runs. "
        "Losses of models with latents include the partial posterior's, so models do not compare."
    )
    losses = table(["model", "epochs", *(f"{rate:g}" for rate in rates)], rows)
    return details("How the learning rates were chosen", [about, losses])


def _mean(results: list[Result], name: str) -> float | None:
    """Returns None where a run has no such value: what is left says nothing about all of them."""
    values = [result["metrics"].get(name) for result in results]
    return None if None in values else statistics.fmean(values)


def _ahead(ours: list[Result], theirs: list[Result], name: str) -> str:
    """Writes by how much our mean is above theirs."""
    own, other = _mean(ours, name), _mean(theirs, name)
    return "–" if own is None or other is None else _signed(own - other)


def _first(metrics: list[dict[str, Any]], name: str, write: Callable[[float], str]) -> str:
    """Writes what is the same for all seeds."""
    value = metrics[0].get(name)
    return "–" if value is None else write(value)


def _spread(metrics: list[dict[str, Any]], name: str, digits: int) -> str:
    """Writes the mean and, of several values, their range; a dash where none is finite.

    >>> _spread([{"a": 1.0}, {"a": 2.0}], "a", 1), _spread([{"a": 1.0}], "a", 1), _spread([{}], "a", 1)
    ('1.5 (1.0 to 2.0)', '1.0', '')
    >>> _spread([{"a": None}], "a", 1)
    '–'
    """
    values = [m[name] for m in metrics if m.get(name) is not None]
    if not values:
        return "–" if any(name in m for m in metrics) else ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return (
        mean
        if len(values) == 1
        else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"
    )


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")
