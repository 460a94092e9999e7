"""The matrix product of a layer, for generation: as accurate as float32, at the speed of tensor cores.

    y = norm(x) weight^T + bias + add          norm(x) = x scale (mean_k x_k^2 + eps)^(-1/2), or x

Shapes: x (..., K); weight (N, K); bias (N,); add, y (..., N); scale (K,).

On a GPU a float32 product runs on the units for single numbers, and one of few rows does not even fill these.
`vssm.ops.linear.triton` has kernels for both. They have no gradients: with gradients, under autocast or
`torch.compile`, and everywhere but on a GPU, PyTorch's own product runs.
"""

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.ops.dispatch import choose_fused, needs_operator, product_dtype
from vssm.ops.linear.weights import Halves

if TYPE_CHECKING:
    from vssm.ops.linear.triton import Parts

__all__ = [
    "Linear",
    "Ready",
    "applied",
    "hooked",
    "linear",
    "linear_parts",
    "linear_ready",
    "plain",
    "ready_parts",
]

_DIVISOR = 32  # of K, in the kernels; less where there are many rows
_FEW = 64


class Ready(NamedTuple):
    """A tensor that was made ready for the product that reads it."""

    x: Tensor
    normed: Tensor | Halves
    """norm(x), whole or in the halves of `vssm.ops.linear.triton`."""

    @property
    def product(self) -> tuple[Tensor, Halves | None]:
        """What is to be multiplied, and its halves."""
        return (self.normed, None) if isinstance(self.normed, Tensor) else (self.x, self.normed)


class Linear(nn.Linear):
    """Creates an `nn.Linear`, same parameters and same numbers, that is fast when it generates on a GPU.

    Example:
        >>> layer = Linear(3, 2)
        >>> x, y = torch.ones(4, 3), torch.ones(4, 2)
        >>> torch.equal(layer(x, add=y), F.linear(x, layer.weight, layer.bias) + y)
        True
    """

    def forward(
        self, x: Tensor | Ready, add: Tensor | None = None, norm: nn.Module | None = None
    ) -> Tensor:
        """Maps x (..., K) to (..., N), normed before by `norm`, and adds `add` (..., N)."""
        return linear(x, self.weight, self.bias, add, norm)


def hooked(module: nn.Module) -> bool:
    """Says whether somebody listens to what a module is given or makes."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def plain(layer: nn.Module) -> bool:
    """Says whether its weights say all that a layer does: it was not replaced (LoRA), and nobody listens."""
    return type(layer) is Linear and not hooked(layer)


def applied(
    layer: nn.Module, x: Tensor | Ready, add: Tensor | None = None, norm: nn.Module | None = None
) -> Tensor:
    """Does what a `Linear` does; what is in the place of one is given the input, normed, and no more.

    Example:
        >>> x, y = torch.ones(4, 3), torch.ones(4, 2)
        >>> layer = Linear(3, 2)
        >>> torch.equal(applied(nn.Sequential(layer), x, add=y), layer(x, add=y))
        True
    """
    if plain(layer):
        return layer(x, add, norm)
    x = x.x if isinstance(x, Ready) else x
    y = layer(x if norm is None else norm(x))
    return y if add is None else add + y


def linear(
    x: Tensor | Ready,
    weight: Tensor,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    norm: nn.Module | None = None,
    backend: str = "auto",
) -> Tensor:
    """Multiplies the rows of x by a weight, as `torch.nn.functional.linear` does.

    Arguments:
        x: The input, (..., K), or what `linear_ready` made of it, with this norm.
        weight: The weight, (N, K).
        bias: Added to every row, (N,).
        add: Added to the result, (..., N).
        norm: Applied to x before, (..., K) to (..., K); a kernel may do an RMSNorm on the way.
        backend: "auto", "reference" or "triton"; "auto" takes the kernel for float32 on CUDA where no
            gradient is asked for and PyTorch is not allowed to be less accurate (`fp32_precision`).

    Returns:
        The product, (..., N).

    Example:
        >>> linear(torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([0.5, 0.0]))
        tensor([11.5000, 17.0000])
    """
    if isinstance(x, Ready):
        from vssm.ops.linear import triton as linear_triton

        given, halves = x.product
        return linear_triton.forward(given, weight, bias, add, halves=halves)
    if norm is not None and not _is_plain(norm, x):
        x, norm = cast(Tensor, norm(x)), None
    skip = backend == "auto" and not x.is_cuda  # a step-by-step loop feels each of these questions
    if skip or not choose_fused(backend, x.device, x.dtype, _refusal(x, weight, bias, add, norm)):
        y = F.linear(x if norm is None else norm(x), weight, bias)
        return y if add is None else add + y
    from vssm.ops.linear import triton as linear_triton

    return linear_triton.forward(x, weight, bias, add, *_scale_of(norm))


def linear_ready(
    x: Tensor, weight: Tensor, add: Tensor, norm: nn.Module, columns: int, backend: str = "auto"
) -> Tensor | Ready:
    """Does `linear`, and may make the result ready for the next product on the way.

    Arguments:
        x: As for `linear`.
        weight: As for `linear`.
        add: As for `linear`.
        norm: Applied to the result before the next product.
        columns: Those of the next product.
        backend: As for `linear`.
    """
    if not _is_plain(norm, add) or hasattr(
        norm.weight, "full_tensor"
    ):  # FSDP2: whole inside `forward` only
        refusal = "the norm must be an RMSNorm of the columns of the result, at hand"
    elif len(weight) % _DIVISOR:
        refusal = f"{_DIVISOR} must divide the columns of the result"
    else:
        refusal = _refusal(x, weight, None, add, norm)
    if not choose_fused(backend, x.device, x.dtype, refusal):
        return linear(x, weight, None, add, backend=backend)
    from vssm.ops.linear import triton as linear_triton

    assert isinstance(norm, nn.RMSNorm) and norm.eps is not None
    y, normed = linear_triton.forward_split(x, weight, add, columns, norm.weight, norm.eps)
    return y if normed is None else Ready(y, normed)


def linear_parts(
    x: Tensor, weight: Tensor, norm: nn.Module | None = None, backend: str = "auto"
) -> "Tensor | Parts":
    """Does `linear`, but may leave parts of the sums over K to be added by who reads the product."""
    if norm is not None and not _is_plain(norm, x):
        x, norm = norm(x), None
    skip = backend == "auto" and not x.is_cuda
    if skip or not choose_fused(backend, x.device, x.dtype, _refusal(x, weight, None, None, norm)):
        return F.linear(x if norm is None else norm(x), weight)
    from vssm.ops.linear import triton as linear_triton

    return linear_triton.multiply(x, weight, None, None, *_scale_of(norm))


def ready_parts(x: Ready, weight: Tensor) -> "Tensor | Parts":
    """Does `linear_parts` with what `linear_ready` has made ready."""
    from vssm.ops.linear import triton as linear_triton

    given, halves = x.product
    return linear_triton.multiply(given, weight, halves=halves)


@cache
def _has_descriptors() -> bool:
    try:
        return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
    except ModuleNotFoundError:  # no Triton at all
        return False


def _is_plain(norm: nn.Module, x: Tensor) -> TypeGuard[nn.RMSNorm]:
    """Says whether kernels can norm the rows of x on the way."""
    return (
        isinstance(norm, nn.RMSNorm)
        and norm.elementwise_affine
        and norm.eps is not None
        and norm.weight.shape == x.shape[-1:]
    )


def _scale_of(norm: nn.RMSNorm | None) -> tuple[Tensor | None, float]:
    if norm is None:
        return None, 0.0
    assert norm.eps is not None
    return norm.weight, norm.eps


def _refusal(
    x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None, norm: nn.RMSNorm | None
) -> str | None:
    """Says why the kernels can not take a product, or None when they can."""
    tensors = [
        t for t in (x, weight, bias, add, None if norm is None else norm.weight) if t is not None
    ]
    if needs_operator(*tensors):
        return "it has no gradient and is unknown to torch.compile"
    if any(t.dtype != torch.float32 or t.device != x.device for t in tensors):
        return "all tensors must be float32 on one device"
    if product_dtype(x.device) is not None:
        return "autocast asks for another dtype"
    K = weight.shape[1]
    if x.shape[-1] != K or (K % _DIVISOR and not (K < _DIVISOR and x.numel() > _FEW * K)):
        return (
            f"weight has {K} columns; x needs as many, and {_DIVISOR} must divide them, or x has more than"
            f" {_FEW} rows of fewer than {_DIVISOR}"
        )
    if add is not None and add.shape != (*x.shape[:-1], len(weight)):
        return f"add has shape {tuple(add.shape)}, not that of the result"
    if getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee") not in ("ieee", "none"):
        return "products may be less accurate than float32, which is faster"
    if not _has_descriptors():
        return "it needs Triton 3.4 or more"
    if x.is_cuda and (
        torch.version.cuda is None or torch.cuda.get_device_capability(x.device) < (8, 0)
    ):
        return "it needs an NVIDIA GPU of compute capability 8.0 or more"
    return None
