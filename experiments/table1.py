"""The paper's Table 1, measured: time against the length T, for a training pass and for sampling.

    python experiments/table1.py --device cuda --seconds-per-point 2 --out results/table1_h200.json

| metric                  | what                                                                  |
| ----------------------- | --------------------------------------------------------------------- |
| `<kind>_train_ms_t<T>`  | forward and backward of the objective on one batch of T steps         |
| `<kind>_sample_ms_t<T>` | T unconditional steps; one shot for vssm and tvae, caches for others  |
| `<kind>_train_exponent` | k of the fit time = c T^k over the upper half of the lengths measured |
| `vssm_l<L>_...`         | the same for a vssm with L levels of latents                          |

The paper counts operations; a clock measures time. A device that is not yet busy does more work in
the same time, so an exponent below the theory's means that the term of that order does not
dominate at these lengths.
"""

import itertools
import re
import shlex
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from math import log
from pathlib import Path
from typing import NamedTuple

import torch
import tyro

from vssm.config import KINDS, ModelConfig
from vssm.engine import Engine
from vssm.lab.bench.measure import Record, check_sizes, model_options, number, open_device
from vssm.models import Model, build
from vssm.objectives import objective

FEATURES = 28


class Theory(NamedTuple):
    """What the paper says about a model; tests show each entry for the code."""

    order: int
    """k of O(T^k), in training and in sampling."""
    trains_in_parallel: bool
    samples_in_parallel: bool
    follows_prompt: bool
    resumes: bool
    """Whether it continues from a state whose size does not grow with the steps behind it."""


# In the paper the plain tvae takes no prompt; with a partial posterior, as ours has, it does.
THEORY = {
    "transformer": Theory(2, True, False, True, False),
    "ssm": Theory(1, True, False, True, True),
    "rnn": Theory(1, False, False, True, True),
    "tvae": Theory(2, True, True, True, False),
    "vrnn": Theory(1, False, False, True, True),
    "vssm": Theory(1, True, True, True, True),
}


def measure_table(
    out: Path | None = None,
    device: str = "auto",
    kinds: tuple[str, ...] = KINDS,
    levels: tuple[int, ...] = (),
    batch: int = 1,
    lengths: tuple[int, ...] = (),
    width: int | None = None,
    layers: int = 2,
    repeats: int = 3,
    seconds_per_point: float = 20.0,
) -> Record:
    """Measures Table 1.

    Arguments:
        out: Where the JSON goes.
        device: auto, cpu or cuda.
        kinds: The models.
        levels: Add the vssm with so many levels of latents, as vssm_l<L>.
        batch: Sequences in a pass.
        lengths: Numbers of steps; powers of two by default.
        width: Narrow models, so that what grows with T shows: 256 on CUDA, 64 on a CPU.
        layers: Depth of every stack.
        repeats: How often each call is timed.
        seconds_per_point: Seconds that all calls for one number may take.
    """
    where = open_device(device)
    cuda = where.type == "cuda"
    models = model_options(kinds, levels)
    lengths = lengths or tuple(2**power for power in (range(8, 16) if cuda else range(5, 12)))
    width = (256 if cuda else 64) if width is None else width
    check_sizes(batch=batch, lengths=lengths, width=width, layers=layers)
    size = {"width": width, "layers": layers, "features": FEATURES}
    config = {"batch": batch, **size, "dtype": "float32"}
    command = f"python {shlex.join(sys.argv)}"
    record = Record("table1", command, where, config, out, repeats, seconds_per_point)
    for length, (name, own) in itertools.product(sorted(set(lengths)), models.items()):
        time_model(record, name, ModelConfig(**size, **own), batch, length)
    headings = ["model"]
    for way in ("training", "sampling"):
        headings += [way, "parallel", "measured", "ms at T"]
    title = f"Table 1, batch {batch}, width {width}, {layers} layers, float32"
    record.table(title, [*headings, "prompt", "resume"], rows(record, levels))
    return record


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Fits time = c T^k to the upper half of the lengths, at least three of them; returns k.

    >>> round(exponent([(1, 5.0), (2, 5.0), (4, 4.0), (8, 16.0), (16, 64.0)]), 3)
    2.0
    """
    points = sorted(points)[-max(3, -(-len(points) // 2)) :]
    lengths, times = zip(*points, strict=True)
    return statistics.linear_regression(list(map(log, lengths)), list(map(log, times))).slope


def time_model(record: Record, name: str, config: ModelConfig, batch: int, length: int) -> None:
    model = build(config).to(record.device)
    x = torch.rand(batch, length, FEATURES, device=record.device)
    record.time(f"{name}_train_ms_t{length}", partial(train_pass, model, x))
    sample = partial(Engine(model).generate, num=batch, length=length)
    record.time(f"{name}_sample_ms_t{length}", sample)


def train_pass(model: Model, x: torch.Tensor) -> None:
    model.zero_grad()
    objective(model, x).loss.mean().backward()


def rows(record: Record, levels: Sequence[int]) -> list[list[str]]:
    """Fits the exponents, and makes a row for every model that was timed."""
    table = []
    for name in model_options(KINDS, levels):
        theory = THEORY[name.partition("_l")[0]]  # levels change no order
        row, order = [name], "O(T²)" if theory.order == 2 else "O(T)"
        timed = False
        parallel = {"train": theory.trains_in_parallel, "sample": theory.samples_in_parallel}
        for way in parallel:
            found = {
                int(match[1]): value
                for key, value in record.metrics.items()
                if (match := re.fullmatch(rf"{name}_{way}_ms_t(\d+)", key)) and value
            }
            fit = last = ""
            if len(found) >= 3:
                k = exponent(list(found.items()))
                record.add({f"{name}_{way}_exponent": k})
                fit = f"T^{k:.2f}"
            if found:
                last, timed = f"{number(found[max(found)])} at {max(found)}", True
            row += [order, yes(parallel[way]), fit, last]
        if timed:
            table.append([*row, yes(theory.follows_prompt), yes(theory.resumes)])
    return table


def yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    tyro.cli(measure_table)
