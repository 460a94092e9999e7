"""The objectives that training maximises, as pure functions of a model and a batch.

    Autoregressive     log p(x_{1:T})
    Variational        ELBO  = E_{q_psi(z|x)} log p_phi(x|z) - KL(q_psi(z|x) || uniform)
                     + partial = sum_t sum_z q_psi(z_t|x_{1:t}) log q_omega(z_t|x_{1:min(C,t)})
    VRNN               ELBO, with KL(q(z_t|h_{t-1}, x_t) || p(z_t|h_{t-1})) summed over the steps
    Ladder             ELBO, with KL(q(z^l|x, z^{<l}) || p(z^l|z^{<l})) summed over the levels
                     + partial = ELBO of log p(x_{C+1:T} | x_{1:C}), by the same network
    AnyPart            S ELBO of log p(x_R | x_K), for random K and R: the unknown entries are
                     divided at random into S parts, of which one is R and those before it are
                     in K; so in expectation a bound on log p of all unknown entries in S passes

The KL and the partial term are exact expectations over z_t. The reconstruction uses one draw of z;
gradients pass through it by the straight-through Gumbel trick at temperature 1. The partial term
treats q_psi as a constant, so that omega learns from the encoder and never the reverse. The cut C
is uniform in {0, ..., T}, one for each sequence; for a ladder in {1, ..., T - 1}.

All terms are per sequence, (B,), in nats: `loss = -(reconstruction - kl + partial)`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vssm.checks import check_model, check_number, check_sequence, shown
from vssm.distributions import Latents, gumbel_uniform
from vssm.models import VRNN, AnyPart, Autoregressive, Ladder, Model, Variational
from vssm.objectives.parts import for_entries, part_terms, there_and_finite
from vssm.ops.operators import product_dtype

__all__ = ["Terms", "objective", "real_steps"]


class Terms(NamedTuple):
    """The parts of an objective, each (B,), in nats.

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="vssm", features=2, width=8, layers=1))
        >>> terms = objective(model, torch.rand(4, 5, 2))
        >>> loss = terms.kl - terms.reconstruction - terms.partial
        >>> torch.allclose(terms.loss, loss)
        True
    """

    loss: Tensor
    """What to minimise."""
    reconstruction: Tensor
    """log p(x|z) for one draw of z; log p(x) for an autoregressive model."""
    kl: Tensor
    """KL(posterior || prior), exact given the draw; zero without latents."""
    partial: Tensor
    """Expected log-probability of the latents under the partial posterior; for a ladder a bound on
    the log-probability of the steps after a cut; zero without either."""


class _Draws(NamedTuple):
    """Draws random numbers for a whole batch, and returns the rows of one part of it."""

    batch: int
    shard: tuple[int, int]
    device: torch.device
    generator: torch.Generator | None

    def gumbel(self, steps: int, latents: int, classes: int, *before: int) -> Tensor:
        """Returns uniform numbers in (0, 1), (..., B, T, Z, N)."""
        shape = (*before, self.batch * self.shard[1], steps, latents, classes)
        return self._own(gumbel_uniform(shape, self.device, self.generator), len(before))

    def share(self, *sizes: int) -> Tensor:
        """Returns uniform numbers in [0, 1), (B, ...): one for each row if no size is given."""
        options = {"dtype": torch.float32, "device": self.device, "generator": self.generator}
        return self._own(torch.rand(self.batch * self.shard[1], *sizes, **options))

    def cut(self, length: int) -> Tensor:
        """Returns one number of {0, ..., T} for each row."""
        options = {"device": self.device, "generator": self.generator}
        return self._own(torch.randint(length + 1, (self.batch * self.shard[1],), **options))

    def _own(self, drawn: Tensor, dim: int = 0) -> Tensor:
        return drawn.narrow(dim, self.shard[0] * self.batch, self.batch)


def objective(
    model: Model,
    x: Tensor,
    generator: torch.Generator | None = None,
    shard: tuple[int, int] = (0, 1),
    lengths: Tensor | None = None,
    kl_weight: Tensor | float | None = None,
    known: Tensor | None = None,
) -> Terms:
    """Scores a batch of sequences for training.

    On a CPU the values of x are checked. On a GPU only its shape and dtype are checked, because
    reading values would wait for the device.

    Arguments:
        model: Any of the six models.
        x: The sequences, (B, T, D), or (B, T) tokens.
        generator: The source of the random draws; torch's own if not given.
        shard: Which part of a larger batch x is, (index, count) of equal parts. Each part gets its
            rows of the draws of the whole batch, so all parts together give the terms of the whole.
        lengths: The number of real steps of each row, (B,), if the rest is padding. The models are
            causal, so padding changes nothing before it.
        kl_weight: Weight of the KL in the loss: a number, or one for each row, (B,); 1 if not
            given. It does not change the other terms.
        known: For models with known="any": which entries of x are there, bool, of the shape of x or
            (B, T). The others are missing: neither read nor scored. By default NaN is missing.

    Returns:
        The named terms, each (B,), differentiable; a trainer minimises `terms.loss.mean()`.

    Example:
        >>> from vssm import ModelConfig, build
        >>> config = ModelConfig(kind="vssm", features=3, width=8, layers=1, latents=2, classes=4)
        >>> model = build(config)
        >>> terms = objective(model, torch.zeros(5, 7, 3))
        >>> terms.loss.shape, bool((terms.kl >= 0).all())
        (torch.Size([5]), True)
    """
    inner = check_model(model)
    if isinstance(inner, AnyPart):
        x, known = there_and_finite(inner, x, known, wait=False)
    elif known is not None:
        raise ValueError("known is for models with known='any'; use None for this one")
    else:
        x = check_sequence(inner, x, wait=False)
    _check_options(x, generator, shard, kl_weight)
    real = None if lengths is None else real_steps(x, lengths)
    draws = _Draws(len(x), shard, x.device, generator)
    if isinstance(inner, Autoregressive):
        p_x, _ = model(x)  # not `inner`: the model may be compiled
        log_likelihood = _total(p_x.log_prob(x), real)
        kl, partial = torch.zeros_like(log_likelihood), torch.zeros_like(log_likelihood)
        return _terms(log_likelihood, kl, partial)
    if isinstance(inner, AnyPart):
        assert known is not None
        there = known if real is None else known & for_entries(real, x)
        reconstruction, kl = part_terms(inner, x, there, draws.gumbel, draws.share)
        terms = _terms(reconstruction, kl, torch.zeros_like(kl))
    elif isinstance(inner, Ladder):
        terms, kl = _ladder_terms(inner, x, lengths, draws)
    else:
        vrnn = isinstance(inner, VRNN)
        score, own = (_vrnn_terms, model) if vrnn else (_variational_terms, inner)
        terms = score(own, x, lengths, real, draws)  # type: ignore[arg-type]
        kl = terms.kl
    if kl_weight is None:
        return terms
    return terms._replace(loss=terms.loss + (kl_weight - 1) * kl)


def _variational_terms(
    model: Variational,
    x: Tensor,
    lengths: Tensor | None,
    real: Tensor | None,
    draws: _Draws,
) -> Terms:
    length, config = x.shape[1], model.config
    q_z, _ = model.posterior(x)
    noise = draws.gumbel(length, config.latents, config.classes)
    # z has the dtype of products, since the decoder multiplies it first.
    z, kl = q_z.rsample_and_kl(noise, product_dtype(x.device))
    p_x, _ = model.likelihood(z)
    cut = draws.cut(length) if lengths is None else (draws.share() * (lengths + 1)).long()
    q_partial, _ = model.partial_posterior(x, cut=cut)
    partial = q_partial.expected_log_prob(q_z.detach())
    return _terms(_total(p_x.log_prob(x), real), _total(kl, real), _total(partial, real))


def _vrnn_terms(
    model: VRNN,
    x: Tensor,
    lengths: Tensor | None,
    real: Tensor | None,
    draws: _Draws,
) -> Terms:
    sizes = 1, model.config.latents, model.config.classes
    path = model(x, draw=lambda t, q_z: q_z.rsample(draws.gumbel(*sizes)))
    reconstruction = _total(path.p_x.log_prob(x), real)
    kl = _total(path.q_z.kl(path.p_z), real)
    return _terms(reconstruction, kl, torch.zeros_like(reconstruction))


def _ladder_terms(
    model: Ladder, x: Tensor, lengths: Tensor | None, draws: _Draws
) -> tuple[Terms, Tensor]:
    """Scores every sequence twice, as a whole and after its cut; returns the KL of both too."""
    length, config = x.shape[1], model.config
    cut = 1 + (draws.share() * ((length if lengths is None else lengths) - 1)).long()
    sizes = length, config.latents // config.levels, config.classes
    noises = draws.gumbel(*sizes, config.levels, 2).flatten(1, 2)  # (L, 2 B, T, Z / L, N)
    task = model.task(x, torch.cat([torch.zeros_like(cut), cut]), lengths, copies=2)
    kl = torch.zeros(len(task.new), dtype=torch.float32, device=x.device)
    dtype = product_dtype(x.device)

    def draw(level: int, p_z: Latents, query: Tensor) -> Tensor:
        nonlocal kl
        q_z = model.rung(level).posterior(p_z, query, task.evidence[level])
        live = task.live[level]
        z, own = q_z.rsample_and_kl(noises[level][:, : live.shape[1]], dtype, p_z)
        kl = kl + torch.where(live, own, 0).sum(1)
        return z

    p_x, _ = model.descend(task.e, draw, cut=task.cut)
    log_p_x = p_x.log_prob(torch.cat([x, x]))
    reconstruction, rest = torch.where(task.new, log_p_x, 0).sum(1).chunk(2)
    divergence, rest_divergence = kl.chunk(2)
    terms = _terms(reconstruction, divergence, rest - rest_divergence)
    return terms, divergence + rest_divergence


def _terms(reconstruction: Tensor, kl: Tensor, partial: Tensor) -> Terms:
    return Terms(-(reconstruction - kl + partial), reconstruction, kl, partial)


def _total(steps: Tensor, real: Tensor | None) -> Tensor:
    return (steps if real is None else torch.where(real, steps, 0)).sum(1)


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
            f"lengths is {shown(lengths)}; it must be an int64 tensor of {batch} numbers, one for "
            "each row"
        )
    if lengths.device.type == "cpu" and bool(((lengths < 1) | (lengths > length)).any()):
        raise ValueError(f"lengths is {lengths.tolist()}; it must be 1 to {length}, the steps of x")
    return torch.arange(length, device=x.device) < lengths[:, None]


def _check_options(
    x: Tensor,
    generator: torch.Generator | None,
    shard: tuple[int, int],
    kl_weight: Tensor | float | None,
) -> None:
    numbers = isinstance(shard, tuple) and [type(n) for n in shard] == [int, int]
    if not numbers or not 0 <= shard[0] < shard[1]:
        raise ValueError(
            f"shard is {shown(shard)}; it must be (index, count) with 0 <= index < count"
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator is {shown(generator)}; it must be a torch.Generator")
    if generator is not None and generator.device.type != x.device.type:
        raise ValueError(f"generator is on {generator.device}; it must be on {x.device}, as x is")
    if isinstance(kl_weight, Tensor):  # reading its values would wait for the device
        if kl_weight.shape not in ((), (1,), (len(x),)) or not kl_weight.is_floating_point():
            raise ValueError(
                f"kl_weight has shape {tuple(kl_weight.shape)} and dtype {kl_weight.dtype}; "
                f"it must be a number >= 0, or {len(x)} floats, one for each row"
            )
    elif kl_weight is not None:
        check_number("kl_weight", kl_weight, 0)
