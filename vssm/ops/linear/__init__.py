"""The matrix product of a layer: y = x weight^T + bias.

Shapes: x (..., K); weight (N, K); bias (N,); y (..., N).

On a GPU, PyTorch multiplies float32 on the units for single numbers, and a product of few rows does
not fill even these. Without gradients, kernels as accurate as float32 and as fast as tensor cores
take over (`vssm.ops.linear.fused`).
"""

import torch.nn.functional as F
from torch import Tensor

from vssm.ops.scan import needs_operator

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies the rows of x by a weight, as `torch.nn.functional.linear` does.

    Example:
        >>> import torch
        >>> weight, bias = torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([0.5, 0.0])
        >>> linear(torch.tensor([1.0, 2.0]), weight, bias)
        tensor([11.5000, 17.0000])
    """
    if not x.is_cuda or needs_operator(x, weight, bias):
        return F.linear(x, weight, bias)
    from vssm.ops.linear.fused import fused_linear

    return fused_linear(x, weight, bias)
