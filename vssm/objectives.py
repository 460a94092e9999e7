"""What training maximises, as pure functions of a model and a batch.

    Autoregressive     log p(x_{1:T})
    Variational        ELBO  = E_{q_psi(z|x)} log p_phi(x|z) - KL(q_psi(z|x) || uniform)
                     + partial = sum_t sum_z q_psi(z_t|x_{1:t}) log q_omega(z_t|x_{1:min(C,t)})
    VRNN               ELBO, with KL(q(z_t|h_{t-1}, x_t) || p(z_t|h_{t-1})) summed over the steps
    Ladder             ELBO of log p(x), with KL(q(z^l|x, z^{<l}) || p(z^l|z^{<l})) summed over the levels
                     + partial = ELBO of log p(x_{C+1:T} | x_{1:C}), by the same network

Expectations over z_t that can be taken exactly are: the KL, and the partial term. The other is one draw,
through which gradients pass by the straight-through Gumbel trick at temperature 1, or by ReinMax. In the
partial term q_psi is a constant, so that ω learns from the encoder and never the other way round. The cut C
is uniform in {0, ..., T}, one for each sequence; that of a ladder in {1, ..., T - 1}.

All terms are per sequence, (B,), in nats: `loss = -(reconstruction - kl + partial)`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vssm.checks import check_choice, check_number, check_type, shown
from vssm.distributions import Latents, gumbel_uniform
from vssm.models import VRNN, Autoregressive, Ladder, Model, inner_model
from vssm.ops.dispatch import product_dtype
from vssm.ops.latents import ESTIMATORS

__all__ = ["Terms", "checked", "objective", "real_steps"]


class Terms(NamedTuple):
    """The parts of an objective, each (B,), in nats."""

    loss: Tensor
    """What to minimise."""
    reconstruction: Tensor
    """log p(x|z) for one draw of z; log p(x) for an autoregressive model."""
    kl: Tensor
    """KL from the prior to the posterior, exact given the draw; zero without latents."""
    partial: Tensor
    """Expected log-probability of the latents under the partial posterior; for a ladder a bound of the
    log-probability of what follows a cut; zero without either."""


def objective(
    model: Model,
    x: Tensor,
    generator: torch.Generator | None = None,
    shard: tuple[int, int] = (0, 1),
    lengths: Tensor | None = None,
    kl_weight: Tensor | float | None = None,
    estimator: str = "gumbel",
) -> Terms:
    """Scores a batch of sequences for training.

    On a CPU the values of x are checked; elsewhere only its shape and dtype are, since reading values
    would wait for the device.

    Arguments:
        model: Any of the six models.
        x: The sequences, (B, T, D), or (B, T) tokens.
        generator: The source of the random draws; torch's own if not given.
        shard: Which part of a larger batch x is, (index, count) of equal parts. The draws are those of the
            whole batch, so that the parts together give what the whole gives.
        lengths: The steps of each row that are real, (B,), where the rest is padding; the models are causal,
            so that padding changes nothing before it.
        kl_weight: What the KL counts in the loss, a number, or one for each row, (B,); 1 if not given. The
            terms are never weighed.
        estimator: How gradients pass through a draw of latents: "gumbel" as in the paper, or "reinmax".

    Returns:
        The named terms, each (B,), differentiable; `terms.loss.mean()` is what a trainer minimises.

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="vssm", features=3, width=8, layers=1, latents=2, classes=4))
        >>> terms = objective(model, torch.zeros(5, 7, 3))
        >>> terms.loss.shape, bool((terms.kl >= 0).all())
        (torch.Size([5]), True)
    """
    given, model = model, inner_model(model)
    x = checked(model, x, wait=False)
    numbers = isinstance(shard, tuple) and [type(n) for n in shard] == [int, int]
    if not numbers or not 0 <= shard[0] < shard[1]:
        raise ValueError(
            f"shard={shown(shard)} is not allowed; allowed: (index, count) with 0 <= index < count"
        )
    if generator is not None:
        check_type("generator", generator, torch.Generator, "a torch.Generator")
        if generator.device.type != x.device.type:
            raise ValueError(
                f"generator is on {generator.device}; allowed: {x.device}, the device of x"
            )
    check_choice("estimator", estimator, ESTIMATORS)
    _check_weight(kl_weight, len(x))
    index, count = shard
    batch, length = x.shape[:2]
    rows = slice(index * batch, (index + 1) * batch)
    config = model.config
    real = None if lengths is None else real_steps(x, lengths)

    def total(steps: Tensor) -> Tensor:
        return (steps if real is None else torch.where(real, steps, 0)).sum(1)

    if isinstance(model, Autoregressive):
        p_x, _ = given(x)  # which may be compiled
        log_likelihood = total(p_x.log_prob(x))
        return _terms(
            log_likelihood, torch.zeros_like(log_likelihood), torch.zeros_like(log_likelihood)
        )

    def noise(steps: int) -> Tensor:
        shape = (batch * count, steps, config.latents, config.classes)
        return gumbel_uniform(shape, x.device, generator)[rows]

    if isinstance(model, VRNN):
        path = model(x, draw=lambda t, q_z: q_z.rsample(noise(1), estimator))
        reconstruction = total(path.p_x.log_prob(x))
        kl = total(path.q_z.kl(path.p_z))
        return _weighed(_terms(reconstruction, kl, torch.zeros_like(reconstruction)), kl, kl_weight)

    if isinstance(model, Ladder):
        share = torch.rand(
            batch * count, dtype=torch.float32, device=x.device, generator=generator
        )[rows]
        cut = 1 + (share * ((length if lengths is None else lengths) - 1)).long()

        sizes = (
            config.levels,
            2,
            batch * count,
            length,
            config.latents // config.levels,
            config.classes,
        )
        noises = gumbel_uniform(sizes, x.device, generator)[:, :, rows].flatten(1, 2)
        return _ladder_terms(model, x, cut, lengths, noises, kl_weight, estimator)

    q_z, _ = model.posterior(x)
    # The decoder multiplies z first.
    z, kl = q_z.rsample_and_kl(noise(length), product_dtype(x.device), estimator=estimator)
    p_x, _ = model.likelihood(z)
    if lengths is None:
        cut = torch.randint(0, length + 1, (batch * count,), device=x.device, generator=generator)[
            rows
        ]
    else:
        share = torch.rand(
            batch * count, dtype=torch.float32, device=x.device, generator=generator
        )[rows]
        cut = (share * (lengths + 1)).long()
    q_partial, _ = model.partial_posterior(x, cut=cut)
    kl, partial = total(kl), total(q_partial.expected_log_prob(q_z.detach()))
    return _weighed(_terms(total(p_x.log_prob(x)), kl, partial), kl, kl_weight)


def _ladder_terms(
    model: Ladder,
    x: Tensor,
    cut: Tensor,
    lengths: Tensor | None,
    noises: Tensor,
    kl_weight: Tensor | float | None,
    estimator: str,
) -> Terms:
    """Scores every sequence twice: as a whole, and what follows its cut; noises (L, 2 B, T, Z / L, N)."""
    task = model.task(x, torch.cat([torch.zeros_like(cut), cut]), lengths, copies=2)
    kl, dtype = (
        torch.zeros(len(task.new), dtype=torch.float32, device=x.device),
        product_dtype(x.device),
    )

    def draw(level: int, p_z: Latents, query: Tensor) -> Tensor:
        nonlocal kl
        q_z = model.rung(level).posterior(p_z, query, task.evidence[level])
        live = task.live[level]
        z, own = q_z.rsample_and_kl(noises[level][:, : live.shape[1]], dtype, p_z, estimator)
        kl = kl + torch.where(live, own, 0).sum(1)
        return z

    p_x, _ = model.descend(task.e, draw, cut=task.cut)
    log_p_x = p_x.log_prob(torch.cat([x, x]))
    reconstruction, rest = torch.where(task.new, log_p_x, 0).sum(1).chunk(2)
    divergence, rest_divergence = kl.chunk(2)
    terms = _terms(reconstruction, divergence, rest - rest_divergence)
    return _weighed(terms, divergence + rest_divergence, kl_weight)


def checked(model: Model, x: Tensor, wait: bool = True) -> Tensor:
    """Returns sequences as a model scores them, tokens as int64; what does not fit is named.

    Without `wait`, values on a GPU are not looked at.
    """
    model.head.validate(x, values=False)
    device = next(model.parameters()).device
    if x.device != device:
        raise ValueError(f"x is on {x.device}; allowed: {device}, the device of the model")
    if wait or device.type == "cpu":
        model.head.validate(x)
    return x.long() if model.head.tokens else x


def real_steps(x: Tensor, lengths: Tensor) -> Tensor:
    """Returns which steps of padded sequences are real, (B, T).

    Arguments:
        x: Padded sequences, (B, T, ...).
        lengths: (B,), each from 1 to T; the values are checked on a CPU only.

    Example:
        >>> real_steps(torch.zeros(2, 3, 1), torch.tensor([3, 1]))
        tensor([[ True,  True,  True],
                [ True, False, False]])
    """
    batch, length = x.shape[:2]
    if not isinstance(lengths, Tensor) or lengths.shape != (batch,) or lengths.dtype != torch.int64:
        raise ValueError(
            f"lengths is {shown(lengths)}; allowed: a tensor of {batch} int64, one for each row"
        )
    if (
        lengths.device.type == "cpu"
        and batch
        and not (lengths.min() >= 1 and lengths.max() <= length)
    ):
        raise ValueError(f"lengths is {lengths.tolist()}; allowed: 1 to {length}, the steps of x")
    return torch.arange(length, device=x.device) < lengths[:, None]


def _check_weight(weight: object, batch: int) -> None:
    if isinstance(weight, Tensor):  # its values would have to be waited for
        if weight.shape not in ((), (1,), (batch,)) or not weight.is_floating_point():
            raise ValueError(
                f"kl_weight has shape {tuple(weight.shape)} and dtype {weight.dtype}; "
                f"allowed: a number >= 0, or {batch} floats, one for each row"
            )
    elif weight is not None:
        check_number("kl_weight", weight, 0)


def _weighed(terms: Terms, kl: Tensor, weight: Tensor | float | None) -> Terms:
    """Makes the KL count `weight` times in the loss, in which it counts once."""
    return terms if weight is None else terms._replace(loss=terms.loss + (weight - 1) * kl)


def _terms(reconstruction: Tensor, kl: Tensor, partial: Tensor) -> Terms:
    return Terms(-(reconstruction - kl + partial), reconstruction, kl, partial)
