"""Draws and expectations of categorical latents, each in one pass over the logits.

    w = v + g,  g = -log(-log u)             z = one_hot(argmax w), whose gradient is
    "gumbel"     the gradient of softmax(w)                                     (Jang et al., 2017)
    "reinmax"    2 J((z + q) / 2) - J(q) / 2,     J(p) = diag p - p p'          (Liu et al., 2023)
    KL(q || uniform) = sum_i sum_n q_in (log q_in + log N)                      q = softmax(v)
    KL(q || p)       = sum_i sum_n q_in (log q_in - log p_in)
    E_q log p        = sum_i sum_n q_in log p_in                                p = softmax(v_p)

| symbol | code | shape |
| --- | --- | --- |
| v | `logits` | (..., Z, N): Z independent categoricals of N classes |
| u | `noise` | (..., Z, N), strictly inside (0, 1) |
| z | first result of `sample_and_kl` | (..., Z, N) one-hot |
| KL, E_q log p | | (...) |

`vssm.ops.latents.triton` has kernels for half and single precision on a GPU, and
`vssm.ops.latents.numba` for float32 on a CPU. Both compute in float32 and keep only their inputs
for backward. Otherwise PyTorch computes in float32 or float64.
"""

import math

import torch
from torch import Tensor

from vssm.ops.dispatch import choose_backend, kernels, needs_operator

ESTIMATORS = ("gumbel", "reinmax")
"""How gradients pass through a draw."""
MAX_CLASSES = 1024
"""The kernels keep all classes of a component in registers."""


def gumbel_one_hot(logits: Tensor, noise: Tensor, estimator: str = "gumbel") -> Tensor:
    """Returns one-hot z by the Gumbel trick; gradients pass as the estimator says.

    Arguments:
        logits: Finite, (..., Z, N).
        noise: Uniform numbers strictly inside (0, 1), broadcast against the logits.
        estimator: "gumbel", or "reinmax", which is unbiased for losses that are quadratic in z.
    """
    _check_estimator(estimator)
    perturbed = logits - torch.log(-torch.log(noise.to(logits.dtype)))
    hard = torch.zeros_like(perturbed).scatter_(-1, perturbed.argmax(-1, keepdim=True), 1.0)
    if estimator == "gumbel":
        soft = perturbed.softmax(-1)
    else:
        q = logits.softmax(-1)
        middle = 0.5 * (hard + q.detach())
        # The value of this softmax is the middle, and its gradient is taken there.
        soft = 2 * (logits + (middle.log() - logits).detach()).softmax(-1) - 0.5 * q
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
    estimator: str = "gumbel",
) -> tuple[Tensor, Tensor]:
    """Draws one-hot z as `gumbel_one_hot` does, and returns the KL to a prior with it.

    Arguments:
        logits: Finite, (..., Z, N); gradients flow to them.
        noise: Uniform numbers strictly inside (0, 1), (..., Z, N), which get no gradient.
        dtype: The dtype of z; the dtype of the KL if not given.
        prior: The logits of the prior, finite, (..., Z, N); gradients flow to them too. The prior
            is uniform if not given.
        backend: "auto", "reference", "numba" or "triton".
        estimator: "gumbel" or "reinmax", as for `gumbel_one_hot`.

    Returns:
        z (..., Z, N), and the KL (...) in float32, or float64 if the logits are.

    Example:
        >>> z, kl = sample_and_kl(torch.zeros(2, 3, 4), torch.linspace(0.1, 0.9, 4).expand(2, 3, 4))
        >>> z[0, 0], bool(kl.abs().max() < 1e-6)
        (tensor([0., 0., 0., 1.]), True)
    """
    _check_estimator(estimator)
    refusal = _refusal(logits, noise, "noise")
    if prior is not None:
        refusal = refusal or _refusal(logits, prior, "prior")
    chosen = choose_backend(backend, logits.device, logits.dtype, refusal)
    if chosen == "reference":
        exact = at_least_float32(logits)
        z, log_q = gumbel_one_hot(exact, noise, estimator), exact.log_softmax(-1)
        if prior is None:
            kl = kl_to_uniform(log_q)
        else:
            kl = (log_q.exp() * (log_q - at_least_float32(prior).log_softmax(-1))).sum((-2, -1))
        return z if dtype is None else z.to(dtype), kl
    dtype = dtype or torch.float32
    if needs_operator(logits, prior):
        return _sample(logits, noise, prior, dtype, estimator == "reinmax", chosen)
    return kernels("latents", chosen).sample_forward(logits, noise, prior, dtype)


def expected_log_prob(logits: Tensor, q: Tensor, backend: str = "auto") -> Tensor:
    """Returns E[log p(z)] for z ~ q, exactly.

    Arguments:
        logits: The logits of p, finite, (..., Z, N); gradients flow to them.
        q: The logits of q, finite, (..., Z, N). If they require a gradient, PyTorch computes all.
        backend: "auto", "reference", "numba" or "triton".

    Returns:
        The expectation, (...), in float32, or float64 if the logits are.

    Example:
        >>> value = expected_log_prob(torch.zeros(3, 4), torch.randn(3, 4))
        >>> bool((value + 3 * math.log(4)).abs() < 1e-5)
        True
    """
    refusal = _refusal(logits, q, "q")
    if torch.is_grad_enabled() and q.requires_grad:
        refusal = "q requires a gradient"
    chosen = choose_backend(backend, logits.device, logits.dtype, refusal)
    if chosen == "reference":
        p, q = (at_least_float32(values).log_softmax(-1) for values in (logits, q))
        return (q.exp() * p).sum((-2, -1))
    if needs_operator(logits):
        return _expected(logits, q, chosen)
    return kernels("latents", chosen).expected_forward(logits, q)


def _check_estimator(estimator: str) -> None:
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"estimator={estimator!r} is unknown; allowed: {', '.join(map(repr, ESTIMATORS))}"
        )


def _refusal(logits: Tensor, other: Tensor, name: str) -> str | None:
    """Returns why the kernels can not take the inputs, or None if they can."""
    if logits.dim() < 2:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)}; allowed: (..., components, classes)"
        )
    if other.shape != logits.shape:
        return (
            f"{name} has shape {tuple(other.shape)}, not that of the logits, {tuple(logits.shape)}"
        )
    if other.device != logits.device:
        return f"{name} is on {other.device}, not on {logits.device} as the logits"
    if other.dtype == torch.float64:
        return f"{name} has dtype float64"
    if not 0 < logits.shape[-1] <= MAX_CLASSES:
        return f"there are {logits.shape[-1]} classes, not 1 to {MAX_CLASSES}"
    return None


def at_least_float32(x: Tensor) -> Tensor:
    """Returns x in float32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


@torch.library.custom_op(
    "vssm::sample_and_kl",
    mutates_args=(),
    schema="(Tensor logits, Tensor noise, Tensor? prior, ScalarType dtype, bool reinmax,"
    " str backend) -> (Tensor, Tensor)",
)
def _sample(logits, noise, prior, dtype, reinmax, backend):  # noqa: ANN001, ANN202
    return kernels("latents", backend).sample_forward(logits, noise, prior, dtype)


@_sample.register_fake
def _(logits, noise, prior, dtype, reinmax, backend):  # noqa: ANN001, ANN202
    kl = logits.new_empty(logits.shape[:-2], dtype=torch.float32)
    return logits.new_empty(logits.shape, dtype=dtype), kl


@torch.library.custom_op(
    "vssm::sample_and_kl_backward",
    mutates_args=(),
    schema="(Tensor dz, Tensor dkl, Tensor logits, Tensor noise, Tensor? prior, bool reinmax,"
    " str backend) -> (Tensor, Tensor)",
)
def _sample_backward(dz, dkl, logits, noise, prior, reinmax, backend):  # noqa: ANN001, ANN202
    return kernels("latents", backend).sample_backward(dz, dkl, logits, noise, prior, reinmax)


@_sample_backward.register_fake
def _(dz, dkl, logits, noise, prior, reinmax, backend):  # noqa: ANN001, ANN202
    dprior = logits.new_empty(0) if prior is None else prior.new_empty(prior.shape)
    return logits.new_empty(logits.shape), dprior


@torch.library.custom_op("vssm::expected_log_prob", mutates_args=())
def _expected(logits: Tensor, q: Tensor, backend: str) -> Tensor:
    return kernels("latents", backend).expected_forward(logits, q)


@_expected.register_fake
def _(logits, q, backend):  # noqa: ANN001, ANN202
    return logits.new_empty(logits.shape[:-2], dtype=torch.float32)


@torch.library.custom_op("vssm::expected_log_prob_backward", mutates_args=())
def _expected_backward(grad: Tensor, logits: Tensor, q: Tensor, backend: str) -> Tensor:
    return kernels("latents", backend).expected_backward(grad, logits, q)


@_expected_backward.register_fake
def _(grad, logits, q, backend):  # noqa: ANN001, ANN202
    return logits.new_empty(logits.shape)


def _save_sample(ctx, inputs, output) -> None:  # noqa: ANN001
    ctx.save_for_backward(*inputs[:3])
    ctx.reinmax, ctx.backend = inputs[4:]


def _sample_gradient(ctx, dz, dkl):  # noqa: ANN001, ANN202
    logits, noise, prior = ctx.saved_tensors
    dv, dprior = _sample_backward(dz, dkl, logits, noise, prior, ctx.reinmax, ctx.backend)
    return dv, None, None if prior is None else dprior, None, None, None


def _save_expected(ctx, inputs, output) -> None:  # noqa: ANN001
    ctx.save_for_backward(*inputs[:2])
    ctx.backend = inputs[2]


def _expected_gradient(ctx, grad):  # noqa: ANN001, ANN202
    return _expected_backward(grad, *ctx.saved_tensors, ctx.backend), None, None


_sample.register_autograd(_sample_gradient, setup_context=_save_sample)
_expected.register_autograd(_expected_gradient, setup_context=_save_expected)
