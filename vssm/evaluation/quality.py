"""How well and how fast a model generates, and how the two trade off.

A way to sample has a short name; its metrics are `fd_NAME`, and `ms_NAME` (one sequence) and
`ms_NAME_b256`:

    one_shot      all steps at once
    wW            in chunks of W steps, each re-conditioned on those before: W = 1 is step by step
    sS            in S passes over all steps; S = T gives the sample that is made step by step
    wW_sS         in chunks of W steps, each in S passes

`fd_NAME` is the Fréchet distance of generated images to the test set (see
`vssm.evaluation.frechet`). Read it beside `fd_floor`, the distance of real training images.

Samples are means of the observation head, as `generate` returns them by default. An autoregressive
model reads its own samples, with their noise, and is scored by these (`fd_sample`) and by the means
behind them (`fd_mean`). Binary images are black and white while means are grey, so a Bernoulli head
on binary data is scored by samples.

Legend: T length; W `chunk`; S `passes`; C prompt, `cut`.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vssm.data import Data, Split
from vssm.engine import Engine
from vssm.evaluation.frechet import cached_classifier, features, frechet_distance
from vssm.models import AnyPart, Ladder, Model, Variational

__all__ = ["LARGE_BATCH", "Progress", "Work", "dials", "generation_calls", "image_makers"]
__all__ += ["image_quality", "measure_times", "observed", "passes_shown", "spread"]
__all__ += ["ways_to_sample"]

LARGE_BATCH = 256
"""Sequences of the times of the dials."""

Progress = Callable[[str, int, int], None]
"""Called with the stage, how much of it is done, and the total."""

Options = dict[str, Any]
"""Options of `generate`."""


def dials(model: Model) -> tuple[str, ...]:
    """Returns the options of `generate` that trade time for quality: `chunk` and `passes`."""
    if isinstance(model, AnyPart):
        return ("passes",)
    if isinstance(model, Ladder):
        return ("chunk",)
    return ("chunk", "passes") if isinstance(model, Variational) else ()


def observed(model: Model, levels: int | None) -> str:
    """Returns what to compare with data of so many grey levels: the head's "mean" or "sample"."""
    return "sample" if model.config.head == "bernoulli" and levels == 2 else "mean"


def passes_shown(length: int) -> list[int]:
    """Returns the numbers of passes S of a curve, without one pass."""
    return [s for s in sorted({2, 4, 8, 16, length}) if 1 < s <= length]


def ways_to_sample(model: Model, length: int, curves: bool = False) -> dict[str, Options]:
    """Returns the options of `generate` for every way to sample.

    Arguments:
        model: Any of the six models; without dials there is only one shot.
        length: T.
        curves: Whether to add passes, with and without chunks.

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="vssm", features=3, width=8, layers=1))
        >>> list(ways_to_sample(model, 28))
        ['one_shot', 'w14', 'w7', 'w4', 'w2', 'w1']
        >>> list(ways_to_sample(model, 28, curves=True))[6:]
        ['s2', 's4', 's8', 's16', 's28', 'w7_s2', 'w7_s4']
    """
    quarter = length // 4
    ways: dict[str, Options] = {"one_shot": {}}
    if "chunk" in dials(model):
        sizes = sorted({length // 2, quarter, 4, 2, 1}, reverse=True)
        ways |= {f"w{w}": {"chunk": w, "recondition": True} for w in sizes if 0 < w < length}
    if "passes" in dials(model) and curves:
        ways |= {f"s{s}": {"passes": s} for s in passes_shown(length)}
        few = [s for s in (2, 4) if s < quarter]
        ways |= {f"w{quarter}_s{s}": {"chunk": quarter, "passes": s} for s in few}
    return {name: {"length": length, **options} for name, options in ways.items()}


class Work:
    """What is measured, on which data, and in batches of which size."""

    def __init__(
        self,
        model: Model,
        data: Data,
        split: Split,
        batch: int | None,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self.model: Model = model
        self.data: Data = data
        self.split: Split = split
        self.device: torch.device = device
        self.length: int = data.meta.length
        self.cut: int = self.length // 2
        steps = 2**15 if device.type == "cuda" else 2**13
        self.batch: int = batch or max(1, min(1024, steps // self.length))
        self.observed: str = observed(model, data.meta.levels)
        self.progress: Progress = progress or (lambda stage, done, total: None)

    def ranges(self, stage: str, num: int) -> Iterator[range]:
        """Yields the ranges of the batches of `num` sequences, and reports the progress."""
        for first in range(0, num, self.batch):
            self.progress(stage, first, num)
            yield range(first, min(first + self.batch, num))
        self.progress(stage, num, num)

    def batches(self, stage: str, index: np.ndarray) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Yields batches of the sequences at `index`: the first position, x, and lengths if any."""
        for rows in self.ranges(stage, len(index)):
            own = index[rows.start : rows.stop]
            yield rows.start, self.split.batch(own, self.device), self.split.real(own, self.device)


def generation_calls(work: Work, curves: bool = False) -> dict[str, Callable[[], object]]:
    """Returns what to time: 1 and 16 sequences in one go, in chunks, resumed, prompted.

    Resumed and prompted make only the second half. With `curves` the ways to sample are timed as
    well, for 1 and 256 sequences.
    """
    model, length, cut = work.model, work.length, work.cut
    engine = Engine(model)
    prompts = work.split.batch(np.arange(16) % len(work.split), work.device)[:, :cut]
    ways: dict[str, Options] = {}
    for num in (1, 16):
        ways[f"generate_ms_b{num}"] = {"num": num, "length": length}
        if dials(model):
            ways[f"chunks_ms_b{num}"] = {"num": num, "length": length, "chunk": max(1, length // 4)}
        if cut:
            state = engine.generate(num=num, length=cut).state
            ways[f"resumed_ms_b{num}"] = {"length": length - cut, "state": state}
            ways[f"prompted_ms_b{num}"] = {"length": length - cut, "prompt": prompts[:num]}
    if curves:
        for name, options in ways_to_sample(model, length, curves).items():
            ways[f"ms_{name}"] = {**options, "num": 1, "observe": work.observed}
            ways[f"ms_{name}_b{LARGE_BATCH}"] = {**ways[f"ms_{name}"], "num": LARGE_BATCH}
    return {name: partial(engine.generate, **options) for name, options in ways.items()}


def measure_times(
    work: Work, calls: dict[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
    """Measures the milliseconds of calls.

    Each is the median of `repeats` calls, fewer when they are slow. `timing_spread` is the largest
    ratio of the third to the first quartile: far above 1, the machine was busy and the times mean
    little.
    """
    metrics, widest = {}, 1.0
    for done, (name, call) in enumerate(calls.items()):
        work.progress("generation times", done, len(calls))
        metrics[name], ratio = _milliseconds(call, work.device, repeats)
        widest = max(widest, ratio)
    work.progress("generation times", len(calls), len(calls))
    return {**metrics, "timing_spread": widest}


def _milliseconds(
    call: Callable[[], object], device: torch.device, repeats: int
) -> tuple[float, float]:
    """Returns the median time of a call after a warm-up, and the third quartile over the first."""

    def timed() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1000 * (time.perf_counter() - start)

    timed()
    times: list[float] = []
    while len(times) < 5 or (len(times) < repeats and sum(times) < 500):
        times.append(timed())
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return median, high / low


def image_quality(
    work: Work, num_images: int, ways: dict[str, Callable[[range], Tensor]]
) -> dict[str, float]:
    """Measures Fréchet distances between the split and samples, completions and training images.

    The data are images with labels. `ways` make the sequences with some numbers, by the name of
    their metric; each makes `num_images`, or as many as the split has.
    """
    split, train, to_image = work.split, work.data.train, work.data.meta.to_image
    assert train.labels is not None and split.labels is not None
    classifier = cached_classifier(
        to_image(train.batch(slice(None))),
        train.labels,
        int(train.labels.max()) + 1,
        work.device,
        partial(work.progress, "classifier"),
    )

    def accuracy(rows: Tensor, labels: Tensor) -> float:
        guesses = classifier.out(rows.to(work.device, torch.float32)).argmax(-1).cpu()
        return float((guesses == labels.cpu()).double().mean())

    num = min(num_images, len(split))
    reference = features(classifier, to_image(split.batch(slice(None))))
    floor = features(classifier, to_image(train.batch(spread(len(train), num))))
    metrics = {
        "num_images": num,
        "classifier_accuracy": accuracy(reference, split.labels),
        "fd_floor": frechet_distance(floor, reference),
    }
    for name, make in ways.items():
        parts = [features(classifier, to_image(make(rows))) for rows in work.ranges(name, num)]
        made = torch.cat(parts)
        finite = bool(torch.isfinite(made).all())
        metrics[name] = frechet_distance(made, reference) if finite else math.nan
        if name == "fd_one_shot" and work.data.meta.classes:  # whether samples have their label
            asked = split.labels[torch.from_numpy(spread(len(split), num))]
            metrics["label_accuracy"] = accuracy(made, asked)
    return metrics


def image_makers(work: Work, num: int, curves: bool) -> dict[str, Callable[[range], Tensor]]:
    """Returns what makes the images of every Fréchet distance, from the rows of the noise."""
    engine, split = Engine(work.model), work.split
    prompts = split.batch(spread(len(split), min(num, len(split))))[:, : work.cut]

    def make(options: Options, prompted: bool, rows: range) -> Tensor:
        given = {}
        if prompted:
            given["prompt"] = prompts[rows.start : rows.stop].to(work.device)
        x = engine.generate(num=len(rows), rows=rows, **options, **given).x
        return torch.cat([*given.values(), x], 1)

    ways: dict[str, Options]
    if dials(work.model):
        observes = {"": work.observed}
        ways = ways_to_sample(work.model, work.length, curves)
        ways = {f"fd_{name}": {**way, "observe": work.observed} for name, way in ways.items()}
    else:
        observes = {"": "sample"} | ({"_mean": "mean"} if work.observed == "mean" else {})
        ways = {f"fd_{o}": {"length": work.length, "observe": o} for o in observes.values()}
    calls = {name: partial(make, options, False) for name, options in ways.items()}
    if work.cut:
        for end, observe in observes.items():
            rest = {"length": work.length - work.cut, "observe": observe}
            calls[f"fd_prompted{end}"] = partial(make, rest, True)
    return calls


def spread(num: int, limit: int | None) -> np.ndarray:
    """Returns at most `limit` of the indices below `num`, evenly spread and ascending."""
    return np.arange(num) if limit is None or limit >= num else np.arange(limit) * num // limit
