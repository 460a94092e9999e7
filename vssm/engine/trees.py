"""Trees of static tensors, and copies of them in few launches.

A tree is a `State`, whose tensors need not be batch first here.
"""

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from vssm.models import AnyPart, Model
from vssm.nn import State
from vssm.sampling.slabs import one_row


def compact(tree: State) -> State:
    """Returns a tree without gaps in memory; a row that all rows share stays one row."""
    return tree.map(lambda tensor: one_row(tensor).contiguous().expand(tensor.shape))


def duplicate(tree: State, position: int | None = None) -> State:
    """Returns a copy of a compact tree, all of whose parts are at a position if one is given.

    Example:
        >>> tree = State({"x": torch.ones(2), "state": State({"h": torch.zeros(3)})})
        >>> copied = duplicate(tree, position=5)
        >>> copied["x"], copied.child("state").position
        (tensor([1., 1.]), 5)
    """
    rows = list(map(one_row, tree.leaves()))
    copies = list(map(torch.empty_like, rows))
    copy(copies, rows)
    left = iter(copies)
    made = tree.map(lambda tensor: next(left).expand(tensor.shape))
    return made if position is None else place(made, position)


def describe(state: State) -> Hashable:
    """Returns the facts that a recording fixes of its inputs: names, shapes, dtypes, positions."""
    tensors, positions = state.flatten()
    shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    return *positions.items(), *shapes


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


def overwrite(tree: State, given: State) -> None:
    """Copies the tensors of another tree into a tree, by name; tensors it lacks become zero.

    Example:
        >>> tree = State({"a": torch.ones(1), "b": torch.ones(1)})
        >>> overwrite(tree, State({"b": torch.full((1,), 2.0)}))
        >>> tree["a"], tree["b"]
        (tensor([0.]), tensor([2.]))
    """
    targets, sources = tree.flatten()[0], given.flatten()[0]
    for name in targets.keys() - sources.keys():
        targets[name].zero_()
    known = [name for name in targets if name in sources]
    copy([targets[name] for name in known], [sources[name] for name in known])


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


def is_relative(model: Model) -> bool:
    """Says whether a recording computes the same at every position.

    It does not for attention, whose cache has a step for each position, nor for the windows of a
    model with known="any".
    """
    return model.config.block != "attention" and not isinstance(model, AnyPart)


def as_input(model: Model, state: State) -> State:
    """Returns a state as input of a recording: without its noise, and at position 0 if it can."""
    kept = {name: child for name, child in state.children.items() if name not in ("seed", "row")}
    return place(State(kept), 0) if is_relative(model) else State(kept, state.position)
