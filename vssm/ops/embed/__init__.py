"""The embedding of hard latents: each selects one row of the weight, and the rows are added.

    y = sum_i weight[i N + z_i]

Shapes: z (..., Z) classes in [0, N); weight (Z N, D); y (..., D).

This is the product of Z one-hot vectors and the weight. On a GPU one kernel
(`vssm.ops.embed.triton`) does it if no gradient is needed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.ops.dispatch import choose_fused, kernels, needs_operator

MAX_LATENTS = 256
"""The kernel adds all latents of a step at once."""


def embed_sum(z: Tensor, weight: Tensor, backend: str = "auto") -> Tensor:
    """Looks up and adds the rows of the weight that the classes select.

    Arguments:
        z: Classes, (..., Z) integers in [0, N).
        weight: The rows of all classes of the first latent, then of the second, ..., (Z N, D).
        backend: "auto", "reference" or "triton"; "auto" takes the kernel on CUDA if no gradient is
            needed.

    Returns:
        The sums, (..., D) in the dtype of the weight.

    Example:
        >>> embed_sum(torch.tensor([1, 0]), torch.tensor([[1.0], [2.0], [4.0], [8.0]]))
        tensor([6.])
    """
    latents = z.shape[-1]
    refusal = None
    if needs_operator(weight):
        refusal = "it has no gradient and is unknown to torch.compile"
    elif z.device != weight.device:
        refusal = f"z is on {z.device}, weight on {weight.device}"
    elif not 1 <= latents <= MAX_LATENTS:
        refusal = f"there are {latents} latents, not 1 to {MAX_LATENTS}"
    if choose_fused(backend, weight.device, weight.dtype, refusal):
        return kernels("embed", "triton").embed_sum(z, weight)
    offsets = torch.arange(0, len(weight), len(weight) // latents, device=z.device)
    rows = (z + offsets).reshape(-1, latents)
    return F.embedding_bag(rows, weight, mode="sum").view(*z.shape[:-1], -1)
