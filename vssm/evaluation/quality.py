"""How well and how fast a model generates, and how the two trade off.

A way to sample has a short name; its metrics are `fd_NAME`, and `ms_NAME` (one sequence) and
`ms_NAME_b256`:

    one_shot      all steps at once
    wW            in chunks of W steps, each re-conditioned on those before: W = 1 is step by step
    sS            in S passes over all steps; S = T gives the sample that is made step by step
    prompted      in one shot, after the first half of test sequences
    others        with known="any": what `known_entries` of `vssm.evaluation.parts` leaves unknown

`fd_NAME` is the Fréchet distance of generated images to the test set (see
`vssm.evaluation.frechet`). Read it beside `fd_floor`, the distance of real training images.

Samples are means of the observation head, as `generate` returns them by default. An autoregressive
model reads its own samples, with their noise, and is scored by these (`fd_sample`) and by the means
behind them (`fd_mean`). Binary images are black and white while means are grey, so a Bernoulli head
on binary data is scored by samples.

Legend: T length; W `chunk`; S `passes`; C prompt, `cut`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vssm.data import Data, Split
from vssm.data.show import tiled
from vssm.data.storage import write_atomically
from vssm.engine import Engine
from vssm.evaluation.frechet import cached_classifier, features, frechet_distance
from vssm.evaluation.parts import known_entries, suffix
from vssm.evaluation.timing import take_times
from vssm.models import AnyPart, Ladder, Model, Variational
from vssm.sampling.filling import fill

_LARGE_BATCH = 256  # sequences of the times of the dials
_SECONDS = 2.0  # that the calls of one time may take
_COLUMNS, _ROWS = 16, 3  # of a picture of samples, for every way to sample

Progress = Callable[[str, int, int], None]
"""Called with the stage, how much of it is done, and the total."""

Way = dict[str, Any]
"""How to make sequences: the options of `make_sequences`."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


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


def ways_to_sample(model: Model, length: int, curves: bool = False) -> dict[str, Way]:
    """Returns the ways to sample from nothing; `curves` adds passes. Models without dials have one.

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="vssm", features=3, width=8, layers=1))
        >>> list(ways_to_sample(model, 28, curves=True))
        ['one_shot', 'w14', 'w7', 'w4', 'w2', 'w1', 's2', 's4', 's8', 's16', 's28']
    """
    ways: dict[str, Way] = {"one_shot": {}}
    if "chunk" in dials(model):
        sizes = sorted({length // 2, length // 4, 4, 2, 1}, reverse=True)
        ways |= {f"w{w}": {"chunk": w, "recondition": True} for w in sizes if 0 < w < length}
    if "passes" in dials(model) and curves:
        passes = sorted({2, 4, 8, 16, length})
        ways |= {f"s{s}": {"passes": s} for s in passes if 1 < s <= length}
    return ways


@dataclass
class Work:
    """What is measured, on which data, and in batches of which size."""

    model: Model
    data: Data
    split: Split
    device: torch.device
    batch: int = 0
    """Sequences of a pass; 0 for what suits the device and the length."""
    progress: Progress = no_progress

    def __post_init__(self) -> None:
        self.length: int = self.data.meta.length
        self.cut: int = self.length // 2
        self.observed: str = observed(self.model, self.data.meta.levels)
        steps = 2**15 if self.device.type == "cuda" else 2**13
        self.batch = self.batch or max(1, min(1024, steps // self.length))

    @cached_property
    def engine(self) -> Engine:
        """Generates with a copy of the model."""
        return Engine(self.model)

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


def make_sequences(
    work: Work,
    x: Tensor,
    rows: range,
    known: str | None = None,
    **options: Any,  # noqa: ANN401
) -> Tensor:
    """Makes whole sequences with the noise of some rows, from what is known of the sequences x.

    `known` is the name of that part, "prefix" for models that continue; None for nothing but given
    features. The options are those of `generate` and `fill`.
    """
    if isinstance(work.model, AnyPart):
        numbers = torch.arange(rows.start, rows.stop, device=x.device)
        there = known_entries(work.data.meta, known, numbers) & ~x.isnan()  # the data have gaps too
        return fill(work.model, x, there, rows=numbers, **options)
    if known is None:
        return work.engine.generate(len(rows), work.length, rows=rows, **options).x
    prompt = x[:, : work.cut]
    made = work.engine.generate(len(rows), work.length - work.cut, prompt, rows=rows, **options)
    return torch.cat([prompt, made.x], 1)


def generation_calls(work: Work, curves: bool = False) -> dict[str, Callable[[], object]]:
    """Returns what to time: 1 and 16 sequences in one go, in chunks, resumed, prompted.

    Resumed makes only the second half. With `curves` the ways to sample are timed as well, for 1
    and 256 sequences.
    """
    model, length, cut, calls = work.model, work.length, work.cut, {}

    def call(num: int, **way: Any) -> Callable[[], object]:  # noqa: ANN401
        x = work.split.batch(np.arange(num) % len(work.split), work.device)
        return partial(make_sequences, work, x, range(num), **way)

    for num in (1, 16):
        calls[f"generate_ms_b{num}"] = call(num)
        if "chunk" in dials(model):
            calls[f"chunks_ms_b{num}"] = call(num, chunk=max(1, length // 4))
        if cut and not isinstance(model, AnyPart):
            state = work.engine.generate(num=num, length=cut).state
            resume = partial(work.engine.generate, length=length - cut, state=state)
            calls[f"resumed_ms_b{num}"] = resume
        if cut:
            calls[f"prompted_ms_b{num}"] = call(num, known="prefix")
    for name, way in ways_to_sample(model, length, curves).items() if curves else ():
        way = {**way, "observe": work.observed}
        calls[f"ms_{name}"] = call(1, **way)
        calls[f"ms_{name}_b{_LARGE_BATCH}"] = call(_LARGE_BATCH, **way)
    return calls


def measure_times(
    work: Work, calls: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
    """Measures the milliseconds of calls, each the median of `repeats`, fewer of slow ones.

    `timing_spread` is the largest ratio of the third to the first quartile: far above 1, the
    machine was busy and the times mean little.
    """
    metrics, widest = {}, 1.0
    for done, (name, call) in enumerate(calls.items()):
        work.progress("generation times", done, len(calls))
        times = take_times(call, work.device, repeats, _SECONDS)
        low, metrics[name], high = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
        widest = max(widest, high / low)
    work.progress("generation times", len(calls), len(calls))
    return {**metrics, "timing_spread": widest}


def image_ways(
    work: Work, curves: bool = False, names: Sequence[str] = (), passes: int = 1
) -> dict[str, Way]:
    """Returns how to make the images of every Fréchet distance.

    Arguments:
        work: The model and its data.
        curves: As in `ways_to_sample`.
        names: With known="any": further parts that are known.
        passes: In how many passes the others are made.
    """
    if dials(work.model):
        ways = ways_to_sample(work.model, work.length, curves)
        ways = {name: {**way, "observe": work.observed} for name, way in ways.items()}
        prompted = {"prompted": work.observed}
    else:
        ways: dict[str, Way] = {"sample": {"observe": "sample"}}
        prompted = {"prompted": "sample"}
        if work.observed == "mean":
            ways["mean"] = {"observe": "mean"}
            prompted["prompted_mean"] = "mean"
    if work.cut:
        ways |= {name: {"known": "prefix", "observe": o} for name, o in prompted.items()}
    parts = {"passes": passes, "observe": work.observed}
    return ways | {suffix(name, passes): {"known": name, **parts} for name in names}


def image_quality(work: Work, num_images: int, ways: Mapping[str, Way]) -> dict[str, float]:
    """Measures Fréchet distances between the split and samples, completions and training images.

    The data are images with labels. Each way makes `num_images`, or as many as the split has.
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
    places = evenly_spaced(len(split), num)
    reference = features(classifier, to_image(split.batch(slice(None))))
    floor = features(classifier, to_image(train.batch(evenly_spaced(len(train), num))))
    metrics = {
        "num_images": num,
        "classifier_accuracy": accuracy(reference, split.labels),
        "fd_floor": frechet_distance(floor, reference),
    }
    for name, way in ways.items():
        parts = []
        for rows in work.ranges(f"fd_{name}", num):
            x = split.batch(places[rows.start : rows.stop], work.device)
            parts.append(features(classifier, to_image(make_sequences(work, x, rows, **way))))
        made = torch.cat(parts)
        finite = bool(torch.isfinite(made).all())
        metrics[f"fd_{name}"] = frechet_distance(made, reference) if finite else math.nan
        if name == "one_shot" and work.data.meta.classes:  # whether samples have their label
            metrics["label_accuracy"] = accuracy(made, split.labels[torch.from_numpy(places)])
    return metrics


@torch.no_grad()
def draw_grid(work: Work, path: Path, ways: Sequence[Way], seed: int = 0) -> None:
    """Draws samples pixel by pixel: three rows of images for each way, and of completed ones."""
    from matplotlib.image import imsave

    num = _ROWS * _COLUMNS
    x = work.split.batch(np.arange(num) * len(work.split) // num, work.device)
    options = {"seed": seed, "observe": work.observed}
    ways = [*ways, {"known": "prefix"}]
    made = [make_sequences(work, x, range(num), **options, **way) for way in ways]
    images = work.data.meta.to_image(torch.cat(made)).cpu().numpy()
    write_atomically(path, lambda file: imsave(file, tiled(images, _COLUMNS), format="png"))


def evenly_spaced(num: int, limit: int | None) -> np.ndarray:
    """Returns at most `limit` of the indices below `num`, ascending."""
    return np.arange(num) if limit is None or limit >= num else np.arange(limit) * num // limit
