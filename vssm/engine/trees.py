"""Trees of static tensors, and copies of them in few launches.

A tree is a `State`, whose tensors need not be batch first here.
"""

from collections.abc import Hashable, Iterable, Iterator
from itertools import accumulate

import torch
from torch import Tensor

from vssm.nn import State
from vssm.sampling.slabs import one_row

__all__ = ["OutputTree", "copy", "describe", "join_steps", "leaves_like", "place", "zero"]

# Bytes from which a tensor gets memory of its own. To gather a larger tensor takes longer than
# another launch, and a caller who keeps a small result must not keep a large one alive.
_LARGE = 1 << 20
_ALIGNED = 256  # bytes, as in allocated memory: how a product is computed depends on it
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class OutputTree:
    """Holds a tree of static tensors; `copy` returns a copy of it in a few launches.

    In a copy, the tensors at the top share a piece of memory, and so do the tensors of each
    subtree: a caller who keeps x keeps z alive, but not the state.

    Example:
        >>> tree = OutputTree(State({"x": torch.ones(2), "z": torch.zeros(3), "state": State({})}))
        >>> copied = tree.copy(position=5)
        >>> copied["x"], copied.child("state").position
        (tensor([1., 1.]), 5)
    """

    def __init__(self, tree: State) -> None:
        self.tree = tree
        tensors = list(tree.leaves())
        self.rows: list[Tensor] = [one_row(tensor).contiguous() for tensor in tensors]
        tops = [
            name if isinstance(child, State) else ""
            for name, child in tree.children.items()
            for _ in (child.leaves() if isinstance(child, State) else [child])
        ]
        groups: dict[Hashable, list[int]] = {}
        for i, row in enumerate(self.rows):
            groups.setdefault(i if row.nbytes >= _LARGE else tops[i], []).append(i)
        self._pieces: list[
            list[Tensor]
        ] = []  # the tensors, or their words, that a piece is made of
        self._places: list[tuple] = [()] * len(tensors)  # piece, dtype and layout of every tensor
        for group in groups.values():
            parts, starts = _side_by_side([self.rows[i] for i in group])
            for i, start in zip(group, starts, strict=True):
                stride = self.rows[i].expand_as(tensors[i]).stride()
                layout = tensors[i].shape, stride, start // self.rows[i].itemsize
                self._places[i] = len(self._pieces), self.rows[i].dtype, layout
            self._pieces.append(parts)

    def copy(self, position: int) -> State:
        """Returns a copy of the tree, all of whose parts are at that position."""
        # One launch copies several tensors as words; `_foreach_copy_` needs one for each dtype.
        pieces = [torch.cat(some) if len(some) > 1 else some[0].clone() for some in self._pieces]
        places = iter(self._places)

        def build(tree: State) -> State:
            children: dict[str, Tensor | State] = {}
            for name, child in tree.children.items():
                if isinstance(child, State):
                    children[name] = build(child)
                else:
                    piece, dtype, layout = next(places)
                    children[name] = pieces[piece].view(dtype).as_strided(*layout)
            return State(children, position)

        return build(self.tree)

    def overwrite(self, tree: State) -> None:
        """Copies another tree of the same form into this one."""
        copy(self.rows, map(one_row, tree.leaves()))


def _side_by_side(rows: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Returns the parts that make dense tensors one piece of memory, and the byte where each
    starts.
    """
    if len(rows) == 1:
        return rows, [0]
    # `torch.cat` copies large words at once, and is slow where a part is empty.
    sizes = [size for row in rows for size in (row.nbytes, row.storage_offset() * row.itemsize)]
    word = next(word for word in _WORDS if not any(size % word.itemsize for size in sizes))
    gap = torch.empty(_ALIGNED // word.itemsize, dtype=word, device=rows[0].device)
    pairs = [
        (row.reshape(-1).view(word), gap[: -row.nbytes % _ALIGNED // word.itemsize]) for row in rows
    ]
    lengths = (word.itemsize * (len(data) + len(after)) for data, after in pairs[:-1])
    parts = [part for pair in pairs for part in pair if len(part)]
    return parts or [gap[:0]], list(accumulate(lengths, initial=0))


def describe(state: State) -> Hashable:
    """Returns what a recording fixes of its inputs: names, shapes, dtypes and positions."""
    children = (
        (name, describe(child) if isinstance(child, State) else (child.shape, child.dtype))
        for name, child in state.children.items()
    )
    return state.position, *children


def place(state: State, position: int) -> State:
    """Returns a state with all of its parts at another position."""
    children = {
        name: place(child, position) if isinstance(child, State) else child
        for name, child in state.children.items()
    }
    return State(children, position, state.owner)


def join_steps(parts: list[State]) -> State:
    """Joins the outputs of consecutive steps."""
    if len(parts) == 1:
        return parts[0]
    return State({name: torch.cat([part[name] for part in parts], 1) for name in parts[0].children})


def leaves_like(tree: Tensor | State, other: Tensor | State) -> Iterator[Tensor]:
    """Yields the tensors of another tree with the names of a tree, in the order of the tree.

    Example:
        >>> a, b = torch.zeros(1), torch.ones(1)
        >>> list(leaves_like(State({"a": a, "b": b}), State({"b": b, "a": a})))
        [tensor([0.]), tensor([1.])]
    """
    if isinstance(tree, Tensor) or isinstance(other, Tensor):
        assert isinstance(other, Tensor)
        yield other
        return
    for name, child in tree.children.items():
        yield from leaves_like(child, other.children[name])


def zero(tensors: Iterable[Tensor]) -> None:
    """Fills many tensors with zeros, with one launch for each dtype."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for group in groups.values():
        torch._foreach_zero_(group)


def copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copies many tensors, with one launch for each dtype where their layout allows it."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            pair = groups.setdefault(target.dtype, ([], []))
            pair[0].append(target)
            pair[1].append(source)
    for into, out_of in groups.values():
        torch._foreach_copy_(into, out_of)
