"""The kernel of `vssm.ops.linear.weights`: reads weights, and splits those rows again that have changed.

A program reads some rows as words of 64 bits. Their mark is the sum of what `_mixed` makes of each word and
its place: that is one to one, so one word that changes always changes the mark, and several leave it as it is
by chance only, once in 2^64 times. The sum has no order, so it repeats.

Rows are read again to split them: what another stream writes in between has another mark, and is seen at the
next time. One launch serves all weights of one shape; it finds them through a table of addresses.

Shapes: weight, high, low (N, K); down (N,); marks (N / ROWS,).
"""

# Kernels are written in the part of Python that Triton compiles.
# ruff: noqa: ANN001, ANN202
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl

from vssm.ops.linear.triton_kernels import halves
from vssm.ops.linear.weights import Kept

__all__ = ["Renewal", "rows_of"]

WORDS = 1024
"""Words of 64 bits that a program reads, about,"""
BLOCK = 512
"""and so many at a time."""
WARPS = 2

STEP = tl.constexpr(0x1E3779B97F4A7C15)
FIRST = tl.constexpr(0x3F58476D1CE4E5B9)
SECOND = tl.constexpr(0x14D049BB133111EB)


@triton.jit
def _mixed(word, place):
    """Maps a word to another, one to one, in a way of its own for every place."""
    x = word.to(tl.uint64, bitcast=True) + place.to(tl.uint64) * STEP
    x = (x ^ (x >> 32)) * FIRST
    x = (x ^ (x >> 29)) * SECOND
    return (x ^ (x >> 32)).to(tl.int64, bitcast=True)


# fmt: off
@triton.jit(do_not_specialize=["N", "always"])
def _renew_kernel(
    table, N, always,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):
    # fmt: on
    blocks = tl.cdiv(N, ROWS)
    block = tl.program_id(0) % blocks
    places = table + tl.program_id(0) // blocks * 5
    weight = tl.multiple_of(tl.load(places).to(tl.pointer_type(tl.float32)), 16)
    marks = tl.load(places + 4).to(tl.pointer_type(tl.int64)) + block
    before = tl.load(marks)
    first = block.to(tl.int64) * ROWS
    words = (weight + first * K).to(tl.pointer_type(tl.int64))
    size = tl.minimum(N - block * ROWS, ROWS) * (K // 2)
    total = tl.zeros((BLOCK,), tl.int64)
    for done in tl.static_range(0, ROWS * (K // 2), BLOCK):
        each = done + tl.arange(0, BLOCK)
        total += _mixed(tl.load(words + each, mask=each < size, other=0), each)
    mark = tl.sum(total, 0)
    if (mark != before) | (always != 0):
        high = tl.multiple_of(tl.load(places + 1).to(tl.pointer_type(tl.float16)), 16)
        low = tl.multiple_of(tl.load(places + 2).to(tl.pointer_type(tl.float16)), 16)
        down = tl.multiple_of(tl.load(places + 3).to(tl.pointer_type(tl.float32)), 16)
        k = tl.arange(0, BK)
        for next_row in range(0, ROWS, BR):
            row = first + next_row + tl.arange(0, BR)
            mask = (row < N)[:, None] & (k < K)[None, :]
            at = row[:, None] * K + k[None, :]
            large, small, factor = halves(tl.load(weight + at, mask=mask, other=0.0))
            tl.store(high + at, large, mask=mask)
            tl.store(low + at, small, mask=mask)
            tl.store(down + row, factor, mask=row < N)
        tl.store(marks, mark)


def rows_of(K: int) -> int:
    """Returns the rows of K columns that share a mark."""
    return max(1, triton.next_power_of_2(2 * WORDS // K + 1) // 2)


class Renewal:
    """Splits rows that have changed of some weights; it can be captured.

    Arguments:
        kept: The halves of the weights, on one device.
    """

    def __init__(self, kept: list[Kept]) -> None:
        self.kept = kept
        shapes: dict[torch.Size, list[Kept]] = {}
        for one in kept:
            shapes.setdefault(one.weight.shape, []).append(one)
        self._tables = [
            (shape, len(alike), torch.tensor([_addresses(one) for one in alike]).to(alike[0].marks.device))
            for shape, alike in shapes.items()
        ]

    def __call__(self, always: bool = False) -> None:
        """Looks at all weights, and splits rows that have changed, or all of them."""
        for (N, K), count, table in self._tables:
            rows, BK = rows_of(K), triton.next_power_of_2(K)
            BR = min(rows, max(1, 2048 // BK))
            _renew_kernel[(count * triton.cdiv(N, rows),)](
                table, N, int(always), K, rows, BLOCK, BR, BK, num_warps=WARPS
            )


def _addresses(kept: Kept) -> list[int]:
    return [kept.address, *(half.data_ptr() for half in kept.halves), kept.marks.data_ptr()]
