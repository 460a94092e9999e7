"""Results beyond the paper: likelihoods, distances of samples, quality against time."""

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from writing import number, origins, table

from vssm.config import RunConfig
from vssm.data.storage import write_atomically
from vssm.lab.experiments import read_results
from vssm.runs.hub import train_command
from vssm.runs.labels import is_number, label

_ABOUT = (
    "Each row is a run that `vssm evaluate RUN --dials` measured and `experiments/keep_result.py` "
    "kept. Likelihoods are in nats, estimated with K draws of the latents on so many test "
    "sequences; higher is better. FD is the Fréchet distance of samples to the test set; lower is "
    "better, and the floor is the distance of as many training images. W: in chunks of W steps, "
    "each re-conditioned on those before. S: in S passes over all steps. Passes and ms are for one "
    "sequence in one shot: the number of sequential rounds of draws, and their time."
)
_WAY = re.compile(r"one_shot|[ws]\d{1,9}")


def quality(folder: Path) -> list[str]:
    """Returns the parts of the page about the results that experiments/keep_result.py kept."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for result in read_results(folder.glob("*.json")):
        data = result["config"]["data"]
        binary = "binarised " if data.get("binarize") else ""
        tasks.setdefault(f"{binary}{data['name']}", []).append(result)
    parts = ["## Better than the paper", _ABOUT] if tasks else []
    for task, results in tasks.items():
        parts += [f"### {task}", _table(results)]
        for result in results:
            parts += _dials(result)
            if (folder / f"{result['name']}.png").is_file():
                ways = "three rows each in one shot, in four chunks, step by step, and completed"
                parts.append(f"![{result['name']}: {ways}](pictures/quality_{result['name']}.png)")
        parts.append(origins(map(_with_training, results)))
    return parts


def _with_training(result: dict[str, Any]) -> dict[str, Any]:
    """Puts the command that trained a run before the one that scored it."""
    config, command = result["config"], result["command"]
    if "train" not in config:
        return result
    run = RunConfig.from_dict({part: config[part] for part in ("data", "model", "train")})
    out = shlex.quote(shlex.split(command)[2])
    return {**result, "command": f"{train_command(run)} --out {out}`, `{command}"}


def _table(results: list[dict[str, Any]]) -> str:
    """Makes the table of the runs of a data set; empty columns are left out."""
    ways = dial_ways({name for result in results for name in result["metrics"]}, "fd")
    chunks = [way for way in ways if way.startswith("w") and "_" not in way]
    passes = [way for way in ways if way.startswith("s")]
    columns = {
        "log p(x)": ["log_likelihood"],
        "by particles": ["log_likelihood_particles"],
        "second half": ["partial_log_likelihood"],
        "nats": ["nats"],
        "bits per dimension": ["bits_per_dim"],
        "FD one shot": ["fd_one_shot"],
        "FD step by step": ["fd_sample"],
        f"FD W = {' / '.join(way[1:] for way in chunks)}": [f"fd_{way}" for way in chunks],
        f"FD S = {' / '.join(way[1:] for way in passes)}": [f"fd_{way}" for way in passes],
        "FD second half": ["fd_prompted"],
        "FD floor": ["fd_floor"],
        "passes": ["passes"],
        "ms": ["generate_ms_b1"],
        "training, s": ["train_seconds"],
        "K": ["num_samples"],
        "test sequences": ["sequences"],
    }
    metrics = [result["metrics"] for result in results]
    shown = {
        title: names
        for title, names in columns.items()
        if any(own.get(name) is not None for own in metrics for name in names)
    }
    rows = []
    for result in results:
        own = result["metrics"]
        cells = (" / ".join(number(own.get(n)) or "–" for n in names) for names in shown.values())
        rows.append([result["name"], *cells])
    return table(["run", *shown], rows)


def _dials(result: dict[str, Any]) -> list[str]:
    """Shows quality against time of one run, if that was measured."""
    name, metrics = result["name"], result["metrics"]
    rows = []
    for way in dial_ways(metrics):
        measured = (f"fd_{way}", f"ms_{way}", f"ms_{way}_b256")
        rows.append([label(f"fd_{way}"), *(number(metrics.get(metric)) for metric in measured)])
    if not rows:
        return []
    parts = [f"Quality against time of {name}:", table([name, "FD", "ms", "ms, batch 256"], rows)]
    if dial_curves(metrics):
        alt = f"Fréchet distance against milliseconds of {name}"
        parts.append(f"![{alt}](pictures/dials_{name}.png)")
    return parts


def draw_dials(metrics: Mapping[str, Any], path: Path) -> None:
    """Draws quality against time as a PNG, if it was measured: a panel per batch size."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = {batch: lines for batch in (1, 256) if (lines := dial_curves(metrics, batch))}
    if not panels:
        return
    figure = Figure(figsize=(4.5 * len(panels), 3.4), layout="constrained")
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


def dial_ways(metrics: Iterable[str], measure: str = "ms") -> list[str]:
    """Returns the ways to sample that were measured: one shot, chunks, passes.

    >>> dial_ways(["ms_s4", "ms_w2", "ms_w14", "ms_s16", "fd_s8", "ms_one_shot", "ms_w2_b256"])
    ['one_shot', 'w14', 'w2', 's4', 's16']
    """
    start = f"{measure}_"
    ways = (name.removeprefix(start) for name in metrics if name.startswith(start))
    sizes = {way: int(way[1:]) for way in filter(_WAY.fullmatch, ways) if way != "one_shot"}
    chunks = sorted((way for way in sizes if way[0] == "w"), key=sizes.__getitem__, reverse=True)
    passes = sorted((way for way in sizes if way[0] == "s"), key=sizes.__getitem__)
    return [*(["one_shot"] if f"{start}one_shot" in metrics else []), *chunks, *passes]


def dial_curves(metrics: Mapping[str, Any], batch: int = 1) -> dict[str, list[tuple[float, float]]]:
    """Returns curves of (milliseconds, Fréchet distance), each from one shot on, and the floor.

    Arguments:
        metrics: Metrics of an evaluation with --dials; others have no curves.
        batch: How many sequences were made at a time.

    Example:
        >>> metrics = {"fd_one_shot": 90.0, "fd_s2": 30.0, "ms_one_shot": 1.5, "ms_s2": 4.0}
        >>> dial_curves({**metrics, "fd_floor": 7})
        {'passes S': [(1.5, 90.0), (4.0, 30.0)], 'floor': [(1.5, 7), (4.0, 7)]}
    """
    end = f"_b{batch}" if batch > 1 else ""
    points: dict[str, tuple[float, float]] = {}
    for way in dial_ways(metrics):
        ms, distance = metrics.get(f"ms_{way}{end}"), metrics.get(f"fd_{way}")
        if is_number(ms) and is_number(distance) and min(ms, distance) > 0:
            points[way] = ms, distance
    lines: dict[str, list[tuple[float, float]]] = {}
    for letter, name in (("w", "chunks W"), ("s", "passes S")):
        if any(way[0] == letter for way in points):
            lines[name] = [point for way, point in points.items() if way[0] in ("o", letter)]
    floor, times = metrics.get("fd_floor"), [ms for ms, _ in points.values()]
    if lines and is_number(floor) and floor > 0:
        lines["floor"] = [(min(times), floor), (max(times), floor)]
    return lines
