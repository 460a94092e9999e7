"""Draws of categorical latents for generation, and their embedding.

z is drawn from one number u by inverse CDF, and y adds the rows that z selects:

    c_n = sum_{m <= n} floor(2^30 p_m)       z = #{n: c_n <= floor(u c_N)}       p = softmax(v)
    y   = sum_i weight[i N + z_i]

| symbol | code | shape |
| --- | --- | --- |
| v | `logits` | (..., Z, N): Z independent categoricals of N classes |
| u | `noise` | (..., Z), strictly inside (0, 1) |
| z | result | (..., Z) int64 |
| c | `cumulative` | (..., Z, N) int32 |

There are no gradients. `vssm.ops.draws.triton` has kernels for a GPU.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.ops.latents import MAX_CLASSES
from vssm.ops.scan import HAS_TRITON, needs_operator

__all__ = ["embed_sum", "inverse_cdf", "repeats"]

MAX_LATENTS = 256
"""The kernel adds the rows of all latents of a step at once."""


def inverse_cdf(
    logits: Tensor, noise: Tensor, temperature: float = 1.0, backend: str = "auto"
) -> Tensor:
    """Returns the first class whose cumulative probability exceeds the noise, (...) int64.

    The logits (..., N) are finite and divided by the temperature. They may have fewer leading
    dimensions than the noise (...), or dimensions of size 1: they are broadcast without a copy.

    Example:
        >>> inverse_cdf(torch.zeros(4), torch.tensor([0.1, 0.3, 0.6, 0.9]))
        tensor([0, 1, 2, 3])
    """
    classes, shared = logits.shape[-1], repeats(logits, noise)
    if shared and 1 <= classes <= MAX_CLASSES and _runs_kernels(backend, logits):
        from vssm.ops.draws import triton as kernels

        return kernels.inverse_cdf(logits, noise, temperature, *shared)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Integer sums are exact in any order, so on every device a class of probability 0 has an empty
    # interval. 2^30 is finer than the noise, and the total fits into int32.
    parts = ((exact / temperature).softmax(-1) * 2**30).int()
    cumulative = parts.cumsum(-1, dtype=torch.int32)
    total = cumulative[..., -1]
    target = torch.minimum((noise * total).int(), total - 1)
    if not target.numel():
        return target.long()
    times, run = shared or (1, target.numel())
    if times == 1:
        cumulative = cumulative.expand(*target.shape, classes)
    # A row is searched once, for all noise that it serves.
    values = target.reshape(-1, times, run).transpose(1, 2).contiguous()
    index = torch.searchsorted(cumulative.reshape(-1, run, classes), values, right=True)
    # If logits are not finite, the last sum may lie below the target.
    return index.clamp_(max=classes - 1).transpose(1, 2).reshape(target.shape)


def _runs_kernels(backend: str, x: Tensor) -> bool:
    if backend != "auto" or not x.is_cuda:
        return backend == "triton"
    return HAS_TRITON and x.dtype != torch.float64 and not needs_operator(x)


def repeats(logits: Tensor, noise: Tensor) -> tuple[int, int] | None:
    """Returns how often a run of rows of the logits is repeated, and how many rows a run has.

    Returns None if the dimensions that are broadcast are not next to each other.

    Example:
        >>> repeats(torch.zeros(2, 1, 3, 8), torch.zeros(2, 5, 3))
        (5, 3)
        >>> repeats(torch.zeros(8), torch.zeros(2, 5))
        (10, 1)
    """
    shape = noise.shape
    if logits.dim() > noise.dim() + 1:
        return None
    own = (1,) * (noise.dim() + 1 - logits.dim()) + tuple(logits.shape[:-1])
    lacking = [i for i, (given, size) in enumerate(zip(own, shape, strict=True)) if given != size]
    if not lacking:
        return 1, math.prod(shape)
    first, last = lacking[0], lacking[-1]
    if any(size != 1 for size in own[first : last + 1]):
        return None
    return math.prod(shape[first : last + 1]), math.prod(shape[last + 1 :])


def embed_sum(z: Tensor, weight: Tensor, backend: str = "auto") -> Tensor:
    """Adds the rows of the weight (Z N, D) that the classes z (..., Z) select: (..., D).

    The weight has the rows of all classes of the first latent, then of the second, and so on. This
    is the product of Z one-hot vectors and the weight.

    Example:
        >>> embed_sum(torch.tensor([1, 0]), torch.tensor([[1.0], [2.0], [4.0], [8.0]]))
        tensor([6.])
    """
    latents = z.shape[-1]
    if _runs_kernels(backend, weight) and 1 <= latents <= MAX_LATENTS:
        from vssm.ops.draws import triton as kernels

        return kernels.embed_sum(z, weight)
    offsets = torch.arange(0, len(weight), len(weight) // latents, device=z.device)
    rows = (z + offsets).reshape(-1, latents)
    return F.embedding_bag(rows, weight, mode="sum").view(*z.shape[:-1], -1)
