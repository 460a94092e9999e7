"""Many sequences in slabs, so that the memory of a pass does not grow with their number and length.

All steps of all rows at once is what parallel generation takes its memory for: a thousand sequences of four
thousand steps would need some 240 GB at width 1024. A GPU is as busy with 15 GB of them. A vssm goes through
time in chunks, and what is still too much is made in slabs of rows: neither changes results but by rounding.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from vssm.models import Model
from vssm.nn import State
from vssm.sampling.request import Noise, Options
from vssm.trees import row_of
from vssm.weights import first_weight

__all__ = ["fitting", "in_slabs"]

_BYTES = 60  # that a pass takes for each row, step and unit of the width of a model
_SHARE = 8  # a slab takes about this part of a GPU's memory: smaller ones are slower
_MOST_NUMBERS = 2**26  # rows times steps times width in a slab on a CPU
_SHORTEST = 256  # steps of a chunk: with fewer, rows are divided

_Rows = Tensor | State | Noise | None


def fitting(model: Model, options: Options, num: int, known: int) -> Options:
    """Returns options with chunks that fit a slab, of a model that makes them as fast as all steps at once.

    Arguments:
        model: The model.
        options: What is asked for.
        num: The number of rows.
        known: The steps of the prompt, which are in memory with the first chunk.
    """
    if options.recondition or model.config.block != "mamba":  # chunks mean more, or take longer
        return options
    room = most_numbers(first_weight(model).device) // (num * model.config.width) - known
    chunk = min(options.chunk, max(room, _SHORTEST))
    if chunk == options.chunk:
        return options
    return options._replace(chunk=-(-options.length // -(-options.length // chunk)))  # of one size


def in_slabs(make: Callable[..., State], model: Model, num: int, steps: int, *inputs: _Rows) -> State:
    """Returns what `make` makes of all rows, from as many of them at a time as a slab may hold.

    Arguments:
        make: Maps inputs of some rows to a tree of as many rows.
        model: The model.
        num: The number of rows.
        steps: The steps of a row that are in memory at once.
        inputs: What it is made of, each of all rows, or of one row for all.
    """
    most = max(1, most_numbers(first_weight(model).device) // max(1, steps * model.config.width))
    if num <= most:
        return make(*inputs)
    size = -(-num // -(-num // most))  # of slabs that are as equal as can be: they replay one recording
    slabs = [slice(first, first + size) for first in range(0, num, size)]
    return _joined([make(*(_part(given, rows) for given in inputs)) for rows in slabs], num)


@lru_cache(maxsize=16)
def most_numbers(device: torch.device) -> int:
    """Returns how many numbers of the width of a model a slab may have, over all rows and steps."""
    if device.type != "cuda":
        return _MOST_NUMBERS
    return torch.cuda.get_device_properties(device).total_memory // (_SHARE * _BYTES)


def _part(given: _Rows, rows: slice) -> _Rows:
    if isinstance(given, Noise):
        return Noise(given.seed[rows], given.row[rows])
    if isinstance(given, State):
        return given.map(lambda tensor: tensor[rows])
    return given if given is None or len(given) == 1 else given[rows]


def _joined(states: Sequence[State], num: int) -> State:
    """Joins what slabs made, but for what only some of them have: a replay adds the noise to its state."""
    first, *others = states
    children: dict[str, Tensor | State] = {}
    for name, child in first.children.items():
        if not all(name in other.children for other in others):
            continue
        if isinstance(child, State):
            children[name] = _joined([state.child(name) for state in states], num)
        elif len(row := row_of(child)) < len(child):  # the same for all rows
            children[name] = row.expand(num, *child.shape[1:])
        else:
            children[name] = torch.cat([state[name] for state in states])
    return State(children, first.position, first.owner)
