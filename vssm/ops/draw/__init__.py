"""Hard draws of categoricals by inverse CDF, a function of uniform noise.

    c_n = sum_{m <= n} floor(2^30 p_m),  p = softmax(v / temperature)
    z   = #{n: c_n <= floor(u c_N)}

| symbol | code | shape |
| --- | --- | --- |
| v | `logits` | (..., N) |
| c | `cumulative` | (..., N) int32 |
| u | `noise` | (...), inside (0, 1) |
| z | result | (...) int64 |

Integer sums are exact in any order, so on every device a class of probability 0 has an empty
interval. 2^30 is finer than the noise, and the total fits into int32. Logits may have fewer leading
dimensions than the noise, or dimensions of size 1: they are broadcast without a copy.

On a GPU one kernel (`vssm.ops.draw.triton`) reads each row of logits once.
"""

import math

import torch
from torch import Tensor

from vssm.ops.dispatch import choose_fused, kernels, needs_operator
from vssm.ops.latents import at_least_float32

MAX_CLASSES = 1024
"""The kernel keeps all classes of a row in registers."""


def inverse_cdf(
    logits: Tensor, noise: Tensor, temperature: float = 1.0, backend: str = "auto"
) -> Tensor:
    """Returns the first class whose cumulative probability exceeds the noise.

    Arguments:
        logits: Finite, (..., N).
        noise: Uniform numbers inside (0, 1), (...).
        temperature: Divides the logits.
        backend: "auto", "reference" or "triton".

    Returns:
        Class indices, (...) int64.

    Example:
        >>> inverse_cdf(torch.zeros(4), torch.tensor([0.1, 0.3, 0.6, 0.9]))
        tensor([0, 1, 2, 3])
    """
    if draws_fused(logits, noise, backend):
        return kernels("draw", "triton").inverse_cdf(logits, noise, temperature)
    return select(cumulative(at_least_float32(logits) / temperature), noise)


def draws_fused(logits: Tensor, noise: Tensor, backend: str = "auto") -> bool:
    """Returns whether the kernel draws; if not, a table of `cumulative` can serve several draws."""
    refusal = None
    if repeats(logits, noise) is None:
        shapes = tuple(logits.shape), tuple(noise.shape)
        refusal = f"logits of shape {shapes[0]} do not repeat over noise of shape {shapes[1]}"
    elif noise.device != logits.device or noise.dtype != torch.float32:
        refusal = f"noise is {noise.dtype} on {noise.device}, not float32 on {logits.device}"
    elif not 1 <= logits.shape[-1] <= MAX_CLASSES:
        refusal = f"there are {logits.shape[-1]} classes, not 1 to {MAX_CLASSES}"
    elif needs_operator(logits):
        refusal = "it has no gradient and is unknown to torch.compile"
    return choose_fused(backend, logits.device, logits.dtype, refusal)


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


def cumulative(logits: Tensor) -> Tensor:
    """Returns the cumulative probabilities times 2^30, (..., N) int32."""
    return (logits.softmax(-1) * 2**30).int().cumsum(-1, dtype=torch.int32)


def select(table: Tensor, noise: Tensor) -> Tensor:
    """Returns the classes (...), int64, that the noise selects in a table of `cumulative`."""
    total = table[..., -1]
    target = torch.minimum((noise * total).int(), total - 1)
    own = (1,) * (target.dim() + 1 - table.dim()) + tuple(table.shape[:-1])
    # Dimensions over which a row of the table is broadcast move to the end, for `searchsorted`.
    shared = [i for i, size in enumerate(own) if size == 1]
    kept = [i for i, size in enumerate(own) if size != 1]
    values = target.permute(kept + shared)
    moved = values.shape
    values = values.reshape(*moved[: len(kept)], math.prod(moved[len(kept) :])).contiguous()
    rows = table.reshape(*moved[: len(kept)], table.shape[-1]).contiguous()
    # If logits are not finite, the table may end below the target.
    index = torch.searchsorted(rows, values, right=True).clamp_(max=table.shape[-1] - 1).view(moved)
    back = sorted(range(len(own)), key=(kept + shared).__getitem__)
    return index.permute(back)
