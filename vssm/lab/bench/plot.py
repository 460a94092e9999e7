"""Pictures of benchmark results: bars for training, lines on logarithmic axes for the others."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vssm.storage import write_atomically

__all__ = ["check_plot", "plot_result"]

_SIZE = r"_ms_b(?P<batch>\d+)_t(?P<length>\d+)"
# Names of metrics, the title of their panel, and the label of their line.
_PANELS = {
    rf"(?:(?P<model>\w+)_)?fwd{_SIZE}": ("forward, ms", "{model}"),
    rf"(?:(?P<model>\w+)_)?bwd{_SIZE}": ("backward, ms", "{model}"),
    rf"(?P<model>floor){_SIZE}": ("forward, ms", "{model}"),
    r"(?P<model>\w+)_tokens_per_second": ("tokens per second", "{model}"),
    r"(?P<model>\w+)_peak_memory_mib": ("peak memory, MiB", "{model}"),
    r"(?P<model>\w+?)_train_ms_t(?P<length>\d+)": ("training pass, ms", "{model}"),
    r"(?P<model>\w+?)_sample_ms_t(?P<length>\d+)": ("sampling, ms", "{model}"),
    r"(?P<model>\w+)_p(?P<patch>\d+)_ms_t(?P<length>\d+)": (
        "forecasts, ms",
        "{model}, {patch} points per step",
    ),
    rf"(?P<model>(?!.*(?:prompted|chunk|p10|p90|floor))\w+?){_SIZE}": (
        "unconditional, batch {batch}, ms",
        "{model}",
    ),
}


def check_plot(path: str | Path | None) -> None:
    """Raises `ValueError` for a picture that can not be drawn, before anything is measured."""
    if path is not None and Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"plot={str(path)!r} is not allowed; allowed: a name in .png or .svg")


def plot_result(made: Mapping[str, Any] | str | Path, path: str | Path) -> None:
    """Draws the result of a benchmark.

    Arguments:
        made: The result, or its file, which may come from another machine.
        path: The picture, .png or .svg; its folder is created if it does not exist.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_plot(path)
    if isinstance(made, str | Path):
        made = json.loads(Path(made).read_text())
    assert isinstance(made, Mapping)
    panels = _panels({name: value for name, value in made["metrics"].items() if value})
    if not panels:
        raise ValueError(f"plot={str(path)!r}: result {made['name']!r} has no numbers to draw")
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    where = made["machine"]["gpu" if made["config"].get("device") == "cuda" else "cpu"]
    figure.suptitle(f"vssm bench {made['name']}, {where}", fontsize=10)
    places = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (title, lines) in zip(places, panels.items(), strict=False):
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        if made["name"] == "train":
            axes.barh(list(lines), [value for ((_, value),) in lines.values()])
            continue
        for label, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=label, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("steps, all sequences" if made["name"] == "scan" else "steps", fontsize=8)
        axes.legend(fontsize=7)
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=120))


def _panels(metrics: Mapping[str, float]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Returns points by title and by label."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for name, value in metrics.items():
        for pattern, (title, label) in _PANELS.items():
            if match := re.fullmatch(pattern, name):
                parts = {"model": "vssm", **{k: v for k, v in match.groupdict().items() if v}}
                x = int(parts.get("length", 1))
                if title in ("forward, ms", "backward, ms"):
                    x *= int(parts["batch"])
                lines = panels.setdefault(title.format(**parts), {})
                lines.setdefault(label.format(**parts), []).append((x, value))
                break
    return panels
