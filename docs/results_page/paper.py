"""The paper's experiments on the results page: likelihoods, times, comparisons, learning rates."""

import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from writing import details, origins, table

from vssm.config import KINDS
from vssm.lab.experiments import DATA_SETS, read_results, scored_runs, show_samples

Runs = dict[str, list[dict[str, Any]]]

_SETTINGS = {  # title: metric, unit, format
    "size": ("parameters", 1e6, "{:.3g} M"),
    "epochs": ("epochs", 1, "{:.4g}"),
    "rate": ("learning_rate", 1, "{:g}"),
}
_COLUMNS = {  # title: metric, digits after the point
    "log p(x)": ("log_likelihood", 1),
    "by particles": ("log_likelihood_particles", 1),
    "second half": ("partial_log_likelihood", 1),
    "half, by particles": ("partial_log_likelihood_particles", 1),
    "ms": ("generate_ms_b1", 2),
    "ms, half": ("prompted_ms_b1", 2),
    "training, s": ("train_seconds", 0),
}
SCALES = {
    "paper": (
        "The paper's experiments",
        'The paper gives its numbers as figures only. In words, it claims that the VSSM "competes '
        'with traditional models in terms of generation quality" and "produces decent results in '
        'only a fraction of the time". Likelihoods are in nats per sequence; higher is better. The '
        "tables show the mean over seeds with the range in brackets. Likelihoods are estimated by "
        "importance sampling for models with latents, and exact for the others. A particle filter "
        "with as many draws gives a tighter estimate (`vssm evaluate --particles`). The second "
        "half is conditioned on the first. Times are milliseconds for one sequence, and for its "
        "second half given the first, with the version that made the run; they are compared only "
        "between equal versions.",
        "The pictures show, on the left, bounds on the validation log-likelihood during training "
        "(the ELBO for models with latents, exact for the others): the median and range over "
        "seeds. Dashed lines are for the second half given the first, where a run recorded it. In "
        "the middle is the test set. On the right are samples: three unconditional rows, and three "
        "that complete the upper half of a test image.",
    ),
    "small": (
        "The paper's experiments, small",
        "Small models, few steps and fewer learning rates, on a CPU. The columns are the same as "
        "above.",
    ),
}


def experiments(folder: Path, scale: str) -> list[str]:
    """Returns the parts of the page about the runs of one scale."""
    found = [data for data in DATA_SETS if scored_runs(folder, data)]
    title, *about = SCALES[scale]
    parts = [f"## {title}", *about]
    if not found:
        return []
    parts.append(f"![Validation curves, test statistics and samples](pictures/{scale}.png)")
    for data in found:
        runs = scored_runs(folder, data)
        parts += [f"### {data}", table(*_table(runs)), *_comparisons(runs)]
        parts += _learning_rates(folder, data)
        parts.append(f"![More samples of every model](pictures/{scale}_{data}.png)")
        parts.append(origins(result for results in runs.values() for result in results))
    return parts


def _table(runs: Mapping[str, Sequence[dict[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Returns the headings and rows of the table of a data set; empty columns are left out."""
    rows: list[dict[str, str]] = []
    for kind, results in runs.items():
        metrics = [result["metrics"] for result in results]
        row = {"model": kind, "seeds": f"{len(results)}"}
        for title, (name, unit, form) in _SETTINGS.items():
            value = metrics[0].get(name)
            row[title] = "" if value is None else form.format(value / unit)
        rows.append(row | {title: _spread(metrics, *column) for title, column in _COLUMNS.items()})
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    return titles, [[row[title] or "–" for title in titles] for row in rows]


def _spread(metrics: Sequence[Mapping[str, Any]], name: str, digits: int) -> str:
    """Writes the mean and, of several values, their range; a dash where none is finite.

    >>> _spread([{"a": 1.0}, {"a": 2.0}], "a", 1), _spread([{"a": 1.0}], "a", 1)
    ('1.5 (1.0 to 2.0)', '1.0')
    >>> _spread([{}], "a", 1), _spread([{"a": None}], "a", 1)
    ('', '–')
    """
    values = [m[name] for m in metrics if m.get(name) is not None]
    if not values:
        return "–" if any(name in m for m in metrics) else ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    span = f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
    return mean if len(values) == 1 else mean + span


def _comparisons(runs: Runs) -> list[str]:
    """Says in sentences how the vssm compares with the others."""
    lines = []
    for other in [kind for kind in runs if "vssm" in runs and kind != "vssm"]:
        pair = runs["vssm"], runs[other]
        gains = []
        for name in ("log_likelihood", "partial_log_likelihood"):
            ours, theirs = (_mean(results, name) for results in pair)
            known = ours is not None and theirs is not None
            gains.append(f"{ours - theirs:+.1f}".replace("-", "−") if known else "–")
        line = f"- vssm against {other}: {gains[0]} nats in full, {gains[1]} in the second half"
        ours, theirs = (_mean(results, "generate_ms_b1") for results in pair)
        versions = {result.get("commit") for results in pair for result in results}
        if ours and theirs and len(versions) == 1:
            faster = theirs / ours
            ratio = (
                f"{faster:.1f} times faster" if faster >= 1 else f"{1 / faster:.1f} times slower"
            )
            line += f"; {ratio} to draw a sequence"
        lines.append(f"{line}.")
    return ["\n".join(lines)] if lines else []


def _mean(results: list[dict[str, Any]], name: str) -> float | None:
    """Returns None where a run has no such value."""
    values = [result["metrics"].get(name) for result in results]
    return None if None in values else statistics.fmean(values)


def _learning_rates(folder: Path, data: str) -> list[str]:
    found: dict[tuple[str, float], dict[float, float | None]] = {}
    for stage in ("grid", "finals"):
        for result in read_results(folder.glob(f"{stage}/{data}_*_lr*.json")):
            metrics = result["metrics"]
            row = found.setdefault((result["config"]["model"]["kind"], metrics["epochs"]), {})
            row[metrics["learning_rate"]] = metrics["validation_loss"]
    rates = sorted({rate for losses in found.values() for rate in losses}, reverse=True)
    rows = []
    for kind, epochs in sorted(found, key=lambda row: (KINDS.index(row[0]), row[1])):
        losses = found[kind, epochs]
        finite = {rate: loss for rate, loss in losses.items() if loss is not None}
        best = min(finite, key=lambda rate: finite[rate], default=None)
        cells = []
        for rate in rates:
            text = f"{finite[rate]:.1f}" if rate in finite else "diverged" if rate in losses else ""
            cells.append(f"**{text}**" if rate == best else text)
        rows.append([kind, f"{epochs:.4g}", *cells])
    about = (
        "Validation loss of the grid of learning rates with seed 0. The rate with the lowest loss "
        "of the longest runs is used. The loss of a model with latents includes the partial "
        "posterior's, so losses of different models do not compare."
    )
    head = ["model", "epochs", *(f"{rate:g}" for rate in rates)]
    return details("How the learning rates were chosen", [about, table(head, rows)] if rows else [])


def draw_samples(results: Path, data: str) -> bytes:
    """Draws all stored samples of every model as a PNG, the paper's additional figure."""
    from matplotlib.figure import Figure

    runs = [run[0] for run in scored_runs(results, data).values()]
    figure = Figure(figsize=(8, 3.4 * len(runs)), layout="constrained")
    for axes, run in zip(figure.subplots(len(runs), 1, squeeze=False)[:, 0], runs, strict=True):
        axes.axis("off")
        kind, seed = run["config"]["model"]["kind"], run["config"]["train"]["seed"]
        show_samples(axes, run, f"{kind}, seed {seed}", 1)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()
