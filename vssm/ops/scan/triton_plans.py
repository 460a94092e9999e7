"""How calls of the selective scan are cut up on a GPU: by their sizes alone, so results repeat.

The numbers were found on an H200. Kernels and letters are those of `vssm.ops.scan.triton`.
"""

from typing import NamedTuple

from vssm.ops.launch_triton import ceil_div


class Plan(NamedTuple):
    """How a call is cut up."""

    length: int  # steps of a chunk of time
    BD: int  # lanes of a program, times the channels of a lane
    K: int  # steps of a block: loaded together; backward: from one kept state to the next
    registers: int | None  # of a thread, at most
    ahead: bool  # B and C are loaded a block ahead, as the other inputs always are
    programs: int = 0  # backward: at most
    parts: int = 1  # lanes of a channel
    split: bool = True  # backward: chunks run side by side, not one after the other
    warps: int = 1  # of a program
    ring: int = 0  # forward: slots of the ring in shared memory; 0 means no ring


MOST_PARTS = 8  # lanes that share a channel forward, at most,
WARPS = 8  # while a multiprocessor has no more warps than this,
ALONE = 256  # and for no longer sequences: longer ones run in chunks side by side, or with a ring
SHORT = 64  # steps from which a ring pays; lanes that load for themselves start sooner
# Warps that a multiprocessor must have for a ring of two or more lanes a channel to beat chunks.
# A step of a ring of two lanes takes 71 ns, or 14.5 ns per 2048 channels of a sequence if that is
# more. With eight lanes (float32, one sequence) it takes 24 ns. In chunks it takes 30 ns per 2048
# channels (H200, 16 states).
RING_WARPS = 2.9
RING_STEPS = {2: 8, 4: 16, 8: 32}  # of a block of a ring, at most, by its lanes per channel
SPAN = 8  # chunks that a program of the backward walks in a row, at most: more hardly saves time
ROUNDS = 8  # spans that a program must have to be that long: few programs then wait at the end


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
    """Returns how `forward` runs: over the whole length if that fills the device, else in chunks.

    Few sequences fill the device if several lanes share a channel and, if they are long, a ring
    copies their inputs ahead. A ring needs a length that 8 divides, channels that 64 divides, and
    inputs that can be copied (`copies`). Lanes without a ring (`lanes`) keep no states for
    backward. Numbers of more than 16 bits are `wide`.
    """
    parts = 1
    while (
        2 * parts <= MOST_PARTS
        and states % (2 * parts) == 0
        and 2 * parts * batch * channels <= 32 * WARPS * processors
    ):
        parts *= 2
    whole = copies and states in (8, 16) and channels % 64 == length % 8 == 0
    if whole and wide and length >= SHORT:  # for 16 bits, more than two lanes do not pay
        most = min(parts, states // 2)  # a lane reads two states at a time
        filled = most * batch * channels >= 32 * RING_WARPS * processors
        if most > 2 and (length <= ALONE or filled):
            return plan_ring(length, most, wide)
    if lanes and parts > 1 and 1 < length <= ALONE:
        warps = max(1, parts // 4)  # reads whole sectors of memory, 8 channels, at every step
        block = parts if parts >= 8 else 2 * parts
        if length >= 64 and parts >= 8:  # longer runs of loads pay
            warps, block = 2 * warps, 2 * parts
        return Plan(length, 32 * warps, block, None, True, parts=parts, warps=warps)
    warps = batch * ceil_div(channels, 64)
    K = 1 if length == 1 or states > 32 else 2
    if states > 16 or (warps < 4 * processors and length < 128):
        return Plan(length, 32, K, None, True)
    if warps >= 6 * processors or length < 128:
        return Plan(length, 64, K, 128, False)
    if whole and 2 * batch * channels >= 32 * RING_WARPS * processors:
        return plan_ring(length, 2, wide)
    # Four waves of programs, 16 per multiprocessor, or fewer if chunks would be too short.
    chunk = ceil_div(length * warps, 64 * processors)
    if chunk <= 32:  # with few programs each has registers to load more at once
        return Plan(32, 64, 4, None, True)
    # For 16 bits, twelve programs of 168 registers load more at once than sixteen of 128.
    K, registers = (K, 128) if wide else (4, 168)
    return Plan(ceil_div(chunk, 64) * 64, 64, K, registers, False)


def plan_packed(sequences: int, length: int, channels: int, states: int, processors: int) -> Plan:
    """Returns how `forward` runs packed sequences: each is one chunk, whatever its length."""
    K = 1 if states > 32 else 2
    if states > 16 or sequences * ceil_div(channels, 64) < 4 * processors:
        return Plan(length, 32, K, None, True)
    return Plan(length, 64, K, 128, False)


def plan_ring(length: int, parts: int, wide: bool) -> Plan:
    """Returns how a ring runs over a multiple of 8 steps, with this many lanes per channel."""
    K = RING_STEPS[parts]
    while length % K:  # without bit operations, because a trace may not know the length
        K //= 2
    # Without a limit the compiler takes few more registers, but an order that waits longer.
    registers = None if parts > 2 else 96 if wide else 72
    return Plan(length, 128, K, registers, True, parts=parts, warps=4, ring=4)


def plan_summary(length: int, states: int, adjoint: bool, few: bool, wide: bool) -> Plan:
    """Returns how chunks, few or many, are summarised, with or without the adjoint."""
    if states > 16:
        return Plan(length, 32, 1, None, False)
    if adjoint:
        return Plan(length, 32, 4, 128, False)
    if few:
        return Plan(length, 64, 4, None, True)
    return Plan(length, 64, 2 if wide else 4, 128, wide)


def plan_pull(length: int, states: int, wide: bool) -> Plan:
    """Returns how the pull of spans of this many steps is found."""
    if states > 16:
        return Plan(length, 32, 1, None, False)
    return Plan(length, 64, 2 if wide else 4, 128, False)


def plan_backward(batch: int, length: int, channels: int, states: int, processors: int) -> Plan:
    """Returns how `backward` runs: chunks side by side unless the rows alone fill the device."""
    # Twelve programs of 168 registers fit a multiprocessor, otherwise eight. Twice as many even out
    # the end, but a scratch, needed without shared memory, should stay in the cache.
    if states in (8, 16):
        programs = 24 * processors
        split = batch * ceil_div(channels, 16) < 2 * programs
        chunk = min(length, 512 // states)
        return Plan(chunk, 32, 2, 168, True, programs=programs, parts=2, split=split)
    K = 1 if length == 1 or states > 32 else 2
    programs = (16 if length <= 64 else 8) * processors
    split = batch * ceil_div(channels, 32) < 2 * programs
    return Plan(min(length, 64), 32, K, None, True, programs=programs, split=split)


def plan_span(batch: int, chunks: int, groups: int) -> int:
    """Returns how many chunks form a span, with this many programs per block of channels."""
    span = 1
    while 2 * span <= min(SPAN, chunks):
        if batch * ceil_div(chunks, 2 * span) < ROUNDS * groups:
            break
        span *= 2
    return span
