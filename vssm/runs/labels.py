"""Names of metrics in words, and groups of metrics."""

import re
from collections.abc import Iterable
from typing import TypeGuard

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


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value is a number that can be drawn: finite, and below 1e100."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100
