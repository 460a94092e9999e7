"""One self-contained HTML page about runs. It formats files and computes nothing.

From a run folder it reads config.json, meta.json, log.jsonl, eval.json and all pictures, as far as
they are there. A damaged file, or a folder without a run, is an error. All text from files is
escaped, and the page loads and runs nothing.

The page opens with pictures and curves; tables follow. A section is a list of blocks, which
page.html lays out: `pictures` side by side, or a `table`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from vssm.data.storage import read_object, write_atomically
from vssm.evaluation.report.chart import Picture, draw_chart
from vssm.runs.config import refuse_forecaster
from vssm.runs.folder import read_log
from vssm.runs.labels import GROUPS, grouped, is_number, label

_TERMS = ("loss", "kl", "partial_elbo")
_COMPARED = len(GROUPS) - 1  # groups of metrics; the last one has counts

Object = Mapping[str, Any]
Points = list[tuple[float, float]]


class _Row(NamedTuple):
    """A row of a table; without cells it is a heading."""

    name: str
    cells: Sequence[Any] = ()
    best: float | None = None
    """The value that is shown in bold."""


class _Table(NamedTuple):
    caption: str
    columns: Sequence[str]
    rows: Sequence[_Row]


@dataclass
class _Run:
    name: str
    config: Object
    meta: Object
    evaluation: Object
    log: Sequence[Object]
    pictures: list[Picture]

    @property
    def metrics(self) -> dict[str, Any]:
        return self.evaluation.get("metrics", {})

    @property
    def task(self) -> str:
        """The data and the kind of density; likelihoods compare only where both are equal."""
        data, model = self.config.get("data", {}), self.config.get("model", {})
        binary = "binarised " if data.get("binarize") else ""
        return f"{binary}{data.get('name', 'unknown data')}, {model.get('head', 'unknown')} head"


def report(run_folders: Iterable[str | Path] | str | Path, out: str | Path = "report.html") -> Path:
    """Writes one HTML page about runs.

    Arguments:
        run_folders: One run folder, or several to show and compare.
        out: The file of the page, .html or .htm; its folder is made if it does not exist.

    Returns:
        The path of the page.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "log.jsonl").write_text("")
        ...     report(folder, out=f"{folder}/report.html").name
        'report.html'
    """
    from jinja2 import Environment, FileSystemLoader

    out = Path(out)
    if out.suffix.lower() not in (".html", ".htm"):  # it could be a file of a run
        raise ValueError(f"out={str(out)!r} is not allowed; use a name that ends in .html or .htm")
    folders = [run_folders] if isinstance(run_folders, str | Path) else run_folders
    runs: list[_Run] = []
    for run in map(_read_run, map(Path, folders)):
        while run.name in [other.name for other in runs]:
            run.name += "′"
        runs.append(run)
    if not runs:
        raise ValueError("nothing to report; give one or more run folders")
    rows = zip_longest(*(run.pictures for run in runs))  # the samples of all runs side by side
    sections = {
        "Samples": [{"pictures": [picture for row in rows for picture in row if picture]}],
        "Training": [{"pictures": _training(runs)}],
        "Test set": [{"table": table} for table in _comparisons(runs)],
        "Runs": [{"table": _facts(runs)}],
    }
    shown = {title: own for title, own in sections.items() if own and any(own[0].values())}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["text"] = _text
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = environment.get_template("page.html").render(sections=shown, date=date)
    out.parent.mkdir(parents=True, exist_ok=True)
    # JSON may hold a lone surrogate, UTF-8 may not.
    write_atomically(out, lambda path: path.write_bytes(page.encode("utf-8", "replace")))
    return out


def _read_picture(path: Path, title: str, alt: str) -> Picture:
    """Reads a PNG for the page; raises `ValueError` if the file is damaged."""
    content = path.read_bytes()
    if not (content.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in content[-12:]):
        raise ValueError(f"{str(path)!r} is damaged: it is not a whole PNG file")
    return Picture(title, alt, content)


def _read_run(folder: Path) -> _Run:
    refuse_forecaster(folder)
    if not any((folder / file).is_file() for file in ("config.json", "log.jsonl", "eval.json")):
        what = "holds no run" if folder.is_dir() else "is not a folder"
        raise ValueError(f"{str(folder)!r} {what}; give run folders, which vssm train writes")
    name = folder.resolve().name
    files = (folder / file for file in ("config.json", "meta.json", "eval.json"))
    contents = [read_object(path) if path.is_file() else {} for path in files]
    log = read_log(folder) if (folder / "log.jsonl").is_file() else []
    run = _Run(name, *contents, log=log, pictures=[])
    for path in sorted(folder.glob("*.png"), key=lambda path: (path.stem != "samples", path)):
        alt = f"{path.stem} of {name} ({run.task})"
        run.pictures.append(_read_picture(path, f"{name}: {path.stem}", alt))
    return run


def _training(runs: Sequence[_Run]) -> list[Picture]:
    """Draws the bounds of runs of one task together, and the terms of a single run."""
    charts: list[Picture] = []
    for task in dict.fromkeys(run.task for run in runs):
        lines = {run.name: _points(run.log, "valid", "bound") for run in runs if run.task == task}
        if any(lines.values()):
            title = f"{task}: bound on log p(x), validation, nats a sequence"
            charts.append(draw_chart(title, "epoch", lines))
    for term in _TERMS if len(runs) == 1 else ():
        lines = {split: _points(runs[0].log, split, term) for split in ("train", "valid")}
        if any(y for points in lines.values() for _, y in points):
            charts.append(draw_chart(f"{label(term)}, nats a sequence", "epoch", lines))
    return charts


def _points(log: Sequence[Object], split: str, term: str) -> Points:
    points = []
    for line in log:
        y = line.get(term)
        if term == "bound" and line["reconstruction"] is not None:
            y = line["reconstruction"] - (line["kl"] or 0)
        if line["split"] == split and y is not None:
            points.append((line["epoch"], y))
    return points


def _comparisons(runs: Sequence[_Run]) -> list[_Table]:
    """Makes a table of metrics for each task, with the best value of every row in bold."""
    tables = []
    for task in dict.fromkeys(run.task for run in runs):
        columns = {run.name: run.metrics for run in runs if run.task == task}
        names = [name for metrics in columns.values() for name in metrics]
        rows: list[_Row] = []
        for title, direction, own in grouped(names, _COMPARED):
            rows.append(_Row(title))
            for name in own:
                values = [metrics.get(name) for metrics in columns.values()]
                numbers = [direction * value for value in values if is_number(value)]
                best = direction * max(numbers) if direction and len(numbers) > 1 else None
                rows.append(_Row(label(name), values, best))
        if rows:
            tables.append(_Table(f"Test set of {task}", list(columns), rows))
    return tables


def _facts(runs: Sequence[_Run]) -> _Table:
    """Makes a table of what the runs are, a column each."""
    columns = []
    for run in runs:
        model, train = run.config.get("model", {}), run.config.get("train", {})
        machine = run.meta.get("machine") or run.evaluation.get("machine", {})
        levels, latent = model.get("levels", 1), model.get("kind") in ("tvae", "vrnn", "vssm")
        commit = str(run.evaluation.get("commit") or run.meta.get("commit") or "")
        columns.append(
            {
                "model": model.get("kind") if levels == 1 else f"vssm, {levels} levels",
                "data": run.task,
                "width": model.get("width"),
                "layers": model.get("layers"),
                "latents": f"{model.get('latents')} × {model.get('classes')}" if latent else None,
                "parameters": run.meta.get("parameters", run.metrics.get("parameters")),
                **{name: train.get(name) for name in ("epochs", "batch", "learning_rate", "seed")},
                "training time, s": run.meta.get("seconds"),
                "machine": machine.get("gpu") or machine.get("cpu"),
                "commit": commit[:12] or None,
            }
        )
    rows = [_Row(label(key), [column[key] for column in columns]) for key in columns[0]]
    return _Table("Settings and costs", [run.name for run in runs], rows)


def _text(value: object) -> str:
    """Writes a value with as many digits as a reader needs.

    >>> [_text(value) for value in (1234567, 1234.567, 12.345, 0.00123, None, True)]
    ['1,234,567', '1,234.6', '12.345', '0.00123', '–', 'True']
    """
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.5g}"
    return f"{value:,}" if is_number(value) else str(value)
