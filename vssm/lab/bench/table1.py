"""The paper's Table 1, measured: time against the length T, for a training pass and for sampling.

| name                    | what                                                                              |
| ----------------------- | --------------------------------------------------------------------------------- |
| `<kind>_train_ms_t<T>`  | forward and backward of the objective on one batch of sequences of T steps        |
| `<kind>_sample_ms_t<T>` | T steps from nothing; one shot for vssm and tvae, with caches for the others      |
| `<kind>_train_exponent` | k of the fit  time = c T^k  (least squares of the logarithms) over the upper half of the lengths measured; likewise `<kind>_sample_exponent` |
| `vssm_l<L>_...`         | the same of a vssm with L levels of latents                                       |

The paper counts work, a clock measures it: a device that is not yet busy does more work in the same time, so
an exponent below the theory's means that the term of that order is not what takes the time at these lengths.
"""

import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vssm.config import KINDS, ModelConfig
from vssm.lab.bench.plot import check_plot, plot_result
from vssm.lab.bench.record import Record, number, table, typed
from vssm.lab.bench.timing import Stopwatch, check_whole, open_device, options_of
from vssm.models import Model, build
from vssm.objectives import objective
from vssm.sampling.generation import generate

__all__ = ["THEORY", "Theory", "exponent", "main_table1"]

_FEATURES = 28


class Theory(NamedTuple):
    """What the paper says of a model; tests show each for the code."""

    order: int
    """k of O(T^k), in training and in sampling."""
    trains_in_parallel: bool
    samples_in_parallel: bool
    follows_prompt: bool
    resumes: bool
    """Whether it goes on from a state whose size does not grow with the steps behind it."""


# The paper gives tvae no prompt in its plain form and one with a partial posterior, which ours has.
THEORY = {
    "transformer": Theory(2, True, False, True, False),
    "ssm": Theory(1, True, False, True, True),
    "rnn": Theory(1, False, False, True, True),
    "tvae": Theory(2, True, True, True, False),
    "vrnn": Theory(1, False, False, True, True),
    "vssm": Theory(1, True, True, True, True),
}


def main_table1(
    out: str | Path | None = None,
    *,
    device: str = "auto",
    kinds: Sequence[str] | None = None,
    levels: Sequence[int] = (),
    batch: int = 1,
    lengths: Sequence[int] | None = None,
    width: int | None = None,
    layers: int = 2,
    repeats: int = 3,
    seconds_per_point: float = 20.0,
    plot: str | Path | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Measures the paper's Table 1, prints it beside the theory and writes it if `out` says where.

    Arguments:
        out: The JSON file, written after every number; a run that was stopped goes on from it.
        device: "auto", "cpu", "cuda" or "cuda:N".
        kinds: The models; all six if not given.
        levels: Adds the vssm with so many levels of latents, each under the name vssm_l<L>.
        batch: Sequences in a pass.
        lengths: Numbers of steps, T; 2^8 to 2^15 on CUDA, 2^5 to 2^11 on a CPU.
        width: Width of the models; 256 on CUDA, 64 on a CPU: narrow, so that what grows with T shows.
        layers: Depth of every stack.
        repeats: How often each call is timed.
        seconds_per_point: What all calls for one number may take.
        plot: Where a picture goes, .png or .svg.
        restart: Whether to forget what `out` holds.
    """
    command = typed("table1", main_table1, locals())
    where = open_device(device)
    check_plot(plot)
    cuda = where.type == "cuda"
    models = options_of(KINDS if kinds is None else kinds, levels)
    if lengths is None:
        lengths = [2**power for power in (range(8, 16) if cuda else range(5, 12))]
    width = (256 if cuda else 64) if width is None else width
    for name, values in (
        ("batch", [batch]),
        ("lengths", lengths),
        ("width", [width]),
        ("layers", [layers]),
    ):
        check_whole(name, *values)
    stopwatch = Stopwatch(where, repeats, seconds_per_point, warm=3 if cuda else 1)
    config = {
        "batch": batch,
        "width": width,
        "layers": layers,
        "features": _FEATURES,
        "dtype": "float32",
    }
    record = Record("table1", command, where, config, out, restart)
    for length in sorted(set(lengths)):
        for name, options in models.items():
            model = build(
                ModelConfig(features=_FEATURES, width=width, layers=layers, **options)
            ).to(where)
            x = torch.rand(batch, length, _FEATURES, device=where)
            stopwatch.alone(record, f"{name}_train_ms", "", length, partial(_train, model, x))
            sample = partial(generate, model, num=batch, length=length)
            stopwatch.alone(record, f"{name}_sample_ms", "", length, sample)
            del model, x, sample
            stopwatch.tidy()
    names = list(options_of(KINDS, levels))
    for name in names:
        for way in ("train", "sample"):
            points = _points(record, f"{name}_{way}")
            if len(points) >= 3:
                record.add({f"{name}_{way}_exponent": exponent(points)})
    _show(record, names)
    made = record.made()
    if plot is not None:
        plot_result(made, plot)
    return made


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Fits time = c T^k over the upper half of the lengths, and at least three of them; returns k.

    >>> round(exponent([(1, 5.0), (2, 5.0), (4, 4.0), (8, 16.0), (16, 64.0)]), 3)
    2.0
    """
    points = sorted(points)[-max(3, -(-len(points) // 2)) :]
    xs, ys = ([math.log(value) for value in values] for values in zip(*points, strict=True))
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return slope / sum((x - x_mean) ** 2 for x in xs)


def _train(model: Model, x: torch.Tensor) -> None:
    model.zero_grad()
    objective(model, x).loss.mean().backward()


def _points(record: Record, series: str) -> list[tuple[int, float]]:
    found = [
        (re.fullmatch(rf"{series}_ms_t(\d+)", name), value)
        for name, value in record.metrics.items()
    ]
    return sorted((int(match[1]), value) for match, value in found if match and value)


def _show(record: Record, names: Sequence[str]) -> None:
    rows = []
    for name in names:
        theory = THEORY[name.partition("_l")[0]]  # levels change no order
        row, order = [name], "O(T²)" if theory.order == 2 else "O(T)"
        for way, parallel in (
            ("train", theory.trains_in_parallel),
            ("sample", theory.samples_in_parallel),
        ):
            points, k = (
                _points(record, f"{name}_{way}"),
                record.metrics.get(f"{name}_{way}_exponent"),
            )
            last = f"{number(points[-1][1])} at {points[-1][0]}" if points else ""
            row += [order, _yes(parallel), "" if k is None else f"T^{k:.2f}", last]
        if len(row) > 1 and any(_points(record, f"{name}_{way}") for way in ("train", "sample")):
            rows.append([*row, _yes(theory.follows_prompt), _yes(theory.resumes)])
    headings = [
        "model",
        "training",
        "//",
        "measured",
        "ms at T",
        "sampling",
        "//",
        "measured",
        "ms at T",
    ]
    config = record.config
    title = f"Table 1, batch {config['batch']}, width {config['width']}, {config['layers']} layers, float32"
    table(title, [*headings, "prompt", "resume"], rows)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
