"""Trees of tensors that stay where they are, and copies of them that take few calls.

Trees are `State`s, whose tensors need not be batch first here.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor

from vssm.nn import State

__all__ = [
    "Gathered",
    "Later",
    "copy",
    "describe",
    "join",
    "leaves_like",
    "leaves_of",
    "row_of",
    "zero",
]

# Bytes from which a tensor has memory of its own: to gather it would take longer than to launch another copy,
# and whoever keeps a small result must not keep a large one.
_LARGE = 1 << 20
_ALIGNED = 256  # bytes, as of memory that is allocated: how products are made depends on it
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Gathered:
    """Holds a tree of tensors that stay where they are, of which `own` gives copies in a few launches.

    All tensors at the top of a copy share a piece of memory, and so do those of each tree there: whoever
    keeps x keeps z, but not the state.

    Arguments:
        tree: The tree.
        shared: Addresses of tensors that never change: these are handed out themselves.

    Example:
        >>> gathered = Gathered(State({"x": torch.ones(2), "z": torch.zeros(3), "state": State({})}))
        >>> own = gathered.own(position=5)
        >>> own["x"], own.child("state").position, len(gathered.pieces)
        (tensor([1., 1.]), 5, 1)
    """

    pieces: list[list[Tensor]]
    """What is copied side by side, for each piece of a copy: a tensor, or the words of several."""

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
        self._where: list[tuple] = [()] * len(
            rows
        )  # for every tensor its piece, type and layout there
        for group in groups.values():
            parts, starts = _side_by_side([rows[i] for i in group])
            for i, start in zip(group, starts, strict=True):
                stride = rows[i].expand_as(tensors[i]).stride()
                at = tensors[i].shape, stride, start // rows[i].itemsize
                self._where[i] = len(self.pieces), rows[i].dtype, at
            self.pieces.append(parts)
        self._rows = [row for row, at in zip(rows, self._where, strict=True) if at]
        self._tensors = [row.expand_as(tensor) for row, tensor in zip(rows, tensors, strict=True)]
        self._names = _numbered(tree, count())
        self._pieces_of = {  # for every tree at the top
            name: {at[0] for i in _flat(numbers) if (at := self._where[i])}
            for name, numbers in self._names.items()
            if not isinstance(numbers, int)
        }

    def own(self, position: int) -> State:
        """Copies the tree; all parts of the copy are at that position.

        Trees in it have their memory at once, their tensors when somebody asks for them.
        """
        # As words, several tensors take one launch: `copy` needs one for each dtype, and gives 65536 numbers
        # to a single block of threads, which is slow for the few tensors here.
        pieces = [torch.cat(parts) if len(parts) > 1 else parts[0].clone() for parts in self.pieces]
        children: _Children = {}
        for name, numbers in self._names.items():
            if isinstance(numbers, int):
                children[name] = self._tensor(numbers, pieces)
            else:  # holds the pieces that are its own only
                own = {piece: pieces[piece] for piece in self._pieces_of[name]}
                children[name] = Later(partial(self._children, numbers, own, position), position)
        return State(children, position)

    def leaves(self) -> Iterator[Tensor]:
        """Yields what is copied."""
        return iter(self._rows)

    def _tensor(self, number: int, pieces: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
        if not self._where[number]:
            return self._tensors[number]
        piece, dtype, layout = self._where[number]
        return pieces[piece].view(dtype).as_strided(*layout)

    def _children(
        self, names: "_Names", pieces: Mapping[int, Tensor], position: int
    ) -> "_Children":
        return {
            name: self._tensor(numbers, pieces)
            if isinstance(numbers, int)
            else State(self._children(numbers, pieces, position), position)
            for name, numbers in names.items()
        }


class Later(State):
    """A state whose children are made when they are asked for: most who generate look at x alone.

    From then on it is a `State` like any other.

    Arguments:
        make: Makes them, in the place of children.

    Example:
        >>> state = Later(lambda: {"h": torch.zeros(2)}, position=3)
        >>> state.position, state["h"] is state["h"], type(state).__name__
        (3, True, 'State')
    """

    __slots__ = ()

    def __init__(self, make: Callable[[], "_Children"], position: int = 0, owner: str = "") -> None:
        _place_of_children.__set__(self, make)
        for name, value in (("position", position), ("owner", owner)):
            object.__setattr__(self, name, value)

    @property
    def children(self) -> "_Children":  # pyright: ignore[reportIncompatibleVariableOverride]
        made: Any = _place_of_children.__get__(self)
        if not isinstance(made, dict):
            made = made()
            _place_of_children.__set__(self, made)
            object.__setattr__(self, "__class__", State)
        return made

    def __reduce__(self) -> tuple:
        return State, (self.children, self.position, self.owner)


_Children = dict[str, Tensor | State]
_place_of_children: Any = State.__dict__["children"]
_Names = dict[str, "int | _Names"]  # of a tree, with the numbers of its tensors


def _numbered(tree: State, numbers: Iterator[int]) -> _Names:
    return {
        name: _numbered(child, numbers) if isinstance(child, State) else next(numbers)
        for name, child in tree.children.items()
    }


def _flat(names: _Names) -> Iterator[int]:
    for numbers in names.values():
        if isinstance(numbers, int):
            yield numbers
        else:
            yield from _flat(numbers)


def _side_by_side(rows: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Returns the parts that make dense tensors one piece of memory, and the byte where each starts there."""
    if len(rows) == 1:
        return rows, [0]
    # `torch.cat` copies large words at once, and is slow where a part is empty.
    sizes = [size for row in rows for size in (row.nbytes, row.storage_offset() * row.itemsize)]
    word = next(word for word in _WORDS if not any(size % word.itemsize for size in sizes))
    gap = torch.empty(_ALIGNED // word.itemsize, dtype=word, device=rows[0].device)
    pairs = [
        (row.reshape(-1).view(word), gap[: -row.nbytes % _ALIGNED // word.itemsize]) for row in rows
    ]
    starts = accumulate(
        (word.itemsize * (len(data) + len(after)) for data, after in pairs[:-1]), initial=0
    )
    return [part for pair in pairs for part in pair if len(part)] or [gap[:0]], list(starts)


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


def leaves_like(tree: Tensor | State, other: Tensor | State) -> list[Tensor]:
    """Returns all tensors of another tree with the names of a tree, in the order of the tree.

    Example:
        >>> a, b = torch.zeros(1), torch.ones(1)
        >>> leaves_like(State({"a": a, "b": b}), State({"b": b, "a": a}))
        [tensor([0.]), tensor([1.])]
    """
    if isinstance(tree, Tensor) or isinstance(other, Tensor):
        return leaves_of(other)
    return [
        leaf
        for name, child in tree.children.items()
        for leaf in leaves_like(child, other.children[name])
    ]


def row_of(tensor: Tensor) -> Tensor:
    """Returns the one row of a tensor that shows it many times."""
    return tensor[:1] if tensor.ndim and tensor.shape[0] > 1 and tensor.stride(0) == 0 else tensor


def zero(tensors: Iterable[Tensor]) -> None:
    """Fills many tensors with zeros, those of one dtype in one launch."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for group in groups.values():
        torch._foreach_zero_(group)


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
