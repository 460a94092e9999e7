"""Names of metrics in words, groups of metrics, and curves of quality against time."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

__all__ = ["GROUPS", "dial_curves", "dial_ways", "grouped", "is_number", "label"]

_LABELS = {  # in the order in which they are shown
    "log_likelihood": "log p(x)",
    "log_likelihood_empty_prior": "log p(x), prior of the empty prompt",
    "partial_log_likelihood": "log p(second half | first half)",
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
    "aggregate_kl": "KL of the aggregate posterior to uniform",
    "passes": "passes at once",
    "num_samples": "draws of each likelihood",
    "num_images": "images of each distance",
    "prefix": "second half",
}
_RULES = (  # the names of other metrics are made of these
    (r"(\w+)_particles", "{}, by particles"),
    (r"pseudo_(\w+)", "pseudo-{}"),
    (r"(generate|chunks|resumed|prompted)_ms_b(\d+)", "{}, batch {}"),
    (r"ms_(one_shot|[ws]\d\w*?)_b(\d+)", "{}, batch {}"),
    (r"ms_(one_shot|[ws]\d\w*)", "{}, batch 1"),
    (r"fd_([ws]\d\w*|(?:prefix|random|block|hole)\w*)", "{}"),
    (r"nats_(\w+)", "−log p of {}"),
    (r"crps_(\w+)", "CRPS of {}"),
    (r"rmse_(\w+)", "RMSE of {}"),
    (r"w(\d+)", "in chunks of {}, re-conditioned"),
    (r"s(\d+)", "in {} passes"),
    (r"((?:prefix|random|block|hole)\d*)_s(\d+)", "{}, {} passes"),
    (r"random(\d+)", "{} % of entries"),
    (r"block(\d+)", "{} steps"),
    (r"hole(\d+)", "a hole of {}"),
)
_LATENTS = r"mse|reconstruction|kl|\w*components|code_perplexity|aggregate_kl"
GROUPS = (  # title, pattern of names, whether more (+1) or less (-1) is better
    ("Likelihood, nats a sequence", r"(partial_)?log_likelihood\w*|elbo", 1),
    ("Pseudo-likelihood of grey values by a Bernoulli head, nats a sequence", r"pseudo_\w+", 1),
    ("Bits and nats", r"bits_per_\w+|nats", -1),
    ("Unknown entries by what is known, per entry", r"(nats|crps|rmse)_\w+", -1),
    ("Fréchet distance of samples to the test set", r"fd_(?!floor)\w+", -1),
    ("Fréchet distance of real images to the test set", r"fd_floor", 0),
    ("Generation time, ms", r"\w+_ms_b\d+|ms_\w+", -1),
    ("Third quartile over first of these times: near 1 on a quiet machine", r"timing_spread", 0),
    ("Reconstruction and latents", _LATENTS, 0),
    ("Counts", r"\w+", 0),
)
_WAY = re.compile(r"one_shot|[ws]\d{1,9}")


def grouped(
    names: Iterable[str], num_groups: int = len(GROUPS)
) -> list[tuple[str, int, list[str]]]:
    """Sorts metrics into groups; returns (title, direction, names) of each group that has some.

    >>> grouped(["sequences", "fd_w4", "elbo", "fd_one_shot"])[:2]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('Likelihood, nats a sequence (more is better)', 1, ['elbo']),
     ('Fréchet distance of samples to the test set (less is better)', -1, ['fd_one_shot', 'fd_w4'])]
    """
    rest, groups = list(dict.fromkeys(names)), []
    order = {name: place for place, name in enumerate(_LABELS)}
    for title, pattern, direction in GROUPS[:num_groups]:
        own = [name for name in rest if re.fullmatch(pattern, name)]
        rest = [name for name in rest if name not in own]
        if own:
            better = {1: " (more is better)", -1: " (less is better)", 0: ""}[direction]
            own.sort(key=lambda name: order.get(name, len(order)))
            groups.append((title + better, direction, own))
    return groups


def label(name: str) -> str:
    """Returns the name of a metric in words.

    >>> names = ("fd_w4", "ms_s8_b256", "chunks_ms_b16", "crps_random50", "max_steps")
    >>> [label(name) for name in names]  # doctest: +NORMALIZE_WHITESPACE
    ['in chunks of 4, re-conditioned', 'in 8 passes, batch 256', 'in four chunks, batch 16',
     'CRPS of 50 % of entries', 'max steps']
    """
    if name in _LABELS:
        return _LABELS[name]
    for pattern, words in _RULES:
        if found := re.fullmatch(pattern, name):
            return words.format(*map(label, found.groups()))
    return name.replace("_", " ")


def dial_ways(metrics: Iterable[str], measure: str = "ms") -> list[str]:
    """Returns the ways to sample that were measured: one shot, chunks, passes.

    >>> dial_ways(["ms_s4", "ms_w2", "ms_w14", "ms_s16", "fd_s8", "ms_one_shot", "ms_w2_b256"])
    ['one_shot', 'w14', 'w2', 's4', 's16']
    """
    start = f"{measure}_"
    ways = (name.removeprefix(start) for name in metrics if name.startswith(start))
    sizes = {way: int(way[1:]) for way in filter(_WAY.fullmatch, ways) if way != "one_shot"}
    chunks = sorted((way for way in sizes if way[0] == "w"), key=sizes.__getitem__, reverse=True)
    passes = sorted((way for way in sizes if way[0] == "s"), key=sizes.__getitem__)
    return [*(["one_shot"] if f"{start}one_shot" in metrics else []), *chunks, *passes]


def dial_curves(metrics: Mapping[str, Any], batch: int = 1) -> dict[str, list[tuple[float, float]]]:
    """Returns curves of (milliseconds, Fréchet distance), each from one shot on, and the floor.

    Arguments:
        metrics: Metrics of an evaluation with `dials=True`; others have no curves.
        batch: How many sequences were made at a time.

    Example:
        >>> metrics = {"fd_one_shot": 90.0, "fd_s2": 30.0, "ms_one_shot": 1.5, "ms_s2": 4.0}
        >>> dial_curves({**metrics, "fd_floor": 7})
        {'passes S': [(1.5, 90.0), (4.0, 30.0)], 'floor': [(1.5, 7), (4.0, 7)]}
    """
    end = f"_b{batch}" if batch > 1 else ""
    points: dict[str, tuple[float, float]] = {}
    for way in dial_ways(metrics):
        ms, distance = metrics.get(f"ms_{way}{end}"), metrics.get(f"fd_{way}")
        if is_number(ms) and is_number(distance) and min(ms, distance) > 0:
            points[way] = ms, distance
    lines: dict[str, list[tuple[float, float]]] = {}
    for letter, name in (("w", "chunks W"), ("s", "passes S")):
        if any(way[0] == letter for way in points):
            lines[name] = [point for way, point in points.items() if way[0] in ("o", letter)]
    floor, times = metrics.get("fd_floor"), [ms for ms, _ in points.values()]
    if lines and is_number(floor) and floor > 0:
        lines["floor"] = [(min(times), floor), (max(times), floor)]
    return lines


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value is a number that can be drawn: finite, and below 1e100."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100
