"""Fan charts: the history of series, and the middle 50, 80 and 95 % of forecasts of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vssm.data.storage import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BANDS = (0.95, 0.8, 0.5)
_MOST_FANS = 12  # in one chart


class Fan(NamedTuple):
    """One series and forecasts of it."""

    name: str
    dates: Any
    """Of the history, (N,): dates or numbers."""
    y: np.ndarray
    """The history, (N,); NaN where missing."""
    ahead: Sequence[tuple[Any, np.ndarray]]
    """The dates, (H,), and the paths, (S, H), of every forecast."""


def draw_fans(fans: Sequence[Fan], path: str | Path | None = None) -> "Figure":
    """Returns a chart of the first twelve series, one above the other; `path` saves it as PNG."""
    from matplotlib.figure import Figure

    fans = fans[:_MOST_FANS]
    figure = Figure(figsize=(8, 1 + 1.6 * len(fans)), layout="constrained")
    plots = figure.subplots(len(fans), 1, sharex=True, squeeze=False)[:, 0]
    style = {"color": "tab:blue", "alpha": 0.25, "linewidth": 0}
    for fan, axes in zip(fans, plots, strict=True):
        axes.plot(fan.dates, fan.y, color="black", linewidth=0.8, label="history")
        for k, (dates, paths) in enumerate(fan.ahead):
            hidden = "_" if k else ""  # a legend leaves out labels that begin with it
            for band in _BANDS:
                low, high = np.quantile(paths, ((1 - band) / 2, (1 + band) / 2), axis=0)
                axes.fill_between(dates, low, high, **style, label=f"{hidden}{band:.0%}")
            middle = np.median(paths, axis=0)
            axes.plot(dates, middle, color="tab:blue", linewidth=1, label=f"{hidden}median")
        axes.set_ylabel(fan.name.replace("$", r"\$"), fontsize=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=6, ncols=5, loc="outside upper center")  # over no line
    if np.asarray(fans[0].dates).dtype.kind == "M":
        figure.autofmt_xdate()
    if path is not None:
        write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=100))
    return figure
