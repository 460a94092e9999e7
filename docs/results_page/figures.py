"""The paper's figures, drawn from the results that `vssm reproduce` keeps."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vssm.config import KINDS
from vssm.lab.experiments import scored_runs

_COLOURS: dict[str, str] = dict(
    zip(KINDS, ("#4c72b0", "#dd8452", "#937860", "#8172b3", "#da8bc3", "#55a868"), strict=True)
)
_CURVES = {"validation_elbo": "-", "validation_partial_elbo": "--"}  # and how they are drawn
_SHOWN_SAMPLES = 0.25  # of the width of a stored picture, in the figure


def draw_figure(results: Path, data_sets: Sequence[str], path: Path) -> None:
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
            _show_samples(axes, own[0], kind, _SHOWN_SAMPLES)
    figure.savefig(path, dpi=100)


def draw_samples(results: Path, data: str, path: Path) -> None:
    """Draws all stored samples of every model as a PNG, the paper's additional figure."""
    from matplotlib.figure import Figure

    runs = [run[0] for run in scored_runs(results, data).values()]
    figure = Figure(figsize=(8, 3.4 * len(runs)), layout="constrained")
    for axes, run in zip(figure.subplots(len(runs), 1, squeeze=False)[:, 0], runs, strict=True):
        axes.axis("off")
        kind, seed = run["config"]["model"]["kind"], run["config"]["train"]["seed"]
        _show_samples(axes, run, f"{kind}, seed {seed}", 1)
    figure.savefig(path, dpi=100)


def _draw_curves(axes: Any, runs: Mapping[str, Sequence[dict[str, Any]]]) -> None:  # noqa: ANN401
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


def _draw_bars(axes: Any, runs: Mapping[str, Sequence[dict[str, Any]]]) -> None:  # noqa: ANN401
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


def _show_samples(axes: Any, run: dict[str, Any], title: str, share: float) -> None:  # noqa: ANN401
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
