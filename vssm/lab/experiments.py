"""The paper's experiments as a table and a figure, from the files that `vssm reproduce` keeps."""

import io
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vssm.config import KINDS

DATA_SETS = ("mnist", "cifar10", "digits")
_COLOURS: dict[str, str] = dict(
    zip(KINDS, ("#4c72b0", "#dd8452", "#937860", "#8172b3", "#da8bc3", "#55a868"), strict=True)
)
_CURVES = {"validation_elbo": "-", "validation_partial_elbo": "--"}  # and how they are drawn
_NUMBERS = (int, float, type(None))
_SUMMARY = ("log_likelihood", "partial_log_likelihood", "generate_ms_b1", "train_seconds")
_SHOWN_SAMPLES = 0.25  # of the width of a stored picture, in the figure
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


def draw_figure(results: Path, data_sets: Sequence[str]) -> bytes:
    """Draws the paper's figure as a PNG: curves, test statistics and samples of each data set."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.4 * len(data_sets)), layout="constrained")
    rows = figure.subfigures(len(data_sets), 1, squeeze=False)[:, 0]
    for row, data in zip(rows, data_sets, strict=True):
        runs = scored_runs(results, data)
        left, middle, right = row.subfigures(1, 3, width_ratios=(1, 1, 1.3))
        left.suptitle(f"{data}: bound on the validation log-likelihood", fontsize=10)
        _draw_curves(left.subplots(), runs)
        middle.suptitle(f"{data}: test set", fontsize=10)
        _draw_bars(middle.subplots(1, 2), runs)
        right.suptitle(f"{data}: samples", fontsize=10)
        columns = min(len(runs), 3)
        places = right.subplots(-(-len(runs) // columns), columns, squeeze=False).ravel()
        for axes in places:
            axes.axis("off")
        for axes, (kind, own) in zip(places, runs.items(), strict=False):
            show_samples(axes, own[0], kind, _SHOWN_SAMPLES)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def _draw_curves(axes: Any, runs: Mapping[str, Sequence[Result]]) -> None:  # noqa: ANN401
    """Draws the median over seeds and its range; the second half given the first is dashed."""
    import pandas as pd

    lowest, dashed = [], False
    for kind, results in runs.items():
        for name, style in _CURVES.items():
            curves = [result["curve"] for result in results]
            seeds = [pd.Series(c.get(name), c["epoch"], dtype=float) for c in curves]
            values = pd.concat(seeds, axis=1).sort_index().dropna(how="all")
            if values.empty:
                continue
            low, middle, high = (values.quantile(share, axis=1) for share in (0, 0.5, 1))
            label = kind if style == "-" else None
            marker = "o" if len(middle) == 1 else None  # a single point draws no line
            look = {"color": _COLOURS[kind], "linewidth": 1.2, "marker": marker, "label": label}
            axes.plot(middle.index, middle, style, **look)
            axes.fill_between(
                middle.index, low, high, color=_COLOURS[kind], alpha=0.25, linewidth=0
            )
            # The first epochs are far below the others.
            lowest.append(middle.iloc[len(middle) // 10 :].quantile(0.02))
            dashed = dashed or style == "--"
    if dashed:
        axes.plot([], [], "--", label="second half", color="grey", linewidth=1.2)
    if lowest:
        bottom, top = min(lowest), axes.get_ylim()[1]
        height = top - bottom
        axes.set_ylim(bottom - 0.02 * height, top + 0.13 * height)  # room for the legend
        axes.legend(fontsize=7, ncols=4, loc="upper center", columnspacing=1)
    axes.set_xlabel("epoch")
    axes.set_ylabel("nats per sequence")


def _draw_bars(axes: Any, runs: Mapping[str, Sequence[Result]]) -> None:  # noqa: ANN401
    panels = (
        ("log-likelihood, nats", ("log_likelihood", "partial_log_likelihood"), "{:.0f}"),
        ("generation, ms", ("generate_ms_b1", "prompted_ms_b1"), "{:.3g}"),
    )
    width = len(runs) + 1
    for ax, (title, names, form) in zip(axes, panels, strict=True):
        for place, (kind, results) in enumerate(runs.items()):
            for group, name in enumerate(names):
                found = [result["metrics"].get(name) for result in results]
                values = [value for value in found if value is not None]
                if not values:
                    continue
                mean, label = statistics.fmean(values), None if group else kind
                reach = [[mean - min(values)], [max(values) - mean]]
                look = {"color": _COLOURS[kind], "capsize": 2, "label": label}
                bar = ax.bar(group * width + place, mean, yerr=reach, **look)
                ax.bar_label(bar, fmt=form, padding=4, fontsize=7, rotation=90)
        ax.set_xticks([(width - 2) / 2, width + (width - 2) / 2], ["full", "partial"])
        ax.set_title(title, fontsize=9)
        ax.set_ylim(top=ax.get_ylim()[1] * 1.08)  # room for the numbers
    axes[0].set_ylim(top=axes[0].get_ylim()[1] * (1 + 0.06 * len(runs)))  # room for the legend
    if axes[0].containers:
        axes[0].legend(fontsize=7)


def show_samples(axes: Any, run: Result, title: str, share: float) -> None:  # noqa: ANN401
    """Shows the left part of the picture that lies beside a result, if there is one."""
    from matplotlib.image import imread

    axes.set_title(title, fontsize=9)
    path = run["path"].with_suffix(".png")
    try:
        picture = imread(path) if path.is_file() else None
    except (OSError, ValueError, SyntaxError) as error:  # Pillow raises SyntaxError
        raise ValueError(f"{str(path)!r} is damaged: {error}; remove it") from None
    if picture is not None:
        axes.imshow(picture[:, : int(share * picture.shape[1])], interpolation="nearest")
