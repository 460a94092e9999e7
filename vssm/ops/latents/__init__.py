"""Categorical latents in training: draws that pass gradients, and divergences.

    w = v + g,  g = -log(-log u)             z = one_hot(argmax w), with the gradient of softmax(w)
    KL(q || uniform) = sum_i sum_n q_in (log q_in + log N)                      q = softmax(v)
    KL(q || p)       = sum_i sum_n q_in (log q_in - log p_in)

| symbol | code | shape |
| --- | --- | --- |
| v | `logits` | (..., Z, N): Z independent categoricals of N classes |
| u | `noise` | (..., Z, N), strictly inside (0, 1) |
| z | result | (..., Z, N) one-hot |
| KL | | (...) |

`vssm.ops.latents.triton` has kernels for a GPU, and `vssm.ops.latents.numba` for float32 on a CPU.
Both keep only their inputs for backward. Otherwise PyTorch computes in float32 or float64. Draws of
generation are in `vssm.ops.draws`.
"""

import math

import torch
from torch import Tensor

from vssm.ops.operators import make_operator
from vssm.ops.scan import choose_backend, kernels_of, needs_operator

__all__ = ["MAX_CLASSES", "gumbel_one_hot", "kl_to_uniform", "sample_and_kl"]

MAX_CLASSES = 1024
"""The kernels hold all classes of a component at once."""


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
    if chosen != "reference":
        run = _sample if needs_operator(logits, prior) else _forward
        return run(logits, prior, noise, dtype or torch.float32, chosen)
    exact = torch.promote_types(logits.dtype, torch.float32)
    z, log_q = gumbel_one_hot(logits.to(exact), noise), logits.log_softmax(-1, exact)
    if prior is None:
        kl = kl_to_uniform(log_q)
    else:
        kl = (log_q.exp() * (log_q - prior.log_softmax(-1, exact))).sum((-2, -1))
    return z if dtype is None else z.to(dtype), kl


def _choose(backend: str, logits: Tensor, *others: Tensor | None) -> str:
    """Returns the backend that will run; "auto" takes kernels only if they can take the tensors."""
    chosen = choose_backend(backend, logits.device, logits.dtype)
    shape, device = logits.shape, logits.device
    fits = 0 < shape[-1] <= MAX_CLASSES and all(
        t is None or (t.shape == shape and t.device == device and t.dtype != torch.float64)
        for t in others
    )
    return chosen if fits or backend != "auto" else "reference"


def _forward(logits, prior, noise, dtype, backend):  # noqa: ANN001, ANN202
    return kernels_of("latents", backend).sample_forward(logits, noise, prior, dtype)


def _fake(logits, prior, noise, dtype, backend):  # noqa: ANN001, ANN202
    kl = logits.new_empty(logits.shape[:-2], dtype=torch.float32)
    return logits.new_empty(logits.shape, dtype=dtype), kl


def _backward(dz, dkl, logits, prior, noise, dtype, backend):  # noqa: ANN001, ANN202
    dz = torch.zeros_like(logits, dtype=dtype) if dz is None else dz
    dkl = logits.new_zeros(logits.shape[:-2], dtype=torch.float32) if dkl is None else dkl
    return kernels_of("latents", backend).sample_backward(dz, dkl, logits, noise, prior)


_sample = make_operator(
    "sample_and_kl",
    "Tensor logits, Tensor? prior, Tensor noise, ScalarType dtype, str backend",
    _forward,
    _backward,
    _fake,
    outputs=2,
    gradients=2,
)
