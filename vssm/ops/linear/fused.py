"""Products of frozen weights, fused with their neighbours: for generation, without gradients.

    y = norm(x) weight^T + bias + add          norm(x) = x scale (mean_k x_k^2 + eps)^(-1/2), or x

Shapes: x (..., K); weight (N, K); bias (N,); add, y (..., N); scale (K,).

The kernels are those of `vssm.ops.linear.triton`; they multiply float32 on tensor cores. PyTorch's
own product runs with gradients, under autocast or `torch.compile`, and on a CPU. `backend` is
"auto", "reference" or, for tests, "triton".
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.ops.conv import causal_conv_silu
from vssm.ops.operators import product_dtype
from vssm.ops.scan import needs_operator

if TYPE_CHECKING:
    from vssm.ops.linear.triton import Parts

__all__ = ["Halves", "PackedWeight", "fused_linear", "linear_conv_silu"]

_DIVISOR = 32  # of K, in the kernels

Halves = tuple[Tensor, Tensor, Tensor]
"""A matrix as high and low parts in float16 and a factor for each row."""


class PackedWeight:
    """A weight that never changes, with the halves that products of many rows read.

    The halves are made when a product first asks for them, and kept: they take as many bytes as the
    weight.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight: Tensor = weight.detach().contiguous()
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


def fused_linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    norm: nn.RMSNorm | None = None,
    backend: str = "auto",
) -> Tensor:
    """Returns y.

    Example:
        >>> fused_linear(torch.ones(2), torch.ones(1, 2), add=torch.ones(1))
        tensor([3.])
    """
    if not _runs(backend, x, weight, bias, add, norm):
        y = F.linear(x if norm is None else norm(x), _tensor(weight), bias)
        return y if add is None else add + y
    from vssm.ops.linear import triton as kernels

    return kernels.forward(x, weight, bias, add, *_scale_of(norm))


def linear_conv_silu(
    x: Tensor,
    weight: Tensor | PackedWeight,
    taps: Tensor,
    bias: Tensor,
    state: Tensor | None = None,
    norm: nn.RMSNorm | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies by a weight and convolves the first half of the product; the second is a gate.

    Arguments:
        x: The input, (B, T, W).
        weight: The weight, (2 D, W).
        taps: The taps of the convolution, (D, K).
        bias: The bias of the convolution, (D,).
        state: As for `causal_conv_silu`.
        norm: Applied to x first.
        backend: As for `fused_linear` and `causal_conv_silu`.

    Returns:
        y and the gate, (B, T, D), and the state to go on from (B, K - 1, D).

    Example:
        >>> x, weight, taps = torch.ones(1, 4, 1), torch.tensor([[1.0], [2.0]]), torch.ones(1, 3)
        >>> y, gate, _ = linear_conv_silu(x, weight, taps, torch.zeros(1))
        >>> y.flatten(), gate.flatten()
        (tensor([0.7311, 1.7616, 2.8577, 2.8577]), tensor([2., 2., 2., 2.]))
    """
    made = _parts(x, weight, norm, backend, whole=needs_operator(taps, bias, state))
    if isinstance(made, Tensor):
        u, z = made.chunk(2, -1)
        u, after = causal_conv_silu(u, taps, bias, state, backend)
        return u, z, after
    from vssm.ops.conv.triton import forward_parts

    after = x.new_empty(len(x), taps.shape[1] - 1, len(taps))
    y, z = forward_parts(made, x.shape[1], taps, bias, state, after)
    return y, z, after


def _parts(
    x: Tensor,
    weight: Tensor | PackedWeight,
    norm: nn.RMSNorm | None,
    backend: str,
    whole: bool,
) -> "Tensor | Parts":
    """Computes `fused_linear`, but unless `whole` may leave parts of the sums over K to add."""
    if whole or not _runs(backend, x, weight, None, None, norm):
        return fused_linear(x, weight, norm=norm, backend=backend)
    from vssm.ops.linear import triton as kernels

    return kernels.multiply(x, weight, None, None, *_scale_of(norm))


def _tensor(weight: Tensor | PackedWeight) -> Tensor:
    return weight.weight if isinstance(weight, PackedWeight) else weight


def _scale_of(norm: nn.RMSNorm | None) -> tuple[Tensor | None, float]:
    return (None, 0.0) if norm is None else (norm.weight, norm.eps or 0.0)


@cache
def _has_descriptors() -> bool:
    """Says whether there is a Triton that knows the descriptors that the kernels read: 3.4."""
    try:
        return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
    except ModuleNotFoundError:  # no Triton at all
        return False


def _runs(
    backend: str,
    x: Tensor,
    packed: Tensor | PackedWeight,
    bias: Tensor | None,
    add: Tensor | None,
    norm: nn.RMSNorm | None,
) -> bool:
    """Says whether the kernels run: on CUDA, for float32 without gradients, and for most widths."""
    if backend != "auto" or not x.is_cuda:
        return backend == "triton"
    weight = _tensor(packed)
    K = weight.shape[1]
    given = (x, weight, bias, add, None if norm is None else norm.weight)
    tensors = [t for t in given if t is not None]
    return (
        not needs_operator(*tensors)
        and all(t.dtype == torch.float32 and t.device == x.device for t in tensors)
        and product_dtype(x.device) is None
        and x.shape[-1] == K
        and K % _DIVISOR == 0
        and (add is None or add.shape == (*x.shape[:-1], len(weight)))
        # Where products may be less accurate than float32, PyTorch's are faster.
        and getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee") in ("ieee", "none")
        and _has_descriptors()
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )
