"""Likelihoods of any part of a sequence given another, for models with known="any".

    log p(x_U | x_K) >= sum_s log 1/K sum_k w_ks
    w_ks = p(x_{R_s}|z, x_{K_s}) p(z|x_{K_s}, R_s) / q(z|x_{K_s}, x_{R_s}),     z ~ q

U are the unknown entries, divided at random into R_1 ... R_S; K_1 = K, and K_{s+1} = K_s + R_s. The
division is that of `vssm.fill` with the same seed and row.

Legend: x (B, T, D) or tokens (B, T); `there`, the entries that are not missing, and `known`, K, of
the shape of x; K also `num_samples`; S `passes`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vssm import noise
from vssm.distributions import Latents, Observation
from vssm.likelihoods.particles import latent_noise
from vssm.models.anypart import AnyPart, Part, order_of_passes
from vssm.objectives import real_steps
from vssm.objectives.parts import for_entries, there_and_finite


def log_likelihood_of_part(
    model: AnyPart,
    x: Tensor,
    there: Tensor,
    known: Tensor,
    passes: int,
    num_samples: int,
    seed: int,
    numbers: Tensor,
    rows: int,
) -> Tensor:
    """Returns an estimate for each sequence, (B,).

    Arguments:
        model: The model.
        x: The sequences, finite.
        there: The entries that are not missing.
        known: K, of the shape of x.
        passes: S.
        num_samples: K, the draws of the latents of each pass.
        seed: The seed of the draws.
        numbers: The row of the noise of each sequence, (B,).
        rows: Sequences in one run of the network.
    """
    known = known | (model.always_known(torch.zeros_like(known)) & there)
    x, there, known = model.pad(x), model.pad(there), model.pad(known)
    columns = 1 if x.ndim == 2 else x.shape[2]
    u = noise.uniform(
        torch.full_like(numbers, seed), numbers, 0, x.shape[1], columns, stream=noise.ORDER
    ).view(x.shape)
    order = order_of_passes(there & ~known, u, model.config.window, passes)
    total = torch.zeros(len(x), device=x.device)
    step = max(1, rows // max(1, len(x)))
    for s in range(passes):
        part, now = model.part_of_pass(x, known, order, s, passes), order == s
        if not part.latent:
            total = total + model.score(model.descend(part, None)[0], x, now)
            continue
        evidence = model.evidence(part)
        nats = torch.full_like(total, -torch.inf)
        for first in range(0, num_samples, step):
            draws = range(first, min(first + step, num_samples))
            offset = range(s * num_samples + draws.start, s * num_samples + draws.stop)
            u = latent_noise(x, seed, numbers, offset, model.config.latents)
            weights = _weigh(model, part, evidence, u)
            nats = torch.logaddexp(nats, torch.logsumexp(weights, 0))
        total = total + nats - math.log(num_samples)
    return total


def _weigh(model: AnyPart, part: Part, evidence: tuple[Tensor, ...], u: Tensor) -> Tensor:
    """Returns log weights (K, B) of draws that uniform numbers (K, B, T, Z) select."""
    copies = part.repeat(len(u))
    p_x, levels = _draw_posterior(model, copies, evidence, u)
    log_w = model.score(p_x, copies.x, copies.made)
    for q_z, p_z, z, live in levels:
        log_w = log_w + torch.where(live, p_z.log_prob(z) - q_z.log_prob(z), 0).sum(1)
    return log_w.view(u.shape[:2])


class _Level(NamedTuple):
    """The latents of one level, drawn from their posterior."""

    q_z: Latents
    p_z: Latents
    z: Tensor
    """(B, A, Z / L)."""
    live: Tensor
    """Which of them speak for a live step, (B, A)."""


def _draw_posterior(
    model: AnyPart,
    part: Part,
    evidence: tuple[Tensor, ...],
    u: Tensor,
    length: int | None = None,
) -> tuple[Observation, list[_Level]]:
    """Draws all latents from the posterior; returns p(x_R|z, x_K) and the latents."""
    draws = u.flatten(0, 1).chunk(model.config.levels, -1)
    levels: list[_Level] = []

    def draw(level: int, p_z: Latents, query: Tensor) -> Tensor:
        known, span = evidence[level].repeat(len(u), 1, 1), model.spans[level]
        q_z = model.rung(level).posterior(p_z, query, known)
        z = q_z.sample(draws[level][:, ::span])
        levels.append(_Level(q_z, p_z, z, part.live_latents(span)))
        return z

    p_x, _ = model.descend(part, draw, length=length)
    return p_x, levels


def reconstruct_part(
    model: AnyPart, x: Tensor, seed: int, lengths: Tensor | None, numbers: Tensor
) -> tuple[Observation, Latents, Latents]:
    """Returns p(x|z) for one draw of z with nothing known but what is given, and q(z) and p(z)."""
    length = x.shape[1]
    x, there = there_and_finite(model, x, None)
    if lengths is not None:
        there = there & for_entries(real_steps(x, lengths), x)
    known = model.always_known(torch.zeros_like(there)) & there
    part = Part(*(model.pad(values) for values in (x, known, there & ~known)))
    u = latent_noise(part.x, seed, numbers, range(1), model.config.latents)
    p_x, levels = _draw_posterior(model, part, model.evidence(part), u, length)
    q_raw, p_raw = [], []
    for q_z, p_z, _, live in levels:
        # A latent that is not live is not paid for: there q = p. One that speaks for several steps
        # is paid for once, at the first of them.
        span = part.x.shape[1] // live.shape[1]
        q = torch.where(live[..., None, None], q_z.logits, p_z.logits)
        for raw, own in ((q_raw, q), (p_raw, p_z.logits)):
            steps = torch.zeros_like(own.repeat_interleave(span, 1))
            steps[:, ::span] = own
            raw.append(steps[:, :length])
    return p_x, Latents(torch.cat(q_raw, -2)), Latents(torch.cat(p_raw, -2))
