"""What goes past the paper on the results page: likelihoods, distances of samples, quality against time."""

import shlex
from pathlib import Path

from vssm.config import RunConfig
from vssm.lab.page.figures import Result, read_results
from vssm.lab.page.markdown import number, origins, table
from vssm.runs.hub import train_command
from vssm.runs.labels import dial_curves, dial_ways, label

__all__ = ["quality"]


def quality(folder: Path) -> list[str]:
    """Shows what goes past the paper, by data set.

    Arguments:
        folder: What `vssm evaluate --result` kept.

    Returns:
        Parts of the page, none when there are no such results.
    """
    tasks: dict[str, list[Result]] = {}
    for result in read_results(folder.glob("*.json"), {"config.data.name": str}):
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
        "passes over all steps. Passes and ms are those of one sequence in one shot: the rounds of draws, "
        "one after the other, and how long they take.",
    ]
    for task, results in tasks.items():
        parts += [f"### {task}", _qualities(results)]
        for result in results:
            parts += _dials(result)
            if (folder / f"{result['name']}.png").is_file():
                shown = (
                    "three rows each in one shot, in four chunks, step by step, and of completions"
                )
                parts.append(f"![{result['name']}: {shown}](pictures/quality_{result['name']}.png)")
        parts.append(origins(_with_training(result) for result in results))
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
                " / ".join(number(result["metrics"].get(name)) or "–" for name in names)
                for names in shown.values()
            ),
        ]
        for result in results
    ]
    return table(["run", *shown], rows)


def _dials(result: Result) -> list[str]:
    """Shows quality against time of one run, if that was measured."""
    name, metrics = result["name"], result["metrics"]
    rows = [
        [
            label(f"fd_{way}"),
            *(number(metrics.get(m)) for m in (f"fd_{way}", f"ms_{way}", f"ms_{way}_b256")),
        ]
        for way in dial_ways(metrics)
    ]
    if not rows:
        return []
    parts = [f"Quality against time of {name}:", table([name, "FD", "ms", "ms, batch 256"], rows)]
    if dial_curves(metrics):
        parts.append(
            f"![Fréchet distance against milliseconds of {name}](pictures/dials_{name}.png)"
        )
    return parts
