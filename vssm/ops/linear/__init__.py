"""The matrix product of a layer: y = x weight^T + bias.

Shapes: x (..., K); weight (N, K); bias (N,); y (..., N).

On a GPU, PyTorch multiplies float32 on the units for single numbers, and a product of few rows does
not fill even these. Without gradients, kernels as accurate as float32 and as fast as tensor cores
take over (`vssm.ops.linear.fused`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Linear", "apply_in_halves", "linear"]


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies the rows of x by a weight, as `torch.nn.functional.linear` does.

    Example:
        >>> weight, bias = torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([0.5, 0.0])
        >>> linear(torch.tensor([1.0, 2.0]), weight, bias)
        tensor([11.5000, 17.0000])
    """
    if not x.is_cuda:
        return F.linear(x, weight, bias)
    from vssm.ops.linear.fused import fused_linear

    return fused_linear(x, weight, bias)


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
