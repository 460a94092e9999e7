"""One self-contained HTML page about runs and results: it reads files and formats them, it computes nothing.

Of a run folder it reads config.json, meta.json, log.jsonl, eval.json and samples.png; of a results folder
every JSON file. Whatever of them is missing or damaged is named on the page; a folder that holds no run, or
no results, is a mistake. All that comes from a file is escaped,
and the page may load nothing and run nothing.
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from vssm.report.chart import chart
from vssm.report.style import STYLE
from vssm.runs.labels import GROUPS, dial_curves, dial_ways, grouped, is_number, label
from vssm.storage import write_atomically

__all__ = ["report"]

_TERMS = ("loss", "reconstruction", "kl", "partial", "partial_elbo")
_COMPARED = 6  # of the groups
_TIME = re.compile(r"(.+)_ms_(?:b(\d+)_)?t(\d+)")
_LARGEST_PICTURE = 16 * 2**20


@dataclass
class _Run:
    name: str
    config: dict[str, Any]
    meta: dict[str, Any]
    evaluation: dict[str, Any]
    log: list[dict[str, Any]]
    picture: bytes | None

    @property
    def task(self) -> str:
        """What must be equal for likelihoods to compare: the data and the kind of density."""
        data, model = _part(self.config, "data"), _part(self.config, "model")
        binary = "binarised " if data.get("binarize") else ""
        return f"{binary}{data.get('name', 'unknown data')}, {model.get('head', 'unknown')} head"


@dataclass
class _Files:
    """Reads files, and keeps a note of each that could not be read."""

    notices: list[str] = field(default_factory=list)

    def json(self, path: Path, name: str, needed: bool = True) -> dict[str, Any]:
        """Returns the object in a JSON file, an empty one when there is none that can be read."""
        content = self._read(path, name, needed)
        if content is None:
            return {}
        try:
            values = json.loads(content)
            if isinstance(values, dict):
                return values
            self.notices.append(f"{name} is damaged: it is no JSON object")
        except (ValueError, RecursionError) as error:
            self.notices.append(f"{name} is damaged: {error}")
        return {}

    def lines(self, path: Path, name: str) -> list[dict[str, Any]]:
        """Returns the objects in a file of one JSON object a line."""
        found, damaged = [], []
        for number, line in enumerate((self._read(path, name) or b"").splitlines(), 1):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                values = None
            if isinstance(values, dict):
                found.append(values)
            else:
                damaged.append(number)
        if damaged:
            which = ", ".join(map(str, damaged[:5])) + (" …" if len(damaged) > 5 else "")
            self.notices.append(f"{name} is damaged; left out: line {which}")
        return found

    def picture(self, path: Path, name: str) -> bytes | None:
        """Returns a PNG file."""
        content = self._read(path, name)
        if content is None:
            return None
        if not content.startswith(b"\x89PNG\r\n\x1a\n") or b"IEND" not in content[-12:]:
            self.notices.append(f"{name} is damaged: it is no whole PNG")
            return None
        if len(content) > _LARGEST_PICTURE:
            self.notices.append(f"{name} has {len(content):,} bytes and was left out")
            return None
        return content

    def _read(self, path: Path, name: str, needed: bool = True) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            if needed:
                self.notices.append(f"{name} is missing")
        except OSError as error:
            self.notices.append(f"{name} cannot be read: {error.strerror}")
        return None


def report(
    run_folders: Iterable[str | Path] | str | Path,
    results_folder: str | Path | None = None,
    out: str | Path = "report.html",
) -> Path:
    """Writes one HTML page about runs and results.

    Arguments:
        run_folders: A run folder, or those to show and to compare; each holds one file of a run at least.
        results_folder: A folder of result files, subfolders included.
        out: Where the page goes, a name in .html or .htm; its folder is made if it does not exist.

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
    if isinstance(run_folders, str | Path):
        run_folders = [run_folders]
    folders, files = [Path(folder) for folder in run_folders], _Files()
    if not folders and results_folder is None:
        raise ValueError(
            "run_folders is empty and results_folder is None; allowed: at least one of the two"
        )
    out = Path(out)
    if out.suffix.lower() not in (".html", ".htm"):  # not over a file of a run
        raise ValueError(f"out={str(out)!r} is not allowed; allowed: a name in .html or .htm")
    runs: dict[str, _Run] = {}
    for folder in folders:
        run = _read_run(folder, files)
        while run.name in runs:
            run.name += "′"
        runs[run.name] = run
    results = {} if results_folder is None else _read_results(Path(results_folder), files)
    sections = {"Comparison": _comparison(runs)} if len(runs) > 1 else {}
    sections |= {f"Run {name}": _run(run) for name, run in runs.items()}
    sections |= {f"Results: {name}": _results(found) for name, found in results.items()}
    page = _page(sections, files.notices)
    out.parent.mkdir(parents=True, exist_ok=True)
    # JSON may hold a lone surrogate, UTF-8 may not.
    write_atomically(out, lambda path: path.write_bytes(page.encode("utf-8", "replace")))
    return out


def _read_run(folder: Path, files: _Files) -> _Run:
    name = folder.resolve().name
    if not any((folder / file).is_file() for file in ("config.json", "log.jsonl", "eval.json")):
        what = "holds no run" if folder.is_dir() else "is no folder"
        raise ValueError(
            f"run_folders has {str(folder)!r}, which {what}; allowed: run folders of vssm train"
        )
    return _Run(
        name,
        files.json(folder / "config.json", f"{name}/config.json"),
        files.json(folder / "meta.json", f"{name}/meta.json", needed=False),
        files.json(folder / "eval.json", f"{name}/eval.json"),
        files.lines(folder / "log.jsonl", f"{name}/log.jsonl"),
        files.picture(folder / "samples.png", f"{name}/samples.png"),
    )


def _read_results(folder: Path, files: _Files) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the results by subfolder, or by file where they lie in the folder itself."""
    top = folder.resolve().name
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.rglob("*.json")):
        place = path.relative_to(folder)
        values = files.json(path, f"{top}/{place.as_posix()}")
        if _part(values, "metrics"):
            group = place.parent.as_posix() if len(place.parts) > 1 else place.stem
            groups.setdefault(group, {})[place.stem] = values
        elif values:
            files.notices.append(f"{top}/{place.as_posix()} has no metrics")
    if not groups:
        what = "holds no result with metrics" if folder.is_dir() else "is no folder"
        raise ValueError(
            f"results_folder={str(folder)!r} {what}; allowed: a folder of result files"
        )
    return groups


def _comparison(runs: Mapping[str, _Run]) -> str:
    tasks: dict[str, dict[str, dict[str, Any]]] = {}
    for name, run in runs.items():
        tasks.setdefault(run.task, {})[name] = _part(run.evaluation, "metrics")
    return "".join(_metrics(f"Test set of {task}", same, _COMPARED) for task, same in tasks.items())


def _run(run: _Run) -> str:
    model, train = _part(run.config, "model"), _part(run.config, "train")
    metrics = _part(run.evaluation, "metrics")
    untimed = {name: value for name, value in metrics.items() if not name.startswith("ms_")}
    machine = _part(run.meta, "machine") or _part(run.evaluation, "machine")
    latent = model.get("kind") in ("tvae", "vrnn", "vssm")
    facts = {
        "model": f"vssm, {model['levels']} levels"
        if model.get("levels", 1) != 1
        else model.get("kind"),
        "data": run.task,
        "size": f"width {_text(model.get('width'))}, {_text(model.get('layers'))} layers",
        "latents": f"{_text(model.get('latents'))} × {_text(model.get('classes'))} classes"
        if latent
        else None,
        "parameters": run.meta.get("parameters", metrics.get("parameters")),
        "training": f"{_text(train.get('epochs'))} epochs, batch {_text(train.get('batch'))}, "
        f"learning rate {_text(train.get('learning_rate'))}, seed {_text(train.get('seed'))}",
        "training time, s": run.meta.get("seconds"),
        "machine": machine.get("gpu") or machine.get("cpu"),
        "commit": str(run.evaluation.get("commit") or run.meta.get("commit") or "")[:12] or None,
        "evaluated with": run.evaluation.get("command"),
    }
    told = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{_cell(value)}</dd></div>"
        for name, value in facts.items()
        if value is not None
    )
    settings = {key: value for key, value in _flat(run.config) if not key.startswith("data_meta.")}
    rows = [(key, [_cell(value)]) for key, value in settings.items()]
    picture = ""
    if run.picture is not None:
        code = base64.b64encode(run.picture).decode()
        text = f"samples of {run.name} ({run.task})"
        picture = (
            f'<figure class="samples"><figcaption>Samples</figcaption>'
            f'<img src="data:image/png;base64,{code}" alt="{escape(text)}"></figure>'
        )
    return (
        f'<dl class="facts">{told}</dl><div class="figures">{_curves(run)}{picture}</div>'
        + _dials(run.name, metrics)
        + (_metrics("Evaluation", {"value": untimed}) if untimed else "")
        + (
            f"<details><summary>All settings</summary>{_table('Settings', ['value'], rows)}</details>"
        )
    )


def _dials(name: str, metrics: Mapping[str, Any]) -> str:
    """Shows quality against time: a chart for every batch size, and a table of all ways to sample."""
    ways = dial_ways(metrics)
    if not ways:
        return ""
    sizes = (re.fullmatch(r"ms_one_shot_b(\d{1,9})", metric) for metric in metrics)
    batches = {1: ""} | {int(size[1]): f"_b{size[1]}" for size in sizes if size}
    figures = []
    for batch in batches:
        lines = dial_curves(metrics, batch)
        if lines:
            title, marked = f"{name}: Fréchet distance, batch {batch}", frozenset(lines) - {"floor"}
            figures.append(
                chart(title, "milliseconds", lines, marked, log=True, dashed=frozenset({"floor"}))
            )
    rows = []
    for way in ways:
        shown = [f"fd_{way}", *(f"ms_{way}{end}" for end in batches.values())]
        rows.append((label(shown[0]), [_cell(metrics.get(metric)) for metric in shown]))
    rows.append((label("fd_floor"), [_cell(metrics.get("fd_floor")), *("–" for _ in batches)]))
    columns = ["Fréchet distance", *(f"ms, batch {batch}" for batch in batches)]
    table = _table(f"{name}: quality against time", columns, rows)
    return f'<div class="figures">{"".join(figures)}</div>{table}'


def _curves(run: _Run) -> str:
    figures = []
    for term in _TERMS:
        lines: dict[str, list[tuple[float, float]]] = {}
        for split in ("train", "valid"):
            points = [
                (line.get("epoch"), line.get(term))
                for line in run.log
                if line.get("split") == split
            ]
            lines[split] = [(x, y) for x, y in points if is_number(x) and is_number(y)]
        if any(y for points in lines.values() for _, y in points):
            title = f"{label(term)}, nats a sequence"
            figures.append(chart(title, "epoch", lines, dots=frozenset({"valid"})))
    return "".join(figures)


def _metrics(
    caption: str, columns: Mapping[str, Mapping[str, Any]], num_groups: int = len(GROUPS)
) -> str:
    """Makes a table of metrics, a row each, with the best of every row in bold."""
    names = [name for metrics in columns.values() for name in metrics]
    rows: list[tuple[str, list[str]]] = []
    for title, direction, own in grouped(names, num_groups):
        rows.append((title, []))
        for name in own:
            values = [metrics.get(name) for metrics in columns.values()]
            numbers = [value for value in values if is_number(value)]
            best = (
                max(numbers, key=lambda v: direction * v)
                if direction and len(numbers) > 1
                else None
            )
            cells = [
                f"<strong>{_cell(v)}</strong>" if v == best and best is not None else _cell(v)
                for v in values
            ]
            rows.append((label(name), cells))
    return _table(caption, list(columns), rows)


def _results(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Shows the results of a file, or of the files of a folder side by side."""
    parts = []
    rest: dict[str, dict[str, Any]] = {}
    for name, values in found.items():
        parts.append(_dials(name, _part(values, "metrics")))
        times: dict[tuple[int, int], dict[str, Any]] = {}
        for metric, value in _part(values, "metrics").items():
            match = _TIME.fullmatch(metric)
            if match and len(match[2] or "") < 10 and len(match[3]) < 10:
                times.setdefault((int(match[2] or 0), int(match[3])), {})[match[1]] = value
            else:
                rest.setdefault(name, {})[metric] = value
        if times:
            parts.append(_times(name, times))
    if rest:
        names = list(dict.fromkeys(metric for metrics in rest.values() for metric in metrics))
        if len(rest) == 1:
            ((name, metrics),) = rest.items()
            parts.append(_table(name, ["value"], [(label(m), [_cell(metrics[m])]) for m in names]))
        else:
            rows = [
                (name, [_cell(metrics.get(m)) for m in names]) for name, metrics in rest.items()
            ]
            parts.append(_table("All results", [label(m) for m in names], rows))
    rows = [
        (name, [_cell(_origin(values, key)) for key in _ORIGIN]) for name, values in found.items()
    ]
    origin = _table("Origin", list(_ORIGIN), rows)
    return "".join(parts) + f"<details><summary>Where this comes from</summary>{origin}</details>"


_ORIGIN = ("date", "commit", "machine", "command")


def _origin(values: Mapping[str, Any], key: str) -> object:
    value = values.get(key)
    return (
        ", ".join(f"{k} {v}" for k, v in value.items() if v) if isinstance(value, dict) else value
    )


def _times(name: str, times: Mapping[tuple[int, int], Mapping[str, Any]]) -> str:
    """Shows times by batch and length: a table, and a chart for every axis that has a second value."""
    series = list(dict.fromkeys(line for cells in times.values() for line in cells))
    rows = [
        (
            f"batch {batch:,}, length {length:,}" if batch else f"length {length:,}",
            [_cell(cells.get(line)) for line in series],
        )
        for (batch, length), cells in sorted(times.items())
    ]
    figures = []
    for axis, fixed, along in ((1, 0, "length"), (0, 1, "batch")):
        for value in sorted({key[fixed] for key in times}):
            lines: dict[str, list[tuple[float, float]]] = {}
            for key, cells in sorted(times.items()):
                for line, time in cells.items():
                    if key[fixed] == value and key[axis] > 0 and is_number(time) and time > 1e-100:
                        lines.setdefault(label(line), []).append((float(key[axis]), float(time)))
            if any(len(points) > 1 for points in lines.values()):
                other = f" at {'batch' if fixed == 0 else 'length'} {value:,}" if value else ""
                title = f"{name}: milliseconds{other}"
                figures.append(chart(title, along, lines, dots=frozenset(lines), log=True))
    table = _table(f"{name}: milliseconds", [label(line) for line in series], rows)
    return f'<div class="figures">{"".join(figures)}</div>{table}'


def _table(caption: str, columns: list[str], rows: list[tuple[str, list[str]]]) -> str:
    """Makes a table; cells are HTML, all else is text, and a row without cells is a heading."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        if cells
        else f'<tr class="group"><th scope="colgroup" colspan="{len(columns) + 1}">{escape(name)}</th></tr>'
        for name, cells in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody>"
        "</table></div>"
    )


def _page(sections: Mapping[str, str], notices: list[str]) -> str:
    warning = ""
    if notices:
        items = "".join(f"<li>{escape(notice)}</li>" for notice in notices)
        warning = (
            f'<aside class="notice" aria-label="Notices"><h2>Not shown</h2><ul>{items}</ul></aside>'
        )
    contents = "".join(
        f'<li><a href="#s{i}">{escape(title)}</a></li>' for i, title in enumerate(sections)
    )
    body = "".join(
        f'<section id="s{i}" aria-labelledby="h{i}"><h2 id="h{i}">{escape(title)}</h2>{text}</section>'
        for i, (title, text) in enumerate(sections.items())
    )
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>vssm report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f"<style>{STYLE}</style></head><body><header><h1>vssm report</h1><p>{date}</p></header>"
        f'<nav aria-label="Contents"><ul>{contents}</ul></nav><main>{warning}{body}</main></body></html>\n'
    )


def _part(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a part of a JSON object that should be an object itself."""
    part = values.get(name)
    return part if isinstance(part, dict) else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


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
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.1f}" if size >= 100 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def _cell(value: object) -> str:
    return escape(_text(value))
