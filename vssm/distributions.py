"""Distributions of observations and latents: parameters in, probabilities and samples out.

An observation head turns the outputs w_t of a network into p(x_t | w_t), independent over features
unless x_t is a token:

    gaussian          x ~ N(w, sigma^2)
    gaussian-learned  x ~ N(w_1, s^2),  log s = bounded(w_2)
    student-t         (x - w_1) / s ~ t with 4 degrees of freedom,  log s = bounded(w_2)
    bernoulli         P(x = 1) = sigmoid(w)
    categorical       P(x = v) = softmax(w)_v
    logistic-mixture  P(x = k / (bins - 1))
                          = sum_m pi_m (F((b_{k+1} - mu_m) / s_m) - F((b_k - mu_m) / s_m)),
                      F = sigmoid, b_k = (k - 1/2) / (bins - 1), b_0 = -inf, b_bins = inf

Latents are q(z_t) = prod_i softmax(logits_{t,i})_{z_{t,i}}: Z independent categoricals of N
classes. Samples are functions of uniform noise u in (0, 1), never of a global generator (see
`vssm.noise`).

| symbol | code | shape |
| --- | --- | --- |
| x | `x` | (B, T, D) float, or (B, T) integers for the categorical head |
| w | `w` | (B, T, size) |
| u | `noise` | (B, T, noise_size) for a head; (..., Z) or (..., Z, N) for latents |
| z | `z` | (..., Z) integers |
| mu, s, log pi | `loc`, `scale`, `logits` | (B, T, D), or (B, T, D, mixtures) in a mixture |
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.ops.draws import inverse_cdf
from vssm.ops.latents import gumbel_one_hot, kl_to_uniform, sample_and_kl

LARGEST = 1e15  # largest value of x: sums of its square stay far from infinity
HEADS_IN_UNIT = ("bernoulli", "logistic-mixture")  # their x lies in [0, 1]
HEADS_WITH_LOCATION = ("gaussian", "gaussian-learned", "student-t")
"""Heads of real numbers whose first D outputs are the location."""
HeadName = Literal[
    "gaussian", "gaussian-learned", "student-t", "bernoulli", "categorical", "logistic-mixture"
]
HEADS: tuple[HeadName, ...] = get_args(HeadName)
_MIN_SCALE, _MAX_SCALE = 1e-3, 20.0
_ROUNDING = 1e-5  # the mean of a head may leave [0, 1] by this, and a model reads what it made


class Observation(ABC):
    """The distribution p(x_t | w_t) of every step of a batch of sequences."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """Expectation (B, T, D); for tokens the mode, (B, T)."""

    def log_prob(self, x: Tensor) -> Tensor:
        """Returns log p(x_t | w_t) in nats, summed over features, (B, T)."""
        return self.entry_log_prob(x).sum(-1)

    @abstractmethod
    def entry_log_prob(self, x: Tensor) -> Tensor:
        """Returns the log-probability of every entry of x, in nats, of the shape of x."""

    @abstractmethod
    def sample(self, noise: Tensor, temperature: float = 1.0) -> Tensor:
        """Returns the x that uniform noise (B, T, noise_size) selects.

        The temperature divides logits and multiplies scales.
        """


@dataclass(frozen=True)
class Head:
    """An observation head: what x looks like, and how network outputs become its distribution."""

    name: str
    features: int
    """Features D of x, or the size of the vocabulary."""
    size: int
    """Network outputs per step."""
    noise_size: int
    """Uniform numbers per step that a sample needs."""
    distribution: Callable[[Tensor], Observation]
    tokens: bool = False
    """Whether x is (B, T) integers rather than (B, T, D) floats."""

    def __call__(self, w: Tensor) -> Observation:
        """Returns p(x | w) from outputs of a network w (B, T, size), in float32 or float64."""
        assert w.shape[-1] == self.size, f"head {self.name} needs {self.size} outputs"
        return self.distribution(_at_least_float32(w))

    def validate(
        self, x: Tensor, name: str = "x", values: bool = True, steps: int = 1, given: int = 0
    ) -> None:
        """Raises a ValueError unless x has the shape, dtype and range of this head.

        Arguments:
            x: Sequences, (B, T, D) finite floats, in [0, 1] for `HEADS_IN_UNIT`, or (B, T) integers
                in [0, D) for tokens.
            name: What the message calls x.
            values: Whether to check the range too, which waits for the device of x.
            steps: The fewest steps that are allowed.
            given: The number of given features, which follow those of the head and may be any
                finite numbers.
        """
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} has type {type(x).__name__}; it must be a torch tensor")
        last = () if self.tokens else (self.features + given,)
        if x.dim() != 2 + len(last) or tuple(x.shape[2:]) != last:
            allowed = f"({', '.join(('batch', 'length', *map(str, last)))})"
            allowed += f", of which the last {given} features are given" if given else ""
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {allowed}")
        if not len(x) or x.shape[1] < steps:
            part, shape = "step" if len(x) else "sequence", tuple(x.shape)
            raise ValueError(
                f"{name} has shape {shape}, no {part}s; it must have one {part} or more"
            )
        floating = x.dtype.is_floating_point
        integer = not (floating or x.dtype.is_complex or x.dtype == torch.bool)
        if not (integer if self.tokens else floating):
            dtype = str(x.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name} has dtype {dtype}; it must be {'an integer' if self.tokens else 'a float'}"
            )
        if x.layout != torch.strided or (floating and x.dtype.itemsize < 2):
            form = f"layout {x.layout}, dtype {x.dtype}".replace("torch.", "")
            raise ValueError(f"{name} has {form}; it must be dense, of 16 bits or more a number")
        if not values:
            return
        made = x if self.tokens else x[..., : self.features]
        finite = f"finite numbers up to {LARGEST:g}"
        if self.tokens:
            made = made.long()  # not all integers can be compared
            bad, allowed = (made < 0) | (made >= self.features), f"0 to {self.features - 1}"
        elif self.name in HEADS_IN_UNIT:
            bad = ~((made.float() - 0.5).abs() <= 0.5 + _ROUNDING)  # true for NaN
            allowed = f"0 to 1 with head {self.name!r}"
        else:
            bad, allowed = ~(made.float().abs() <= LARGEST), finite
        _refuse_bad(name, made, bad, allowed)
        if given:
            others = x[..., self.features :]
            _refuse_bad(
                f"one of the given features of {name}", others, ~(others.abs() <= LARGEST), finite
            )


def _refuse_bad(name: str, x: Tensor, bad: Tensor, allowed: str) -> None:
    """Raises a ValueError that names the first bad entry of x, if there is one."""
    if bad.any():
        row, step, *_ = place = bad.nonzero()[0].tolist()
        value = x[tuple(place)].item()
        given = "contains NaN or infinite values"
        if math.isfinite(value):
            given = f"is {value}" if isinstance(value, int) else f"is {value:g}"
        raise ValueError(f"{name} {given} at row {row}, step {step}; use {allowed}")


def make_head(
    name: str, features: int, sigma: float = 0.1, mixtures: int = 5, bins: int = 256
) -> Head:
    """Creates an observation head.

    Arguments:
        name: One of `HEADS`.
        features: Features D of x, or the size of the vocabulary for `categorical`.
        sigma: Standard deviation of `gaussian`.
        mixtures: Components per feature of `logistic-mixture`.
        bins: Levels of `logistic-mixture`; x lies on the grid k / (bins - 1).

    Example:
        >>> head = make_head("gaussian", features=28)
        >>> p_x = head(torch.zeros(2, 5, head.size))
        >>> p_x.log_prob(torch.zeros(2, 5, 28)).shape
        torch.Size([2, 5])
    """
    if name not in HEADS:  # "auto" is for runs, where the data settle it
        raise ValueError(f"head is {name!r}; choose from {', '.join(HEADS)}")
    D, M = features, mixtures
    size, noise_size, distribution = {
        "gaussian": (D, D, partial(Gaussian, scale=sigma)),
        "gaussian-learned": (2 * D, D, partial(Gaussian, scale=None)),
        "student-t": (2 * D, D, StudentT),
        "bernoulli": (D, D, Bernoulli),
        "categorical": (D, 1, Categorical),
        "logistic-mixture": (D * M * 3, 2 * D, partial(LogisticMixture, mixtures=M, bins=bins)),
    }[name]
    return Head(name, D, size, noise_size, distribution, tokens=name == "categorical")


class Gaussian(Observation):
    """Normal distribution; with `scale=None`, w holds (loc, raw scale) and the scale is learned.

    A learned scale lies in (1e-3, 20) and is 0.14, the geometric middle, where its output is 0.
    """

    def __init__(self, w: Tensor, scale: float | None) -> None:
        self._w, self._fixed = w, scale
        self.loc: Tensor = w.chunk(2, dim=-1)[0] if scale is None else w

    @cached_property
    def scale(self) -> Tensor:
        """The standard deviations, (B, T, D), or () of one for all."""
        if self._fixed is not None:
            return self._w.new_full((), self._fixed)
        return _bounded_scale(self._w.chunk(2, dim=-1)[1])

    @property
    def mean(self) -> Tensor:
        return self.loc

    def entry_log_prob(self, x: Tensor) -> Tensor:
        error = (x - self.loc) / self.scale
        return -(error.square() / 2 + self.scale.log() + math.log(2 * math.pi) / 2)

    def sample(self, noise: Tensor, temperature: float = 1.0) -> Tensor:
        normal = math.sqrt(2) * torch.erfinv(2 * noise.to(self.loc.dtype) - 1)
        return self.loc + self.scale * _positive(temperature) * normal


class StudentT(Observation):
    """Student's t with 4 degrees of freedom: heavy tails, for data with outliers.

    w holds (loc, raw scale), as for a `Gaussian` whose scale is learned. With 4 degrees of freedom
    the quantile function has a closed form.

    References:
        Quantile Mechanics (Shaw, 2006): sampling Student's t for even degrees of freedom.
    """

    loc: Tensor

    def __init__(self, w: Tensor) -> None:
        self.loc, raw = w.chunk(2, dim=-1)
        self.scale: Tensor = _bounded_scale(raw)

    @property
    def mean(self) -> Tensor:
        return self.loc

    def entry_log_prob(self, x: Tensor) -> Tensor:
        error = (x - self.loc) / self.scale
        return math.log(3 / 8) - self.scale.log() - 2.5 * torch.log1p(error.square() / 4)

    def sample(self, noise: Tensor, temperature: float = 1.0) -> Tensor:
        u = noise.to(self.loc.dtype)
        a = (4 * u * (1 - u)).clamp(min=1e-12).sqrt()
        far = 2 * ((torch.acos(a.clamp(max=1)) / 3).cos() / a - 1).clamp(min=0).sqrt()
        return self.loc + _positive(temperature) * self.scale * torch.sign(u - 0.5) * far


class Bernoulli(Observation):
    """Independent coin flips, of x that is 0 or 1.

    For x between 0 and 1 `log_prob` is minus the cross-entropy. Its exponential does not integrate
    to 1: it is a pseudo-likelihood, and `vssm evaluate` calls it so.
    """

    def __init__(self, w: Tensor) -> None:
        self.logits = w

    @property
    def mean(self) -> Tensor:
        return self.logits.sigmoid()

    def entry_log_prob(self, x: Tensor) -> Tensor:
        x = x.to(self.logits.dtype)
        return x * F.logsigmoid(self.logits) + (1 - x) * F.logsigmoid(-self.logits)

    def sample(self, noise: Tensor, temperature: float = 1.0) -> Tensor:
        tails = torch.sigmoid(-self.logits / _positive(temperature))
        return (noise > tails).to(self.logits.dtype)


class Categorical(Observation):
    """One token of a vocabulary per step."""

    def __init__(self, w: Tensor) -> None:
        self.logits = w

    @property
    def mean(self) -> Tensor:
        return self.logits.argmax(-1)

    def log_prob(self, x: Tensor) -> Tensor:
        return self.logits.log_softmax(-1).gather(-1, x.long().unsqueeze(-1)).squeeze(-1)

    def entry_log_prob(self, x: Tensor) -> Tensor:
        return self.log_prob(x)  # a token is one entry

    def sample(self, noise: Tensor, temperature: float = 1.0) -> Tensor:
        return inverse_cdf(self.logits, noise.squeeze(-1), _positive(temperature))


class LogisticMixture(Observation):
    """Mixture of logistics per feature, on the grid k / (bins - 1) with open-ended edge bins.

    Where w is 0, the components are spread evenly over [0, 1]. Scales lie between a tenth of a bin
    and 20.

    References:
        PixelCNN++ (Salimans et al., 2017) https://arxiv.org/abs/1701.05517
    """

    def __init__(self, w: Tensor, mixtures: int, bins: int) -> None:
        self.width: float = 1 / (bins - 1)
        parts = w.unflatten(-1, (-1, 3, mixtures))
        raw: tuple[Tensor, ...] = parts.unbind(-2)  # (B, T, D, M)
        self.logits: Tensor = raw[0]
        centres = torch.arange(mixtures, dtype=w.dtype, device=w.device) + 0.5
        self.loc: Tensor = raw[1] + centres / mixtures
        self.scale: Tensor = _bounded_scale(raw[2], self.width / 10)

    @property
    def mean(self) -> Tensor:
        """Mean of the mixture of logistics clipped to [0, 1], in closed form.

        The mean over the bins is the midpoint rule for the same integral: they differ by at most
        half a bin.
        """
        # E[clip(X)] = int_0^1 F((mu - t) / s) dt = s (softplus(mu / s) - softplus((mu - 1) / s));
        # the linear part of each softplus is taken out as a clamp, else they would cancel at small
        # scales.
        low, high = (torch.exp(-(self.loc - edge).abs() / self.scale).log1p() for edge in (0, 1))
        means = self.loc.clamp(0, 1) + self.scale * (low - high)
        return (self.logits.softmax(-1) * means).sum(-1)

    def entry_log_prob(self, x: Tensor) -> Tensor:
        x = x.to(self.loc.dtype).unsqueeze(-1)
        upper, lower = x - self.loc + self.width / 2, x - self.loc - self.width / 2
        # F(a) - F(b) = F(a) F(-b) (1 - exp(b - a)), exact in the tails where the difference itself
        # would be 0
        below, above = F.logsigmoid(upper / self.scale), F.logsigmoid(-lower / self.scale)
        inside = below + above + torch.log(-torch.expm1(-self.width / self.scale))
        mass = torch.where(x > 1 - self.width / 2, above, inside)
        mass = torch.where(x < self.width / 2, below, mass)
        return torch.logsumexp(self.logits.log_softmax(-1) + mass, dim=-1)

    def sample(self, noise: Tensor, temperature: float = 1.0) -> Tensor:
        choice, u = noise.to(self.loc.dtype).chunk(2, dim=-1)
        component = inverse_cdf(self.logits, choice, _positive(temperature)).unsqueeze(-1)
        loc = torch.take_along_dim(self.loc, component, -1).squeeze(-1)
        scale = torch.take_along_dim(self.scale, component, -1).squeeze(-1)
        levels = round(1 / self.width)
        x = loc + scale * temperature * torch.logit(u)
        return (x * levels).round().clamp(0, levels) / levels


class Latents:
    """Distribution of z: Z independent categoricals of N classes, in float32 or float64.

    Arguments:
        logits: Finite, unnormalised log-probabilities, (..., Z, N).

    Example:
        >>> q_z = Latents(torch.zeros(2, 5, 4, 8))
        >>> q_z.sample(torch.full((2, 5, 4), 0.3))[0, 0]
        tensor([2, 2, 2, 2])
        >>> q_z.kl_to_uniform().shape
        torch.Size([2, 5])
    """

    def __init__(self, logits: Tensor) -> None:
        self.raw = logits
        """The logits in the precision they came in; kernels read half precision as it is."""

    @cached_property
    def logits(self) -> Tensor:
        """Unnormalised log-probabilities, (..., Z, N)."""
        return _at_least_float32(self.raw)

    @cached_property
    def log_probs(self) -> Tensor:
        """Normalised log-probabilities, (..., Z, N)."""
        return self.logits.log_softmax(-1)

    @property
    def probs(self) -> Tensor:
        """Probabilities, (..., Z, N)."""
        return self.log_probs.exp()

    @property
    def mode(self) -> Tensor:
        """Most likely z, (..., Z)."""
        return self.logits.argmax(-1)

    def detach(self) -> "Latents":
        """Returns the same distribution without a gradient."""
        return Latents(self.raw.detach())

    def kl_to_uniform(self) -> Tensor:
        """Returns KL(self || uniform) = Z log N - entropy, (...)."""
        return kl_to_uniform(self.log_probs)

    def kl(self, other: "Latents") -> Tensor:
        """Returns KL(self || other), (...)."""
        return (self.probs * (self.log_probs - other.log_probs)).sum((-2, -1))

    def expected_log_prob(self, q: "Latents") -> Tensor:
        """Returns E[log self(z)] for z ~ q, exactly, (...); gradients flow to both."""
        return (q.probs * self.log_probs).sum((-2, -1))

    def log_prob(self, z: Tensor) -> Tensor:
        """Returns log-probabilities of z (..., Z) integers, (...); batches are broadcast."""
        shape = torch.broadcast_shapes(z.shape, self.logits.shape[:-1])
        log_probs = self.log_probs.expand(*shape, -1)
        return log_probs.gather(-1, z.long().expand(shape).unsqueeze(-1)).squeeze(-1).sum(-1)

    def sample(self, noise: Tensor, temperature: float = 1.0) -> Tensor:
        """Returns the z that the noise selects, by inverse CDF.

        Arguments:
            noise: Uniform numbers in (0, 1), (..., Z). Logits of batch 1, or with fewer leading
                dimensions, serve a whole batch of noise without being copied.
            temperature: Divides the logits.

        Returns:
            Class indices, (..., Z) int64.
        """
        return inverse_cdf(self.raw, noise, _positive(temperature))

    def rsample(self, noise: Tensor) -> Tensor:
        """Returns one-hot z (..., Z, N) by the straight-through Gumbel trick.

        Arguments:
            noise: Uniform numbers strictly inside (0, 1), (..., Z, N), for example from
                `gumbel_uniform`.
        """
        return gumbel_one_hot(self.logits, noise)

    def rsample_and_kl(
        self,
        noise: Tensor,
        dtype: torch.dtype | None = None,
        prior: "Latents | None" = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns `rsample(noise)` and `kl(prior)`, on a GPU in one pass over the logits.

        Arguments:
            noise: As for `rsample`.
            dtype: The dtype of the one-hot vectors; that of the KL if not given.
            prior: Uniform if not given.
        """
        return sample_and_kl(self.raw, noise, dtype, None if prior is None else prior.raw)


def gumbel_uniform(
    shape: tuple[int, ...],
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns uniform float32 numbers inside (0, 1), so that log(u) and log(-log(u)) are finite.

    Arguments:
        shape: Shape of the result.
        device: Device of the result.
        generator: Source of randomness on that device; the default generator when None.
    """
    # torch.rand can return 0, a source of NaN in F.gumbel_softmax (pytorch #22442, #41663,
    # #101620).
    u = torch.rand(shape, dtype=torch.float32, device=device, generator=generator)
    return u.clamp_(min=2.0**-25)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _bounded_scale(raw: Tensor, least: float = _MIN_SCALE) -> Tensor:
    """Maps outputs to scales in (least, 20); the log scale has slope 1 at 0 and no flat tails.

    Example:
        >>> _bounded_scale(torch.tensor([0.0, 1e9]), 0.05)
        tensor([ 1., 20.])
    """
    middle, reach = math.log(least * _MAX_SCALE) / 2, math.log(_MAX_SCALE / least) / 2
    # softsign, because gradients of tanh and sigmoid are exactly 0 in float32 once they saturate.
    return torch.exp(middle + reach * F.softsign(raw / reach))


def _positive(temperature: float) -> float:
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; it must be a positive number")
    return temperature
