"""Makes large calls in pieces, so that the memory of a pass does not grow with the call.

Parallel generation holds all steps of all rows in memory: a thousand sequences of four thousand
steps would need 240 GB at the paper's scale, where a GPU is as busy with 15 GB. So a vssm makes
long sequences in chunks, and a call that is still too large is made in slabs of rows. A transformer
that generates step by step needs several times the memory of its keys and values. Results change by
rounding only.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vssm.models import Autoregressive, Model, Variational, first_weight
from vssm.nn import State
from vssm.sampling.request import Noise, Options

__all__ = ["divide", "in_slabs", "one_row", "rows_of_slab"]

_SHARE = 8  # a slab takes about this part of a GPU's memory: smaller ones are slower
_CPU_BYTES = 2**32  # of a slab on a CPU
_COPIES = 3.75  # of its keys and values that a recorded transformer takes, as measured on an H200
_USABLE = 0.9  # of a GPU's memory
_LOGITS = 3  # copies of the latents' logits of a pass
SHORTEST = 256  # steps of a chunk: with fewer, rows are divided

_Rows = Tensor | State | Noise | None


def divide(
    model: Model, prompt: Tensor | None, state: State | None, num: int, options: Options
) -> tuple[Options, int]:
    """Returns options whose chunks fit the memory, and how many rows to make at a time."""
    known = 0 if prompt is None else prompt.shape[1]
    if isinstance(model, Autoregressive):
        before = known + (0 if state is None else state.position)
        return options, rows_of_cache(model, num, before + options.length)
    reads = prompt is not None or state is not None
    if model.config.kind == "vssm" and not options.recondition and isinstance(model, Variational):
        # Short chunks are as fast as long ones here, and change nothing.
        weight = first_weight(model)
        taken = num * bytes_of_step(model, weight, reads)
        if not reads:  # the logits of one row serve all rows
            taken += _LOGITS * model.config.latents * model.config.classes * weight.itemsize
        most = max(bytes_of_slab(weight.device) // taken - known, SHORTEST)
        options = options._replace(chunk=min(options.chunk, most))
    steps = known + min(options.chunk, options.length)
    return options, rows_of_slab(model, num, steps, reads or options.recondition)


def rows_of_slab(model: Model, num: int, steps: int, reads: bool) -> int:
    """Returns how many of `num` rows to make at a time, in slabs of equal size.

    Arguments:
        model: The model.
        num: The number of rows.
        steps: The steps of a row that are in memory at once.
        reads: Whether every row has latents of its own, as after a prompt or a state.
    """
    weight = first_weight(model)
    most = bytes_of_slab(weight.device) // max(1, steps * bytes_of_step(model, weight, reads))
    return -(-num // -(-num // max(most, 1)))


def rows_of_cache(model: Model, num: int, steps: int) -> int:
    """Returns how many of `num` rows to make at a time, so that keys and values of `steps` fit."""
    weight, config = first_weight(model), model.config
    usable = _USABLE * bytes_of_device(weight.device)
    if config.kind != "transformer" or not usable:
        return num
    row = 2 * config.width * config.layers * steps * weight.itemsize
    room = usable - num * row  # beside the state of all rows
    if num * row * _COPIES <= usable or room < row * _COPIES:
        return num
    return -(-num // -(-num // int(room / (row * _COPIES))))


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


def bytes_of_slab(device: torch.device) -> int:
    """Returns how much memory a slab may take."""
    return bytes_of_device(device) // _SHARE or _CPU_BYTES


def bytes_of_device(device: torch.device) -> int:
    """Returns the memory of a GPU, and 0 of a CPU, whose programs share it."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def bytes_of_step(model: Model, weight: Tensor, reads: bool) -> int:
    """Returns about how many bytes a pass takes for a row and step, as measured on an H200.

    Products and scan of one block are in memory at a time, beside logits of latents and head. Keys
    and values of all blocks of attention stay, with the queries, which share their memory.
    """
    config = model.config
    numbers = config.width * (5 * config.expand + 5) + 4 * model.head.size
    if config.kind in ("transformer", "tvae"):  # a call that reads has two stacks of it
        numbers += 3 * config.width * config.layers * (2 if reads else 1)
    if reads:
        numbers += _LOGITS * config.latents * config.classes
    return numbers * weight.itemsize


def _part(given: _Rows, rows: slice) -> _Rows:
    if isinstance(given, Noise):
        assert given.start is None, "only recordings have a start, and slabs are not recorded"
        return Noise(given.seed[rows], given.row[rows])
    if isinstance(given, State):
        return given.map(lambda tensor: tensor[rows])
    return given if given is None or len(given) == 1 else given[rows]


def _room(made: State, num: int) -> State:
    """Returns a tree like that of a slab with room for all rows; shared rows stay shared."""
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
    """Copies what a slab made to its rows."""
    for name, child in whole.children.items():
        if isinstance(child, State):
            _put(child, made.child(name), rows)
        elif one_row(child) is child:
            child[rows] = made[name]


def one_row(tensor: Tensor) -> Tensor:
    """Returns the row that a tensor repeats without copies, or the tensor itself."""
    shared = tensor.ndim and tensor.shape[0] > 1 and tensor.stride(0) == 0
    return tensor[:1] if shared else tensor
