"""What metrics are called in words, which of them belong together, and the curves of the dials."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

__all__ = ["GROUPS", "LABELS", "dial_curves", "dial_ways", "grouped", "is_number", "label"]

LABELS = {
    "log_likelihood": "log p(x)",
    "log_likelihood_empty_prior": "log p(x), prior of the empty prompt",
    "partial_log_likelihood": "log p(second half | first half)",
    "log_likelihood_particles": "log p(x), by particles",
    "log_likelihood_empty_prior_particles": "log p(x), prior of the empty prompt, by particles",
    "partial_log_likelihood_particles": "log p(second half | first half), by particles",
    "elbo": "ELBO",
    "partial_elbo": "ELBO of the second half given the first",
    "bits_per_dim": "bits per dimension",
    "bits_per_char": "bits per character",
    "nats": "−log p(x), binary pixels",
    "mse": "mean squared error",
    "fd_one_shot": "one shot",
    "fd_sample": "step by step, with noise",
    "fd_mean": "step by step, means",
    "fd_prompted": "second half completed",
    "fd_prompted_mean": "second half completed, means",
    "fd_floor": "floor: training images",
    "generate": "whole sequence",
    "chunks": "in four chunks",
    "resumed": "second half, resumed",
    "prompted": "second half, prompted",
    "timing_spread": "largest spread",
    "kl": "KL",
    "components": "latent components",
    "active_components": "active latent components",
    "code_perplexity": "code perplexity",
    "aggregate_kl": "KL of the aggregate posterior to uniform",
    "passes": "passes at once",
    "num_samples": "draws of each likelihood",
    "num_images": "images of each distance",
}
GROUPS = (  # title, pattern of names, whether more (+1) or less (-1) is better
    ("Likelihood, nats a sequence", r"(partial_)?log_likelihood\w*|elbo", 1),
    (
        "Pseudo-likelihood of grey values by a Bernoulli head, no likelihood, nats a sequence",
        r"pseudo_\w+",
        1,
    ),
    ("Bits and nats", r"bits_per_\w+|nats", -1),
    ("Fréchet distance of samples to the test set", r"fd_(?!floor)\w+", -1),
    ("Fréchet distance of real images to the test set", r"fd_floor", 0),
    ("Generation time, ms", r"\w+_ms_b\d+|ms_\w+", -1),
    (
        "Spread of these times, third quartile over first: near 1 on a quiet machine",
        r"timing_spread",
        0,
    ),
    (
        "Reconstruction and latents",
        r"mse|reconstruction|kl|\w*components|code_perplexity|aggregate_kl",
        0,
    ),
    ("Counts", r"\w+", 0),
)
_WAY = re.compile(r"one_shot|w(\d{1,9})(?:_s(\d{1,9}))?|s(\d{1,9})")


def grouped(
    names: Iterable[str], num_groups: int = len(GROUPS)
) -> list[tuple[str, int, list[str]]]:
    """Returns the title of each group that has some of the metrics, its direction, and their names.

    >>> grouped(["sequences", "fd_w4", "elbo", "fd_one_shot"])[:2]  # doctest: +NORMALIZE_WHITESPACE
    [('Likelihood, nats a sequence (more is better)', 1, ['elbo']),
     ('Fréchet distance of samples to the test set (less is better)', -1, ['fd_one_shot', 'fd_w4'])]
    """
    left, groups = list(dict.fromkeys(names)), []
    order = {name: place for place, name in enumerate(LABELS)}
    for title, pattern, direction in GROUPS[:num_groups]:
        own = [name for name in left if re.fullmatch(pattern, name)]
        own.sort(key=lambda name: order.get(name, len(order)))
        left = [name for name in left if name not in own]
        if own:
            better = {1: " (more is better)", -1: " (less is better)", 0: ""}[direction]
            groups.append((title + better, direction, own))
    return groups


def label(name: str) -> str:
    """Says the name of a metric in words.

    >>> [label(name) for name in ("fd_w4", "fd_w7_s2", "ms_s8_b256", "chunks_ms_b16", "max_steps")]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['in chunks of 4, re-conditioned', 'in chunks of 7, 2 passes each', 'in 8 passes, batch 256',
     'in four chunks, batch 16', 'max steps']
    """
    if name in LABELS:
        return LABELS[name]
    if name.startswith("pseudo_"):
        return f"pseudo-{label(name.removeprefix('pseudo_'))}"
    if timed := re.fullmatch(r"(generate|chunks|resumed|prompted)_ms_b(\d+)", name):
        return f"{LABELS[timed[1]]}, batch {timed[2]}"
    if (timed := re.fullmatch(r"ms_(\w+?)(?:_b(\d+))?", name)) and _WAY.fullmatch(timed[1]):
        return f"{label(f'fd_{timed[1]}')}, batch {timed[2] or 1}"
    if name.startswith("fd_") and _WAY.fullmatch(name[3:]):
        chunk, passes = _turned(name[3:])
        if not chunk:
            return f"in {passes} passes"
        return f"in chunks of {chunk}, " + (f"{passes} passes each" if passes else "re-conditioned")
    return name.replace("_", " ")


def dial_ways(metrics: Iterable[str], measure: str = "ms") -> list[str]:
    """Returns the ways to sample that have a measure: one shot, then each dial as it is turned, then both.

    >>> dial_ways(["ms_s4", "ms_w2", "ms_s16", "fd_s16", "ms_one_shot", "ms_w2_b256"])
    ['one_shot', 'w2', 's4', 's16']
    """

    def order(way: str) -> tuple[bool, bool, bool, int, int]:
        chunk, passes = _turned(way)
        return chunk > 0 and passes > 0, passes > 0, chunk > 0, -chunk, passes

    ways = {name.removeprefix(f"{measure}_") for name in metrics if name.startswith(f"{measure}_")}
    return sorted(filter(_WAY.fullmatch, ways), key=order)


def dial_curves(metrics: Mapping[str, Any], batch: int = 1) -> dict[str, list[tuple[float, float]]]:
    """Returns points (milliseconds, Fréchet distance) by dial, from one shot on, and the floor.

    Arguments:
        metrics: Those of an evaluation with `dials=True`; of others there are no curves.
        batch: How many sequences were made at a time.

    Example:
        >>> metrics = {"fd_one_shot": 90.0, "fd_s2": 30.0, "ms_one_shot": 1.5, "ms_s2": 4.0, "fd_floor": 7}
        >>> dial_curves(metrics)
        {'passes S': [(1.5, 90.0), (4.0, 30.0)], 'floor': [(1.5, 7), (4.0, 7)]}
    """
    points: dict[str, tuple[float, float]] = {}
    for way in dial_ways(metrics):
        ms, fd = (
            metrics.get(f"ms_{way}" + (f"_b{batch}" if batch > 1 else "")),
            metrics.get(f"fd_{way}"),
        )
        if is_number(ms) and is_number(fd) and min(ms, fd) > 1e-100:
            points[way] = ms, fd
    lines: dict[str, list[tuple[float, float]]] = {}
    for way, point in points.items():
        chunk, passes = _turned(way)
        name = (
            f"chunks of {chunk}, passes S"
            if chunk and passes
            else "chunks W"
            if chunk
            else "passes S"
        )
        if chunk or passes:
            first = points.get(f"w{chunk}" if chunk and passes else "one_shot")
            lines.setdefault(name, [first] if first else []).append(point)
    floor, times = metrics.get("fd_floor"), [ms for ms, _ in points.values()]
    if lines and is_number(floor) and floor > 1e-100:
        lines["floor"] = [(min(times), floor), (max(times), floor)]
    return lines


def _turned(way: str) -> tuple[int, int]:
    """Returns W and S of a way to sample, 0 where that dial is not turned."""
    found = _WAY.fullmatch(way)
    assert found is not None
    return int(found[1] or 0), int(found[2] or found[3] or 0)


def is_number(value: object) -> TypeGuard[float]:
    """Says whether a value can be drawn: a number, finite and not absurd."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100
