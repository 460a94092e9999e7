"""The results page and the paper's figures, from committed result files alone: nothing is measured here.

    RESULTS/*.json, RESULTS/*/*.json                 any result: a table each
    RESULTS/paper/, RESULTS/small/                   what `vssm reproduce` keeps: tables, verdicts and figures

The same files always give the same page, so a test can compare it with the one that is committed.
"""

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vssm.storage import write_atomically

__all__ = ["draw_figure", "draw_samples", "write_page"]

_KINDS: tuple[str, ...] = ("transformer", "ssm", "rnn", "tvae", "vrnn", "vssm")
_DATA_SETS = ("mnist", "cifar10", "digits")
_SCALES = {
    "paper": ("The paper's experiments", "vssm reproduce mnist"),
    "small": ("The paper's experiments, small", "vssm reproduce mnist --scale small"),
}
_COLOURS: dict[str, str] = dict(
    zip(_KINDS, ("#4c72b0", "#dd8452", "#937860", "#8172b3", "#da8bc3", "#55a868"), strict=True)
)
_SHOWN_COLUMNS = 4  # of the samples, in the figure
_STORED_COLUMNS = 16
_TIME = re.compile(r"(.+)_b(\d+)_t(\d+)")

Result = dict[str, Any]


def write_page(results: str | Path, page: str | Path) -> Path:
    """Writes the results page as Markdown, and its figures to the folder `pictures` beside it.

    Arguments:
        results: The folder of result files.
        page: Where the page goes.

    Returns:
        `page`.
    """
    results, page = Path(results), Path(page)
    if not results.is_dir():
        raise ValueError(f"results={str(results)!r} is no folder; allowed: a folder of result files")
    text = _page(results)
    pictures = page.parent / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for scale in _SCALES:
        found = [data for data in _DATA_SETS if _runs(results / scale, data)]
        if found:
            draw_figure(results / scale, pictures / f"{scale}.png", found)
        for data in found:
            draw_samples(results / scale, data, pictures / f"{scale}_{data}.png")
    write_atomically(page, lambda path: path.write_text(text))
    return page


def _page(results: Path) -> str:
    parts = [
        "# Results",
        "Made from the files in `results/` by `vssm report --results results --page docs/results.md`, not by "
        "hand. Every number comes from a file that says its command, commit and machine.",
    ]
    for scale, (title, command) in _SCALES.items():
        if (results / scale).is_dir():
            parts += _experiments(results / scale, scale, title)
        elif scale == "paper":
            parts += [f"## {title}", f"No run of this scale is committed yet; `{command}` makes them."]
    for path in sorted([*results.glob("*.json"), *results.glob("*/*.json")]):
        if path.parent.name not in _SCALES:
            parts += _any_result(path, path.relative_to(results).as_posix())
    return "\n\n".join(parts) + "\n"


def _experiments(folder: Path, scale: str, title: str) -> list[str]:
    parts = [
        f"## {title}",
        'The paper gives its numbers as figures only. In words it claims that the VSSM "competes with '
        'traditional models in terms of generation quality" and "produces decent results in only a fraction '
        'of the time". Likelihoods are in nats a sequence, the mean over seeds with their range in brackets; '
        "by importance sampling for models with latents, exact for the others. The second half is given the "
        "first. Times are milliseconds for one sequence, and for its second half given its first.",
    ]
    found = [data for data in _DATA_SETS if _runs(folder, data)]
    if found:
        parts.append(f"![Validation curves, test statistics and samples](pictures/{scale}.png)")
        parts.append(
            "Left: the bound on the validation log-likelihood during training (the ELBO for models with "
            "latents, exact for the others), median and range over seeds. Middle: the test set. Right: "
            "samples, three rows from nothing and three that complete the upper half of a test image."
        )
    for data in found:
        parts += _data_set(folder, scale, data)
    return parts


def _data_set(folder: Path, scale: str, data: str) -> list[str]:
    runs = _runs(folder, data)
    rows = []
    for kind, results in runs.items():
        metrics = [result["metrics"] for result in results]
        first = results[0]["config"]
        rows.append(
            [
                kind,
                f"{len(results)}",
                f"{metrics[0]['parameters'] / 1e6:.3g} M",
                _short(metrics[0]["epochs"]),
                f"{first['train']['learning_rate']:g}",
                _spread(metrics, "log_likelihood", 1),
                _spread(metrics, "partial_log_likelihood", 1),
                _spread(metrics, "generate_ms_b1", 2),
                _spread(metrics, "prompted_ms_b1", 2),
                _spread(metrics, "train_seconds", 0),
            ]
        )
    head = [
        "model",
        "seeds",
        "size",
        "epochs",
        "rate",
        "log p(x)",
        "second half",
        "ms",
        "ms, half",
        "training, s",
    ]
    parts = [f"### {data}", _table(head, rows), *_verdicts(runs), *_grid(folder, data)]
    parts.append(f"![More samples of every model](pictures/{scale}_{data}.png)")
    return [*parts, _origins(result for results in runs.values() for result in results)]


def _verdicts(runs: dict[str, list[Result]]) -> list[str]:
    """Says in sentences how the vssm stands to the others."""
    lines = []
    for other in [kind for kind in runs if "vssm" in runs and kind != "vssm"]:
        full, half = (
            _mean(runs["vssm"], name) - _mean(runs[other], name)
            for name in ("log_likelihood", "partial_log_likelihood")
        )
        ratio = _mean(runs[other], "generate_ms_b1") / _mean(runs["vssm"], "generate_ms_b1")
        speed = f"{ratio:.1f} times faster" if ratio >= 1 else f"{1 / ratio:.1f} times slower"
        lines.append(
            f"- vssm against {other}: {_signed(full)} nats in full, {_signed(half)} in the second half; "
            f"{speed} to draw a sequence."
        )
    return ["\n".join(lines)] if lines else []


def _grid(folder: Path, data: str) -> list[str]:
    found: dict[str, dict[float, Result]] = {}
    for result in _read(folder.glob(f"grid/{data}_*_lr*.json")):
        kind = result["config"]["model"]["kind"]
        found.setdefault(kind, {})[result["metrics"]["learning_rate"]] = result
    if not found:
        return []
    rates = sorted({rate for results in found.values() for rate in results}, reverse=True)
    rows = []
    for kind in sorted(found, key=_KINDS.index):
        losses = {rate: found[kind][rate]["metrics"]["validation_loss"] for rate in found[kind]}
        finite = {rate: loss for rate, loss in losses.items() if loss is not None}
        best = min(finite, key=lambda rate: finite[rate], default=None)
        cells = []
        for rate in rates:
            text = "" if rate not in losses else "diverged" if rate not in finite else f"{finite[rate]:.1f}"
            cells.append(f"**{text}**" if rate == best and text else text)
        rows.append([kind, *cells])
    epochs = sorted({r["metrics"]["epochs"] for results in found.values() for r in results.values()})
    lengths = " or ".join(map(_short, epochs))
    return [
        f"Validation loss of the grid of learning rates, seed 0, {lengths} epochs; the lowest is taken. "
        "Losses of models with latents include the partial posterior's, so rows do not compare.",
        _table(["model", *(f"{rate:g}" for rate in rates)], rows),
    ]


def _any_result(path: Path, name: str) -> list[str]:
    (result,) = _read([path])
    times: dict[tuple[int, int], dict[str, float | None]] = {}
    rest: dict[str, float | None] = {}
    for metric, value in result["metrics"].items():
        match = _TIME.fullmatch(metric)
        if match:
            times.setdefault((int(match[2]), int(match[3])), {})[match[1]] = value
        else:
            rest[metric] = value
    parts = [f"## {name.removesuffix('.json')}"]
    if times:
        columns = [f"{batch} x {length}" for batch, length in times]
        names = list(dict.fromkeys(metric for cells in times.values() for metric in cells))
        rows = [[f"`{n}`", *(_number(cells.get(n)) for cells in times.values())] for n in names]
        parts.append(_table(["batch x length", *columns], rows))
    if rest:
        parts.append(_table(["metric", "value"], [[f"`{n}`", _number(value)] for n, value in rest.items()]))
    return [*parts, _origins([result])]


def _origins(results: Iterable[Result]) -> str:
    """Lists commands, each with the commits, days and machines of its runs."""
    rows = []
    for result in results:
        machine = result["machine"]
        where = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
        commit = str(result.get("commit") or "unknown")
        dirty = " (changed)" if commit.endswith("-dirty") else ""
        rows.append([f"`{result['command']}`", where, commit[:12] + dirty, result["date"][:10]])
    return _table(["command", "machine", "commit", "date"], rows)


def draw_figure(results: str | Path, path: str | Path, data_sets: Sequence[str]) -> None:
    """Draws the paper's figure: for each data set validation curves, test statistics and samples.

    Arguments:
        results: The folder that `vssm reproduce` keeps results in.
        path: The PNG, replaced as a whole.
        data_sets: A row of three panels each.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.4 * len(data_sets)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subfigures(len(data_sets), 1, squeeze=False)[:, 0]
    for row, data in zip(rows, data_sets, strict=True):
        runs = _runs(Path(results), data)
        left, middle, right = row.subfigures(1, 3, width_ratios=(1, 1, 1.3))
        _draw_curves(left.subplots(), runs)
        left.suptitle(f"{data}: validation log-likelihood", fontsize=10)
        _draw_bars(middle.subplots(1, 2), runs)
        middle.suptitle(f"{data}: test set", fontsize=10)
        right.suptitle(f"{data}: samples", fontsize=10)
        for axes, kind in zip(right.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
            picture = _picture(Path(results), runs[kind][0])
            if picture is not None:
                width = picture.shape[1] * _SHOWN_COLUMNS // _STORED_COLUMNS
                axes.imshow(picture[:, :width], interpolation="nearest")
            axes.set_title(kind, fontsize=9)
            axes.axis("off")
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=100))


def draw_samples(results: str | Path, data: str, path: str | Path) -> None:
    """Draws all stored samples of every model, the paper's additional figure.

    Arguments:
        results: The folder that `vssm reproduce` keeps results in.
        data: The data set.
        path: The PNG, replaced as a whole.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = _runs(Path(results), data)
    figure = Figure(figsize=(8, 3.4 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, kind in zip(figure.subplots(len(runs), 1, squeeze=False)[:, 0], runs, strict=True):
        picture = _picture(Path(results), runs[kind][0])
        if picture is not None:
            axes.imshow(picture, interpolation="nearest")
        axes.set_title(f"{kind}, seed {runs[kind][0]['config']['train']['seed']}", fontsize=9)
        axes.axis("off")
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=100))


def _draw_curves(axes: Any, runs: dict[str, list[Result]]) -> None:  # noqa: ANN401
    lowest = []
    for kind, results in runs.items():
        values: dict[float, list[float]] = {}
        for result in results:
            curve = result["curve"]
            for epoch, value in zip(curve["epoch"], curve["validation_elbo"], strict=True):
                if value is not None:
                    values.setdefault(epoch, []).append(value)
        epochs = sorted(values)
        if not epochs:
            continue
        middle = [statistics.median(values[epoch]) for epoch in epochs]
        axes.plot(epochs, middle, label=kind, color=_COLOURS[kind], linewidth=1.2)
        low, high = ([pick(values[epoch]) for epoch in epochs] for pick in (min, max))
        axes.fill_between(epochs, low, high, color=_COLOURS[kind], alpha=0.25, linewidth=0)
        lowest.append(middle[len(middle) // 10])  # the first epochs are far below all others
    if lowest:
        axes.set_ylim(bottom=min(lowest))
        axes.legend(fontsize=8)
    axes.set_xlabel("epoch")
    axes.set_ylabel("nats a sequence")


def _draw_bars(axes: Any, runs: dict[str, list[Result]]) -> None:  # noqa: ANN401
    panels = (
        ("log-likelihood, nats", ("log_likelihood", "partial_log_likelihood"), ".0f"),
        ("generation, ms", ("generate_ms_b1", "prompted_ms_b1"), ".3g"),
    )
    for ax, (title, names, form) in zip(axes, panels, strict=True):
        for place, (kind, results) in enumerate(runs.items()):
            for group, name in enumerate(names):
                values = [result["metrics"][name] for result in results]
                mean, x = statistics.fmean(values), group * (len(runs) + 1) + place
                reach = [[mean - min(values)], [max(values) - mean]]
                ax.bar(
                    x, mean, color=_COLOURS[kind], yerr=reach, capsize=2, label=kind if not group else None
                )
                ax.annotate(f"{mean:{form}}", (x, mean), ha="center", va="bottom", fontsize=7)
        ax.set_xticks(
            [group * (len(runs) + 1) + (len(runs) - 1) / 2 for group in range(2)], ["full", "partial"]
        )
        ax.set_title(title, fontsize=9)
    axes[0].legend(fontsize=7)


def _picture(folder: Path, result: Result) -> Any:  # noqa: ANN401
    from matplotlib.image import imread

    path = folder / f"{result['name']}.png"
    return imread(path) if path.is_file() else None


def _runs(folder: Path, data: str) -> dict[str, list[Result]]:
    """Returns the scored runs of a data set by kind, each with its seeds in order."""
    found: dict[str, list[Result]] = {}
    for result in _read(folder.glob(f"{data}_*_seed*.json")):
        found.setdefault(result["config"]["model"]["kind"], []).append(result)
    for results in found.values():
        results.sort(key=lambda result: result["config"]["train"]["seed"])
    return {kind: found[kind] for kind in _KINDS if kind in found}


def _read(paths: Iterable[Path]) -> list[Result]:
    results = []
    for path in sorted(paths):
        try:
            values = json.loads(path.read_bytes())
            if not isinstance(values["metrics"], dict) or not isinstance(values["machine"], dict):
                raise TypeError("metrics and machine are no JSON objects")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(path)!r} is damaged: {error!r}; allowed: a result file") from None
        results.append(values)
    return results


def _mean(results: list[Result], name: str) -> float:
    return statistics.fmean(result["metrics"][name] for result in results)


def _spread(metrics: list[dict[str, Any]], name: str, digits: int) -> str:
    """Writes the mean and, of several values, their range.

    >>> _spread([{"a": 1.0}, {"a": 2.0}], "a", 1), _spread([{"a": 1.0}], "a", 1), _spread([{}], "a", 1)
    ('1.5 (1.0 to 2.0)', '1.0', '')
    """
    values = [m[name] for m in metrics if m.get(name) is not None]
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _short(value: float) -> str:
    return f"{value:.4g}"


def _number(value: float | None) -> str:
    """Writes any metric: whole numbers as they are, others with four digits.

    >>> [_number(value) for value in (None, 28, 12345.678, 0.0123456, 2.5)]
    ['', '28', '12,346', '0.01235', '2.5']
    """
    if value is None:
        return ""
    if isinstance(value, int) or value == math.floor(value):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.0f}"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
