"""Hard draws of categoricals by inverse CDF, a function of uniform noise.

    c_n = sum_{m <= n} floor(2^30 p_m),  p = softmax(v / temperature)          z = #{n: c_n <= floor(u c_N)}

| symbol | code | shape |
| --- | --- | --- |
| v | `logits` | (..., N) |
| c | `cumulative` | (..., N) int32 |
| u | `noise` | (...), inside (0, 1) |
| z | result | (...) int64 |

Integer sums are exact in any order: on every device a class of probability 0 has an empty interval. 2^30 is
finer than the noise and leaves the total inside int32. Logits with fewer leading dimensions, or with
neighbouring dimensions of size 1, serve all of the noise there without being copied.

On a GPU one kernel of `vssm.ops.draw.triton` reads each row of logits once and keeps nothing in between.
"""

import math

import torch
from torch import Tensor

from vssm.ops.dispatch import choose_fused, needs_operator
from vssm.ops.latents import at_least_float32

__all__ = ["cumulative", "draws_fused", "inverse_cdf", "repeats", "select"]

MAX_CLASSES = 1024
"""The kernel holds all classes of a row in registers."""


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
        from vssm.ops.draw import triton as draw_triton

        return draw_triton.inverse_cdf(logits, noise, temperature)
    return select(cumulative(at_least_float32(logits) / temperature), noise)


def draws_fused(logits: Tensor, noise: Tensor, backend: str = "auto") -> bool:
    """Says whether the kernel draws; if not, a table of `cumulative` serves more than one draw."""
    return choose_fused(backend, logits.device, logits.dtype, _refusal(logits, noise))


def _refusal(logits: Tensor, noise: Tensor) -> str | None:
    """Says why the kernel can not take the inputs, None if it can."""
    if repeats(logits, noise) is None:
        return f"logits of shape {tuple(logits.shape)} do not repeat over noise of shape {tuple(noise.shape)}"
    if noise.device != logits.device or noise.dtype != torch.float32:
        return f"noise is {noise.dtype} on {noise.device}, not float32 on {logits.device}"
    if not 1 <= logits.shape[-1] <= MAX_CLASSES:
        return f"there are {logits.shape[-1]} classes, not 1 to {MAX_CLASSES}"
    if needs_operator(logits):
        return "it has no gradient and is unknown to torch.compile"
    return None


def repeats(logits: Tensor, noise: Tensor) -> tuple[int, int] | None:
    """Returns how often a run of rows of the logits is repeated, and how many rows a run has.

    None, where they are not runs: where the dimensions that logits lack are not next to each other.

    Example:
        >>> repeats(torch.zeros(2, 1, 3, 8), torch.zeros(2, 5, 3)), repeats(torch.zeros(8), torch.zeros(2, 5))
        ((5, 3), (10, 1))
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
    """Returns the classes, (...) int64, that the noise selects in a table of `cumulative`."""
    total = table[..., -1]
    target = torch.minimum((noise * total).int(), total - 1)
    own = (1,) * (target.dim() + 1 - table.dim()) + tuple(table.shape[:-1])
    # A row of the table serves all of the noise in dimensions that it lacks, moved last for `searchsorted`.
    shared = [i for i, size in enumerate(own) if size == 1]
    kept = [i for i, size in enumerate(own) if size != 1]
    values = target.permute(kept + shared)
    moved = values.shape
    values = values.reshape(*moved[: len(kept)], math.prod(moved[len(kept) :])).contiguous()
    rows = table.reshape(*moved[: len(kept)], table.shape[-1]).contiguous()
    # Of logits that are not finite the table may end below the target.
    index = torch.searchsorted(rows, values, right=True).clamp_(max=table.shape[-1] - 1).view(moved)
    back = sorted(range(len(own)), key=(kept + shared).__getitem__)
    return index.permute(back)
