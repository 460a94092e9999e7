"""Line charts as inline SVG: no script, no font, no file; colours come from the page's style sheet."""

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["chart"]

_WIDTH, _HEIGHT = 420, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 20, 10, 42
_MOST_POINTS = 300
_COLOURS = 6  # classes c0 to c5 of the style sheet

Points = Sequence[tuple[float, float]]


def chart(
    title: str,
    x_label: str,
    lines: Mapping[str, Points],
    dots: frozenset[str] = frozenset(),
    log: bool = False,
    dashed: frozenset[str] = frozenset(),
) -> str:
    """Draws lines through points as an HTML figure with a legend.

    Arguments:
        title: What is shown, also read aloud.
        x_label: The name of the horizontal axis.
        lines: Points (x, y) by name; finite, and positive with `log`.
        dots: The names of lines whose points are marked.
        log: Whether both axes are logarithmic.
        dashed: The names of lines that are dashed.

    Example:
        >>> figure = chart("Loss", "epoch", {"train": [(0, 3.0), (1, 2.0)]})
        >>> figure.count("<polyline"), "epoch" in figure
        (1, True)
    """
    lines = {name: _thinned(points) for name, points in lines.items() if points}
    xs = [x for points in lines.values() for x, _ in points]
    # The first losses are far above the rest: the axis fits what comes after a twentieth of the way.
    start = min(xs) + (max(xs) - min(xs)) / 20 if not log else min(xs)
    ys = [y for points in lines.values() for x, y in points if x >= start]
    whole = all(float(x).is_integer() for x in xs)  # sizes, which are ticks themselves
    x_axis, y_axis = _Axis(xs, log, at=sorted(set(xs)) if whole else ()), _Axis(ys, log)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<svg class="{"open" if log else "cut"}" x="{_LEFT}" y="{_TOP}" '
        f'width="{_inner_width()}" height="{_inner_height()}">',
    ]
    for y in y_axis.ticks:
        parts.append(
            f'<line class="grid" x1="0" x2="100%" y1="{_y(y_axis, y)}" y2="{_y(y_axis, y)}"/>'
        )
    for index, (name, points) in enumerate(lines.items()):
        places = [(_x(x_axis, x), _y(y_axis, y)) for x, y in points]
        path = " ".join(f"{x},{y}" for x, y in places)
        dash = ' stroke-dasharray="6 4"' if name in dashed else ""
        parts.append(f'<polyline class="c{index % _COLOURS}"{dash} points="{path}"/>')
        if name in dots or len(points) == 1:
            parts += [
                f'<circle class="c{index % _COLOURS}" cx="{x}" cy="{y}" r="2.5"/>'
                for x, y in places
            ]
    parts.append("</svg>")
    for y in y_axis.ticks:
        parts.append(
            f'<text x="{_LEFT - 6}" y="{_TOP + _y(y_axis, y) + 4:.1f}" class="end">{_short(y)}</text>'
        )
    for x in x_axis.ticks:
        place = f'x="{_LEFT + _x(x_axis, x):.1f}" y="{_HEIGHT - _BOTTOM + 16}"'
        parts.append(f'<text {place} class="middle">{_short(x)}</text>')
    middle = _LEFT + _inner_width() / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 4}" class="middle">{escape(x_label)}</text></svg>'
    )
    legend = "".join(
        f'<li><span class="key c{index % _COLOURS}"></span>{escape(name)}</li>'
        for index, name in enumerate(lines)
    )
    caption = f'<figcaption>{escape(title)}<ul class="legend">{legend}</ul></figcaption>'
    return f'<figure class="chart">{caption}{"".join(parts)}</figure>'


class _Axis:
    """A range of values, its ticks, and where a value lies in it, from 0 to 1."""

    def __init__(self, values: Sequence[float], log: bool, at: Sequence[float] = ()) -> None:
        self.log = log
        low, high = min(values), max(values)
        if low == high:
            low, high = (
                (low / 2, high * 2)
                if log
                else (low - abs(low) / 2 - 0.5, high + abs(high) / 2 + 0.5)
            )
        self.low, self.high = low, high
        if log and 0 < len(at) <= 8:
            self.ticks = list(at)
            return
        self.ticks = _decades(low, high) if log else _rounded(low, high)
        if log:  # the ends are ticks too
            self.low, self.high = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def place(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _rounded(low: float, high: float) -> list[float]:
    """Returns about five multiples of 1, 2 or 5 times a power of ten in a range."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [number * step for number in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = -(-(last - first) // 6)
    return [10.0**power for power in range(first, last + 1, step)]


def _thinned(points: Points) -> Points:
    """Returns at most `_MOST_POINTS` of the points, the last among them."""
    step = -(-len(points) // _MOST_POINTS)
    return [*points[:-1:step], points[-1]]


def _x(axis: _Axis, value: float) -> float:
    return round(axis.place(value) * _inner_width(), 1)


def _y(axis: _Axis, value: float) -> float:
    place = min(
        max(axis.place(value), -1), 2
    )  # far outside is outside, and no number to trust a browser with
    return round((1 - place) * _inner_height(), 1)


def _inner_width() -> int:
    return _WIDTH - _LEFT - _RIGHT


def _inner_height() -> int:
    return _HEIGHT - _TOP - _BOTTOM


def _short(value: float) -> str:
    """Writes a tick: 0.001, 20, 3000 or 40k.

    >>> [_short(value) for value in (0.001, 0, 20.0, 65536, 2e6)]
    ['0.001', '0', '20', '65.5k', '2M']
    """
    for size, letter in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.4g}".replace("-", "−")
