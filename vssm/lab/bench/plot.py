"""Pictures of benchmark results: bars for training, points and lines on logarithmic axes for the others."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vssm.storage import write_atomically

__all__ = ["check_plot", "plot_result"]


def check_plot(path: str | Path | None) -> None:
    """Raises `ValueError` for a picture that can not be made, before anything is measured."""
    if path is not None and Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"plot={str(path)!r} is not allowed; allowed: a name in .png or .svg")


def plot_result(made: Mapping[str, Any] | str | Path, path: str | Path) -> None:
    """Draws the result of a benchmark.

    Arguments:
        made: The result, or its file: the machine that draws need not be the one that measured.
        path: The picture, .png or .svg; its folder is made if it does not exist.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_plot(path)
    if isinstance(made, str | Path):
        made = json.loads(Path(made).read_text())
    assert isinstance(made, Mapping)
    panels = _panels(made["name"], {k: v for k, v in made["metrics"].items() if v})
    if not panels:
        raise ValueError(f"plot={str(path)!r}: result {made['name']!r} has no numbers to draw")
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    machine = made["machine"]
    where = machine["gpu"] if made["config"].get("device") == "cuda" else machine["cpu"]
    figure.suptitle(f"vssm bench {made['name']}, {where}", fontsize=10)
    for axes, (title, bars, lines) in zip(
        figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False
    ):
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        if bars:
            axes.barh(list(lines), [points[""] for points in lines.values()])
            continue
        axes.set_yscale("log")
        steps = all(isinstance(x, int) for points in lines.values() for x in points)
        if steps:
            axes.set_xscale("log", base=2)
        axes.set_xlabel("steps" if steps else "batch, steps", fontsize=8)
        for label, points in lines.items():
            values = sorted(points.items()) if steps else points.items()
            axes.plot(*zip(*values, strict=True), "o-" if steps else "o", label=label, markersize=4)
        axes.legend(fontsize=7)
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=120))


def _panels(
    name: str, metrics: Mapping[str, float]
) -> list[tuple[str, bool, dict[str, dict[Any, float]]]]:
    """Returns (title, whether bars, values by label and by place) of every panel."""
    panels: dict[str, dict[str, dict[Any, float]]] = {}

    def put(title: str, label: str, x: Any, value: float) -> None:  # noqa: ANN401
        panels.setdefault(title, {}).setdefault(label, {})[x] = value

    for key, value in metrics.items():
        if match := re.fullmatch(r"(.*?)_?(fwd|bwd)_ms_b(\d+)_t(\d+)", key):
            way = "forward" if match[2] == "fwd" else "backward"
            put(f"{way}, ms", match[1] or "vssm", f"{match[3]}, {match[4]}", value)
        elif match := re.fullmatch(r"floor_ms_b(\d+)_t(\d+)", key):
            put("forward, ms", "floor", f"{match[1]}, {match[2]}", value)
        elif match := re.fullmatch(r"(\w+)_(tokens_per_second|peak_memory_mib)", key):
            title = "tokens a second" if match[2].startswith("tokens") else "most memory, MiB"
            put(title, match[1], "", value)
        elif match := re.fullmatch(r"(\w+?)_(train|sample)_ms_t(\d+)", key):
            title = "training pass, ms" if match[2] == "train" else "sampling, ms"
            put(title, match[1], int(match[3]), value)
        elif match := re.fullmatch(r"(\w+)_p(\d+)_ms_t(\d+)", key):
            put("forecasts, ms", f"{match[1]}, {match[2]} a step", int(match[3]), value)
        elif match := re.fullmatch(
            r"((?!.*(?:prompted|chunk|p10|p90|floor))\w+?)_ms_b(\d+)_t(\d+)", key
        ):
            put(f"from nothing, batch {match[2]}, ms", match[1], int(match[3]), value)
    return [(title, name == "train", lines) for title, lines in panels.items()]
