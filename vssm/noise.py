"""Counter-based noise: every random number of a generation is a pure function of where it is used.

    u = uniform(seed, row, position, component, stream, draw),    0 < u < 1

So chunk size, batch split, resume points and device never change which sample a seed gives. The
function is Philox4x32-10: ten rounds on a counter of four 32-bit words c under a key of two, k:

    (hi0, lo0) = M0 c0,  (hi1, lo1) = M1 c2
    c <- (hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0),  k <- (k0 + W0, k1 + W1)

with c = (position, component // 4, low half of the row, stream 2^24 + draw) and
k = (low half of the seed ^ high half of the row, high half of the seed); component i is output word
i % 4. Rows of a batch are small numbers; a fork of a row is a hash of it: see `fork`. Integers
only, so CPU and GPU give the same bits; on a GPU one kernel, `vssm.ops.noise_triton`, computes all
of it.

References:
    Parallel random numbers: as easy as 1, 2, 3 (Salmon et al., 2011)
    https://doi.org/10.1145/2063384.2063405

Legend: c `counter` (4, ...) and k `key` (2, ...) int64 in [0, 2^32); u (B, T, components) float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vssm.ops.scan import HAS_TRITON

LATENT = 0
"""Stream of the latents z."""
OBSERVATION = 1
"""Stream of the observations x given z."""
PARTICLE = 2
"""Stream of the choice among draws of the latents, in a particle filter."""
ORDER = 3
"""Stream of the order in which passes make the entries of x, where any part may be known."""


class Noise(NamedTuple):
    """The noise of a batch: the seed and the row that each sequence reads."""

    seed: Tensor
    """The seed of each sequence, (B,)."""
    row: Tensor
    """The row of each sequence, (B,)."""
    start: Tensor | None = None
    """Added to all positions, (1,), where only the device knows them."""

    @property
    def num(self) -> int:
        """The number of sequences."""
        return len(self.row)

    def uniform(
        self, position: int, length: int, components: int, stream: int, draw: int = 0
    ) -> Tensor:
        """Returns uniform numbers of a stream for some steps, (B, length, components)."""
        where = position if self.start is None else self.start + position
        return uniform(self.seed, self.row, where, length, components, stream, draw)


_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_WORD = 2**32
_MASK = _WORD - 1


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Returns the Philox4x32-10 hash of a counter under a key.

    Arguments:
        counter: Four words, (4, ...) int64 in [0, 2^32).
        key: Two words, (2, ...) int64 in [0, 2^32), broadcast against a word of the counter.

    Returns:
        Four words, (4, ...) int64 in [0, 2^32).

    Example:
        >>> [hex(word) for word in philox(torch.zeros(4, 1).long(), torch.zeros(2, 1).long())[:, 0]]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        # A product of 64 bits may wrap to a negative number: its bits are right all the same. Only
        # even words enter products, so the odd words keep their high half until the end.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK), p1
        c2, c3 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK), p0
        k0, k1 = k0 + _W0, k1 + _W1
    return torch.stack((c0, c1 & _MASK, c2, c3 & _MASK))


def uniform(
    seed: Tensor,
    row: Tensor,
    position: int | Tensor,
    length: int,
    components: int,
    stream: int = LATENT,
    draw: int = 0,
) -> Tensor:
    """Returns uniform noise for `length` consecutive positions of each sequence.

    Arguments:
        seed: Seed of each sequence, (B,) int64, any value.
        row: Number of each sequence under its seed, (B,) int64, 0 or more; not checked on a GPU,
            because the check would wait for the device.
        position: Absolute position of the first step; position + length may not pass 2^32. A (1,)
            int64 tensor if only the device knows it; then it is not checked.
        length: Number of steps T.
        components: Numbers per step; the first n do not depend on how many there are.
        stream: What the noise is for, `LATENT`, `OBSERVATION`, `PARTICLE` or `ORDER` (any
            integer in [0, 256)).
        draw: Number of a repeated draw, such as an importance sample, in [0, 2^24).

    Returns:
        Numbers strictly inside (0, 1), (B, T, components) float32 on the device of `seed`.

    Example:
        >>> seed, row = torch.tensor([7, 7]), torch.tensor([0, 1])
        >>> u = uniform(seed, row, position=0, length=5, components=3)
        >>> torch.equal(u[1:, 2:], uniform(seed[1:], row[1:], position=2, length=3, components=3))
        True
    """
    first = 0 if isinstance(position, Tensor) else position
    ranges = {"position": (first, _WORD), "position + length": (first + length, _WORD)}
    ranges |= {"stream": (stream, 2**8 - 1), "draw": (draw, 2**24 - 1)}
    for name, (value, most) in ranges.items():  # beyond them, noise would repeat
        if not 0 <= value <= most:
            raise ValueError(f"{name} is {value}; it must be 0 to {most}")
    if seed.is_cuda and HAS_TRITON:
        from vssm.ops import noise_triton

        return noise_triton.uniform(seed, row, position, length, components, stream << 24 | draw)
    counter = seed.new_empty(4, len(seed), length, -(-components // 4))
    steps = torch.arange(first, first + length, device=seed.device)
    counter[0] = (steps + position if isinstance(position, Tensor) else steps)[:, None]
    counter[1] = torch.arange(counter.shape[3], device=seed.device)
    counter[2] = (row & _MASK)[:, None, None]
    counter[3] = stream << 24 | draw
    key = torch.stack(((seed ^ row >> 32) & _MASK, seed >> 32 & _MASK))[..., None, None]
    # 23 bits and a half: exact in float32, whereas 24 bits and a half would round up to 1.
    u = (philox(counter, key) >> 9).float().add_(0.5).mul_(2.0**-23)
    return u.movedim(0, -1).flatten(-2)[..., :components]


def fork(row: Tensor, copies: int) -> Tensor:
    """Returns the rows of `copies` forks of every row, (B, copies).

    A fork is a 64-bit hash of its parent and of its number among the copies (the finaliser of
    SplitMix64). So all forks, and forks of forks, read different noise; two rows of a tree of n
    forks collide with probability n^2 / 2^63. Batches are far below 2^62, so no fork collides with
    a row of a batch. The first forks do not depend on how many are made.

    Arguments:
        row: Numbers of sequences, (B,) int64, 0 or more.
        copies: Forks of each.

    References:
        Fast splittable pseudorandom number generators (Steele, Lea & Flood, 2014)
        https://doi.org/10.1145/2660193.2660195

    Example:
        >>> rows = torch.cat([fork(torch.tensor([0]), 4), fork(torch.tensor([1]), 2)], 1)
        >>> len(rows.unique())
        6
    """
    copy = torch.arange(1, copies + 1, device=row.device)
    # Products wrap at 64 bits. A shift keeps the sign, which the mask removes.
    x = row[:, None] * _signed(0xD1B54A32D192ED03) + copy * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return x & (1 << 62) - 1 | 1 << 62


def _signed(word: int) -> int:
    """Returns the signed 64-bit number with the bits of an unsigned one."""
    return word - (1 << 64) if word >> 63 else word
