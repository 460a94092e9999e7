"""Categorical latents: draws for training and for generation, expectations, and embeddings.

    w = v + g,  g = -log(-log u)             z = one_hot(argmax w), with the gradient of softmax(w)
    KL(q || uniform) = sum_i sum_n q_in (log q_in + log N)                      q = softmax(v)
    KL(q || p)       = sum_i sum_n q_in (log q_in - log p_in)
    E_q log p        = sum_i sum_n q_in log p_in                                p = softmax(v_p)

Generation draws z from one number u by inverse CDF, and adds the rows that z selects:

    c_n = sum_{m <= n} floor(2^30 p_m)       z = #{n: c_n <= floor(u c_N)}
    y   = sum_i weight[i N + z_i]

| symbol | code | shape |
| --- | --- | --- |
| v | `logits` | (..., Z, N): Z independent categoricals of N classes |
| u | `noise` | (..., Z, N) or, for the inverse CDF, (..., Z); strictly inside (0, 1) |
| z | result | (..., Z, N) one-hot or, by inverse CDF, (..., Z) int64 |
| KL, E_q log p | | (...) |
| c | `cumulative` | (..., Z, N) int32 |

`vssm.ops.latents.triton` has kernels for a GPU, and `vssm.ops.latents.numba` for training in
float32 on a CPU. Both keep only their inputs for backward. Otherwise PyTorch computes in float32 or
float64.
"""

import math
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.ops.operators import make_operator
from vssm.ops.scan import choose_backend, has_triton, needs_operator

__all__ = [
    "at_least_float32",
    "cumulative",
    "draws_fused",
    "embed_sum",
    "expected_log_prob",
    "gumbel_one_hot",
    "inverse_cdf",
    "kl_to_uniform",
    "sample_and_kl",
    "select",
]

MAX_CLASSES = 1024
"""The kernels keep all classes of a component in registers."""
MAX_LATENTS = 256
"""The kernel adds the rows of all latents of a step at once."""


def gumbel_one_hot(logits: Tensor, noise: Tensor) -> Tensor:
    """Returns one-hot z by the Gumbel trick, with the gradient of a softmax at temperature 1."""
    perturbed = logits - torch.log(-torch.log(noise.to(logits.dtype)))
    hard = torch.zeros_like(perturbed).scatter_(-1, perturbed.argmax(-1, keepdim=True), 1.0)
    soft = perturbed.softmax(-1)
    return hard + (soft - soft.detach())  # the bracket is exactly 0, so z stays one-hot


def kl_to_uniform(log_probs: Tensor) -> Tensor:
    """Returns KL(q || uniform), (...), of normalised log-probabilities (..., Z, N)."""
    # log N is inside the sum, because near the uniform distribution two sums would cancel.
    return (log_probs.exp() * (log_probs + math.log(log_probs.shape[-1]))).sum((-2, -1))


def at_least_float32(x: Tensor) -> Tensor:
    """Returns x in float32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def sample_and_kl(
    logits: Tensor,
    noise: Tensor,
    dtype: torch.dtype | None = None,
    prior: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Draws one-hot z as `gumbel_one_hot` does, and returns the KL to a prior with it.

    Arguments:
        logits: Finite, (..., Z, N); gradients flow to them.
        noise: Uniform numbers strictly inside (0, 1), (..., Z, N), which get no gradient.
        dtype: The dtype of z; the dtype of the KL if not given.
        prior: The logits of the prior, finite, (..., Z, N); gradients flow to them too. The prior
            is uniform if not given.
        backend: "auto", "reference", "numba" or "triton".

    Returns:
        z (..., Z, N), and the KL (...) in float32, or float64 if the logits are.

    Example:
        >>> z, kl = sample_and_kl(torch.zeros(2, 3, 4), torch.linspace(0.1, 0.9, 4).expand(2, 3, 4))
        >>> z[0, 0], bool(kl.abs().max() < 1e-6)
        (tensor([0., 0., 0., 1.]), True)
    """
    chosen = _choose(backend, logits, noise, prior)
    if chosen == "reference":
        exact = at_least_float32(logits)
        z, log_q = gumbel_one_hot(exact, noise), exact.log_softmax(-1)
        if prior is None:
            kl = kl_to_uniform(log_q)
        else:
            kl = (log_q.exp() * (log_q - at_least_float32(prior).log_softmax(-1))).sum((-2, -1))
        return z if dtype is None else z.to(dtype), kl
    run = _sample if needs_operator(logits, prior) else _sample_forward
    return run(logits, prior, noise, dtype or torch.float32, chosen)


def expected_log_prob(logits: Tensor, q: Tensor, backend: str = "auto") -> Tensor:
    """Returns E[log p(z)] for z ~ q, exactly, (...), in float32 or float64.

    The arguments are logits of p and of q, finite, (..., Z, N). Gradients flow to those of p. If
    those of q require a gradient, PyTorch computes all.

    Example:
        >>> value = expected_log_prob(torch.zeros(3, 4), torch.randn(3, 4))
        >>> bool((value + 3 * math.log(4)).abs() < 1e-5)
        True
    """
    chosen = _choose(backend, logits, q)
    if chosen == "reference" or (torch.is_grad_enabled() and q.requires_grad):
        p, q = (at_least_float32(values).log_softmax(-1) for values in (logits, q))
        return (q.exp() * p).sum((-2, -1))
    return (_expected if needs_operator(logits) else _expected_forward)(logits, q, chosen)


def inverse_cdf(
    logits: Tensor, noise: Tensor, temperature: float = 1.0, backend: str = "auto"
) -> Tensor:
    """Returns the first class whose cumulative probability exceeds the noise, (...) int64.

    The logits (..., N) are finite and divided by the temperature. They may have fewer leading
    dimensions than the noise (...), or dimensions of size 1: they are broadcast without a copy.

    Example:
        >>> inverse_cdf(torch.zeros(4), torch.tensor([0.1, 0.3, 0.6, 0.9]))
        tensor([0, 1, 2, 3])
    """
    if draws_fused(logits, noise, backend):
        return _kernels("triton").inverse_cdf(logits, noise, temperature)
    return select(cumulative(at_least_float32(logits) / temperature), noise)


def draws_fused(logits: Tensor, noise: Tensor, backend: str = "auto") -> bool:
    """Returns whether the kernel draws; if not, a table of `cumulative` can serve several draws."""
    return backend == "triton" or (
        backend == "auto"
        and logits.is_cuda
        and has_triton()
        and not needs_operator(logits)
        and logits.dtype != torch.float64
        and 1 <= logits.shape[-1] <= MAX_CLASSES
        and repeats(logits, noise) is not None
    )


def repeats(logits: Tensor, noise: Tensor) -> tuple[int, int] | None:
    """Returns how often a run of rows of the logits is repeated, and how many rows a run has.

    Returns None if the dimensions that are broadcast are not next to each other.

    Example:
        >>> repeats(torch.zeros(2, 1, 3, 8), torch.zeros(2, 5, 3))
        (5, 3)
        >>> repeats(torch.zeros(8), torch.zeros(2, 5))
        (10, 1)
    """
    shape = noise.shape
    if logits.dim() > noise.dim() + 1:
        return None
    own = (1,) * (noise.dim() + 1 - logits.dim()) + tuple(logits.shape[:-1])
    lacking = [i for i, (given, size) in enumerate(zip(own, shape, strict=True)) if given != size]
    if not lacking:
        return 1, math.prod(shape)
    first, last = lacking[0], lacking[-1]
    if any(size != 1 for size in own[first : last + 1]):
        return None
    return math.prod(shape[first : last + 1]), math.prod(shape[last + 1 :])


def cumulative(logits: Tensor) -> Tensor:
    """Returns the cumulative probabilities times 2^30, (..., N) int32.

    Integer sums are exact in any order, so on every device a class of probability 0 has an empty
    interval. 2^30 is finer than the noise, and the total fits into int32.
    """
    return (logits.softmax(-1) * 2**30).int().cumsum(-1, dtype=torch.int32)


def select(table: Tensor, noise: Tensor) -> Tensor:
    """Returns the classes (...), int64, that the noise selects in a table of `cumulative`."""
    total = table[..., -1]
    target = torch.minimum((noise * total).int(), total - 1)
    own = (1,) * (target.dim() + 1 - table.dim()) + tuple(table.shape[:-1])
    # Dimensions over which a row of the table is broadcast move to the end, for `searchsorted`.
    shared = [i for i, size in enumerate(own) if size == 1]
    kept = [i for i, size in enumerate(own) if size != 1]
    values = target.permute(kept + shared)
    moved = values.shape
    values = values.reshape(*moved[: len(kept)], math.prod(moved[len(kept) :])).contiguous()
    rows = table.reshape(*moved[: len(kept)], table.shape[-1]).contiguous()
    # If logits are not finite, the table may end below the target.
    index = torch.searchsorted(rows, values, right=True).clamp_(max=table.shape[-1] - 1).view(moved)
    back = sorted(range(len(own)), key=(kept + shared).__getitem__)
    return index.permute(back)


def embed_sum(z: Tensor, weight: Tensor, backend: str = "auto") -> Tensor:
    """Adds the rows of the weight (Z N, D) that the classes z (..., Z) select: (..., D).

    The weight has the rows of all classes of the first latent, then of the second, and so on. This
    is the product of Z one-hot vectors and the weight.

    Example:
        >>> embed_sum(torch.tensor([1, 0]), torch.tensor([[1.0], [2.0], [4.0], [8.0]]))
        tensor([6.])
    """
    latents = z.shape[-1]
    if backend == "triton" or (
        backend == "auto"
        and weight.is_cuda
        and has_triton()
        and not needs_operator(weight)
        and weight.dtype != torch.float64
        and 1 <= latents <= MAX_LATENTS
    ):
        return _kernels("triton").embed_sum(z, weight)
    offsets = torch.arange(0, len(weight), len(weight) // latents, device=z.device)
    rows = (z + offsets).reshape(-1, latents)
    return F.embedding_bag(rows, weight, mode="sum").view(*z.shape[:-1], -1)


def _choose(backend: str, logits: Tensor, *others: Tensor | None) -> str:
    """Returns the backend that will run; "auto" takes kernels only if they can take the tensors."""
    chosen = choose_backend(backend, logits.device, logits.dtype)
    shape, device = logits.shape, logits.device
    fits = 0 < shape[-1] <= MAX_CLASSES and all(
        t is None or (t.shape == shape and t.device == device and t.dtype != torch.float64)
        for t in others
    )
    return chosen if fits or backend != "auto" else "reference"


@cache
def _kernels(backend: str) -> ModuleType:
    if backend == "numba":
        from vssm.ops.latents import numba as kernels
    else:
        from vssm.ops.latents import triton as kernels
    return kernels


def _sample_forward(logits, prior, noise, dtype, backend):  # noqa: ANN001, ANN202
    return _kernels(backend).sample_forward(logits, noise, prior, dtype)


def _sample_fake(logits, prior, noise, dtype, backend):  # noqa: ANN001, ANN202
    kl = logits.new_empty(logits.shape[:-2], dtype=torch.float32)
    return logits.new_empty(logits.shape, dtype=dtype), kl


def _sample_backward(dz, dkl, logits, prior, noise, dtype, backend):  # noqa: ANN001, ANN202
    dz = torch.zeros_like(logits, dtype=dtype) if dz is None else dz
    dkl = logits.new_zeros(logits.shape[:-2], dtype=torch.float32) if dkl is None else dkl
    return _kernels(backend).sample_backward(dz, dkl, logits, noise, prior)


def _expected_forward(logits: Tensor, q: Tensor, backend: str) -> Tensor:
    return _kernels(backend).expected_forward(logits, q)


def _expected_backward(grad: Tensor, logits: Tensor, q: Tensor, backend: str) -> tuple[Tensor]:
    return (_kernels(backend).expected_backward(grad, logits, q),)


_sample = make_operator(
    "sample_and_kl",
    "Tensor logits, Tensor? prior, Tensor noise, ScalarType dtype, str backend",
    _sample_forward,
    _sample_backward,
    _sample_fake,
    outputs=2,
    gradients=2,
)
_expected = make_operator(
    "expected_log_prob",
    "Tensor logits, Tensor q, str backend",
    _expected_forward,
    _expected_backward,
    lambda logits, q, backend: logits.new_empty(logits.shape[:-2], dtype=torch.float32),
    gradients=1,
)
