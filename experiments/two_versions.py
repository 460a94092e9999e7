"""Times generation on a CPU by two versions of this repository, in turns.

    git worktree add /tmp/old 21f02ed
    python experiments/two_versions.py --old /tmp/old --out results/two_versions.json

Each version has a process of its own, which waits while the other one works. For each point both
versions time the same call for a while, several turns each, so a machine whose speed drifts slows
both of them. A time is the median over all turns in milliseconds; `ratio` is this version's time
over the old one's. A version that has `vssm.Engine` generates with an engine.
"""

import itertools
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import tyro

import vssm
from vssm.models import build

if TYPE_CHECKING:
    from vssm.config import Kind  # an old version has no such name

FEATURES = 28


def main(
    old: Path,
    *,
    out: Path | None = None,
    kinds: tuple[str, ...] = ("vssm", "tvae", "vrnn", "rnn", "ssm", "transformer"),
    batches: tuple[int, ...] = (1, 16),
    lengths: tuple[int, ...] = (28, 256),
    width: int = 256,
    turns: int = 5,
    seconds: float = 0.5,
) -> None:
    """Times all points and prints a table, the highest ratio first.

    Arguments:
        old: A checkout of the old version.
        out: Where the JSON goes.
        kinds: The models.
        batches: Numbers of sequences.
        lengths: Numbers of steps in a sequence.
        width: Width of the models, which have four layers.
        turns: Turns of each version for each point.
        seconds: The least length of a turn.
    """
    workers = {"old": start(old), "new": start(Path(__file__).parents[1])}
    metrics: dict[str, float] = {}
    for kind, length, batch in itertools.product(kinds, lengths, batches):
        for way in ("", "_prompted", "_chunk")[: 3 if kind in ("vssm", "tvae") else 2]:
            point = json.dumps([kind, width, batch, length, way, seconds])
            times: dict[str, list[float]] = {"old": [], "new": []}
            for _, version in itertools.product(range(turns), workers):
                times[version] += ask(workers[version], point)
            medians = {version: statistics.median(times[version]) for version in workers}
            name = f"{kind}{way}_b{batch}_t{length}"
            metrics |= {f"{name}_{version}_ms": medians[version] for version in workers}
            metrics[f"{name}_ratio"] = medians["new"] / medians["old"]
            print(f"{name}: {metrics[f'{name}_ratio']:.2f}", file=sys.stderr)
    for worker in workers.values():
        worker.kill()
    print_table(metrics)
    if out is not None:
        from vssm.runs.results import result, write_result

        commit = subprocess.check_output(["git", "-C", old, "rev-parse", "HEAD"], text=True)
        config = {"old": commit.strip(), "width": width, "turns": turns, "seconds": seconds}
        command = shlex.join(["python", *sys.argv])
        write_result(out, result("two versions", command=command, config=config, metrics=metrics))


def start(checkout: Path) -> subprocess.Popen[str]:
    """Starts the process of a version."""
    return subprocess.Popen(
        [sys.executable, __file__, "--answer"],
        env={"PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(worker: subprocess.Popen[str], point: str) -> list[float]:
    """Returns the times of one turn."""
    assert worker.stdin is not None and worker.stdout is not None
    print(point, file=worker.stdin, flush=True)
    return json.loads(worker.stdout.readline())


def print_table(metrics: dict[str, float]) -> None:
    """Prints a row for each point, and how many points are over 1.1."""
    ratios = {name.removesuffix("_ratio"): metrics[name] for name in metrics if "_ratio" in name}
    print("| point | old, ms | new, ms | ratio |\n| --- | --- | --- | --- |")
    for name, ratio in sorted(ratios.items(), key=lambda item: -item[1]):
        both = " | ".join(f"{metrics[f'{name}_{version}_ms']:.1f}" for version in ("old", "new"))
        print(f"| {name} | {both} | {ratio:.2f} |")
    slower = sum(ratio > 1.1 for ratio in ratios.values())
    median = statistics.median(ratios.values())
    print(f"\nMedian ratio {median:.2f}; {slower} of {len(ratios)} points are over 1.10.")


def answer() -> None:
    """Answers each point on standard input with the times of its calls."""
    torch.manual_seed(0)
    last, call = "", None
    for line in sys.stdin:
        *point, seconds = json.loads(line)
        if line != last or call is None:
            last, call = line, make_call(*point)
            for _ in range(2):  # kernels are compiled
                call()
        times: list[float] = []
        while sum(times) < 1000 * seconds:
            begin = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - begin))
        print(json.dumps(times), flush=True)


def make_call(kind: "Kind", width: int, batch: int, length: int, way: str) -> Callable[[], object]:
    """Returns the call that is timed."""
    config = vssm.ModelConfig(kind=kind, features=FEATURES, width=width, layers=4)
    model = build(config).eval()
    generate: Callable[..., object] = partial(vssm.generate, model)
    if hasattr(vssm, "Engine"):
        generate = vssm.Engine(model).generate
    if way == "_prompted":
        prompt = torch.rand(batch, length // 2, FEATURES)
        return lambda: generate(prompt=prompt, length=length - length // 2)
    chunk: dict[str, Any] = {"chunk": length // 4} if way == "_chunk" else {}
    return lambda: generate(num=batch, length=length, **chunk)


if __name__ == "__main__":
    if "--answer" in sys.argv:
        answer()
    else:
        tyro.cli(main)
