"""Line charts, drawn by matplotlib for a light or a dark page."""

import base64
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# All are readable on white and on black.
_COLOURS = ("#3b8ad0", "#d9652f", "#3a9a68", "#9b66c2", "#b98a2a", "#c4567a")
_GREY = "#808890"
_FEW = 20  # points that are marked

Points = Sequence[tuple[float, float]]


class Picture(NamedTuple):
    """A picture, ready for the page."""

    title: str
    alt: str
    """What it shows, for those who cannot see it."""
    content: bytes
    kind: str = "png"
    """Or "svg+xml"."""
    legend: Mapping[str, str] = {}
    """Colours by the name of the line."""

    @property
    def source(self) -> str:
        """The content as a URL."""
        return f"data:image/{self.kind};base64,{base64.b64encode(self.content).decode()}"


def draw_chart(title: str, x_label: str, lines: Mapping[str, Points]) -> Picture:
    """Draws lines through points; few points are marked.

    Arguments:
        title: What is shown.
        x_label: The name of the horizontal axis.
        lines: Finite points (x, y) by name.

    Example:
        >>> draw_chart("Loss", "epoch", {"train": [(0, 3.0), (1, 2.0)]}).legend
        {'train': '#3b8ad0'}
    """
    from matplotlib.figure import Figure

    lines = {name: points for name, points in lines.items() if points}
    legend = dict(zip(lines, itertools.cycle(_COLOURS)))
    figure = Figure(figsize=(4.6, 2.8), layout="constrained", facecolor="none")
    axes = figure.subplots()
    for name, points in lines.items():
        style = "o-" if len(points) <= _FEW else "-"
        axes.plot(*zip(*points, strict=True), style, color=legend[name], markersize=4)
    # The first losses are far above the rest: the axis fits the last 95 percent.
    xs = [x for points in lines.values() for x, _ in points]
    start = min(xs) + (max(xs) - min(xs)) / 20
    ys = [y for points in lines.values() for x, y in points if x >= start]
    margin = (max(ys) - min(ys)) / 20 or abs(ys[0]) / 2 or 0.5
    axes.set_ylim(min(ys) - margin, max(ys) + margin)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
    axes.set_xlabel(x_label, color=_GREY)
    axes.set_facecolor("none")
    axes.grid(axis="y", color=_GREY, alpha=0.3)
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", length=0, labelcolor=_GREY)
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return Picture(title, title, file.getvalue(), "svg+xml", legend)
