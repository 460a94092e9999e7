"""The noise of `vssm.noise.uniform` on a GPU, in one kernel: the same bits as its PyTorch twin.

A thread computes one Philox hash, four numbers: word i // 4 of a step makes the components i.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vssm.ops.launch_triton import launch

BLOCK = 256


# fmt: off
@triton.jit(do_not_specialize=["position", "length", "components", "tag", "total"])
def _uniform_kernel(
    out, seed, row, start, position, length, components, tag, total,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):
    # fmt: on
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = index < total
    words = (components + 3) // 4
    word = index % words
    step = index // words  # b * length + t
    b = step // length
    where = position + (step % length).to(tl.int64)
    if start is not None:
        where += tl.load(start)
    number = tl.load(row + b, mask=live, other=0)
    key = tl.load(seed + b, mask=live, other=0) ^ (number >> 32)
    c2 = number.to(tl.uint32)
    c3 = tl.full((BLOCK,), 0, tl.uint32) + tag.to(tl.uint32)
    hashed = tl.philox(key, where.to(tl.uint32), word.to(tl.uint32), c2, c3)
    first = step * components + word * 4
    for i in tl.static_range(4):
        # 23 bits and a half, as in the twin, which float32 represents exactly.
        u = ((hashed[i] >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
        tl.store(out + first + i, u, mask=live & (word * 4 + i < components))


def uniform(
    seed: Tensor, row: Tensor, position: int | Tensor, length: int, components: int, tag: int
) -> Tensor:
    """Returns `vssm.noise.uniform` of checked arguments; tag is stream 2^24 + draw."""
    out = torch.empty(len(seed), length, components, dtype=torch.float32, device=seed.device)
    total = len(seed) * length * -(-components // 4)
    start, position = (position, 0) if isinstance(position, Tensor) else (None, position)
    if total:
        sizes = (position, length, components, tag, total)
        wide = 4 * (total + BLOCK) >= 2**31  # 64-bit divisions are slow
        launch(
            _uniform_kernel, (triton.cdiv(total, BLOCK),),
            out, seed.contiguous(), row.contiguous(), start, *sizes, BLOCK=BLOCK, WIDE=wide,
        )  # fmt: skip
    return out
