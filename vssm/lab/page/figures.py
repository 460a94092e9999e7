"""The figures of the results page, from committed result files: the paper's, and quality against time."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vssm.runs.labels import dial_curves, is_number
from vssm.storage import write_atomically

__all__ = [
    "KINDS",
    "Result",
    "damage",
    "draw_dials",
    "draw_figure",
    "draw_samples",
    "read_results",
    "scored_runs",
]

KINDS: tuple[str, ...] = ("transformer", "ssm", "rnn", "tvae", "vrnn", "vssm")
_COLOURS: dict[str, str] = dict(
    zip(KINDS, ("#4c72b0", "#dd8452", "#937860", "#8172b3", "#da8bc3", "#55a868"), strict=True)
)
_SHOWN_COLUMNS = 4  # of the samples, in the figure
_SHOWN_MODELS = 3  # beside each other, there
_STORED_COLUMNS = 16
_JSON = {dict: "JSON object", list: "list", str: "text", int: "whole number", float: "number"}
_ENVELOPE = {
    "metrics": dict,
    "machine": dict,
    "config": dict,
    "name": str,
    "command": str,
    "date": str,
}
_SCORED = {"config.model.kind": str, "config.train.seed": int, "curve.epoch": list}
_SCORED |= {"curve.validation_elbo": list}
_CURVES = {"validation_elbo": "-", "validation_partial_elbo": "--"}  # and how they are drawn

Result = dict[str, Any]


def scored_runs(folder: Path, data: str) -> dict[str, list[Result]]:
    """Returns the scored runs of a data set by kind, each with its seeds in order."""
    found: dict[str, list[Result]] = {}
    paths = folder.glob(f"{data}_*_seed*.json")
    for result in read_results(
        (p for p in paths if p.stem.rpartition("seed")[2].isdecimal()), _SCORED
    ):
        curve = result["curve"]
        for name in ("epoch", *_CURVES):
            values = curve.get(name, curve["epoch"])
            numbers = isinstance(values, list) and all(
                value is None or is_number(value) for value in values
            )
            if not numbers or len(values) != len(curve["epoch"]):
                raise ValueError(
                    f"{str(result['path'])!r} is damaged: curve.{name} is no list of a number for each epoch;"
                    " allowed: a result file"
                )
        found.setdefault(result["config"]["model"]["kind"], []).append(result)
    for results in found.values():
        results.sort(key=lambda result: result["config"]["train"]["seed"])
    return {kind: found[kind] for kind in KINDS if kind in found}


def read_results(paths: Iterable[Path], needs: Mapping[str, type] | None = None) -> list[Result]:
    """Reads result files, and adds to each its own `path`; a file that is damaged is named.

    Arguments:
        paths: The files.
        needs: What each must have beside the envelope: types by names such as "config.model.kind".
    """
    results = []
    for path in sorted(paths):
        try:
            values = json.loads(path.read_bytes())
            for name, kind in {**_ENVELOPE, **(needs or {})}.items():
                value = values
                for part in name.split("."):
                    value = value[part]
                if not isinstance(value, int | float if kind is float else kind):
                    raise ValueError(f"{name} is no {_JSON[kind]}")
            for name, value in values["metrics"].items():
                if value is not None and not is_number(value):
                    raise ValueError(f"metric {name} is no number")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{str(path)!r} is damaged: {damage(error)}; allowed: a result file"
            ) from None
        results.append({**values, "path": path})
    return results


def damage(error: Exception) -> str:
    """Says in words what is wrong with a file, by the error that its reading gave.

    >>> damage(KeyError("metrics")), damage(TypeError("'int' object is not subscriptable"))
    ("it has no 'metrics'", 'it is no result file')
    """
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return str(error) if isinstance(error, ValueError) else "it is no result file"


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
        runs = scored_runs(Path(results), data)
        left, middle, right = row.subfigures(1, 3, width_ratios=(1, 1, 1.3))
        _draw_curves(left.subplots(), runs)
        left.suptitle(f"{data}: bound on the validation log-likelihood", fontsize=10)
        _draw_bars(middle.subplots(1, 2), runs)
        middle.suptitle(f"{data}: test set", fontsize=10)
        right.suptitle(f"{data}: samples", fontsize=10)
        columns = min(len(runs), _SHOWN_MODELS)
        places = right.subplots(-(-len(runs) // columns), columns, squeeze=False).ravel()
        for axes in places:
            axes.axis("off")
        for axes, kind in zip(places, runs, strict=False):
            picture = _picture(Path(results), runs[kind][0])
            if picture is not None:
                width = picture.shape[1] * _SHOWN_COLUMNS // _STORED_COLUMNS
                axes.imshow(picture[:, :width], interpolation="nearest")
            axes.set_title(kind, fontsize=9)
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

    runs = scored_runs(Path(results), data)
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
    lowest, dashed = [], False
    for kind, results in runs.items():
        for name, style in _CURVES.items():
            values = _by_epoch([result["curve"] for result in results], name)
            epochs = sorted(values)
            if not epochs:
                continue
            middle = [statistics.median(values[epoch]) for epoch in epochs]
            label = kind if style == "-" else None
            marker = "o" if len(epochs) == 1 else None  # a line of one point is none
            axes.plot(
                epochs,
                middle,
                style,
                label=label,
                color=_COLOURS[kind],
                linewidth=1.2,
                marker=marker,
            )
            low, high = ([pick(values[epoch]) for epoch in epochs] for pick in (min, max))
            axes.fill_between(epochs, low, high, color=_COLOURS[kind], alpha=0.25, linewidth=0)
            later = sorted(
                middle[len(middle) // 10 :]
            )  # first epochs are far below others, as spikes are
            lowest.append(later[len(later) // 50])
            dashed = dashed or style == "--"
    if dashed:
        axes.plot([], [], "--", label="second half", color="grey", linewidth=1.2)
    if lowest:
        bottom, top = min(lowest), axes.get_ylim()[1]
        height = top - bottom
        axes.set_ylim(
            bottom - 0.02 * height, top + 0.13 * height
        )  # room for the legend over the curves
        axes.legend(fontsize=7, ncols=4, loc="upper center", columnspacing=1)
    axes.set_xlabel("epoch")
    axes.set_ylabel("nats a sequence")


def _by_epoch(curves: Sequence[Mapping[str, list[Any]]], name: str) -> dict[float, list[float]]:
    """Returns the values of all seeds at each epoch; a run from before a curve was kept has none."""
    values: dict[float, list[float]] = {}
    for curve in curves:
        for epoch, value in zip(curve["epoch"], curve.get(name, ()), strict=False):
            if value is not None:
                values.setdefault(epoch, []).append(value)
    return values


def _draw_bars(axes: Any, runs: dict[str, list[Result]]) -> None:  # noqa: ANN401
    panels = (
        ("log-likelihood, nats", ("log_likelihood", "partial_log_likelihood"), ".0f"),
        ("generation, ms", ("generate_ms_b1", "prompted_ms_b1"), ".3g"),
    )
    for ax, (title, names, form) in zip(axes, panels, strict=True):
        for place, (kind, results) in enumerate(runs.items()):
            label: str | None = kind  # of its first bar
            for group, name in enumerate(names):
                values = [result["metrics"].get(name) for result in results]
                values = [value for value in values if value is not None]
                if not values:
                    continue
                mean, x = statistics.fmean(values), group * (len(runs) + 1) + place
                reach = [[mean - min(values)], [max(values) - mean]]
                ax.bar(x, mean, color=_COLOURS[kind], yerr=reach, capsize=2, label=label)
                label = None
                place_of = {
                    "textcoords": "offset points",
                    "xytext": (0, 4),
                    "ha": "center",
                    "va": "bottom",
                }
                ax.annotate(f"{mean:{form}}", (x, max(values)), fontsize=7, rotation=90, **place_of)
        ax.set_xticks(
            [group * (len(runs) + 1) + (len(runs) - 1) / 2 for group in range(2)],
            ["full", "partial"],
        )
        ax.set_title(title, fontsize=9)
        ax.set_ylim(top=ax.get_ylim()[1] * 1.08)  # room for the numbers over the bars
    axes[0].set_ylim(
        top=axes[0].get_ylim()[1] * (1 + 0.06 * len(runs))
    )  # and for the legend over them
    if axes[0].containers:
        axes[0].legend(fontsize=7)


def _picture(folder: Path, result: Result) -> Any:  # noqa: ANN401
    from matplotlib.image import imread

    path = folder / f"{result['name']}.png"
    try:
        return imread(path) if path.is_file() else None
    except (
        OSError,
        ValueError,
        SyntaxError,
    ) as error:  # the last is what Pillow says of other files
        raise ValueError(f"{str(path)!r} is damaged: {error}; allowed: without that file") from None


def draw_dials(metrics: Mapping[str, Any], path: str | Path) -> bool:
    """Draws quality against time, one panel for a batch of one and one for a batch of 256.

    Arguments:
        metrics: Those of one result.
        path: The PNG, replaced as a whole.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = {batch: lines for batch in (1, 256) if (lines := dial_curves(metrics, batch))}
    if not panels:
        return False
    figure = Figure(figsize=(4.5 * len(panels), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (batch, lines) in zip(places, panels.items(), strict=True):
        for name, points in lines.items():
            style = {"linestyle": "--", "color": "grey"} if name == "floor" else {"marker": "."}
            axes.loglog(*zip(*points, strict=True), label=name, linewidth=1.2, **style)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"milliseconds, batch {batch}")
        axes.set_ylabel("Fréchet distance")
        axes.legend(fontsize=8)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=100))
    return True
