"""The results page and the paper's figures, from committed result files alone: nothing is measured here.

    RESULTS/paper/, RESULTS/small/      what `vssm reproduce` keeps: tables, verdicts and figures; it may also
                                        lie in RESULTS itself, as in a folder that was given to that command
    RESULTS/quality/                    what `vssm evaluate --result` keeps: tables and curves
    RESULTS/*.json, RESULTS/*/*.json    comparisons and benchmarks by their name, and any other: raw tables
    RESULTS/X_before_Y.json             an older measurement of RESULTS/X_Y.json: what only it has comes first

The same files always give the same page, so a test can compare it with the one that is committed.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vssm.lab.page.benchmarks import SECTIONS, Benchmark, benchmark
from vssm.lab.page.figures import (
    Result,
    draw_dials,
    draw_figure,
    draw_samples,
    read_results,
    scored_runs,
)
from vssm.lab.page.markdown import (
    contents,
    details,
    links,
    machine,
    number,
    origins,
    table,
    wrapped,
)
from vssm.lab.page.paper import DATA_SETS, SCALES, experiments
from vssm.lab.page.quality import quality
from vssm.lab.page.views import show
from vssm.storage import write_atomically

__all__ = ["write_page"]

_TIME = re.compile(r"(.+?)_(?:b(\d+)_)?t(\d+)")
_APART = {  # what stands between benchmark and machine in the name of a file
    "before": "of an older version, what was not measured again",
    "long": "large batches of long sequences",
    "peers": "beside other implementations",
}


def write_page(results: str | Path, page: str | Path) -> Path:
    """Writes the results page as Markdown, and its figures to the folder `pictures` beside it.

    Arguments:
        results: The folder of result files.
        page: Where the page goes, a name in .md.

    Returns:
        `page`.
    """
    results, page = Path(results), Path(page)
    if page.suffix != ".md":  # not over a result
        raise ValueError(f"page={str(page)!r} is not allowed; allowed: a name in .md")
    if not [*results.glob("*.json"), *results.glob("*/*.json")]:
        what = "holds no results" if results.is_dir() else "is no folder"
        raise ValueError(f"results={str(results)!r} {what}; allowed: a folder of result files")
    scales = _scales(results)
    text = _page(results, page.parent, scales)
    pictures = page.parent / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for scale, (own, found) in scales.items():
        if found:
            draw_figure(own, pictures / f"{scale}.png", found)
        for data in found:
            draw_samples(own, data, pictures / f"{scale}_{data}.png")
    for result in read_results(results.glob("quality/*.json")):
        draw_dials(result["metrics"], pictures / f"dials_{result['name']}.png")
        samples = results / "quality" / f"{result['name']}.png"
        if samples.is_file():
            shutil.copyfile(samples, pictures / f"quality_{result['name']}.png")
    write_atomically(page, lambda path: path.write_text(text))
    return page


def _scales(results: Path) -> dict[str, tuple[Path, list[str]]]:
    """Returns where the paper's experiments of each scale lie, and of which data sets there are runs."""
    here: dict[str, list[str]] = {scale: [] for scale in SCALES}
    for data in DATA_SETS:
        for runs in list(scored_runs(results, data).values())[:1]:
            here["small" if "--scale small" in runs[0]["command"] else "paper"].append(data)
    found = {
        scale: (results / scale, [data for data in DATA_SETS if scored_runs(results / scale, data)])
        for scale in SCALES
    }
    if not any(here.values()):
        return found
    own = {scale: found[scale] if found[scale][1] else (results, here[scale]) for scale in SCALES}
    return {scale: place for scale, place in own.items() if place[1]}


def _page(results: Path, folder: Path, scales: Mapping[str, tuple[Path, list[str]]]) -> str:
    intro = (
        "Made from result files by `vssm report --results FOLDER --page FILE`, not by hand. Every number "
        "comes from a file that says its command, commit and machine. A dash stands for what was not "
        "measured or does not apply."
    )
    parts = [
        part
        for scale, (own, found) in scales.items()
        for part in experiments(own, scale, found, alone=len(scales) == 1)
    ]
    parts += quality(results / "quality")
    paths = sorted([*results.glob("*.json"), *results.glob("*/*.json")])
    here = [data for own, found in scales.values() if own == results for data in found]
    shown = {
        run["path"] for data in here for runs in scored_runs(results, data).values() for run in runs
    }
    for data in here:
        shown |= {*results.glob(f"grid/{data}_*.json"), *results.glob(f"finals/{data}_*.json")}
    found = read_results(
        path
        for path in paths
        if path not in shown and path.relative_to(results).parts[0] not in (*SCALES, "quality")
    )
    for title, benchmarks in SECTIONS.items():
        parts += _section(title, benchmarks, found)
    unknown = [result for result in found if benchmark(result) is None]
    parts += ["## Other results"] if unknown else []
    for result in unknown:
        parts += _any_result(result, result["path"].relative_to(results).with_suffix("").as_posix())
    return (
        "\n\n".join(
            map(wrapped, ["# Results", intro, contents(parts), *parts, links(paths, folder)])
        )
        + "\n"
    )


def _section(title: str, benchmarks: Sequence[Benchmark], found: Sequence[Result]) -> list[str]:
    """Shows the results of some benchmarks under one title, each under its own where there are several."""
    parts = []
    for kind in benchmarks:
        own = [result for result in found if benchmark(result) is kind]
        # GPUs first, then files with a plain name before those that stand apart.
        own.sort(
            key=lambda result: (not result["machine"].get("gpu"), result["path"].stem.count("_"))
        )
        if own:
            parts += [f"### {kind.title}", kind.about] if len(benchmarks) > 1 else [kind.about]
        for result in own:
            parts += [_heading(result, kind), *_benchmark(result, kind, found)]
    return [f"## {title}", *parts] if parts else []


def _heading(result: Result, kind: Benchmark) -> str:
    """Names a result by its data set, or by its machine and what sets its file apart."""
    stem: str = result["path"].stem
    if kind.of_data:
        return f"### {stem}"
    first, *apart = stem.split("_")
    if first != result["name"]:
        return f"#### {stem}"
    return f"#### {': '.join([machine(result), *(_APART.get(word, word) for word in apart[:-1])])}"


def _benchmark(result: Result, kind: Benchmark, found: Sequence[Result]) -> list[str]:
    metrics, file = result["metrics"], result["path"]
    newer = file.with_name(file.name.replace("_before_", "_"))
    again = {name for other in found if other["path"] == newer != file for name in other["metrics"]}
    counts = [
        words.format(number(metrics[name]))
        for name, words in kind.counts.items()
        if name in metrics
    ]
    line = ", ".join(counts) or "; ".join(_settings(result["config"]))
    parts = [f"{line[:1].upper()}{line[1:]}."] if line else []
    others = [name for name in metrics if name not in kind.counts]
    parts += _tables(kind, {name: metrics[name] for name in others if name not in again})
    old = _tables(kind, {name: metrics[name] for name in others if name in again})
    parts += details("What was measured again since", old)
    return [*parts, *_notes(result["config"]), origins([result])]


def _tables(kind: Benchmark, metrics: Mapping[str, float | None]) -> list[str]:
    shown, folded, rest = show(kind.views, metrics)
    if rest:
        rows = [[kind.values.get(name, f"`{name}`"), number(value)] for name, value in rest.items()]
        shown.append(table(["what", "value"], rows))
    return [*shown, *details(kind.folded, folded)]


def _settings(config: Mapping[str, Any]) -> list[str]:
    """Says settings in words, those that are one value; and sizes of a scan, which differ by row."""
    words = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in config.items()
        if isinstance(value, str | int | float) and name != "source"
    ]
    shapes = config.get("shapes")
    if isinstance(shapes, list) and all(isinstance(shape, dict) for shape in shapes):
        sizes = dict.fromkeys(
            f"{shape.get('channels')} x {shape.get('states')}" for shape in shapes
        )
        words.append(f"channels x states {', '.join(sizes)}")
    return words


def _notes(config: Mapping[str, Any]) -> list[str]:
    """Lists what the file notes about metrics, such as why one was left out."""
    names: dict[str, list[str]] = {}
    notes = config.get("notes")
    for name, note in (notes if isinstance(notes, dict) else {}).items():
        names.setdefault(str(note), []).append(f"`{name}`")
    lines = [f"- {note}: {', '.join(own)}" for note, own in names.items()]
    return details(
        "What was left out or measured otherwise, and why", ["\n".join(lines)] if lines else []
    )


def _any_result(result: Result, name: str) -> list[str]:
    """Shows a result that is not known, by the names of its metrics."""
    times: dict[tuple[int, int], dict[str, float | None]] = {}
    rest: dict[str, float | None] = {}
    for metric, value in result["metrics"].items():
        match = _TIME.fullmatch(metric)
        if match:
            times.setdefault((int(match[2] or 0), int(match[3])), {})[match[1]] = value
        else:
            rest[metric] = value
    parts = [f"### {name}"]
    if times:
        columns = [f"{batch} x {length}" if batch else f"{length}" for batch, length in times]
        names = list(dict.fromkeys(metric for cells in times.values() for metric in cells))
        rows = [[f"`{n}`", *(number(cells.get(n)) for cells in times.values())] for n in names]
        head = "batch x length" if any(batch for batch, _ in times) else "length"
        parts.append(table([head, *columns], rows))
    if rest:
        parts.append(
            table(["metric", "value"], [[f"`{n}`", number(value)] for n, value in rest.items()])
        )
    return [*parts, origins([result])]
