"""How likely data is under a model.

    autoregressive   log p(x_{C+1:T} | x_{1:C}), exact
    vssm, tvae       log 1/K sum_k p(x|z^k) p(z^k) / q_psi(z^k|x)                        C = 0
                     log 1/K sum_k p(x_{C+1:T}|z^k) q_omega(z^k|x_{1:C}) / q_psi(z^k|x)    C > 0
    vrnn             log 1/K sum_k w_k(1:T) - log 1/K sum_k w_k(1:C),   w_k = p(x|z) p(z) / q(z|x)

with z^k drawn from the posterior (importance sampling; Burda et al., 2016). In expectation the
estimates for C = 0 are lower bounds that tighten with K. The sum over k is streamed: memory does
not grow with K.

Legend: x (B, T, D) or tokens (B, T); K `num_samples`; C `prompt_length`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vssm import noise
from vssm.config import check_choice
from vssm.models import VRNN, Autoregressive, Model, Variational

__all__ = ["log_likelihood"]

_ROWS_PER_PASS = 512  # draws of several k share a pass while the batch is small


@torch.no_grad()
def log_likelihood(
    model: Model,
    x: Tensor,
    num_samples: int = 100,
    prompt_length: int = 0,
    prior: str = "uniform",
    seed: int = 0,
) -> Tensor:
    """Estimates log p(x_{C+1:T} | x_{1:C}) for every sequence.

    Arguments:
        model: Any of the six models.
        x: The sequences, (B, T, D), or (B, T) tokens.
        num_samples: K, the number of latent draws; an autoregressive model needs none.
        prompt_length: C, the number of steps that are given.
        prior: For vssm and tvae at C = 0: "uniform", or "partial" for q_omega(z | ∅), the prior that
            unconditional generation draws from. With C > 0 it is always q_omega(z | x_{1:C}).
        seed: Names the draws: equal seeds give equal estimates, however the batch is split.

    Returns:
        Nats, (B,).

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="ssm", features=3, width=8, layers=1))
        >>> log_likelihood(model, torch.zeros(2, 6, 3), prompt_length=3).shape
        torch.Size([2])
    """
    model.head.validate(x)
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples} is not allowed; allowed: a whole number >= 1")
    if not 0 <= prompt_length <= x.shape[1]:
        raise ValueError(f"prompt_length={prompt_length} is not allowed; allowed: 0 to {x.shape[1]}")
    check_choice("prior", prior, ("uniform", "partial"))
    if isinstance(model, Autoregressive):
        p_x, _ = model(x)
        return p_x.log_prob(x)[:, prompt_length:].sum(1)

    totals: list[Tensor] = []
    weigh = (
        _vrnn_weights(model, x, prompt_length)
        if isinstance(model, VRNN)
        else (_variational_weights(model, x, prompt_length, prior))
    )
    step = max(1, _ROWS_PER_PASS // max(1, len(x)))
    for first in range(0, num_samples, step):
        u = _draws(model, x, seed, range(first, min(first + step, num_samples)))
        parts = [torch.logsumexp(weights, 0) for weights in weigh(u)]
        totals = [torch.logaddexp(a, b) for a, b in zip(totals, parts, strict=True)] if totals else parts
    estimates = [total - math.log(num_samples) for total in totals]
    return estimates[0] - estimates[1] if len(estimates) > 1 else estimates[0]


def _draws(model: Variational | VRNN, x: Tensor, seed: int, draws: range) -> Tensor:
    """Returns the uniform numbers of some draws, (K, B, T, Z)."""
    rows = torch.arange(len(x), device=x.device)
    seeds = torch.full_like(rows, seed)
    shape = (0, x.shape[1], model.config.latents)
    return torch.stack([noise.uniform(seeds, rows, *shape, stream=noise.LATENT, draw=k) for k in draws])


def _variational_weights(
    model: Variational, x: Tensor, cut: int, prior: str
) -> Callable[[Tensor], list[Tensor]]:
    """Returns a function from uniform numbers (K, B, T, Z) to log weights (K, B)."""
    q_z, _ = model.posterior(x)
    p_z = None
    if cut or prior == "partial":
        p_z, _ = model.partial_posterior(x[:, :cut] if cut else None, empty=x.shape[1] - cut)
    log_uniform = -x.shape[1] * model.config.latents * math.log(model.config.classes)

    def weigh(u: Tensor) -> list[Tensor]:
        z = q_z.sample(u)
        p_x, _ = model.likelihood(z.flatten(0, 1))
        repeated = x.repeat(len(u), *[1] * (x.ndim - 1))
        log_p_x = p_x.log_prob(repeated).unflatten(0, u.shape[:2])[..., cut:].sum(-1)
        log_p_z = log_uniform if p_z is None else p_z.log_prob(z).sum(-1)
        return [log_p_x + log_p_z - q_z.log_prob(z).sum(-1)]

    return weigh


def _vrnn_weights(model: VRNN, x: Tensor, cut: int) -> Callable[[Tensor], list[Tensor]]:
    """Returns a function from uniform numbers (K, B, T, Z) to log weights of x_{1:T} and x_{1:C}."""

    def weigh(u: Tensor) -> list[Tensor]:
        repeated = x.repeat(len(u), *[1] * (x.ndim - 1))
        flat = u.flatten(0, 1)
        path = model(repeated, draw=lambda t, q_z: q_z.sample(flat[:, t : t + 1]))
        steps = path.p_x.log_prob(repeated) + path.p_z.log_prob(path.z) - path.q_z.log_prob(path.z)
        steps = steps.unflatten(0, u.shape[:2])
        return [steps.sum(-1), steps[..., :cut].sum(-1)] if cut else [steps.sum(-1)]

    return weigh
