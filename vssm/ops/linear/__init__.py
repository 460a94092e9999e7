"""The matrix product of a layer, fused with its neighbours.

    y = norm(x) weight^T + bias + add          norm(x) = x scale (mean_k x_k^2 + eps)^(-1/2), or x

Shapes: x (..., K); weight (N, K); bias (N,); add, y (..., N); scale (K,).

On a GPU, PyTorch multiplies float32 on the units for single numbers, and a product of few rows does
not fill even these. Without gradients, the kernels of `vssm.ops.linear.triton` take over, which are
as accurate as float32 and use tensor cores. PyTorch's own product runs with gradients, under
autocast or `torch.compile`, and on a CPU.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.ops.operators import product_dtype
from vssm.ops.scan import HAS_TRITON, needs_operator

__all__ = ["Halves", "PackedWeight", "linear"]

_DIVISOR = 32  # of K, in the kernels

Halves: TypeAlias = tuple[Tensor, Tensor, Tensor]
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


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    norm: nn.RMSNorm | None = None,
) -> Tensor:
    """Multiplies the rows of x, after the norm, by a weight and adds the bias and `add`.

    Example:
        >>> weight, bias = torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([0.5, 0.0])
        >>> linear(torch.tensor([1.0, 2.0]), weight, bias, add=torch.ones(2))
        tensor([12.5000, 18.0000])
    """
    matrix = weight.weight if isinstance(weight, PackedWeight) else weight
    if _runs_kernels(x, matrix, bias, add, None if norm is None else norm.weight):
        from vssm.ops.linear import triton as kernels

        return kernels.linear(x, weight, bias, add, norm)
    y = F.linear(x if norm is None else norm(x), matrix, bias)
    return y if add is None else add + y


def _runs_kernels(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Says whether the kernels run: on CUDA, for float32 without gradients, and for most widths."""
    if not x.is_cuda:
        return False
    tensors = [t for t in (x, weight, *others) if t is not None]
    return (
        not needs_operator(*tensors)
        and all(t.dtype == torch.float32 and t.device == x.device for t in tensors)
        and product_dtype(x.device) is None
        and x.shape[-1] == weight.shape[1]
        and weight.shape[1] % _DIVISOR == 0
        # Where products may be less accurate than float32, PyTorch's are faster.
        and torch.backends.cuda.matmul.fp32_precision in ("ieee", "none")
        and HAS_TRITON
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )
