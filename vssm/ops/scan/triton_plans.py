"""How calls of the selective scan are cut up on a GPU: by their sizes alone, so that they repeat bit for bit.

The numbers were found on an H200. Kernels and letters are those of `vssm.ops.scan.triton`.
"""

from typing import NamedTuple

import torch
import triton

__all__ = [
    "Plan",
    "plan_backward",
    "plan_forward",
    "plan_pull",
    "plan_span",
    "plan_starts",
    "plan_summary",
]


class Plan(NamedTuple):
    """How a call is cut up."""

    length: int  # steps of a chunk of time
    BD: int  # lanes a program, times the channels of a lane
    K: int  # steps a block: loaded together; backward: from one kept state to the next
    registers: int | None  # a thread, at most
    ahead: bool  # B and C are loaded a block ahead, as the others always are
    polynomials: int = 0  # forward: states of a channel whose exponential is a polynomial
    programs: int = 0  # backward: at most
    parts: int = 1  # lanes a channel
    split: bool = True  # backward: chunks run side by side, not one after the other
    warps: int = 1  # a program
    ring: int = (
        0  # forward: blocks of the ring in shared memory that inputs are copied to; 0: no ring
    )


MOST_PARTS = 8
"""Lanes that share a channel forward, at most,"""
WARPS = 8
"""while a multiprocessor has no more warps than this,"""
ALONE = 256
"""and of no longer sequences: more of time is run side by side, in chunks, unless there is a ring."""
SHORT = 64
"""Steps from which a ring pays; before, lanes that load for themselves have started sooner."""
RING_WARPS = 2.9
"""Warps that a multiprocessor must have for a ring of two lanes a channel, or of more, to beat chunks.

A step of a ring of two lanes takes 71 ns, or 14.5 ns for every 2048 channels of a sequence if that is more;
one of eight lanes, which has float32 and one sequence, 24 ns. In chunks it takes 30 ns for these 2048
channels (H200, 16 states).
"""
RING_STEPS = {2: 8, 4: 16, 8: 32}
"""Steps of a block of a ring by its lanes a channel, at most."""


def plan_forward(
    batch: int,
    length: int,
    channels: int,
    states: int,
    processors: int,
    wide: bool = False,
    copies: bool = True,
    lanes: bool = True,
) -> Plan:
    """Returns how `forward` runs: over the whole length at once if that fills the device, else in chunks.

    Few sequences that are not long do fill it with several lanes a channel, and some long ones with lanes and
    a ring. A ring has only whole blocks: with a length that is no multiple of 8 or channels that are none of
    64 there are lanes without one or chunks, as where `copies` says that inputs cannot be copied to it.
    Without `lanes`, which keep no states for a backward, there are chunks. Wide numbers have more than 16
    bits.
    """
    parts = 1
    while (
        2 * parts <= MOST_PARTS
        and states % (2 * parts) == 0
        and 2 * parts * batch * channels <= 32 * WARPS * processors
    ):
        parts *= 2
    whole = copies and states in (8, 16) and channels % 64 == length % 8 == 0
    if whole and wide and length >= SHORT:  # numbers of 16 bits are not worth more than two lanes
        most = min(parts, states // 2)  # a lane reads two states at a time
        filled = most * batch * channels >= 32 * RING_WARPS * processors
        if most > 2 and (length <= ALONE or filled):
            return _plan_ring(length, most, wide)
    if lanes and parts > 1 and 1 < length <= ALONE:
        warps = max(
            1, parts // 4
        )  # then it reads whole sectors of memory, 8 channels, of every step
        block = parts if parts >= 8 else 2 * parts
        if length >= 64 and parts >= 8:  # longer runs of loads pay
            warps, block = 2 * warps, 2 * parts
        return Plan(length, 32 * warps, block, None, True, parts=parts, warps=warps)
    warps = batch * triton.cdiv(channels, 64)
    K = 1 if length == 1 or states > 32 else 2
    # One in 16 exponentials as a polynomial: its instructions then take as long as the others' exponentials.
    polynomials = states // 16
    if states > 16 or (warps < 4 * processors and length < 128):
        return Plan(length, 32, K, None, True, polynomials)
    if warps >= 6 * processors or length < 128:
        return Plan(length, 64, K, 128, False, polynomials)
    if whole and 2 * batch * channels >= 32 * RING_WARPS * processors:
        return _plan_ring(length, 2, wide)
    # Four waves of programs, 16 a multiprocessor; or fewer, when chunks would be too short to be worth it.
    chunk = triton.cdiv(length * warps, 64 * processors)
    if chunk <= 32:  # few programs: each has registers to load more at once
        return Plan(32, 64, 4, None, True, polynomials)
    # Twelve programs of 168 registers a multiprocessor load more numbers of 16 bits at once than sixteen.
    K, registers = (K, 128) if wide else (4, 168)
    return Plan(triton.cdiv(chunk, 64) * 64, 64, K, registers, False, polynomials)


def _plan_ring(length: int, parts: int, wide: bool) -> Plan:
    """Returns how a ring with so many lanes a channel runs over a length that 8 divides."""
    K = RING_STEPS[parts]
    while length % K:  # no bits of it: a trace may not know the length
        K //= 2
    # Without a limit the compiler takes hardly more registers, in an order that waits longer for results.
    registers = None if parts > 2 else 96 if wide else 72
    return Plan(length, 128, K, registers, True, parts=parts, warps=4, ring=4)


def plan_summary(
    length: int, states: int, adjoint: bool, few: bool = False, wide: bool = False
) -> Plan:
    """Returns how chunks, few of them or many, are summarised, with or without the adjoint."""
    polynomials = (
        0 if adjoint else states // 8
    )  # more than when out is written, which takes instructions too
    if states > 16:
        return Plan(length, 32, 1, None, False, polynomials)
    if adjoint:
        return Plan(length, 32, 4, 128, False)
    if few:
        return Plan(length, 64, 4, None, True, polynomials)
    return Plan(length, 64, 2 if wide else 4, 128, wide, polynomials)


def plan_pull(length: int, states: int, wide: bool = False) -> Plan:
    """Returns how pull of spans of so many steps is found."""
    if states > 16:
        return Plan(length, 32, 1, None, False, states // 8)
    return Plan(length, 64, 2 if wide else 4, 128, False, states // 8)


def plan_starts(length: int, states: int, dtype: torch.dtype) -> Plan:
    """Returns how the states before chunks are found, straight through time, for B of a dtype."""
    if states > 16:
        return Plan(length, 32, 1, None, False)
    return Plan(length, 64, 2, 128, dtype == torch.bfloat16)  # more would not fit registers


def plan_backward(batch: int, length: int, channels: int, states: int, processors: int) -> Plan:
    """Returns how `backward` runs: chunks side by side unless rows and channels alone fill the device."""
    # Twelve programs of 168 registers fit a multiprocessor, else eight. Twice as many even out the end; but a
    # scratch, where shared memory does not do, grows with the length and should stay in the cache.
    if states in (8, 16):
        programs = 24 * processors
        split = batch * triton.cdiv(channels, 16) < 2 * programs
        return Plan(min(length, 512 // states), 32, 2, 168, True, 0, programs, 2, split)
    K = 1 if length == 1 or states > 32 else 2
    programs = (16 if length <= 64 else 8) * processors
    split = batch * triton.cdiv(channels, 32) < 2 * programs
    return Plan(min(length, 64), 32, K, None, True, 0, programs, 1, split)


SPAN = 8
"""Chunks that a program of the backward walks in a row, at most: more would hardly save any more."""
ROUNDS = 8
"""Spans that a program must have for them to be that long: at the end few then wait for others."""


def plan_span(batch: int, chunks: int, groups: int) -> int:
    """Returns how many chunks are a span, for so many programs a block of channels."""
    span = 1
    while (
        2 * span <= min(SPAN, chunks) and batch * triton.cdiv(chunks, 2 * span) >= ROUNDS * groups
    ):
        span *= 2
    return span
