"""Line charts as inline SVG, drawn by matplotlib and coloured by the page's style sheet."""

import io
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Chart", "draw_chart"]

# Colours to draw with, which become names of colours in the style sheet, light and dark.
_LINES = {f"#0000f{index}": f"var(--c{index})" for index in range(6)}
_TEXT, _GRID = "#0000fa", "#0000fb"
_NAMES = _LINES | {_TEXT: "var(--soft)", _GRID: "var(--line)"}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 11,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
}
_STYLE |= {"xtick.color": _TEXT, "ytick.color": _TEXT, "grid.color": _GRID}

Points = Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """A chart, ready for the page."""

    title: str
    legend: dict[str, str]
    """Colours by the name of the line."""
    view: str
    """The viewBox of the SVG."""
    svg: str
    """What is inside the SVG."""


def draw_chart(
    title: str,
    x_label: str,
    lines: Mapping[str, Points],
    marked: Collection[str] = (),
    log: bool = False,
    dashed: Collection[str] = (),
) -> Chart:
    """Draws lines through points.

    Arguments:
        title: What is shown.
        x_label: The name of the horizontal axis.
        lines: Points (x, y) by name; finite, and positive with `log`.
        marked: The names of lines whose points are marked.
        log: Whether both axes are logarithmic.
        dashed: The names of lines that are dashed.

    Example:
        >>> draw_chart("Loss", "epoch", {"train": [(0, 3.0), (1, 2.0)]}).legend
        {'train': 'var(--c0)'}
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    lines = {name: points for name, points in lines.items() if points}
    colours = {name: list(_LINES)[index % len(_LINES)] for index, name in enumerate(lines)}
    xs = sorted({x for points in lines.values() for x, _ in points})
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 2.8), layout="constrained", facecolor="none")
        axes = figure.subplots()
        for name, points in lines.items():
            marker = "o" if name in marked or len(points) == 1 else None
            line = "--" if name in dashed else "-"
            x, y = zip(*points, strict=True)
            axes.plot(x, y, line, color=colours[name], marker=marker, markersize=4)
        if log:
            axes.loglog()
            axes.minorticks_off()
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            if len(xs) <= 8 and all(float(x).is_integer() for x in xs):  # batches, lengths
                axes.set_xticks(xs)
        else:
            # The first losses are far above the rest: the axis fits the last 95 percent.
            start = xs[0] + (xs[-1] - xs[0]) / 20
            ys = [y for points in lines.values() for x, y in points if x >= start]
            margin = (max(ys) - min(ys)) / 20 or abs(ys[0]) / 2 or 0.5
            axes.set_ylim(min(ys) - margin, max(ys) + margin)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
        axes.set_xlabel(x_label)
        axes.set_facecolor("none")
        axes.grid(axis="y")
        axes.spines[:].set_visible(False)
        axes.tick_params(which="both", length=0)
        file = io.StringIO()
        figure.savefig(file, format="svg")
    legend = {name: _NAMES[colour] for name, colour in colours.items()}
    return Chart(title, legend, *_inline(file.getvalue()))


def _inline(svg: str) -> tuple[str, str]:
    """Returns the viewBox and the content of an SVG file, made fit for a page with many of them."""
    found = re.search(r'<svg[^>]*viewBox="([^"]*)"[^>]*>(.*)</svg>', svg, re.DOTALL)
    assert found is not None
    drop = r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->"
    content = re.sub(drop, "", found[2], flags=re.DOTALL).replace("xlink:href", "href")
    content = re.sub(r'<g id="[^"]*"', "<g", content)  # matplotlib gives all charts the same
    return found[1], re.sub("#0000f[0-9a-f]", lambda colour: _NAMES[colour[0]], content)
