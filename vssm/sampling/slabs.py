"""Large calls in pieces, so that the memory of a pass does not grow with the number of sequences.

All steps of all rows at once is what parallel generation takes its memory for: a thousand sequences of four
thousand steps would need some 240 GB at the paper's scale. A GPU is as busy with 15 GB of them. So a vssm
goes through long sequences in chunks of time, and what is still too much is made in slabs of rows. Neither
changes results but by rounding. Slabs of one size count as calls that repeat: the second is recorded.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from vssm.models import Model
from vssm.nn import State
from vssm.sampling.request import Noise, Options
from vssm.trees import row_of
from vssm.weights import first_weight

__all__ = ["fitting", "in_slabs"]

_SHARE = 8  # a slab takes about this part of a GPU's memory: smaller ones are slower
_CPU_BYTES = 2**32  # of a slab on a CPU
_SHORTEST = 256  # steps of a chunk: with fewer, rows are divided

_Rows = Tensor | State | Noise | None


def fitting(model: Model, options: Options, num: int, known: int, reads: bool) -> Options:
    """Returns options with chunks that fit a slab, of a model that makes them as fast as all steps at once.

    Arguments:
        model: The model.
        options: What is asked for.
        num: The number of rows.
        known: The steps of the prompt, which are in memory with the first chunk.
        reads: Whether there is a prompt or a state, so that every row has latents of its own.
    """
    if options.recondition or model.config.block != "mamba":  # chunks mean more, or take longer
        return options
    weight = first_weight(model)
    room = bytes_of_slab(weight.device) // (num * _bytes_of_step(model, weight, reads)) - known
    most = max(room, _SHORTEST)
    if min(options.chunk, options.length) <= most:
        return options
    count = max(1, min(-(-options.length // most), options.length // _SHORTEST))
    return options._replace(chunk=min(options.chunk, -(-options.length // count)))  # of one size


def in_slabs(
    make: Callable[..., State], model: Model, num: int, steps: int, reads: bool, *inputs: _Rows
) -> State:
    """Returns what `make` makes of all rows, from as many of them at a time as a slab may hold.

    Arguments:
        make: Maps inputs of some rows to a tree of as many rows.
        model: The model.
        num: The number of rows.
        steps: The steps of a row that are in memory at once.
        reads: Whether every row has latents of its own, as after a prompt or a state.
        inputs: What it is made of, each of all rows; a tensor may be one row for all.
    """
    weight = first_weight(model)
    most = max(1, bytes_of_slab(weight.device) // max(1, steps * _bytes_of_step(model, weight, reads)))
    if num <= most:
        return make(*inputs)
    size = -(-num // -(-num // most))  # of slabs that are as equal as can be
    whole = None
    for first in range(0, num, size):
        rows = slice(first, first + size)
        made = make(*(_part(given, rows) for given in inputs))
        whole = _room(made, num) if whole is None else whole
        _put(whole, made, rows)
        del made  # states may be views of all that a pass made
    assert whole is not None
    return whole


@lru_cache(maxsize=16)
def bytes_of_slab(device: torch.device) -> int:
    """Returns how much memory a slab may take."""
    if device.type != "cuda":
        return _CPU_BYTES
    return torch.cuda.get_device_properties(device).total_memory // _SHARE


def _bytes_of_step(model: Model, weight: Tensor, reads: bool) -> int:
    """Returns about what a pass takes for a row and step, as measured on an H200 from nothing.

    Products and scan of one block are in memory at a time; logits of latents and head beside them. Keys and
    values of all blocks of attention stay, and hold on to the queries, with which they were made.
    """
    config = model.config
    numbers = config.width * (5 * config.expand + 5) + 4 * model.head.size
    if config.block == "attention":  # who reads has such a stack beside the decoder
        numbers += 3 * config.width * config.layers * (2 if reads else 1)
    if reads:
        numbers += 3 * config.latents * config.classes
    return numbers * weight.itemsize


def _part(given: _Rows, rows: slice) -> _Rows:
    if isinstance(given, Noise):
        return Noise(given.seed[rows], given.row[rows])
    if isinstance(given, State):
        return given.map(lambda tensor: tensor[rows])
    return given if given is None or len(given) == 1 else given[rows]


def _room(made: State, num: int) -> State:
    """Returns a tree such as that of a slab with room for all rows; what all rows share stays shared."""
    children: dict[str, Tensor | State] = {}
    for name, child in made.children.items():
        if isinstance(child, State):
            children[name] = _room(child, num)
        elif len(row := row_of(child)) < len(child):
            children[name] = row.clone().expand(num, *child.shape[1:])
        elif name not in ("seed", "row"):  # which replays add to the state, and the caller to all
            children[name] = child.new_empty(num, *child.shape[1:])
    return State(children, made.position, made.owner)


def _put(whole: State, made: State, rows: slice) -> None:
    """Copies what a slab made to its rows."""
    for name, child in whole.children.items():
        if isinstance(child, State):
            _put(child, made.child(name), rows)
        elif row_of(child) is child:
            child[rows] = made[name]
