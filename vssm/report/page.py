"""One self-contained HTML page about runs and results. It formats files and computes nothing.

From a run folder it reads config.json, meta.json, log.jsonl, eval.json and samples.png; from a
results folder every JSON file. A missing or damaged file is named on the page. A folder without any
run or result is an error. All text from files is escaped, and the page loads and runs nothing.

A section of the page is a list of blocks, which page.html lays out. A block is a dictionary with
`facts`, or with `charts` and a `picture`, or with a `table`, folded up if it has a `summary`.
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from vssm.report.chart import Chart, draw_chart
from vssm.runs.config import flatten
from vssm.runs.labels import GROUPS, dial_curves, dial_ways, grouped, is_number, label
from vssm.storage import read_object, write_atomically

__all__ = ["report"]

_TERMS = ("loss", "reconstruction", "kl", "partial", "partial_elbo")
_TRAINING = ("epochs", "batch", "learning_rate", "seed")  # settings that a run shows first
_COMPARED = 6  # groups of metrics in the comparison of runs
_TIME = re.compile(r"(.+)_ms_(?:b(\d{1,9})_)?t(\d{1,9})")
_ORIGIN = ("date", "commit", "machine", "command")

Object = Mapping[str, Any]
Blocks = list[dict[str, Any]]


class Row(NamedTuple):
    """A row of a table; without cells it is a heading."""

    name: str
    cells: Sequence[Any] = ()
    best: float | None = None
    """The value that is shown in bold."""


class Table(NamedTuple):
    """A table of the page."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Row]


@dataclass
class _Run:
    name: str
    config: Object
    meta: Object
    evaluation: Object
    log: list[Object]
    picture: bytes

    @property
    def task(self) -> str:
        """The data and the kind of density; likelihoods compare only where both are equal."""
        data, model = _part(self.config, "data"), _part(self.config, "model")
        binary = "binarised " if data.get("binarize") else ""
        return f"{binary}{data.get('name', 'unknown data')}, {model.get('head', 'unknown')} head"


def report(
    run_folders: Iterable[str | Path] | str | Path,
    results_folder: str | Path | None = None,
    out: str | Path = "report.html",
) -> Path:
    """Writes one HTML page about runs and results.

    Arguments:
        run_folders: One run folder, or several to show and compare.
        results_folder: A folder of result files, subfolders included.
        out: The file of the page, .html or .htm; its folder is made if it does not exist.

    Returns:
        The path of the page.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "log.jsonl").write_text("")
        ...     page = report(folder, out=f"{folder}/report.html")
        ...     "config.json is missing" in page.read_text()
        True
    """
    from jinja2 import Environment, FileSystemLoader

    folders = [run_folders] if isinstance(run_folders, str | Path) else list(run_folders)
    if not folders and results_folder is None:
        raise ValueError(
            "run_folders is empty and results_folder is None; allowed: at least one of the two"
        )
    out = Path(out)
    if out.suffix.lower() not in (".html", ".htm"):  # it could be a file of a run
        raise ValueError(f"out={str(out)!r} is not allowed; allowed: a name in .html or .htm")
    notices: list[str] = []
    runs: dict[str, _Run] = {}
    for folder in folders:
        run = _read_run(Path(folder), notices)
        while run.name in runs:
            run.name += "′"
        runs[run.name] = run
    results = {} if results_folder is None else _read_results(Path(results_folder), notices)
    sections = {"Comparison": _comparison(runs)} if len(runs) > 1 else {}
    sections |= {f"Run {name}": _run(run) for name, run in runs.items()}
    sections |= {f"Results: {name}": _results(found) for name, found in results.items()}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["text"] = _text
    page = environment.get_template("page.html").render(
        sections=sections, notices=notices, date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    # JSON may hold a lone surrogate, UTF-8 may not.
    write_atomically(out, lambda path: path.write_bytes(page.encode("utf-8", "replace")))
    return out


def _read_run(folder: Path, notices: list[str]) -> _Run:
    if not any((folder / file).is_file() for file in ("config.json", "log.jsonl", "eval.json")):
        what = "holds no run" if folder.is_dir() else "is no folder"
        raise ValueError(
            f"run_folders has {str(folder)!r}, which {what}; allowed: run folders of vssm train"
        )
    name = folder.resolve().name
    for file in ("config.json", "eval.json", "log.jsonl", "samples.png"):
        if not (folder / file).is_file():
            notices.append(f"{name}/{file} is missing")
    config, meta, evaluation = (
        _read_json(folder / file, f"{name}/{file}", notices)
        for file in ("config.json", "meta.json", "eval.json")
    )
    log, damaged = [], []
    for number, line in enumerate(_read_bytes(folder / "log.jsonl").splitlines(), 1):
        try:
            log.append(dict(json.loads(line).items()))
        except (ValueError, AttributeError, RecursionError):  # it is not a JSON object
            damaged.append(str(number))
    if damaged:
        lines = ", ".join(damaged[:5]) + " …" * (len(damaged) > 5)
        notices.append(f"{name}/log.jsonl is damaged; left out: line {lines}")
    picture = _read_bytes(folder / "samples.png")
    if picture and not (picture.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in picture[-12:]):
        notices.append(f"{name}/samples.png is damaged: it is not a whole PNG file")
        picture = b""
    return _Run(name, config, meta, evaluation, log, picture)


def _read_bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _read_json(path: Path, name: str, notices: list[str]) -> Object:
    """Returns the object in a JSON file; an empty one, and a notice, if the file is damaged."""
    try:
        return read_object(path) if path.is_file() else {}
    except ValueError as error:
        notices.append(str(error).replace(repr(str(path)), name))
        return {}


def _read_results(folder: Path, notices: list[str]) -> dict[str, dict[str, Object]]:
    """Returns results by subfolder; results in the folder itself by file."""
    groups: dict[str, dict[str, Object]] = {}
    for path in sorted(folder.rglob("*.json")):
        place = path.relative_to(folder)
        name = f"{folder.resolve().name}/{place.as_posix()}"
        values = _read_json(path, name, notices)
        if _part(values, "metrics"):
            group = place.parent.as_posix() if len(place.parts) > 1 else place.stem
            groups.setdefault(group, {})[place.stem] = values
        elif values:
            notices.append(f"{name} has no metrics")
    if not groups:
        what = "holds no result with metrics" if folder.is_dir() else "is no folder"
        raise ValueError(
            f"results_folder={str(folder)!r} {what}; allowed: a folder of result files"
        )
    return groups


def _comparison(runs: Mapping[str, _Run]) -> Blocks:
    tasks: dict[str, dict[str, Object]] = {}
    for name, run in runs.items():
        tasks.setdefault(run.task, {})[name] = _part(run.evaluation, "metrics")
    return [_metrics(f"Test set of {task}", own, _COMPARED) for task, own in tasks.items()]


def _run(run: _Run) -> Blocks:
    model, train = _part(run.config, "model"), _part(run.config, "train")
    metrics = _part(run.evaluation, "metrics")
    machine = _part(run.meta, "machine") or _part(run.evaluation, "machine")
    levels = model.get("levels", 1)
    latent = model.get("kind") in ("tvae", "vrnn", "vssm")
    facts = {
        "model": model.get("kind") if levels == 1 else f"vssm, {levels} levels",
        "data": run.task,
        "width": model.get("width"),
        "layers": model.get("layers"),
        "latents": f"{model.get('latents')} × {model.get('classes')} classes" if latent else None,
        "parameters": run.meta.get("parameters", metrics.get("parameters")),
        **{name.replace("_", " "): train.get(name) for name in _TRAINING},
        "training time, s": run.meta.get("seconds"),
        "machine": machine.get("gpu") or machine.get("cpu"),
        "commit": str(run.evaluation.get("commit") or run.meta.get("commit") or "")[:12] or None,
        "evaluated with": run.evaluation.get("command"),
    }
    picture = base64.b64encode(run.picture).decode()
    figures = {"picture": picture, "alt": f"samples of {run.name} ({run.task})"}
    untimed = {name: value for name, value in metrics.items() if not name.startswith("ms_")}
    settings = {name: value for name, value in run.config.items() if name != "data_meta"}
    rows = [Row(key, [value]) for key, value in flatten(settings).items()]
    return [
        {"facts": facts},
        {"charts": _curves(run.log), **figures},
        *_dials(run.name, metrics),
        *([_metrics("Evaluation", {"value": untimed})] if untimed else []),
        {"table": Table("Settings", ["value"], rows), "summary": "All settings"},
    ]


def _curves(log: Sequence[Object]) -> list[Chart]:
    charts = []
    for term in _TERMS:
        lines: dict[str, list[tuple[float, float]]] = {"train": [], "valid": []}
        for line in log:
            split, x, y = line.get("split"), line.get("epoch"), line.get(term)
            if split in ("train", "valid") and is_number(x) and is_number(y):
                lines[split].append((x, y))
        if any(y for points in lines.values() for _, y in points):
            charts.append(draw_chart(f"{label(term)}, nats a sequence", "epoch", lines, ["valid"]))
    return charts


def _dials(name: str, metrics: Object) -> Blocks:
    """Shows quality against time: a chart for each batch size, and a table of ways to sample."""
    ways, charts = dial_ways(metrics), []
    if not ways:
        return []
    sizes = (re.fullmatch(r"ms_one_shot_b(\d{1,9})", metric) for metric in metrics)
    ends = {1: ""} | {int(size[1]): f"_b{size[1]}" for size in sizes if size}
    for batch in ends:
        if lines := dial_curves(metrics, batch):
            title, marked = f"{name}: Fréchet distance, batch {batch}", lines.keys() - {"floor"}
            charts.append(draw_chart(title, "milliseconds", lines, marked, True, ["floor"]))
    rows = []
    for way in [*ways, "floor"]:
        shown = (f"fd_{way}", *(f"ms_{way}{end}" for end in ends.values()))
        rows.append(Row(label(f"fd_{way}"), [metrics.get(metric) for metric in shown]))
    columns = ["Fréchet distance", *(f"ms, batch {batch}" for batch in ends)]
    return [{"charts": charts}, {"table": Table(f"{name}: quality against time", columns, rows)}]


def _metrics(
    caption: str, columns: Mapping[str, Object], num_groups: int = len(GROUPS)
) -> dict[str, Table]:
    """Makes a table of metrics, a row each, with the best value of every row in bold."""
    names = [name for metrics in columns.values() for name in metrics]
    rows: list[Row] = []
    for title, direction, own in grouped(names, num_groups):
        rows.append(Row(title))
        for name in own:
            values = [metrics.get(name) for metrics in columns.values()]
            numbers = [direction * value for value in values if is_number(value)]
            best = direction * max(numbers) if direction and len(numbers) > 1 else None
            rows.append(Row(label(name), values, best))
    return {"table": Table(caption, list(columns), rows)}


def _results(found: Mapping[str, Object]) -> Blocks:
    """Shows the results of a file, or of the files of a folder side by side."""
    blocks: Blocks = []
    rest: dict[str, dict[str, Any]] = {}
    origins = []
    for name, values in found.items():
        blocks += _dials(name, _part(values, "metrics"))
        times: dict[tuple[int, int], dict[str, Any]] = {}
        for metric, value in _part(values, "metrics").items():
            if match := _TIME.fullmatch(metric):
                times.setdefault((int(match[2] or 0), int(match[3])), {})[match[1]] = value
            else:
                rest.setdefault(name, {})[metric] = value
        blocks += _times(name, times) if times else []
        machine = ", ".join(f"{key} {fact}" for key, fact in _part(values, "machine").items())
        facts = {**values, "machine": machine or values.get("machine")}
        origins.append(Row(name, [facts.get(key) for key in _ORIGIN]))
    names = list(dict.fromkeys(metric for metrics in rest.values() for metric in metrics))
    if len(rest) == 1:
        ((name, metrics),) = rest.items()
        rows = [Row(label(metric), [metrics[metric]]) for metric in names]
        blocks.append({"table": Table(name, ["value"], rows)})
    elif rest:
        rows = [Row(name, [metrics.get(m) for m in names]) for name, metrics in rest.items()]
        blocks.append({"table": Table("All results", [label(m) for m in names], rows)})
    origin = Table("Origin", _ORIGIN, origins)
    return [*blocks, {"table": origin, "summary": "Where this comes from"}]


def _times(name: str, times: Mapping[tuple[int, int], Object]) -> Blocks:
    """Shows times by (batch, length): a table, and charts along the axes with several values."""
    series = list(dict.fromkeys(line for cells in times.values() for line in cells))
    rows = [
        Row(
            f"batch {batch:,}, length {length:,}" if batch else f"length {length:,}",
            [cells.get(line) for line in series],
        )
        for (batch, length), cells in sorted(times.items())
    ]
    charts = []
    for axis, fixed, along in ((1, 0, "length"), (0, 1, "batch")):
        for value in sorted({key[fixed] for key in times}):
            lines: dict[str, list[tuple[float, float]]] = {}
            for key, cells in sorted(times.items()):
                for line, time in cells.items():
                    if key[fixed] == value and key[axis] > 0 and is_number(time) and time > 1e-100:
                        lines.setdefault(label(line), []).append((float(key[axis]), float(time)))
            if any(len(points) > 1 for points in lines.values()):
                other = f" at {('batch', 'length')[fixed]} {value:,}" if value else ""
                title = f"{name}: milliseconds{other}"
                charts.append(draw_chart(title, along, lines, lines, log=True))
    table = Table(f"{name}: milliseconds", [label(line) for line in series], rows)
    return [{"charts": charts}, {"table": table}]


def _part(values: Object, name: str) -> dict[str, Any]:
    """Returns a part of a JSON object that should be an object itself."""
    part = values.get(name)
    return part if isinstance(part, dict) else {}


def _text(value: object) -> str:
    """Writes a value with as many digits as a reader needs.

    >>> [_text(value) for value in (1234567, 1234.5, 12.345, 0.00123, float("nan"), None, True)]
    ['1,234,567', '1,234.5', '12.35', '0.00123', 'not finite', '–', 'True']
    """
    if value is None:
        return "–"
    if isinstance(value, float) and not is_number(value):
        return "not finite"
    if not isinstance(value, float):
        return f"{value:,}" if is_number(value) else str(value)
    if not 1 <= abs(value) < 1e7:
        return f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.2f}"
