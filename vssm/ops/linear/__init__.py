"""The matrix product of a layer, without gradients: as accurate as float32, as fast as tensor
cores.

    y = norm(x) weight^T + bias + add          norm(x) = x scale (mean_k x_k^2 + eps)^(-1/2), or x

Shapes: x (..., K); weight (N, K); bias (N,); add, y (..., N); scale (K,).

On a GPU, PyTorch multiplies float32 on the units for single numbers, and a product of few rows does
not fill even these. `vssm.ops.linear.triton` has kernels for both cases. They have no gradients.
PyTorch's own product runs with gradients, under autocast or `torch.compile`, and on a CPU.

`linear_parts`, `linear_ready` and `PackedWeight` let `vssm.engine` fuse neighbouring products.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.ops.dispatch import choose_fused, needs_operator, product_dtype

if TYPE_CHECKING:
    from vssm.ops.linear.triton import Parts

__all__ = [
    "Halves",
    "Linear",
    "PackedWeight",
    "Ready",
    "apply_in_halves",
    "has_descriptors",
    "linear",
    "linear_parts",
    "linear_ready",
    "ready_parts",
]

_DIVISOR = 32  # of K, in the kernels; less where there are many rows
_FEW = 64

Halves = tuple[Tensor, Tensor, Tensor]
"""A matrix as high and low parts in float16 and a factor for each row."""


class PackedWeight:
    """A weight that never changes, with the halves that products of many rows read.

    The halves are made when a product first asks for them, and kept: they take as many bytes as the
    weight.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach().contiguous()
        self._halves: Halves | None = None

    def halves(self, split: Callable[[Tensor], Halves]) -> Halves:
        """Returns the halves, made by `split` at the first call."""
        if self._halves is None:
            halves = split(self.weight)
            if self.weight.is_cuda:
                if torch.cuda.is_current_stream_capturing():
                    return halves  # belongs to the memory of that CUDA graph
                torch.cuda.current_stream(self.weight.device).synchronize()  # any stream may read
            self._halves = halves
        return self._halves


class Ready(NamedTuple):
    """A tensor that was made ready for the product that reads it."""

    x: Tensor
    normed: Tensor | Halves
    """norm(x), whole or in halves."""

    @property
    def product(self) -> tuple[Tensor, Halves | None]:
        """The tensor to multiply, and its halves."""
        return (self.normed, None) if isinstance(self.normed, Tensor) else (self.x, self.normed)


class Linear(nn.Linear):
    """Creates an `nn.Linear`, same parameters and same numbers, that is fast without gradients on
    CUDA.

    Example:
        >>> layer, x = Linear(3, 2), torch.ones(4, 3)
        >>> torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        True
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., K) to (..., N)."""
        return linear(x, self.weight, self.bias)


def apply_in_halves(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Applies a linear layer and returns the two halves of its result.

    Training on CUDA multiplies once for each half: the gradients of the halves are then not copied
    into one matrix. A layer of another class (LoRA) or with a hook is called as it is.

    Example:
        >>> u, z = apply_in_halves(Linear(3, 4), torch.ones(5, 3))
        >>> u.shape, z.shape
        (torch.Size([5, 2]), torch.Size([5, 2]))
    """
    hooked = bool(layer._forward_hooks or layer._forward_pre_hooks)
    if torch.is_grad_enabled() and x.is_cuda and type(layer) is Linear and not hooked:
        first, second = layer.weight.unflatten(0, (2, -1)).unbind()
        return F.linear(x, first), F.linear(x, second)
    u, z = layer(x).chunk(2, -1)
    return u, z


def linear(
    x: Tensor | Ready,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    norm: nn.RMSNorm | None = None,
    backend: str = "auto",
) -> Tensor:
    """Multiplies the rows of x by a weight, as `torch.nn.functional.linear` does.

    Arguments:
        x: The input, (..., K), or a result of `linear_ready` with this norm.
        weight: The weight, (N, K).
        bias: Added to every row, (N,).
        add: Added to the result, (..., N).
        norm: Applied to x before the product.
        backend: "auto", "reference" or "triton"; "auto" takes the kernel for float32 on CUDA,
            unless a gradient is needed or PyTorch may be less accurate (`fp32_precision`).

    Returns:
        The product, (..., N).

    Example:
        >>> weight, bias = torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([0.5, 0.0])
        >>> linear(torch.tensor([1.0, 2.0]), weight, bias)
        tensor([11.5000, 17.0000])
    """
    if isinstance(x, Ready):
        from vssm.ops.linear import triton as linear_triton

        given, halves = x.product
        return linear_triton.forward(given, weight, bias, add, halves=halves)
    skip = backend == "auto" and not x.is_cuda  # a step-by-step loop feels each of these questions
    if skip or not choose_fused(backend, x.device, x.dtype, _refusal(x, weight, bias, add, norm)):
        y = F.linear(x if norm is None else norm(x), _tensor(weight), bias)
        return y if add is None else add + y
    from vssm.ops.linear import triton as linear_triton

    return linear_triton.forward(x, weight, bias, add, *_scale_of(norm))


def linear_ready(
    x: Tensor,
    weight: Tensor | PackedWeight,
    add: Tensor,
    norm: nn.RMSNorm,
    columns: int,
    backend: str = "auto",
) -> Tensor | Ready:
    """Computes `linear`, and may prepare the result for the next product in the same kernel.

    Arguments:
        x: As for `linear`.
        weight: As for `linear`.
        add: As for `linear`.
        norm: Applied to the result before the next product.
        columns: The columns of the next product.
        backend: As for `linear`.
    """
    refusal = _refusal(x, weight, None, add, norm)
    if len(_tensor(weight)) % _DIVISOR:
        refusal = f"{_DIVISOR} must divide the columns of the result"
    if not choose_fused(backend, x.device, x.dtype, refusal):
        return linear(x, weight, None, add, backend=backend)
    from vssm.ops.linear import triton as linear_triton

    y, normed = linear_triton.forward_split(x, weight, add, columns, *_scale_of(norm))
    return y if normed is None else Ready(y, normed)


def linear_parts(
    x: Tensor,
    weight: Tensor | PackedWeight,
    norm: nn.RMSNorm | None = None,
    backend: str = "auto",
) -> "Tensor | Parts":
    """Computes `linear`, but may leave parts of the sums over K for the reader to add."""
    skip = backend == "auto" and not x.is_cuda
    if skip or not choose_fused(backend, x.device, x.dtype, _refusal(x, weight, None, None, norm)):
        return F.linear(x if norm is None else norm(x), _tensor(weight))
    from vssm.ops.linear import triton as linear_triton

    return linear_triton.multiply(x, weight, None, None, *_scale_of(norm))


def ready_parts(x: Ready, weight: Tensor | PackedWeight) -> "Tensor | Parts":
    """Computes `linear_parts` of a result of `linear_ready`."""
    from vssm.ops.linear import triton as linear_triton

    given, halves = x.product
    return linear_triton.multiply(given, weight, halves=halves)


def _tensor(weight: Tensor | PackedWeight) -> Tensor:
    return weight.weight if isinstance(weight, PackedWeight) else weight


@cache
def has_descriptors() -> bool:
    """Says whether there is a Triton that knows the descriptors that the kernels read."""
    try:
        return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
    except ModuleNotFoundError:  # no Triton at all
        return False


def _scale_of(norm: nn.RMSNorm | None) -> tuple[Tensor | None, float]:
    return (None, 0.0) if norm is None else (norm.weight, norm.eps or 0.0)


def _refusal(
    x: Tensor,
    packed: Tensor | PackedWeight,
    bias: Tensor | None,
    add: Tensor | None,
    norm: nn.RMSNorm | None,
) -> str | None:
    """Says why the kernels can not take a product, or returns None when they can."""
    weight = _tensor(packed)
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
            f"weight has {K} columns; x needs as many, and {_DIVISOR} must divide them, or x has "
            f"more than {_FEW} rows of fewer than {_DIVISOR}"
        )
    if add is not None and add.shape != (*x.shape[:-1], len(weight)):
        return f"add has shape {tuple(add.shape)}, not that of the result"
    if getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee") not in ("ieee", "none"):
        return "products may be less accurate than float32, which is faster"
    if not has_descriptors():
        return "it needs Triton 3.4 or more"
    if x.is_cuda and (
        torch.version.cuda is None or torch.cuda.get_device_capability(x.device) < (8, 0)
    ):
        return "it needs an NVIDIA GPU of compute capability 8.0 or more"
    return None
