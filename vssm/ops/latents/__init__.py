"""Draws and expectations of categorical latents, each in one pass over the logits.

    w = v + g,  g = -log(-log u)                      z = one_hot(argmax w), with a gradient of `estimator`:
    "gumbel"     that of softmax(w)                                                  (Jang et al., 2017)
    "reinmax"    2 J((z + q) / 2) - J(q) / 2          J(p) = diag p - p p'           (Liu et al., 2023)
    KL(q || uniform) = sum_i sum_n q_in (log q_in + log N)                           q = softmax(v)
    KL(q || p)       = sum_i sum_n q_in (log q_in - log p_in)
    E_q log p        = sum_i sum_n q_in log p_in                                     p = softmax(v_p)

| symbol | code | shape |
| --- | --- | --- |
| v | `logits` | (..., Z, N): Z independent categoricals of N classes |
| u | `noise` | (..., Z, N), strictly inside (0, 1) |
| z | first result of `sample_and_kl` | (..., Z, N) one-hot |
| KL, E_q log p | | (...) |

On a GPU the kernels of `vssm.ops.latents.triton` read logits of any half or single precision once, on a CPU
those of `vssm.ops.latents.numba` logits in float32. They compute in float32 and keep nothing for backward but
their inputs. Elsewhere PyTorch does it, in float32 or float64.
"""

import importlib
import math
from types import ModuleType

import torch
from torch import Tensor

from vssm.ops.dispatch import needs_operator
from vssm.ops.scan import choose_backend

__all__ = [
    "ESTIMATORS",
    "at_least_float32",
    "expected_log_prob",
    "gumbel_one_hot",
    "kl_to_uniform",
    "sample_and_kl",
]

ESTIMATORS = ("gumbel", "reinmax")
"""How gradients pass through a draw."""
MAX_CLASSES = 1024
"""The kernels hold all classes of a component in registers."""


def gumbel_one_hot(logits: Tensor, noise: Tensor, estimator: str = "gumbel") -> Tensor:
    """Returns one-hot z by the Gumbel trick; gradients pass as the estimator says.

    Arguments:
        logits: Finite, (..., Z, N).
        noise: Uniform numbers strictly inside (0, 1), broadcast against the logits.
        estimator: "gumbel", or "reinmax", whose mean is the true gradient if the loss is quadratic in z.
    """
    _check_estimator(estimator)
    perturbed = logits - torch.log(-torch.log(noise.to(logits.dtype)))
    hard = torch.zeros_like(perturbed).scatter_(-1, perturbed.argmax(-1, keepdim=True), 1.0)
    if estimator == "gumbel":
        soft = perturbed.softmax(-1)
    else:
        q = logits.softmax(-1)
        middle = 0.5 * (hard + q.detach())
        # Its value is the middle, its gradient that of a softmax there.
        soft = 2 * (logits + (middle.log() - logits).detach()).softmax(-1) - 0.5 * q
    return hard + (
        soft - soft.detach()
    )  # the bracket is exactly 0: the value stays exactly one-hot


def kl_to_uniform(log_probs: Tensor) -> Tensor:
    """Returns KL(q || uniform), (...), of normalised log-probabilities (..., Z, N)."""
    # log N inside the sum: near the uniform distribution the difference of the two sums would cancel
    return (log_probs.exp() * (log_probs + math.log(log_probs.shape[-1]))).sum((-2, -1))


def sample_and_kl(
    logits: Tensor,
    noise: Tensor,
    dtype: torch.dtype | None = None,
    prior: Tensor | None = None,
    backend: str = "auto",
    estimator: str = "gumbel",
) -> tuple[Tensor, Tensor]:
    """Draws one-hot z as `gumbel_one_hot` does, and returns the KL to a prior with it.

    Arguments:
        logits: Finite, (..., Z, N); gradients flow to them.
        noise: Uniform numbers strictly inside (0, 1), (..., Z, N), which get no gradient.
        dtype: The dtype of z, in which ones and zeros are exact; that of the KL if not given.
        prior: The logits of the prior, finite, (..., Z, N); gradients flow to them too. Uniform if not given.
        backend: "auto", "reference", "numba" or "triton".
        estimator: "gumbel" or "reinmax", as for `gumbel_one_hot`.

    Returns:
        z (..., Z, N), and the KL (...) in float32, or float64 if the logits are.

    Example:
        >>> z, kl = sample_and_kl(torch.zeros(2, 3, 4), torch.linspace(0.1, 0.9, 4).expand(2, 3, 4))
        >>> z[0, 0], bool(kl.abs().max() < 1e-6)
        (tensor([0., 0., 0., 1.]), True)
    """
    if logits.dim() < 2:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)}; allowed: (..., components, classes)"
        )
    _check_estimator(estimator)
    refusal = _refusal(logits, noise, "noise") or (
        prior is not None and _refusal(logits, prior, "prior")
    )
    chosen = _choose(backend, logits, refusal or None)
    if chosen == "reference":
        exact = at_least_float32(logits)
        z, log_q = gumbel_one_hot(exact, noise, estimator), exact.log_softmax(-1)
        if prior is None:
            kl = kl_to_uniform(log_q)
        else:
            kl = (log_q.exp() * (log_q - at_least_float32(prior).log_softmax(-1))).sum((-2, -1))
        return z if dtype is None else z.to(dtype), kl
    dtype = dtype or torch.float32
    if needs_operator(logits) or (prior is not None and needs_operator(prior)):
        return _sample(logits, noise, prior, dtype, estimator == "reinmax", chosen)
    return _kernels(chosen).sample_forward(logits, noise, prior, dtype)


def expected_log_prob(logits: Tensor, q: Tensor, backend: str = "auto") -> Tensor:
    """Returns E[log p(z)] for z ~ q, exactly.

    Arguments:
        logits: Those of p, finite, (..., Z, N); gradients flow to them.
        q: The logits of q, finite, (..., Z, N). If they need a gradient too, PyTorch does it all.
        backend: "auto", "reference", "numba" or "triton".

    Returns:
        The expectation, (...), in float32, or float64 if the logits are.

    Example:
        >>> (expected_log_prob(torch.zeros(3, 4), torch.randn(3, 4)) / math.log(4)).round(decimals=5)
        tensor(-3.)
    """
    if logits.dim() < 2:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)}; allowed: (..., components, classes)"
        )
    refusal = _refusal(logits, q, "q")
    if torch.is_grad_enabled() and q.requires_grad:
        refusal = "q requires a gradient"
    chosen = _choose(backend, logits, refusal)
    if chosen == "reference":
        p, q = (at_least_float32(values).log_softmax(-1) for values in (logits, q))
        return (q.exp() * p).sum((-2, -1))
    if needs_operator(logits):
        return _expected(logits, q, chosen)
    return _kernels(chosen).expected_forward(logits, q)


def _check_estimator(estimator: str) -> None:
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"estimator={estimator!r} is unknown; allowed: {', '.join(map(repr, ESTIMATORS))}"
        )


def _choose(backend: str, logits: Tensor, refusal: str | None) -> str:
    """Returns the backend that runs; raises `ValueError` when the one asked for can not."""
    chosen = choose_backend(backend, logits.device, logits.dtype)
    if refusal is None or chosen == "reference":
        return chosen
    if backend == "auto":
        return "reference"
    raise ValueError(
        f"backend={backend!r} can not run here: {refusal}; allowed: 'auto', 'reference'"
    )


def _refusal(logits: Tensor, other: Tensor, name: str) -> str | None:
    """Says why the kernels can not take the inputs, None if they can."""
    if other.shape != logits.shape:
        return (
            f"{name} has shape {tuple(other.shape)}, not that of the logits, {tuple(logits.shape)}"
        )
    if other.device != logits.device:
        return f"{name} is on {other.device}, not on {logits.device} as the logits"
    if other.dtype == torch.float64:
        return f"{name} has dtype float64"
    if not 0 < logits.shape[-1] <= MAX_CLASSES:
        many = f"more than {MAX_CLASSES}" if logits.shape[-1] else "not one"
        return f"there are {logits.shape[-1]} classes, {many}"
    return None


def at_least_float32(x: Tensor) -> Tensor:
    """Returns x in float32, or in float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def _kernels(backend: str) -> ModuleType:
    # Imported at first use: numba and triton take a second to load and not everybody needs them.
    return importlib.import_module(f"vssm.ops.latents.{backend}")


@torch.library.custom_op("vssm::sample_and_kl", mutates_args=())
def _sample(
    logits: Tensor,
    noise: Tensor,
    prior: Tensor | None,
    dtype: torch.dtype,
    reinmax: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return _kernels(backend).sample_forward(logits, noise, prior, dtype)


@_sample.register_fake
def _(logits, noise, prior, dtype, reinmax, backend):  # noqa: ANN001, ANN202
    return logits.new_empty(logits.shape, dtype=dtype), logits.new_empty(
        logits.shape[:-2], dtype=torch.float32
    )


@torch.library.custom_op("vssm::sample_and_kl_backward", mutates_args=())
def _sample_backward(
    dz: Tensor,
    dkl: Tensor,
    logits: Tensor,
    noise: Tensor,
    prior: Tensor | None,
    reinmax: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return _kernels(backend).sample_backward(dz, dkl, logits, noise, prior, reinmax)


@_sample_backward.register_fake
def _(dz, dkl, logits, noise, prior, reinmax, backend):  # noqa: ANN001, ANN202
    return logits.new_empty(logits.shape), logits.new_empty(
        0
    ) if prior is None else prior.new_empty(prior.shape)


@torch.library.custom_op("vssm::expected_log_prob", mutates_args=())
def _expected(logits: Tensor, q: Tensor, backend: str) -> Tensor:
    return _kernels(backend).expected_forward(logits, q)


@_expected.register_fake
def _(logits, q, backend):  # noqa: ANN001, ANN202
    return logits.new_empty(logits.shape[:-2], dtype=torch.float32)


@torch.library.custom_op("vssm::expected_log_prob_backward", mutates_args=())
def _expected_backward(grad: Tensor, logits: Tensor, q: Tensor, backend: str) -> Tensor:
    return _kernels(backend).expected_backward(grad, logits, q)


@_expected_backward.register_fake
def _(grad, logits, q, backend):  # noqa: ANN001, ANN202
    return logits.new_empty(logits.shape)


def _save_two(ctx, inputs, output) -> None:  # noqa: ANN001
    ctx.save_for_backward(*inputs[:2])
    ctx.backend = inputs[2]


def _save_draw(ctx, inputs, output) -> None:  # noqa: ANN001
    ctx.save_for_backward(*inputs[:3])
    ctx.reinmax, ctx.backend = inputs[4:]


def _sample_gradient(ctx, dz, dkl):  # noqa: ANN001, ANN202
    logits, noise, prior = ctx.saved_tensors
    dv, dprior = _sample_backward(dz, dkl, logits, noise, prior, ctx.reinmax, ctx.backend)
    return dv, None, None if prior is None else dprior, None, None, None


_sample.register_autograd(_sample_gradient, setup_context=_save_draw)
_expected.register_autograd(
    lambda ctx, grad: (_expected_backward(grad, *ctx.saved_tensors, ctx.backend), None, None),
    setup_context=_save_two,
)
