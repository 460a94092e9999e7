"""The layers of blocks and stacks, and the embeddings of inputs.

On a CPU these layers are those of PyTorch. On CUDA, `vssm.ops` has faster kernels for them.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.config import ModelConfig
from vssm.ops.latents import embed_sum
from vssm.ops.linear import linear
from vssm.ops.norm import rms_norm
from vssm.ops.operators import product_dtype

__all__ = [
    "LatentEmbedding",
    "Linear",
    "RMSNorm",
    "StepSizes",
    "apply_in_halves",
    "embedding",
]


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
        return linear(x, self.weight, self.bias) if x.is_cuda else super().forward(x)


class StepSizes(nn.Linear):
    """Creates a linear layer whose bias the scan adds: bfloat16 would round small steps away."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., rank) to (..., inner), without the bias."""
        return linear(x, self.weight) if x.is_cuda else F.linear(x, self.weight)


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


class RMSNorm(nn.RMSNorm):
    """Creates an `nn.RMSNorm`, same parameter and same numbers, for use before a matrix product.

    Under autocast on CUDA the result has the dtype of that product.

    Example:
        >>> RMSNorm(3, eps=1e-5)(torch.tensor([[1.0, 1.0, -1.0]])).detach()
        tensor([[ 1.0000,  1.0000, -1.0000]])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., D) to (..., D)."""
        if not x.is_cuda:
            return super().forward(x)
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps, product_dtype(x.device))


def embedding(config: ModelConfig) -> nn.Module:
    """Returns the input projection for x: a linear map, or a table for tokens."""
    if config.head == "categorical":
        return nn.Embedding(config.features, config.width)
    return _Projection(config.features, config.width)


class _Projection(nn.Linear):
    """A linear map for data and samples, which are float32 whatever the weights are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class LatentEmbedding(nn.Module):
    """Creates the linear map of Z one-hot vectors of N classes to the width.

    Classes are looked up and summed; one-hot vectors are multiplied, so that they get a gradient.
    """

    latents: int
    classes: int

    def __init__(self, latents: int, classes: int, width: int) -> None:
        super().__init__()
        # Z rows are summed: this scale makes the sum of unit variance.
        self.weight: nn.Parameter = nn.Parameter(
            torch.randn(latents * classes, width) / math.sqrt(latents)
        )
        self.latents, self.classes = latents, classes

    def forward(self, z: Tensor) -> Tensor:
        """Maps z, (B, T, Z) classes or (B, T, Z, N) one-hot, to (B, T, width)."""
        if z.is_floating_point():
            if not torch.is_autocast_enabled(z.device.type):  # draws are always float32
                z = z.to(self.weight.dtype)
            return z.flatten(-2) @ self.weight
        assert z.shape[-1] == self.latents, f"z has {z.shape[-1]} latents, not {self.latents}"
        return embed_sum(z, self.weight)
