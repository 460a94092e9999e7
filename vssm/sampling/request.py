"""Checks a call of `generate` or `observe`, once, and turns it into a `Request`.

A request holds the prompt, the state to go on from, the noise of every row, and the options. The
algorithms of `vssm.sampling` and the engine take it as it is.
"""

import math
import operator
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vssm import noise
from vssm.checks import check_choice, check_flag, shown, whole_number, whole_numbers
from vssm.models import VRNN, AnyPart, Autoregressive, Ladder, Model, Variational, first_weight
from vssm.nn import State
from vssm.sampling.resuming import check_reads, check_state, shares_latents

__all__ = [
    "Noise",
    "Options",
    "Request",
    "Result",
    "check_bytes",
    "check_noise",
    "check_reading",
    "check_request",
    "check_room",
    "check_sequence",
    "check_temperature",
    "no_steps",
]


class Noise:
    """The noise of a batch: the seed and the row that each sequence reads.

    Arguments:
        seed: The seed of each sequence, (B,).
        row: The row of each sequence, (B,).
        start: Added to all positions, (1,), where only the device knows them.
    """

    def __init__(self, seed: Tensor, row: Tensor, start: Tensor | None = None) -> None:
        self.seed: Tensor = seed
        self.row: Tensor = row
        self.start: Tensor | None = start

    @property
    def num(self) -> int:
        """The number of sequences."""
        return len(self.row)

    @property
    def device(self) -> torch.device:
        """Where the noise is made."""
        return self.row.device

    def latent(self, model: Variational | VRNN | Ladder, position: int, length: int) -> Tensor:
        """Returns uniform numbers for the latents of some steps, (B, length, Z)."""
        return self._uniform(position, length, model.config.latents, noise.LATENT)

    def observation(self, model: Model, position: int, length: int) -> Tensor:
        """Returns uniform numbers for the observations of some steps, (B, length, ...)."""
        return self._uniform(position, length, model.head.noise_size, noise.OBSERVATION)

    def uniform(
        self, position: int, length: int, components: int, stream: int, draw: int = 0
    ) -> Tensor:
        """Returns uniform numbers of a stream for some steps, (B, length, components)."""
        return noise.uniform(self.seed, self.row, position, length, components, stream, draw)

    def _uniform(self, position: int, length: int, components: int, stream: int) -> Tensor:
        where = position if self.start is None else self.start + position
        return noise.uniform(self.seed, self.row, where, length, components, stream)


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


Result = tuple[Tensor, Tensor | None, State | None]
"""x, z and the state after them."""


def no_steps(model: Model, source: Noise) -> tuple[Tensor, Tensor | None]:
    """Returns x and z of zero steps."""
    num, device, z = source.num, source.device, None
    if not isinstance(model, Autoregressive):
        z = torch.empty(num, 0, model.config.latents, dtype=torch.int64, device=device)
    if model.head.tokens:
        return torch.empty(num, 0, dtype=torch.int64, device=device), z
    dtype = torch.promote_types(first_weight(model).dtype, torch.float32)  # that of made steps
    return torch.empty(num, 0, model.config.features, dtype=dtype, device=device), z


class Request(NamedTuple):
    """A call of `generate` that was checked."""

    prompt: Tensor | None
    state: State | None
    """The state to go on from, at a position above 0."""
    source: Noise
    options: Options


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
    options = _check_options(model, length, state is not None, *dials)
    device = first_weight(model).device
    if prompt is not None:
        prompt = check_sequence(model, prompt, "prompt", device, steps=0)
    if state is not None:
        state = check_state(model, state, device)
    num = _check_num(None if num is None else whole_number("num", num, 1), prompt, state)
    check_room(model, num, options.length, device)
    if state is not None and state.batch != num:
        if shares_latents(model, state):
            raise ValueError(
                f"num={num} sequences would share the latents behind this state of one row. If "
                f"it has read data, pass num={num} to observe, so that each draws its own; to "
                f"continue one sample in {num} ways, pass state.repeat({num})"
            )
        state = state.repeat(num)
    if state is not None and prompt is not None:
        prompt = prompt.expand(num, *prompt.shape[1:])
    source = check_noise(num, seed, rows, state, device)
    if prompt is not None and prompt.shape[1] == 0:
        prompt = None
    if prompt is not None and state is not None:
        check_reads(state, "prompt and state together are ambiguous here")
    if state is not None and options.recondition:
        name = "recondition=True" if options.passes == 1 else f"passes={options.passes}"
        check_reads(state, f"{name} can not start from this state")
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
    device = first_weight(model).device
    if model.config.given:
        raise ValueError("observe is not for models with given features; use vssm.fill")
    x = check_sequence(model, x, "x", device)
    if state is not None:
        state = check_state(model, state, device)
        check_reads(state, "x can not follow this state")
    own = len(x) if state is None else state.batch
    num = own if num is None else whole_number("num", num, 1)
    if state is not None and num != own:
        raise ValueError(
            f"num={num} is not the number of rows of the state, {own}; state.repeat makes more"
        )
    if len(x) not in (1, num):
        raise ValueError(f"x has {len(x)} rows; it must have {num}, or one row for all")
    check_room(model, num, x.shape[1], device)
    source = check_noise(num, seed, rows, state, device)
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
            raise ValueError(f"seed is {seed}; it must be a whole number of 64 bits")
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
    resumed: bool,
    chunk: int | None,
    recondition: bool,
    passes: int,
    temperature: float,
    observe: str,
    cache: bool,
) -> Options:
    length, passes = whole_number("length", length, 0), whole_number("passes", passes, 1)
    chunk = None if chunk is None else whole_number("chunk", chunk, 1)
    temperature = check_temperature(temperature)
    check_flag("recondition", recondition)
    check_flag("cache", cache)
    check_choice("observe", observe, ("mean", "sample"))
    _check_kind(model, chunk, recondition, passes, cache)
    if not cache and resumed:
        raise ValueError(
            "cache=False recomputes from the first step and can not use a state; use a prompt"
        )
    sample = observe == "sample" or (model.head.tokens and isinstance(model, Autoregressive))
    if model.config.given:
        raise ValueError(
            f"the model has {model.config.given} given features, which generate can not know; "
            "use vssm.fill, with their values in x"
        )
    recondition = bool(recondition) or (passes > 1 and not isinstance(model, AnyPart))
    chunk = chunk or max(length, 1)
    return Options(length, chunk, recondition, passes, temperature, sample, bool(cache))


def _check_kind(
    model: Model, chunk: int | None, recondition: bool, passes: int, cache: bool
) -> None:
    """Raises `ValueError` for options that are not for the kind of a model."""
    kind = model.config.kind
    if passes > 1 and isinstance(model, Ladder):
        raise ValueError(f"passes={passes} is for a vssm or tvae without levels; use passes=1")
    given = {"recondition=True": recondition, f"passes={passes}": passes > 1}
    given[f"chunk={chunk}"] = chunk is not None
    name = next((name for name, there in given.items() if there), None)
    if name is not None and not isinstance(model, Variational | Ladder | AnyPart):
        raise ValueError(
            f"{name} is for models that generate in parallel, not kind={kind!r}; use a vssm or tvae"
        )
    if not cache and not isinstance(model, Autoregressive):
        raise ValueError(
            f"cache=False is for autoregressive models, not kind={kind!r}; "
            "use a transformer, ssm or rnn"
        )


def check_sequence(
    model: Model, x: Tensor, name: str, device: torch.device, steps: int = 1
) -> Tensor:
    """Returns sequences in the dtype of the model; raises `ValueError` if they do not fit it."""
    model.head.validate(x, name=name, values=False, steps=steps)
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}; move it to {device}, where the model is")
    model.head.validate(x, name=name, steps=steps)
    return x.to(torch.int64 if model.head.tokens else first_weight(model).dtype)


def check_room(model: Model, num: int, length: int, device: torch.device) -> None:
    """Raises `ValueError` if x and z alone would not fit into memory.

    Otherwise the operating system would kill the process.
    """
    numbers = 1 if model.head.tokens else model.config.features
    numbers += 0 if isinstance(model, Autoregressive) else model.config.latents
    check_bytes(f"num={num} and length={length}", 4 * num * length * numbers, device)


def check_bytes(what: str, needed: int, device: torch.device) -> None:
    """Raises `ValueError` if a result takes more memory than a device has."""
    room = _memory(device)
    if room and needed > room:
        raise ValueError(
            f"{what} would take {needed / 1e9:,.0f} GB, but {device} has {room / 1e9:,.0f} GB; "
            "ask for less at once"
        )


def _memory(device: torch.device) -> int:
    """Returns the bytes that a device has; 0 if that is unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return 0


def _check_num(num: int | None, prompt: Tensor | None, state: State | None) -> int:
    """Returns the number of rows; a prompt or state of one row serves any number."""
    given = {}
    if prompt is not None:
        given["prompt"] = len(prompt)
    if state is not None:
        given["state"] = state.batch
    total = num or max(given.values(), default=1)
    for name, batch in given.items():
        if batch not in (1, total) or not batch:
            raise ValueError(f"{name} has {batch} rows; it must have 1 or {total or 'more'}")
    return total
