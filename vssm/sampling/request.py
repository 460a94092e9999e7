"""Requests: the arguments of `generate` and `observe`, checked once, and the memory they may take.

A request holds the prompt, the state to continue from, the noise of every row, and the options. The
algorithms of `vssm.sampling` and the engine take it as it is.

Parallel generation holds all steps of all rows in memory: at the paper's scale, a thousand
sequences of four thousand steps would need 240 GB, although 15 GB keep a GPU just as busy. So a
vssm generates long sequences in chunks, and a call that is still too large is computed in slabs of
rows. A transformer that generates step by step needs several times the memory of its keys and
values. Results change only by rounding.
"""

import math
import operator
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vssm.checks import (
    check_choice,
    check_flag,
    check_sequence,
    shown,
    whole_number,
    whole_numbers,
)
from vssm.models import AnyPart, Autoregressive, Ladder, Model, Variational, first_weight
from vssm.nn import State
from vssm.noise import Noise
from vssm.sampling.resuming import check_reads, check_state, with_rows

SHORTEST = 256  # steps of a chunk: with fewer, rows are divided
_SHARE = 8  # a slab takes about this part of a GPU's memory: smaller ones are slower
_CPU_BYTES = 2**32  # of a slab on a CPU
_COPIES = 3.75  # of its keys and values that a recorded transformer takes, as measured on an H200
_USABLE = 0.9  # of a GPU's memory
_LOGITS = 3  # copies of the latents' logits of a pass


class Options(NamedTuple):
    """The options of `generate`, checked."""

    length: int
    chunk: int
    recondition: bool
    passes: int
    temperature: float
    sample: bool
    """Whether x is a sample of the head rather than its mean."""
    cache: bool = True


class Request(NamedTuple):
    """A checked call of `generate`."""

    prompt: Tensor | None
    state: State | None
    """The state to go on from, at a position above 0."""
    source: Noise
    options: Options


Result = tuple[Tensor, Tensor | None, State | None]
"""x, z and the state after them."""


def check_request(
    model: Model,
    num: int | None,
    length: int,
    prompt: Tensor | None,
    state: State | None,
    seed: int | Tensor | None,
    rows: Sequence[int] | Tensor | None,
    *dials: Any,  # noqa: ANN401
) -> Request:
    """Checks the arguments of `generate`, of the same names; the dials are those of `Options`."""
    options = _check_options(model, length, *dials)
    weight = first_weight(model)
    if prompt is not None:
        prompt = check_sequence(model, prompt, "prompt", steps=0)
        prompt = prompt if model.head.tokens else prompt.to(weight.dtype)
    if state is not None:
        state = check_state(model, state, weight)
    num = _check_num(num, prompt, state)
    _check_room(model, num, options.length, weight.device)
    if state is not None:
        state = with_rows(model, state, num)
        prompt = None if prompt is None else prompt.expand(num, *prompt.shape[1:])
    source = check_noise(num, seed, rows, state, weight.device)
    if prompt is not None and prompt.shape[1] == 0:
        prompt = None
    if state is not None:
        if not options.cache:
            raise ValueError(
                "cache=False recomputes from the first step and cannot use a state; use a prompt"
            )
        if prompt is not None:
            check_reads(state, "prompt cannot follow this state")
        if options.recondition:
            name = "recondition=True" if options.passes == 1 else f"passes={options.passes}"
            check_reads(state, f"{name} cannot start from this state")
    before = state if state is not None and state.position else None
    return Request(prompt, before, source, options)


def check_reading(
    model: Model,
    x: Tensor,
    state: State | None,
    seed: int | Tensor | None,
    rows: Sequence[int] | Tensor | None,
    num: int | None,
) -> tuple[Tensor, State | None, Noise]:
    """Checks the arguments of `observe`, of the same names."""
    if model.config.given:
        raise ValueError("observe is not for models with given features; use vssm.fill")
    weight = first_weight(model)
    x = check_sequence(model, x)
    x = x if model.head.tokens else x.to(weight.dtype)
    if state is not None:
        state = check_state(model, state, weight)
        check_reads(state, "x cannot follow this state")
    own = len(x) if state is None else state.batch
    num = own if num is None else whole_number("num", num, 1)
    if state is not None and num != own:
        raise ValueError(
            f"num={num} does not fit the {own} rows of the state; use state.repeat for more rows"
        )
    if len(x) not in (1, num):
        raise ValueError(f"x has {len(x)} rows; it must have {num}, or one row for all")
    _check_room(model, num, x.shape[1], weight.device)
    source = check_noise(num, seed, rows, state, weight.device)
    return x, state if state is not None and state.position else None, source


def check_temperature(temperature: float) -> float:
    """Returns a temperature as a float; raises `ValueError` if logits or scales overflow."""
    try:
        value = math.nan if isinstance(temperature, str | bytes) else float(temperature)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not 1e-30 <= value <= 1e6:
        raise ValueError(
            f"temperature is {shown(temperature)}; it must be a number from 1e-30 to 1e6"
        )
    return value


def check_noise(
    num: int,
    seed: int | Tensor | None,
    rows: Sequence[int] | Tensor | None,
    state: State | None,
    device: torch.device,
) -> Noise:
    """Returns the noise that a seed and rows name, or that a state goes on with."""
    seed = operator.index(seed) if isinstance(seed, np.integer) else seed
    if seed is None:
        seeds = torch.zeros(num, dtype=torch.int64, device=device)
        seeds = seeds if state is None else state["seed"]
    elif isinstance(seed, int) and not isinstance(seed, bool):
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed is {seed}; it must be a 64-bit whole number")
        seeds = torch.full((num,), seed, device=device)
    else:
        seeds = whole_numbers("seed", seed, device)
        seeds = seeds.repeat(num) if seeds.ndim == 0 else seeds.clone()  # a state keeps it
    if rows is None:
        row = torch.arange(num, device=device) if state is None else state["row"]
    else:
        row = whole_numbers("rows", rows, device).clone()
    for name, given in (("seed", seeds), ("rows", row)):
        if given.shape != (num,):
            raise ValueError(
                f"{name} has shape {tuple(given.shape)}; it must be ({num},), one for each row"
            )
    return Noise(seeds, row)


def _check_options(
    model: Model,
    length: int,
    chunk: int | None,
    recondition: bool,
    passes: int,
    temperature: float,
    observe: str,
    cache: bool,
) -> Options:
    length, passes = whole_number("length", length, 0), whole_number("passes", passes, 1)
    if isinstance(model, AnyPart):
        passes = min(passes, model.most_passes)
    chunk = None if chunk is None else whole_number("chunk", chunk, 1)
    temperature = check_temperature(temperature)
    check_flag("recondition", recondition)
    check_flag("cache", cache)
    check_choice("observe", observe, ("mean", "sample"))
    kind, stepwise = model.config.kind, isinstance(model, Autoregressive)
    if model.config.given:
        raise ValueError(
            f"the model has {model.config.given} given features, which generate cannot know; "
            "use vssm.fill, with their values in x"
        )
    if passes > 1 and isinstance(model, Ladder):
        raise ValueError(f"passes={passes} is for a vssm or tvae without levels; use passes=1")
    given = {"recondition=True": recondition, f"passes={passes}": passes > 1}
    given[f"chunk={chunk}"] = chunk is not None
    for name, there in given.items():
        if there and kind not in ("vssm", "tvae"):
            raise ValueError(
                f"{name} is for models that generate in parallel, not kind={kind!r}; "
                "use a vssm or tvae"
            )
    if not cache and not stepwise:
        raise ValueError(
            f"cache=False is for autoregressive models, not kind={kind!r}; "
            "use a transformer, ssm or rnn"
        )
    sample = observe == "sample" or (model.head.tokens and stepwise)
    recondition = bool(recondition) or (passes > 1 and not isinstance(model, AnyPart))
    chunk = chunk or max(length, 1)
    return Options(length, chunk, recondition, passes, temperature, sample, bool(cache))


def _check_num(num: int | None, prompt: Tensor | None, state: State | None) -> int:
    """Returns the number of rows; a prompt or state of one row serves any number."""
    num = None if num is None else whole_number("num", num, 1)
    given = {} if prompt is None else {"prompt": len(prompt)}
    given |= {} if state is None else {"state": state.batch}
    total = num or max(given.values(), default=1)
    for name, batch in given.items():
        if batch not in (1, total) or not batch:
            raise ValueError(f"{name} has {batch} rows; it must have 1 or {total or 'more'}")
    return total


def _check_room(model: Model, num: int, length: int, device: torch.device) -> None:
    """Raises `ValueError` if x and z alone do not fit: the system would kill the process."""
    numbers = 1 if model.head.tokens else model.config.features
    numbers += 0 if isinstance(model, Autoregressive) else model.config.latents
    needed, room = 4 * num * length * numbers, bytes_of_device(device)
    if not room and hasattr(os, "sysconf"):  # not on Windows
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if room and needed > room:
        raise ValueError(
            f"num={num} and length={length} would take {needed / 1e9:,.0f} GB, but {device} has "
            f"{room / 1e9:,.0f} GB; ask for less at once"
        )


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
    return min(_equal_parts(num, max(most, 1)), rows_of_cache(model, num, steps))


def _equal_parts(num: int, most: int) -> int:
    """Returns the size of the fewest parts of equal size, `most` at most."""
    return -(-num // -(-num // most))


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
    return _equal_parts(num, int(room / (row * _COPIES)))


def bytes_of_slab(device: torch.device) -> int:
    """Returns how much memory a slab may take."""
    return bytes_of_device(device) // _SHARE or _CPU_BYTES


def bytes_of_device(device: torch.device) -> int:
    """Returns the memory of a GPU, and 0 of a CPU, whose programs share it."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def bytes_of_step(model: Model, weight: Tensor, reads: bool) -> int:
    """Returns about how many bytes a pass takes for a row and step, as measured on an H200.

    The products and the scan of one block are in memory at a time, beside the logits of latents and
    head. Keys and values of all attention blocks stay, with the queries, which share their memory.
    """
    config = model.config
    numbers = config.width * (5 * config.expand + 5) + 4 * model.head.size
    if config.kind in ("transformer", "tvae"):  # a call that reads has two stacks of it
        numbers += 3 * config.width * config.layers * (2 if reads else 1)
    if reads:
        numbers += _LOGITS * config.latents * config.classes
    return numbers * weight.itemsize
