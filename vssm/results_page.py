"""The results page and the paper's figures, from committed result files alone: nothing is measured here.

    RESULTS/*.json, RESULTS/*/*.json                 any result: a table each
    RESULTS/paper/, RESULTS/small/                   what `vssm reproduce` keeps: tables, verdicts and figures
    RESULTS/quality/                                 what `vssm evaluate --result` keeps: tables and curves

The same files always give the same page, so a test can compare it with the one that is committed.
"""

import math
import re
import shlex
import shutil
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vssm.config import RunConfig
from vssm.hub import train_command
from vssm.labels import dial_curves, dial_ways, label
from vssm.results_figures import (
    KINDS,
    Result,
    draw_dials,
    draw_figure,
    draw_samples,
    read_results,
    scored_runs,
)
from vssm.storage import write_atomically

__all__ = ["write_page"]

_DATA_SETS = ("mnist", "cifar10", "digits")
_SCALES = {
    "paper": ("The paper's experiments", "vssm reproduce mnist"),
    "small": ("The paper's experiments, small", "vssm reproduce mnist --scale small"),
}
_TIME = re.compile(r"(.+?)_(?:b(\d+)_)?t(\d+)")


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
    text = _page(results)
    pictures = page.parent / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for scale in _SCALES:
        found = [data for data in _DATA_SETS if scored_runs(results / scale, data)]
        if found:
            draw_figure(results / scale, pictures / f"{scale}.png", found)
        for data in found:
            draw_samples(results / scale, data, pictures / f"{scale}_{data}.png")
    for result in read_results(results.glob("quality/*.json")):
        draw_dials(result["metrics"], pictures / f"dials_{result['name']}.png")
        samples = results / "quality" / f"{result['name']}.png"
        if samples.is_file():
            shutil.copyfile(samples, pictures / f"quality_{result['name']}.png")
    write_atomically(page, lambda path: path.write_text(text))
    return page


def _page(results: Path) -> str:
    parts = [
        "# Results",
        "Made from the files in `results/` by `vssm report --results results --page docs/results.md`, not by "
        "hand. Every number comes from a file that says its command, commit and machine.",
    ]
    for scale, (title, command) in _SCALES.items():
        if (results / scale).is_dir():
            parts += _experiments(results / scale, scale, title)
        elif scale == "paper":
            parts += [f"## {title}", f"No run of this scale is committed yet; `{command}` makes them."]
    parts += _quality(results / "quality")
    for path in sorted([*results.glob("*.json"), *results.glob("*/*.json")]):
        if path.parent.name not in (*_SCALES, "quality"):
            parts += _any_result(path, path.relative_to(results).as_posix())
    return "\n\n".join(map(_wrapped, parts)) + "\n"


def _wrapped(part: str) -> str:
    """Returns a part of the page, its text in lines of at most 128 characters; tables and the like stay."""
    if part.startswith(("|", "#", "!", "-", " ")):
        return part
    return textwrap.fill(part, 128, break_long_words=False, break_on_hyphens=False)


def _experiments(folder: Path, scale: str, title: str) -> list[str]:
    parts = [
        f"## {title}",
        'The paper gives its numbers as figures only. In words it claims that the VSSM "competes with '
        'traditional models in terms of generation quality" and "produces decent results in only a fraction '
        'of the time". Likelihoods are in nats a sequence, higher is better, the mean over seeds with their '
        "range in brackets; by importance sampling for models with latents, exact for the others. A particle "
        "filter with as many draws is closer to what these are (`vssm evaluate --particles`). The "
        "second half is given the first. Times are milliseconds for one sequence, and for its second "
        "half given its first, with the version that made the run; they are compared where it is the same.",
    ]
    found = [data for data in _DATA_SETS if scored_runs(folder, data)]
    if found:
        parts.append(f"![Validation curves, test statistics and samples](pictures/{scale}.png)")
        parts.append(
            "Left: the bound on the validation log-likelihood during training (the ELBO for models with "
            "latents, exact for the others), median and range over seeds. Middle: the test set. Right: "
            "samples, three rows from nothing and three that complete the upper half of a test image."
        )
    for data in found:
        parts += _data_set(folder, scale, data)
    return parts


def _data_set(folder: Path, scale: str, data: str) -> list[str]:
    runs = scored_runs(folder, data)
    columns = {
        "seeds": lambda metrics: f"{len(metrics)}",
        "size": lambda metrics: f"{metrics[0]['parameters'] / 1e6:.3g} M",
        "epochs": lambda metrics: _short(metrics[0]["epochs"]),
        "rate": lambda metrics: f"{metrics[0]['learning_rate']:g}",
        "log p(x)": lambda metrics: _spread(metrics, "log_likelihood", 1),
        "by particles": lambda metrics: _spread(metrics, "log_likelihood_particles", 1),
        "second half": lambda metrics: _spread(metrics, "partial_log_likelihood", 1),
        "half, by particles": lambda metrics: _spread(metrics, "partial_log_likelihood_particles", 1),
        "ms": lambda metrics: _spread(metrics, "generate_ms_b1", 2),
        "ms, half": lambda metrics: _spread(metrics, "prompted_ms_b1", 2),
        "training, s": lambda metrics: _spread(metrics, "train_seconds", 0),
    }
    cells = {
        kind: {name: cell([result["metrics"] for result in results]) for name, cell in columns.items()}
        for kind, results in runs.items()
    }
    shown = [name for name in columns if any(row[name] for row in cells.values())]
    head, rows = ["model", *shown], [[kind, *(row[name] for name in shown)] for kind, row in cells.items()]
    parts = [f"### {data}", _table(head, rows), *_verdicts(runs), *_grid(folder, data)]
    parts.append(f"![More samples of every model](pictures/{scale}_{data}.png)")
    return [*parts, _origins(result for results in runs.values() for result in results)]


def _verdicts(runs: dict[str, list[Result]]) -> list[str]:
    """Says in sentences how the vssm stands to the others."""
    lines = []
    for other in [kind for kind in runs if "vssm" in runs and kind != "vssm"]:
        full, half = (
            _mean(runs["vssm"], name) - _mean(runs[other], name)
            for name in ("log_likelihood", "partial_log_likelihood")
        )
        line = f"- vssm against {other}: {_signed(full)} nats in full, {_signed(half)} in the second half"
        if len({result["commit"] for kind in ("vssm", other) for result in runs[kind]}) == 1:
            ratio = _mean(runs[other], "generate_ms_b1") / _mean(runs["vssm"], "generate_ms_b1")
            speed = f"{ratio:.1f} times faster" if ratio >= 1 else f"{1 / ratio:.1f} times slower"
            line += f"; {speed} to draw a sequence"
        lines.append(f"{line}.")
    return ["\n".join(lines)] if lines else []


def _grid(folder: Path, data: str) -> list[str]:
    found: dict[tuple[str, float], dict[float, Result]] = {}
    for stage in ("grid", "finals"):
        for result in read_results(folder.glob(f"{stage}/{data}_*_lr*.json")):
            row = result["config"]["model"]["kind"], result["metrics"]["epochs"]
            found.setdefault(row, {})[result["metrics"]["learning_rate"]] = result
    if not found:
        return []
    rates = sorted({rate for results in found.values() for rate in results}, reverse=True)
    rows = []
    for kind, epochs in sorted(found, key=lambda row: (KINDS.index(row[0]), row[1])):
        losses = {rate: made["metrics"]["validation_loss"] for rate, made in found[kind, epochs].items()}
        finite = {rate: loss for rate, loss in losses.items() if loss is not None}
        best = min(finite, key=lambda rate: finite[rate], default=None)
        cells = []
        for rate in rates:
            text = "" if rate not in losses else "diverged" if rate not in finite else f"{finite[rate]:.1f}"
            cells.append(f"**{text}**" if rate == best and text else text)
        rows.append([kind, _short(epochs), *cells])
    return [
        "Validation loss of the grid of learning rates, seed 0; the lowest is taken, of the longest runs. "
        "Losses of models with latents include the partial posterior's, so models do not compare.",
        _table(["model", "epochs", *(f"{rate:g}" for rate in rates)], rows),
    ]


def _quality(folder: Path) -> list[str]:
    """Shows what goes past the paper, by data set: likelihoods, distances of samples, and the dials."""
    tasks: dict[str, list[Result]] = {}
    for result in read_results(folder.glob("*.json")):
        data = result["config"]["data"]
        binary = "binarised " if data.get("binarize") else ""
        tasks.setdefault(f"{binary}{data['name']}", []).append(result)
    if not tasks:
        return []
    parts = [
        "## Better than the paper",
        "Each row is a run that `vssm evaluate RUN --dials --result results/quality/DATA_NAME.json` keeps. "
        "Likelihoods are in nats, by K draws of the latents of so many test sequences; higher is better. FD "
        "is the Fréchet distance of samples to the test set; lower is better, and the floor is that of as "
        "many training images. W: in chunks of W steps, each re-conditioned on those before. S: in S "
        "passes over all steps. Passes and ms are those of one sequence in one shot: how often the networks "
        "run one after the other, and how long.",
    ]
    for task, results in tasks.items():
        parts += [f"### {task}", _qualities(results)]
        for result in results:
            parts += _dials(result)
            if (folder / f"{result['name']}.png").is_file():
                shown = "three rows each in one shot, in four chunks, step by step, and of completions"
                parts.append(f"![{result['name']}: {shown}](pictures/quality_{result['name']}.png)")
        parts.append(_origins(_with_training(result) for result in results))
    return parts


def _with_training(result: Result) -> Result:
    """Puts the command that trained a run before the one that scored it."""
    config, command = result["config"], result["command"]
    if "train" not in config:
        return result
    run = RunConfig.from_dict({part: config[part] for part in ("data", "model", "train")})
    out = shlex.quote(shlex.split(command)[2])
    return {**result, "command": f"{train_command(run)} --out {out}`, `{command}"}


def _qualities(results: list[Result]) -> str:
    """Makes the table of the runs of a data set; a column that all leave empty is left out."""
    ways = dial_ways({name for result in results for name in result["metrics"]}, "fd")
    chunks = [way for way in ways if way.startswith("w") and "_" not in way]
    passes = [way for way in ways if way.startswith("s")]
    columns = {
        "log p(x)": ["log_likelihood"],
        "by particles": ["log_likelihood_particles"],
        "second half": ["partial_log_likelihood"],
        "nats": ["nats"],
        "bits a dimension": ["bits_per_dim"],
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
    shown = {
        title: names
        for title, names in columns.items()
        if any(result["metrics"].get(name) is not None for result in results for name in names)
    }
    rows = [
        [
            result["name"],
            *(
                " / ".join(_number(result["metrics"].get(name)) or "–" for name in names)
                for names in shown.values()
            ),
        ]
        for result in results
    ]
    return _table(["run", *shown], rows)


def _dials(result: Result) -> list[str]:
    """Shows quality against time of one run, if that was measured."""
    name, metrics = result["name"], result["metrics"]
    rows = [
        [label(f"fd_{way}"), *(_number(metrics.get(m)) for m in (f"fd_{way}", f"ms_{way}", f"ms_{way}_b256"))]
        for way in dial_ways(metrics)
    ]
    if not rows:
        return []
    parts = [f"Quality against time of {name}:", _table([name, "FD", "ms", "ms, batch 256"], rows)]
    if dial_curves(metrics):
        parts.append(f"![Fréchet distance against milliseconds of {name}](pictures/dials_{name}.png)")
    return parts


def _any_result(path: Path, name: str) -> list[str]:
    (result,) = read_results([path])
    times: dict[tuple[int, int], dict[str, float | None]] = {}
    rest: dict[str, float | None] = {}
    for metric, value in result["metrics"].items():
        match = _TIME.fullmatch(metric)
        if match:
            times.setdefault((int(match[2] or 0), int(match[3])), {})[match[1]] = value
        else:
            rest[metric] = value
    parts = [f"## {name.removesuffix('.json')}"]
    if times:
        columns = [f"{batch} x {length}" if batch else f"{length}" for batch, length in times]
        names = list(dict.fromkeys(metric for cells in times.values() for metric in cells))
        rows = [[f"`{n}`", *(_number(cells.get(n)) for cells in times.values())] for n in names]
        head = "batch x length" if any(batch for batch, _ in times) else "length"
        parts.append(_table([head, *columns], rows))
    if rest:
        parts.append(_table(["metric", "value"], [[f"`{n}`", _number(value)] for n, value in rest.items()]))
    return [*parts, _origins([result])]


def _origins(results: Iterable[Result]) -> str:
    """Lists commands, each with the commits, days and machines of its runs."""
    rows = []
    for result in results:
        machine = result["machine"]
        where = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
        commit = str(result.get("commit") or "unknown")
        dirty = " (changed)" if commit.endswith("-dirty") else ""
        rows.append([f"`{result['command']}`", where, commit[:12] + dirty, result["date"][:10]])
    return _table(["command", "machine", "commit", "date"], rows)


def _mean(results: list[Result], name: str) -> float:
    return statistics.fmean(result["metrics"][name] for result in results)


def _spread(metrics: list[dict[str, Any]], name: str, digits: int) -> str:
    """Writes the mean and, of several values, their range.

    >>> _spread([{"a": 1.0}, {"a": 2.0}], "a", 1), _spread([{"a": 1.0}], "a", 1), _spread([{}], "a", 1)
    ('1.5 (1.0 to 2.0)', '1.0', '')
    """
    values = [m[name] for m in metrics if m.get(name) is not None]
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _short(value: float) -> str:
    return f"{value:.4g}"


def _number(value: float | None) -> str:
    """Writes any metric: whole numbers as they are, others with four digits.

    >>> [_number(value) for value in (None, 28, 12345.678, 0.0123456, 2.5)]
    ['', '28', '12,346', '0.01235', '2.5']
    """
    if value is None:
        return ""
    if isinstance(value, int) or value == math.floor(value):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.0f}"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
