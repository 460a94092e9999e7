"""Trees of tensors that stay where they are, and copies of them that take few calls.

Trees are `State`s, whose tensors need not be batch first here.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator
from itertools import accumulate, count

import torch
from torch import Tensor

from vssm.nn import State

__all__ = ["Gathered", "copy", "describe", "join", "leaves_of", "row_of"]

# Bytes from which a tensor has memory of its own: to gather it would take longer than to launch another copy,
# and whoever keeps a small result must not keep a large one.
_LARGE = 1 << 20
_ALIGNED = 256  # bytes, as of memory that is allocated: how products are made depends on it


class Gathered:
    """Lays a tree out in a few pieces of memory that stay, of which `own` gives copies.

    All tensors at the top share a piece, and so do those of each tree there: whoever keeps x keeps z, but not
    the state.

    Arguments:
        tree: What is to be laid out; it is copied there.
        shared: Addresses of tensors that never change: these are handed out themselves.

    Example:
        >>> gathered = Gathered(State({"x": torch.ones(2), "z": torch.zeros(3), "state": State({})}))
        >>> own = gathered.own(position=5)
        >>> gathered.tree["x"].zero_(), own["x"], own.child("state").position, len(gathered.pieces)
        (tensor([0., 0.]), tensor([1., 1.]), 5, 1)
    """

    tree: State
    """The tree in its place."""
    pieces: list[Tensor]
    """All of its memory."""

    def __init__(self, tree: State, shared: Collection[int] = ()) -> None:
        tensors = list(tree.leaves())
        rows = [row_of(tensor).contiguous() for tensor in tensors]
        tops = [
            name if isinstance(child, State) else ""
            for name, child in tree.children.items()
            for _ in leaves_of(child)
        ]
        groups: dict[Hashable, list[int]] = {}
        for i, row in enumerate(rows):
            if row.data_ptr() not in shared:
                groups.setdefault(i if row.nbytes >= _LARGE else tops[i], []).append(i)
        self.pieces = []
        self._read_as: list[tuple[int, torch.dtype]] = []  # the pieces, and the types of the tensors in them
        self._where: list[tuple] = [()] * len(rows)  # for every tensor the item of `_read_as`, and its layout
        for group in groups.values():
            piece, views = _side_by_side([rows[i] for i in group])
            for i, view in zip(group, views, strict=True):
                rows[i], read_as = view, (len(self.pieces), view.dtype)
                if read_as not in self._read_as:
                    self._read_as.append(read_as)
                stride = view.expand_as(tensors[i]).stride()
                offset = view.storage_offset() - piece.storage_offset()
                self._where[i] = self._read_as.index(read_as), tensors[i].shape, stride, offset
            self.pieces.append(piece)
        self._tensors = [row.expand_as(tensor) for row, tensor in zip(rows, tensors, strict=True)]
        self._nodes: list[list[tuple[str, int]]] = []  # children by number; the last is the root
        self._number(tree, count())
        self.tree = self._built(self._tensors, tree.position)

    def own(self, position: int) -> State:
        """Copies the tree; all parts of the copy are at that position."""
        pieces = [piece.clone() for piece in self.pieces]
        read_as = [pieces[piece].view(dtype) for piece, dtype in self._read_as]
        pairs = zip(self._where, self._tensors, strict=True)
        tensors = [read_as[at[0]].as_strided(*at[1:]) if at else shared for at, shared in pairs]
        return self._built(tensors, position)

    def leaves(self) -> Iterator[Tensor]:
        """Yields the pieces."""
        return iter(self.pieces)

    def _number(self, tree: State, numbers: Iterator[int]) -> int:
        children = [
            (name, self._number(child, numbers) if isinstance(child, State) else next(numbers))
            for name, child in tree.children.items()
        ]
        self._nodes.append(children)
        return len(self._tensors) + len(self._nodes) - 1

    def _built(self, tensors: list[Tensor], position: int) -> State:
        made: list[Tensor | State] = [*tensors]
        for children in self._nodes:
            made.append(State({name: made[number] for name, number in children}, position))
        root = made[-1]
        assert isinstance(root, State)
        return root


def _side_by_side(rows: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copies dense tensors into one piece of memory; one that is alone stays where it is.

    They are joined as bytes, in one launch: `copy` needs one for each dtype, and gives 65536 numbers to a
    single block of threads, which is slow for the few tensors here.
    """
    if len(rows) == 1:
        return rows[0], rows
    gap = torch.empty(_ALIGNED, dtype=torch.uint8, device=rows[0].device)
    parts = [(row.reshape(-1).view(torch.uint8), gap[: -row.nbytes % _ALIGNED]) for row in rows]
    piece = torch.cat([part for pair in parts for part in pair])
    starts = accumulate((len(data) + len(after) for data, after in parts), initial=0)
    pairs = zip(starts, rows, strict=False)
    return piece, [piece[at : at + row.nbytes].view(row.dtype).view(row.shape) for at, row in pairs]


def describe(state: State) -> Hashable:
    """Returns what a recording fixes of its inputs: names, shapes, dtypes and positions."""
    children = (
        (name, describe(child) if isinstance(child, State) else (child.shape, child.dtype))
        for name, child in state.children.items()
    )
    return state.position, *children


def join(parts: list[State]) -> State:
    """Joins the outputs of consecutive steps."""
    return State({name: torch.cat([part[name] for part in parts], 1) for name in parts[0].children})


def leaves_of(child: Tensor | State) -> list[Tensor]:
    """Returns all tensors of a tree, or the tensor."""
    return [child] if isinstance(child, Tensor) else list(child.leaves())


def row_of(tensor: Tensor) -> Tensor:
    """Returns the one row of a tensor that shows it many times."""
    return tensor[:1] if tensor.ndim and tensor.shape[0] > 1 and tensor.stride(0) == 0 else tensor


def copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copies many tensors: those of one dtype in one launch where their layout allows."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            pair = groups.setdefault(target.dtype, ([], []))
            pair[0].append(target)
            pair[1].append(source)
    for into, out_of in groups.values():
        torch._foreach_copy_(into, out_of)
