"""Computes a large call in slabs of rows; `divide` and `rows_of_slab` say how many rows a slab has.

The results of all slabs are written into memory for all rows; rows that share memory stay shared.
"""

from collections.abc import Callable

from torch import Tensor

from vssm.nn import State
from vssm.noise import Noise

_Rows = Tensor | State | Noise | None


def in_slabs(make: Callable[..., State], rows: int, num: int, *inputs: _Rows) -> State:
    """Calls a function with some rows of its inputs at a time, and returns all rows.

    Arguments:
        make: Maps inputs of some rows to a tree of as many rows.
        rows: How many rows at a time.
        num: The number of all rows.
        inputs: The inputs of all rows; a tensor may be one row for all.
    """
    if rows >= num:
        return make(*inputs)
    whole = None
    for first in range(0, num, rows):
        some = slice(first, first + rows)
        made = make(*(_part(given, some) for given in inputs))
        whole = _room(made, num) if whole is None else whole
        _put(whole, made, some)
        del made  # states may be views of all that a pass made
    assert whole is not None
    return whole


def _part(given: _Rows, rows: slice) -> _Rows:
    if isinstance(given, Noise):
        assert given.start is None, "only recordings have a start, and slabs are not recorded"
        return Noise(given.seed[rows], given.row[rows])
    if isinstance(given, State):
        return given.map(lambda tensor: tensor[rows])
    return given if given is None or len(given) == 1 else given[rows]


def _room(made: State, num: int) -> State:
    """Returns a tree like the tree of a slab, with room for all rows; shared rows stay shared."""
    children: dict[str, Tensor | State] = {}
    for name, child in made.children.items():
        if isinstance(child, State):
            children[name] = _room(child, num)
        elif len(row := one_row(child)) < len(child):
            children[name] = row.clone().expand(num, *child.shape[1:])
        else:
            children[name] = child.new_empty(num, *child.shape[1:])
    return State(children, made.position, made.owner)


def _put(whole: State, made: State, rows: slice) -> None:
    """Copies the results of a slab to its rows."""
    for name, child in whole.children.items():
        if isinstance(child, State):
            _put(child, made.child(name), rows)
        elif one_row(child) is child:
            child[rows] = made[name]


def one_row(tensor: Tensor) -> Tensor:
    """Returns the row that a tensor repeats without copies, or the tensor itself."""
    shared = tensor.ndim and tensor.shape[0] > 1 and tensor.stride(0) == 0
    return tensor[:1] if shared else tensor
