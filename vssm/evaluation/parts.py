"""How well and how fast a model with known="any" fills in the unknown part of test sequences.

A name says which part is known: "prefix", "random:P", "block:N" or "hole:N", as in
`vssm.objectives.masks`; for images the entries are pixels. The metrics of "random:0.5" end in
`random50`, and in `random50_s4` if the unknown entries are made in S = 4 passes:

    nats_random50     - log p(x_U | x_K) / |U|            U the unknown entries, K the known ones
    crps_random50     E|X - y| - E|X - X'| / 2, averaged over U    for numbers that are no pixels
    rmse_random50     root of the mean of (E X - y)^2 over U       likewise
    fd_random50       Fréchet distance of images that were filled to the split       for images

The scores of a series are in deviations of its columns. Its windows are scaled by the known values
of their context only.

Legend: x (B, T, D) or tokens (B, T), D with given features, which are always known.
"""

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vssm import noise
from vssm.data import Meta
from vssm.evaluation.quality import LARGE_BATCH, Work, passes_shown, spread
from vssm.forecasting.metrics import crps
from vssm.likelihoods import log_likelihood
from vssm.models import Model
from vssm.objectives import real_steps
from vssm.objectives.masks import named_mask
from vssm.sampling.filling import fill

__all__ = ["Way", "fill_by_name", "fill_calls", "fill_makers", "fill_scores", "fill_ways"]
__all__ += ["known_entries", "suffix"]

_SEED = 1  # of the masks "random:P"; the number of a sequence, not its batch, decides its mask
Way = tuple[str | None, int]
"""The name of the known part, None for nothing, and the number of passes."""


def suffix(known: str, passes: int = 1) -> str:
    """Returns the end of the names of metrics.

    Example:
        >>> suffix("random:0.5"), suffix("hole:14", passes=4)
        ('random50', 'hole14_s4')
    """
    if share := re.fullmatch(r"random:(.*)", known):
        known = f"random{round(100 * float(share[1]))}"
    return known.replace(":", "") + (f"_s{passes}" if passes > 1 else "")


def known_entries(meta: Meta, known: str | None, numbers: Tensor) -> Tensor:
    """Returns which entries are known of the sequences with these numbers, (B, T, D) or (B, T)."""
    tokens = meta.suggested_head == "categorical"
    channels = meta.image_shape[2] if meta.image_shape else 1  # a pixel is known as a whole
    columns = 1 if tokens else (meta.features - meta.given) // channels
    seeds = torch.full_like(numbers, _SEED)
    u = noise.uniform(seeds, numbers, 0, meta.length, columns, stream=noise.ORDER)
    nothing = torch.zeros_like(u, dtype=torch.bool)
    mask = nothing if known is None else named_mask(known, meta.length, columns, u)
    if tokens:
        return mask.squeeze(-1)
    return F.pad(mask.repeat_interleave(channels, -1), (0, meta.given), value=True)


def fill_by_name(
    model: Model, meta: Meta, x: Tensor, way: Way, numbers: Tensor, observe: str, seed: int = 0
) -> Tensor:
    """Returns sequences x with the entries filled in that a way leaves unknown."""
    known = known_entries(meta, way[0], numbers)
    options = {"passes": way[1], "observe": observe, "seed": seed, "rows": numbers}
    if model.head.tokens:
        return fill(model, x, known, **options)
    return fill(model, torch.where(known, x, torch.nan), **options)


def fill_ways(length: int, curves: bool, names: tuple[str, ...], passes: int) -> dict[str, Way]:
    """Returns the ways to make sequences: from nothing, from their first half, and by names.

    Example:
        >>> fill_ways(28, True, ("hole:14",), passes=4)  # doctest: +NORMALIZE_WHITESPACE
        {'one_shot': (None, 1), 's2': (None, 2), 's4': (None, 4), 's8': (None, 8),
         's16': (None, 16), 's28': (None, 28), 'prompted': ('prefix', 1),
         'hole14_s4': ('hole:14', 4)}
    """
    ways: dict[str, Way] = {"one_shot": (None, 1)}
    if curves:
        ways |= {f"s{s}": (None, s) for s in passes_shown(length)}
    if length > 1:
        ways["prompted"] = ("prefix", 1)
    return ways | {suffix(name, passes): (name, passes) for name in names}


def fill_calls(work: Work, curves: bool) -> dict[str, Callable[[], object]]:
    """Returns what to time: 1 and 16 sequences from nothing and from their first half.

    With `curves`, passes from nothing are timed too, for 1 and 256 sequences.
    """
    meta = work.data.meta

    def call(way: Way, num: int) -> Callable[[], object]:
        x = work.split.batch(np.arange(num) % len(work.split), work.device)
        numbers = torch.arange(num, device=work.device)
        return partial(fill_by_name, work.model, meta, x, way, numbers, work.observed)

    calls = {}
    for num in (1, 16):
        calls[f"generate_ms_b{num}"] = call((None, 1), num)
        if work.cut:
            calls[f"prompted_ms_b{num}"] = call(("prefix", 1), num)
    if curves:
        for name, way in fill_ways(work.length, curves, (), 1).items():
            if way[0] is None:
                calls[f"ms_{name}"] = call(way, 1)
                calls[f"ms_{name}_b{LARGE_BATCH}"] = call(way, LARGE_BATCH)
    return calls


def fill_makers(
    work: Work, num: int, curves: bool, names: tuple[str, ...], passes: int
) -> dict[str, Callable[[range], Tensor]]:
    """Returns what makes the images of every Fréchet distance: sequences of the split, filled."""
    places, meta = spread(len(work.split), min(num, len(work.split))), work.data.meta

    def make(way: Way, rows: range) -> Tensor:
        x = work.split.batch(places[rows.start : rows.stop], work.device)
        numbers = torch.arange(rows.start, rows.stop, device=work.device)
        return fill_by_name(work.model, meta, x, way, numbers, work.observed)

    ways = fill_ways(work.length, curves, names, passes)
    return {f"fd_{name}": partial(make, way) for name, way in ways.items()}


def fill_scores(
    work: Work, index: np.ndarray, known: str, passes: int, num_samples: int
) -> dict[str, float]:
    """Measures the nats of the unknown entries, and the errors of samples of real numbers."""
    meta, end = work.data.meta, suffix(known, passes)
    real_valued = meta.image_shape is None and not work.model.head.tokens
    totals = dict.fromkeys(["nats", *(("crps", "rmse") if real_valued else ())], 0.0)
    count = 0
    for rows in work.ranges(end, len(index)):
        own = index[rows.start : rows.stop]
        numbers = torch.arange(rows.start, rows.stop, device=work.device)
        mask = known_entries(meta, known, numbers)
        x, lengths = work.split.batch(own, work.device, mask), work.split.real(own, work.device)
        options = {"rows": rows.start, "lengths": lengths, "known": mask, "passes": passes}
        nats = log_likelihood(work.model, x, num_samples, **options)
        unknown = ~mask if meta.suggested_head == "categorical" else ~mask & ~x.isnan()
        if lengths is not None:
            there = real_steps(x, lengths)
            unknown = unknown & there.view(*there.shape, *[1] * (x.ndim - 2))
        totals["nats"] -= float(nats.double().sum())
        count += int(unknown.sum())
        if real_valued and bool(unknown.any()):
            _, unit = work.split.scale(own, work.device, mask)
            gaps, y = torch.where(mask, x, torch.nan), torch.where(unknown, x, 0) * unit
            options = {"num": num_samples, "passes": passes, "observe": "sample"}
            some = max(1, work.batch // num_samples)  # sequences whose samples are made at once
            for part in torch.arange(len(x), device=work.device).split(some):
                made = fill(work.model, gaps[part], **options, rows=numbers[part])
                made, truth = (made * unit[part, None]).cpu(), y[part].cpu()
                errors = {"crps": crps(made, truth), "rmse": (made.mean(1) - truth).square()}
                for name, error in errors.items():
                    totals[name] += float(error[unknown[part].cpu()].double().sum())
    metrics = {f"{name}_{end}": total / max(1, count) for name, total in totals.items()}
    if real_valued:
        metrics[f"rmse_{end}"] **= 0.5
    return metrics
