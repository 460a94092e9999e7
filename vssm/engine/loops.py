"""Programs that generate step by step: recorded blocks of steps of a loop.

A loop carries a tree of tensors from step to step, and reads noise and data from a feed. Blocks of
16, 4 and 1 steps are recorded, when they are first needed.

A transformer's step writes keys and values into a cache with room for R steps, since a recording
has fixed shapes. A mask hides the steps after the position, which only the device knows.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.engine.programs import Recorder
from vssm.engine.trees import copy, duplicate, join_steps, overwrite
from vssm.nn import AttentionBlock, Stack, State

_BLOCKS = (16, 4, 1)  # steps in one recording

Step: TypeAlias = Callable[[State, State], tuple[State, State]]
"""Maps the carried tree and the feed of one step to the carried tree after it and the outputs."""


class Loop:
    """Records some steps of a loop.

    Arguments:
        recorder: The recorder.
        step: One step of the loop; feed and outputs are (B, 1, ...).
        carried: The carried tree, with the right shapes; its values are not used.
    """

    def __init__(self, recorder: Recorder, step: Step, carried: State) -> None:
        self._recorder, self._step = recorder, step
        with torch.inference_mode(False):
            self._carried = carried.map(
                lambda t: torch.zeros_like(t, memory_format=torch.contiguous_format)
            )
        self._blocks: dict[int, _Block] = {}

    def __call__(self, carried: State, feed: State) -> tuple[State, State]:
        """Runs over all steps of the feed.

        Arguments:
            carried: The tree before the first step; a missing part starts from zero.
            feed: What the steps read, each (B, T, ...).

        Returns:
            The outputs of all steps, each (B, T, ...), and the tree after the last step.
        """
        overwrite(self._carried, carried)
        steps, done = list(feed.leaves()), 0
        length, made = steps[0].shape[1], None
        while done < length:
            size = next(size for size in _BLOCKS if size <= length - done)
            if size not in self._blocks:
                before = self._carried.map(torch.clone)
                self._blocks[size] = _Block(self._recorder, self._step, self._carried, feed, size)
                overwrite(self._carried, before)  # recording has run the steps
            now = slice(done, done + size)
            new = self._blocks[size]([tensor[:, now] for tensor in steps])
            if made is None:
                made = new.map(lambda t: t.new_empty(len(t), length, *t.shape[2:]))
            copy([tensor[:, now] for tensor in made.leaves()], new.leaves())
            done += size
        assert made is not None
        return made, duplicate(self._carried, carried.position + length)


class _Block:
    """A recording of some steps, which overwrites the carried tree."""

    def __init__(
        self, recorder: Recorder, step: Step, carried: State, feed: State, size: int
    ) -> None:
        with torch.inference_mode(False):
            static = feed.map(lambda t: t[:, :size].clone(memory_format=torch.contiguous_format))
        outputs: list[State] = []

        def run() -> None:
            now = carried
            outputs.clear()
            for t in range(size):
                now, made = step(now, static.map(lambda tensor, t=t: tensor[:, t : t + 1]))
                outputs.append(made)
            copy(carried.leaves(), now.leaves())
            outputs[:] = [join_steps(outputs)]

        self._static, self._outputs = list(static.leaves()), outputs
        self._replay = recorder.record(run)

    def __call__(self, feed: list[Tensor]) -> State:
        copy(self._static, feed)
        self._replay()
        return self._outputs[0]


class CachedLoop(Loop):
    """Records some steps of a loop over key-value caches of fixed size.

    Arguments:
        recorder: The recorder.
        step: As for `Loop`; it writes into the caches.
        carried: As for `Loop`. A call also takes and returns `stack`, the keys and values so far.
        caches: For every block its keys and values, (2, B, heads, R, size).
    """

    def __init__(
        self, recorder: Recorder, step: Step, carried: State, caches: list[Tensor]
    ) -> None:
        super().__init__(recorder, step, carried)
        self._caches = caches

    def __call__(self, carried: State, feed: State) -> tuple[State, State]:
        """Runs over all steps of the feed, as `Loop` does."""
        torch._foreach_zero_(self._caches)  # the mask cannot hide a NaN
        if "stack" in carried.children:
            for i, cache in enumerate(self._caches):
                known = carried.child("stack").child(str(i))
                for static, name in zip(cache, ("k", "v"), strict=True):
                    static[:, :, : known.position] = known[name][:, :, : known.position]
        made, after = super().__call__(carried, feed)
        end = after.position
        blocks: dict[str, Tensor | State] = {}
        for i, cache in enumerate(self._caches):
            k, v = cache[:, :, :, :end].clone(memory_format=torch.contiguous_format)
            blocks[str(i)] = State({"k": k, "v": v}, end)
        return made, State({**after.children, "stack": State(blocks, end)}, end)


def decode_step(stack: Stack, e: Tensor, caches: list[Tensor], at: Tensor, codes: Tensor) -> Tensor:
    """Runs one step of a transformer's stack at a position that only the device knows.

    Arguments:
        stack: The stack.
        e: The embedded input of the step, (B, 1, width).
        caches: For every block its keys and values, (2, B, heads, R, size), written in place.
        at: The position p, (1,).
        codes: The codes of the positions 0 to R - 1, (R, width).

    Returns:
        The output of the stack, (B, 1, outputs).
    """
    hidden = torch.arange(len(codes), device=e.device) > at
    mask = e.new_zeros(len(codes)).masked_fill_(hidden, -torch.inf)
    e = e + codes.index_select(0, at)
    for block, cache in zip(stack.blocks, caches, strict=True):
        assert isinstance(block, AttentionBlock)
        e = _attend(block, e, cache, at, mask)
    return stack.out(stack.norm(e))


def _attend(block: AttentionBlock, x: Tensor, cache: Tensor, at: Tensor, mask: Tensor) -> Tensor:
    """Runs one step of a block, x (B, 1, width).

    The mask (R,) is 0 up to the position and -inf after it.
    """
    batch, _, width = x.shape
    _, _, heads, room, size = cache.shape
    qkv = block.c_attn(block.ln_1(x)).view(batch, 3, heads, size).movedim(1, 0)
    cache.index_copy_(3, at, qkv[1:, :, :, None])
    q, (k, v) = qkv[0], cache
    if q.dtype.itemsize < 4:  # its kernel keeps the scores in float32
        mask = mask.expand(1, 1, 1, room)
        y = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask)
    else:
        # For one query the kernel would compute sixty-four, and give each head to one processor.
        rows = batch * heads
        q, k, v = q.reshape(rows, 1, size), k.view(rows, room, size), v.view(rows, room, size)
        mask = mask.expand(rows, 1, room)
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=size**-0.5)
        parts = _num_parts(rows, room)
        y = scores.softmax(-1).view(rows * parts, 1, -1) @ v.view(rows * parts, -1, size)
        y = y.view(rows, parts, size).sum(1) if parts > 1 else y
    return block.finish(x, y.reshape(batch, 1, width))


def _num_parts(rows: int, room: int) -> int:
    """Returns into how many parts to cut a sum over the room, so that few rows fill a device."""
    parts = 1
    while parts * rows < 256 and room % (2 * parts) == 0 and room // (2 * parts) >= 64:
        parts *= 2
    return parts
