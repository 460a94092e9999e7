"""Likelihoods: how likely data is under a model.

    autoregressive   log p(x_{C+1:T} | x_{1:C}), exact
    vssm, tvae       log 1/K sum_k p(x|z^k) p(z^k) / q_psi(z^k|x)                       C = 0
                     log 1/K sum_k p(x_{C+1:T}|z^k) q_omega(z^k|x_{1:C}) / q_psi(z^k|x)   C > 0
    with levels      log 1/K sum_k p(x_{C+1:T}|z^k, x_{1:C}) p(z^k|x_{1:C}) / q(z^k|x)      any C
    any part known   see `vssm.likelihoods.parts`
    vrnn             log 1/K sum_k w_k(1:T) - log 1/K sum_k w_k(1:C),   w_k = p(x|z) p(z) / q(z|x)

with z^k drawn from the posterior (importance sampling; Burda et al., 2016). In expectation these
are lower bounds on log p that tighten with K: for C = 0, and for a model with levels at any C. For
vssm and tvae at C > 0 it is a bound on the log of the sum over z of p(x_{C+1:T}|z)
q_omega(z|x_{1:C}). For vrnn at C > 0 it is a difference of two bounds, not a bound. The sum over k
is streamed: memory does not grow with K. `vssm.likelihoods.particles` gives closer estimates by a
particle filter.

Legend: x (B, T, D) or tokens (B, T); K `num_samples`; C `prompt_length`, `cut`.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Integral

import torch
from torch import Tensor

from vssm.checks import (
    check_choice,
    check_model,
    check_number,
    check_sequence,
    shown,
    whole_number,
    whole_numbers,
)
from vssm.distributions import Latents, Observation
from vssm.likelihoods.particles import filtered, latent_noise, partial_prior, repeated
from vssm.likelihoods.parts import log_likelihood_of_part, reconstruct_part
from vssm.models import (
    VRNN,
    AnyPart,
    Autoregressive,
    Ladder,
    Model,
    Trajectory,
    Variational,
)
from vssm.models.ladder import Task
from vssm.objectives import real_steps
from vssm.objectives.parts import for_entries, there_and_finite

__all__ = ["METHODS", "estimates", "log_likelihood", "reconstruct"]

METHODS = ("importance", "particles")

_ROWS_PER_PASS = 512  # draws of several k share a pass while the batch is small


@torch.no_grad()
def log_likelihood(
    model: Model,
    x: Tensor,
    num_samples: int = 100,
    prompt_length: int = 0,
    prior: str = "uniform",
    seed: int = 0,
    lengths: Tensor | None = None,
    method: str = "importance",
    rows: Sequence[int] | Tensor | int = 0,
    known: Tensor | None = None,
    passes: int = 1,
) -> Tensor:
    """Estimates log p(x_{C+1:T} | x_{1:C}) for every sequence, or log p of any part given another.

    Arguments:
        model: Any of the six models.
        x: The sequences, (B, T, D), or (B, T) tokens.
        num_samples: K, the number of latent draws; an autoregressive model needs none.
        prompt_length: C, the number of steps that are given.
        prior: For vssm and tvae at C = 0: "uniform", or "partial" for q_omega(z | ∅), the prior
            that unconditional generation draws from. With C > 0 it is always q_omega(z | x_{1:C}).
            A model with levels has one prior, its own.
        seed: Equal seeds and rows give equal estimates.
        lengths: The number of real steps of each row, (B,), if the rest is padding.
        method: "importance", as in the paper, or "particles", a particle filter, which comes much
            closer to log p(x) with as many draws but takes the steps one after the other. A model
            with levels or known="any" has only "importance".
        rows: Which rows of the noise the sequences draw from, or the first of them; 0 to B - 1 by
            default. Part of a batch, with its own rows, has the same estimates as in the whole.
        known: For models with known="any": which entries are given, bool, of the shape of x or (B,
            T); the first C steps by default. Entries that are NaN are missing: neither given nor
            scored.
        passes: S, for models with known="any": the passes in which the unknown entries are drawn.

    Returns:
        Nats, (B,).

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="ssm", features=3, width=8, layers=1))
        >>> log_likelihood(model, torch.zeros(2, 6, 3), prompt_length=3).shape
        torch.Size([2])
    """
    model = check_model(model)
    passes = whole_number("passes", passes, 1)
    x, there = _check_data(model, x, known, passes)
    num_samples = whole_number("num_samples", num_samples, 1)
    prompt_length = whole_number("prompt_length", prompt_length, 0)
    seed = whole_number("seed", seed, -(2**63))
    check_number("seed", seed, -(2**63), below=2**63, whole=True)
    check_choice("prior", prior, ("uniform", "partial"))
    check_choice("method", method, METHODS)
    if method == "particles" and isinstance(model, Ladder | AnyPart):
        raise ValueError(
            "method='particles' is not for models with levels or known='any'; use 'importance'"
        )
    real = None if lengths is None else real_steps(x, lengths)
    shortest = x.shape[1] if lengths is None else int(lengths.min())
    if prompt_length > shortest:
        raise ValueError(
            f"prompt_length is {prompt_length}; it must be 0 to {shortest}, the shortest length"
        )
    numbers = _numbers(x, rows)
    if isinstance(model, AnyPart):
        known = _first_steps(x, prompt_length) if known is None else for_entries(known, x)
        there = there if real is None else there & for_entries(real, x)
        return log_likelihood_of_part(
            model, x, there, known & there, passes, num_samples, seed, numbers, _ROWS_PER_PASS
        )
    case = [(prompt_length, prior)]
    return estimates(model, x, num_samples, case, seed, _ROWS_PER_PASS, real, method, numbers)[0]


def _check_data(
    model: Model, x: Tensor, known: Tensor | None, passes: int
) -> tuple[Tensor, Tensor]:
    """Returns sequences as a model scores them, and which entries are not missing."""
    if isinstance(model, AnyPart):
        if known is not None:
            there_and_finite(model, torch.nan_to_num(x), known)
        return there_and_finite(model, x, None)
    x = check_sequence(model, x)
    for name, given in (("known", known is not None), (f"passes={passes}", passes > 1)):
        if given:
            raise ValueError(f"{name} is for models with known='any'; use the default")
    return x, torch.ones_like(x, dtype=torch.bool)


def _first_steps(x: Tensor, num: int) -> Tensor:
    """Returns which entries of x are in its first steps."""
    steps = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    return for_entries(steps < num, x)


def _numbers(x: Tensor, rows: Sequence[int] | Tensor | int) -> Tensor:
    """Returns the row of the noise of each sequence: the given rows, or consecutive ones."""
    if (
        isinstance(rows, Integral)
        and not isinstance(rows, bool)
        and 0 <= int(rows) <= 2**32 - len(x)
    ):
        return torch.arange(int(rows), int(rows) + len(x), device=x.device)
    given = whole_numbers("rows", rows, x.device)
    if given.shape != (len(x),) or bool(((given < 0) | (given >= 2**32)).any()):
        raise ValueError(
            f"rows is {shown(rows)}; it must hold {len(x)} whole numbers from 0 to 2^32 - 1, or be"
            " the first of them"
        )
    return given


def estimates(
    model: Model,
    x: Tensor,
    num_samples: int,
    cases: list[tuple[int, str]],
    seed: int,
    rows: int,
    real: Tensor | None,
    method: str,
    numbers: Tensor | int,
) -> list[Tensor]:
    """Returns one estimate, (B,), for each case (prompt length, prior), all from the same draws.

    Arguments:
        model: Any of the six models.
        x: The sequences.
        num_samples: K.
        cases: Prompt lengths and priors.
        seed: The seed of the draws.
        rows: Sequences in a pass.
        real: Which steps count, (B, T); None for all.
        method: One of `METHODS`.
        numbers: The row of the noise of each sequence, (B,), or the first row.
    """
    numbers = _numbers(x, numbers) if isinstance(numbers, int) else numbers
    ones = torch.ones(x.shape[:2], dtype=torch.float32, device=x.device)
    mask = ones if real is None else real.float()
    if isinstance(model, Autoregressive):
        p_x, _ = model(x)
        log_p_x = p_x.log_prob(x) * mask
        return [log_p_x[:, cut:].sum(1) for cut, _ in cases]
    if isinstance(model, AnyPart):
        x, there = there_and_finite(model, x, None)
        there = there & for_entries(mask.bool(), x)
        prefixes = [_first_steps(x, cut) & there for cut, _ in cases]
        rest = 1, num_samples, seed, numbers, rows
        return [log_likelihood_of_part(model, x, there, known, *rest) for known in prefixes]
    if method == "particles":
        assert not isinstance(model, Ladder)
        return filtered(model, x, num_samples, cases, seed, rows, mask, numbers)

    kinds = {VRNN: _vrnn_weights, Ladder: _ladder_weights, Variational: _variational_weights}
    weigh = kinds[type(model)](model, x, cases, mask)  # type: ignore[operator]

    def noise(draws: range) -> Tensor:
        return latent_noise(x, seed, numbers, draws, model.config.latents)

    nats = _mean_weights(weigh, noise, num_samples, max(1, rows // max(1, len(x))))
    if isinstance(model, VRNN):
        whole, *prompts = nats
        return [whole - prompt for prompt in prompts]
    return nats


def _mean_weights(
    weigh: Callable[[Tensor], list[Tensor]],
    noise: Callable[[range], Tensor],
    num_samples: int,
    at_once: int,
) -> list[Tensor]:
    """Returns log 1/K sum_k w_k of each case, (B,), from `at_once` of the K draws at a time."""
    totals: list[Tensor] = []
    for first in range(0, num_samples, at_once):
        u = noise(range(first, min(first + at_once, num_samples)))
        parts = [torch.logsumexp(weights, 0) for weights in weigh(u)]
        if totals:
            parts = [torch.logaddexp(a, b) for a, b in zip(totals, parts, strict=True)]
        totals = parts
    return [total - math.log(num_samples) for total in totals]


def _variational_weights(
    model: Variational, x: Tensor, cases: list[tuple[int, str]], mask: Tensor
) -> Callable[[Tensor], list[Tensor]]:
    """Returns a function from uniform numbers (K, B, T, Z) to log weights (K, B) of each case."""
    q_z, _ = model.posterior(x)
    priors = [partial_prior(model, x, *case) for case in cases]
    log_uniform = -mask.sum(1) * model.config.latents * math.log(model.config.classes)

    def weigh(u: Tensor) -> list[Tensor]:
        z = q_z.sample(u)
        p_x, _ = model.likelihood(z.flatten(0, 1))
        log_p_x = p_x.log_prob(repeated(x, len(u))).unflatten(0, u.shape[:2]) * mask
        log_q_z = (q_z.log_prob(z) * mask).sum(-1)
        weights = []
        for (cut, _), p_z in zip(cases, priors, strict=True):
            log_p_z = log_uniform if p_z is None else (p_z.log_prob(z) * mask).sum(-1)
            weights.append(log_p_x[..., cut:].sum(-1) + log_p_z - log_q_z)
        return weights

    return weigh


def _ladder_weights(
    model: Ladder, x: Tensor, cases: list[tuple[int, str]], mask: Tensor
) -> Callable[[Tensor], list[Tensor]]:
    """Returns a function from uniform numbers (K, B, T, Z) to log weights (K, B) of each case."""
    lengths = mask.sum(1).long()
    cuts = [torch.full((len(x),), cut, device=x.device) for cut, _ in cases]
    tasks = [model.task(x, cut, lengths) for cut in cuts]

    def weigh(u: Tensor) -> list[Tensor]:
        weights = []
        for task in tasks:
            path = _climb(model, task.repeat(len(u)), u.flatten(0, 1))
            log_p_x = path.p_x.log_prob(repeated(x, len(u))).unflatten(0, u.shape[:2])
            ratio = (path.p_z.log_prob(path.z) - path.q_z.log_prob(path.z)).sum(-1)
            weights.append(
                torch.where(task.new, log_p_x, 0).sum(-1) + ratio.unflatten(0, u.shape[:2])
            )
        return weights

    return weigh


def _climb(model: Ladder, task: Task, u: Tensor) -> Trajectory:
    """Draws all latents of a task from the posterior with uniform numbers (B, T, Z)."""
    q_zs, p_zs, zs = [], [], []

    def draw(level: int, p_z: Latents, query: Tensor) -> Tensor:
        q_z = model.rung(level).posterior(p_z, query, task.evidence[level])
        live = task.live[level][..., None, None]  # elsewhere q = p, with no weight and no KL
        z = q_z.sample(u.chunk(model.config.levels, -1)[level][:, : live.shape[1]])
        found = torch.where(live, q_z.logits, 0), torch.where(live, p_z.logits, 0), z
        if model.rung(level).span > 1:
            starts = model.rung(level).starts(task.cut, u.shape[1])
            found = tuple(_at(starts, values, u.shape[1]) for values in found)
        for values, value in zip((q_zs, p_zs, zs), found, strict=True):
            values.append(value)
        return z

    p_x, state = model.descend(task.e, draw, cut=task.cut)
    q_z, p_z = (Latents(torch.cat(logits, -2)) for logits in (q_zs, p_zs))
    return Trajectory(p_x, q_z, p_z, torch.cat(zs, -1), state)


def _at(steps: Tensor, values: Tensor, length: int) -> Tensor:
    """Returns values (B, A, ...) at their steps (B, A), and zeros elsewhere, (B, T, ...)."""
    index = steps.view(*steps.shape, *[1] * (values.ndim - 2)).expand_as(values)
    room = values.new_zeros(
        len(values), 2 * length, *values.shape[2:]
    )  # some steps are past the end
    return room.scatter(1, index, values)[:, :length]


def _vrnn_weights(
    model: VRNN, x: Tensor, cases: list[tuple[int, str]], mask: Tensor
) -> Callable[[Tensor], list[Tensor]]:
    """Returns a function from uniform numbers to log weights of x_{1:T} and of each x_{1:C}."""

    def weigh(u: Tensor) -> list[Tensor]:
        copies, flat = repeated(x, len(u)), u.flatten(0, 1)
        path = model(copies, draw=lambda t, q_z: q_z.sample(flat[:, t : t + 1]))
        steps = path.p_x.log_prob(copies) + path.p_z.log_prob(path.z) - path.q_z.log_prob(path.z)
        steps = steps.unflatten(0, u.shape[:2]) * mask
        return [steps.sum(-1), *(steps[..., :cut].sum(-1) for cut, _ in cases)]

    return weigh


def reconstruct(
    model: Model, x: Tensor, seed: int, lengths: Tensor | None = None, first: int = 0
) -> tuple[Observation, Latents | None, Latents | None]:
    """Returns p(x|z) for one draw of z, the posterior and the prior of z; p(x) without latents.

    With `lengths`, (B,), only the real steps mean something. The noise starts at row `first`.
    """
    if isinstance(model, Autoregressive):
        return model(x)[0], None, None
    if isinstance(model, AnyPart):
        return reconstruct_part(model, x, seed, lengths, _numbers(x, first))
    u = latent_noise(x, seed, _numbers(x, first), range(1), model.config.latents)[0]
    if isinstance(model, VRNN):
        path = model(x, draw=lambda t, q_z: q_z.sample(u[:, t : t + 1]))
        return path.p_x, path.q_z, path.p_z
    if isinstance(model, Ladder):
        none = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        path = _climb(model, model.task(x, none, lengths), u)
        return path.p_x, path.q_z, path.p_z
    q_z, _ = model.posterior(x)
    uniform = Latents(q_z.logits.new_zeros(q_z.logits.shape[-1:]))
    return model.likelihood(q_z.sample(u))[0], q_z, uniform
