"""Writes the results page of this repository and its figures from the committed result files.

    python docs/results_page [RESULTS] [PAGE]            default: results docs/results.md

| files                            | what they become                                    |
| -------------------------------- | --------------------------------------------------- |
| RESULTS/paper/, RESULTS/small/   | tables and figures of `vssm reproduce`              |
| RESULTS/quality/                 | tables and curves of `vssm evaluate --dials`        |
| RESULTS/*.json, RESULTS/*/*.json | comparisons and benchmarks; raw tables of any other |
| RESULTS/X_before_Y.json          | an older measurement of RESULTS/X_Y.json            |

Nothing is measured here. The same files always give the same page, so a test compares it with the
committed one.
"""

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import SECTIONS, Benchmark, benchmark
from paper import SCALES, draw_samples, experiments
from quality import draw_dials, quality
from views import show
from writing import contents, details, links, machine, number, origins, table, wrapped

from vssm.data.storage import write_atomically
from vssm.lab.experiments import DATA_SETS, draw_figure, read_results, scored_runs

_INTRO = (
    "Made by `make docs`, not by hand. Every number comes from a result file that records its "
    "command, commit and machine. A dash means not measured or not applicable."
)
_VARIANTS = {  # words between benchmark and machine in the name of a file
    "before": "an older version, only what was not measured again",
    "long": "large batches of long sequences",
    "peers": "beside other implementations",
}


def write_page(results: str | Path, page: str | Path) -> Path:
    """Writes the page as Markdown, and its figures to the folder `pictures` beside it."""
    results, page = Path(results), Path(page)
    text = page_text(results, page.parent)
    _draw(results, page.parent / "pictures")
    write_atomically(page, lambda path: path.write_text(text))
    return page


def page_text(results: Path, folder: Path) -> str:
    """Returns the page as Markdown, with links as seen from a folder."""
    paths = sorted([*results.glob("*.json"), *results.glob("*/*.json")])
    if not paths:
        raise ValueError(f"results={str(results)!r} holds no result files")
    parts = [part for scale in SCALES for part in experiments(results / scale, scale)]
    parts += quality(results / "quality")
    shown = (*SCALES, "quality")
    others = read_results(p for p in paths if p.relative_to(results).parts[0] not in shown)
    for title, benchmarks in SECTIONS.items():
        parts += _section(title, benchmarks, others)
    unknown = [result for result in others if benchmark(result) is None]
    parts += ["## Other results"] if unknown else []
    for result in unknown:
        parts += [f"### {result['path'].stem}", *_by_passes(result["metrics"]), origins([result])]
    whole = ["# Results", _INTRO, contents(parts), *parts, links(paths, folder)]
    return "\n\n".join(map(wrapped, whole)) + "\n"


def _by_passes(metrics: dict[str, float]) -> list[str]:
    """Shows metrics, with a column for each number of passes S where names have a part `_sS`."""
    by_name: dict[str, dict[int, float]] = {}
    for name, value in metrics.items():
        if found := re.search(r"_s(\d+)(?=_|$)", name):
            base = name[: found.start()] + name[found.end() :]
            by_name.setdefault(base, {})[int(found[1])] = value
    passes = sorted({s for values in by_name.values() for s in values})
    others = [name for name in metrics if not re.search(r"_s\d+(?=_|$)", name)]
    shown = [table(["metric", "value"], [[f"`{n}`", number(metrics[n])] for n in others])]
    if by_name:
        head = ["metric", *(f"S = {s}" for s in passes)]
        rows = [[f"`{n}`", *(number(v.get(s)) for s in passes)] for n, v in by_name.items()]
        shown.append(table(head, rows))
    return shown


def _draw(results: Path, pictures: Path) -> None:
    pictures.mkdir(parents=True, exist_ok=True)
    for scale in SCALES:
        found = [data for data in DATA_SETS if scored_runs(results / scale, data)]
        if found:
            (pictures / f"{scale}.png").write_bytes(draw_figure(results / scale, found))
        for data in found:
            (pictures / f"{scale}_{data}.png").write_bytes(draw_samples(results / scale, data))
    for result in read_results(results.glob("quality/*.json")):
        draw_dials(result["metrics"], pictures / f"dials_{result['name']}.png")
        samples = results / "quality" / f"{result['name']}.png"
        if samples.is_file():
            shutil.copyfile(samples, pictures / f"quality_{result['name']}.png")


def _section(
    title: str, benchmarks: Sequence[Benchmark], found: Sequence[dict[str, Any]]
) -> list[str]:
    """Shows the results of some benchmarks under one title."""
    parts = []
    for kind in benchmarks:
        own = [result for result in found if benchmark(result) is kind]
        # GPUs first, then files with a plain name before variants.
        own.sort(
            key=lambda result: (not result["machine"].get("gpu"), result["path"].stem.count("_"))
        )
        if own:
            parts += [f"### {kind.title}", kind.about] if len(benchmarks) > 1 else [kind.about]
        for result in own:
            parts += [_heading(result, kind), *_benchmark(result, kind, found)]
    return [f"## {title}", *parts] if parts else []


def _heading(result: dict[str, Any], kind: Benchmark) -> str:
    """Names a result by its data set, or by its machine and variant."""
    stem: str = result["path"].stem
    if kind.of_data:
        return f"### {stem}"
    first, *rest = stem.split("_")
    if first != result["name"]:
        return f"#### {stem}"
    return (
        f"#### {': '.join([machine(result), *(_VARIANTS.get(word, word) for word in rest[:-1])])}"
    )


def _benchmark(
    result: dict[str, Any], kind: Benchmark, found: Sequence[dict[str, Any]]
) -> list[str]:
    metrics, file = result["metrics"], result["path"]
    newer = file.with_name(file.name.replace("_before_", "_"))
    again = {name for other in found if other["path"] == newer != file for name in other["metrics"]}
    counts = [w.format(number(metrics[name])) for name, w in kind.counts.items() if name in metrics]
    line = ", ".join(counts) or "; ".join(_settings(result["config"]))
    parts = [f"{line[:1].upper()}{line[1:]}."] if line else []
    rest = {name: value for name, value in metrics.items() if name not in kind.counts}
    parts += _tables(kind, {name: rest[name] for name in rest if name not in again})
    old = _tables(kind, {name: rest[name] for name in rest if name in again})
    parts += details("Measured again since", old)
    return [*parts, *_notes(result["config"]), origins([result])]


def _tables(kind: Benchmark, metrics: Mapping[str, float | None]) -> list[str]:
    shown, folded, rest = show(kind.views, metrics)
    if rest:
        rows = [[kind.values.get(name, f"`{name}`"), number(value)] for name, value in rest.items()]
        shown.append(table(["what", "value"], rows))
    return [*shown, *details(kind.folded, folded)]


def _settings(config: Mapping[str, Any]) -> list[str]:
    """Writes the settings that are a single value, and the sizes of a scan."""
    words = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in config.items()
        if isinstance(value, str | int | float) and name != "source"
    ]
    if shapes := config.get("shapes"):
        sizes = dict.fromkeys(f"{shape['channels']} x {shape['states']}" for shape in shapes)
        words.append(f"channels x states {', '.join(sizes)}")
    return words


def _notes(config: Mapping[str, Any]) -> list[str]:
    """Lists the notes of a result, such as why a metric was left out."""
    names: dict[str, list[str]] = {}
    for name, note in config.get("notes", {}).items():
        names.setdefault(note, []).append(f"`{name}`")
    lines = [f"- {note}: {', '.join(own)}" for note, own in names.items()]
    return details("What was left out or measured differently", ["\n".join(lines)] if lines else [])


if __name__ == "__main__":
    print(write_page(*(sys.argv[1:] or ("results", "docs/results.md"))))
