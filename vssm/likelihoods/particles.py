"""Likelihoods by a particle filter: importance sampling that continues from its better draws.

    z_t^k ~ q_psi(z_t | x_{1:t}),    w_k <- w_k p(x_t | z_{1:t}^k) p(z_t^k) / q_psi(z_t^k | x_{1:t})
    where few draws have most of the weight, (sum_k w_k)^2 < K/2 sum_k w_k^2:
        log p <- log p + log 1/K sum_k w_k,  z_{1:t}^k drawn again in proportion to w_k,  w_k <- 1

Importance sampling multiplies the weights of all steps, until one draw of K has nearly all the
weight. Here many draws count at every step, so the estimate is much closer to log p(x). It is still
a lower bound in expectation, because the mean of its exponential is p(x). For a vrnn with a prompt
it is not a bound, because it is a difference of two estimates. The filter takes the steps one after
the other, and holds K sequences in memory at once.

References:
    Novel approach to nonlinear/non-Gaussian Bayesian state estimation (Gordon et al., 1993)
    Filtering variational objectives (Maddison et al., 2017) https://arxiv.org/abs/1705.09279

Legend: x (B, T, D) or tokens (B, T); K `num_samples`; C `cut`; particle k of sequence b is row k B
+ b.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vssm import noise
from vssm.distributions import Latents
from vssm.models import VRNN, Variational
from vssm.nn import State

Step = Callable[[int, Tensor, State | None], tuple[Tensor, State]]
"""From t, uniform numbers (K, B, 1, Z) and a state to log weights (K, B) and the next state."""


def latent_noise(x: Tensor, seed: int, rows: Tensor, draws: range, latents: int) -> Tensor:
    """Returns the uniform numbers of some draws of the latents, (K, B, T, Z), for rows (B,)."""
    seeds, size = torch.full_like(rows, seed), (0, x.shape[1], latents)
    uniform = [noise.uniform(seeds, rows, *size, stream=noise.LATENT, draw=k) for k in draws]
    return torch.stack(uniform)


def partial_prior(model: Variational, x: Tensor, cut: int, prior: str) -> Latents | None:
    """Returns q_omega(z | x_{1:C}); None for the uniform prior, which goes with C = 0 alone."""
    if not cut and prior == "uniform":
        return None
    return model.partial_posterior(x[:, :cut] if cut else None, empty=x.shape[1] - cut)[0]


def repeated(x: Tensor, times: int) -> Tensor:
    """Returns a batch repeated as a whole, (times B, ...)."""
    return x.repeat(times, *[1] * (x.ndim - 1))


def filtered(
    model: Variational | VRNN,
    x: Tensor,
    num_samples: int,
    cases: list[tuple[int, str]],
    seed: int,
    rows: int,
    mask: Tensor,
    numbers: Tensor,
) -> list[Tensor]:
    """Returns one estimate, (B,), for each case (prompt length, prior); see `log_likelihood`.

    Arguments:
        model: A vssm or tvae without levels, or a vrnn.
        x: The sequences.
        num_samples: K.
        cases: Prompt lengths and priors.
        seed: The seed of the draws; before the first resampling they are those of importance
            sampling.
        rows: Particles in a pass, of as many sequences as fit, at least one.
        mask: 1 for steps that count, 0 for padding, (B, T).
        numbers: The row of the noise of each sequence, (B,).
    """
    parts = []
    size = max(1, rows // num_samples)
    for first in range(0, len(x), size):
        some, real = x[first : first + size], mask[first : first + size]
        own = numbers[first : first + size]
        u = latent_noise(some, seed, own, range(num_samples), model.config.latents)
        seeds = torch.full_like(own, seed)
        again = noise.uniform(seeds, own, 0, x.shape[1], 1, stream=noise.PARTICLE)[..., 0]
        if isinstance(model, VRNN):
            nats = _run(_vrnn_step(model, some, real), u, again)
            start = torch.zeros_like(nats[:, :1])
            nats = torch.cat([start, nats], 1)  # log p(x_{1:t}) at t
            parts.append([nats[:, -1] - nats[:, cut] for cut, _ in cases])
        else:
            q_z, _ = model.posterior(some)
            steps = [_variational_step(model, some, q_z, *case, real) for case in cases]
            parts.append([_run(step, u, again)[:, -1] for step in steps])
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    return [torch.cat(part).to(dtype) for part in zip(*parts, strict=True)]


def _run(step: Step, u: Tensor, again: Tensor) -> Tensor:
    """Returns estimates of log p(x_{1:t}) for every t, (B, T), resampling with `again` (B, T)."""
    num, batch, length = u.shape[:3]
    unmoved = torch.arange(num, device=u.device)[:, None].expand(num, batch)
    log_w = torch.zeros(num, batch, dtype=torch.float32, device=u.device)  # of a mean weight of 1
    log_p = torch.zeros(batch, dtype=torch.float64, device=u.device)  # a sum over all steps
    state, nats = None, []
    for t in range(length):
        more, state = step(t, u[:, :, t : t + 1], state)
        mean = torch.logsumexp(log_w + more, 0) - math.log(num)
        log_p, log_w = log_p + mean, log_w + more - mean
        nats.append(log_p)
        w = log_w.softmax(0)
        few = w.square().sum(0) * num > 2
        if t + 1 < length and few.any():
            log_w = torch.where(few, 0.0, log_w)
            chosen = torch.where(few, _choose(w, again[:, t]), unmoved)
            state = state.select((chosen * batch + torch.arange(batch, device=u.device)).flatten())
    return torch.stack(nats, 1)


def _choose(w: Tensor, u: Tensor) -> Tensor:
    """Returns K particles in proportion to their weights w (K, B), evenly spaced from u (B,) on.

    Example:
        >>> _choose(torch.tensor([[0.5], [0.0], [0.25], [0.25]]), torch.tensor([0.5])).flatten()
        tensor([0, 0, 2, 3])
    """
    num = len(w)
    ends = w.double().cumsum(0).T.contiguous()
    points = (torch.arange(num, device=w.device) + u.double()[:, None]) / num * ends[:, -1:]
    return torch.searchsorted(ends, points, right=True).clamp_(max=num - 1).T


def _variational_step(
    model: Variational, x: Tensor, q_z: Latents, cut: int, prior: str, mask: Tensor
) -> Step:
    p_z = partial_prior(model, x, cut, prior)
    uniform = -model.config.latents * math.log(model.config.classes)

    def step(t: int, u: Tensor, state: State | None) -> tuple[Tensor, State]:
        at = slice(t, t + 1)
        q_t = Latents(q_z.raw[:, at])
        z = q_t.sample(u)
        p_x, state = model.likelihood(z.flatten(0, 1), state)
        log_p_z = uniform if p_z is None else Latents(p_z.raw[:, at]).log_prob(z)
        log_w = log_p_z - q_t.log_prob(z)
        if t >= cut:
            log_w = log_w + p_x.log_prob(repeated(x[:, at], len(u))).unflatten(0, u.shape[:2])
        return log_w[..., 0] * mask[:, t], state

    return step


def _vrnn_step(model: VRNN, x: Tensor, mask: Tensor) -> Step:
    def step(t: int, u: Tensor, state: State | None) -> tuple[Tensor, State]:
        x_t, flat = repeated(x[:, t : t + 1], len(u)), u.flatten(0, 1)
        h = model.memory(len(flat), state)
        q_z = model.posterior(h, x_t)
        z = q_z.sample(flat)
        log_w = model.likelihood(h, z).log_prob(x_t) + model.prior(h).log_prob(z) - q_z.log_prob(z)
        return log_w.view(u.shape[:2]) * mask[:, t], model.advance(x_t, z, state)

    return step
