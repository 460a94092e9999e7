"""Generation: what a user asks for is checked here; `vssm.sampling` makes it.

Every random number is a function of (seed, row, position, component), so chunk size, batch split
and resume point never change what a seed gives, but for float rounding. Rarely, rounding decides
between two classes of a latent, and then the sample differs from there on.
"""

import dataclasses
import math
import operator
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vssm.checks import check_choice, check_flag, shown, whole_number, whole_numbers
from vssm.config import ModelConfig
from vssm.models import (
    VRNN,
    AnyPart,
    Autoregressive,
    Ladder,
    Model,
    Variational,
    first_weight,
    inner_model,
)
from vssm.nn import State
from vssm.nn.show import html_table
from vssm.sampling import read, sample
from vssm.sampling.layout import fitted
from vssm.sampling.request import BLIND, Noise, Options

__all__ = [
    "Generation",
    "Request",
    "check_bytes",
    "check_noise",
    "check_reading",
    "check_request",
    "check_room",
    "check_temperature",
    "generate",
    "observe",
    "own_state",
    "owner_of",
    "shares_latents",
]


class Generation(NamedTuple):
    """What `generate` made.

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="rnn", features=3, width=8, layers=1))
        >>> made = generate(model, num=2, length=4)
        >>> x, z, state = made
        >>> made
        Generation(x=(2, 4, 3), z=None, state=State(position=4, stack/0/h (2, 8), ...))
    """

    x: Tensor
    """The new steps only, (B, length, D), or (B, length) tokens."""
    z: Tensor | None
    """Their latents, (B, length, Z); None for an autoregressive model."""
    state: State
    """Where to resume: `generate(model, length=..., state=state)`."""

    def __repr__(self) -> str:
        x, z = (None if values is None else tuple(values.shape) for values in (self.x, self.z))
        return f"Generation(x={x}, z={z}, state={self.state!r})"

    def _repr_html_(self) -> str:
        z = None if self.z is None else tuple(self.z.shape)
        return html_table("Generation", {"x": tuple(self.x.shape), "z": z, "state": self.state})


def generate(
    model: Model,
    num: int | None = None,
    length: int = 28,
    prompt: Tensor | None = None,
    chunk: int | None = None,
    recondition: bool = False,
    passes: int = 1,
    temperature: float = 1.0,
    observe: str = "mean",
    seed: int | Tensor | None = None,
    state: State | None = None,
    rows: Sequence[int] | Tensor | None = None,
    cache: bool = True,
) -> Generation:
    """Generates `length` new steps after a prompt, after a state, or from nothing.

    Arguments:
        model: Any of the six models.
        num: The number of sequences, B. Defaults to the rows of the prompt or state, else 1. One
            row of prompt or state serves any number: `num=16` gives sixteen continuations of it.
            Each draws the latents of the prompt for itself. The latents behind a state are drawn
            already, so a vssm, tvae or vrnn refuses to share those of a state that may have read
            data: `observe(..., num=16)` draws them sixteen times, and `state.repeat(16)` shares
            them on purpose.
        length: The number of new steps.
        prompt: Steps that come first, (B, C, D), or (B, C) tokens.
        chunk: W, for vssm and tvae: make W steps at a time. Alone it changes nothing in the result.
        recondition: For vssm and tvae: read each generated chunk before making the next.
        passes: S, for vssm and tvae: parallel passes over each chunk. 1 is the paper's one shot.
            Each further pass redraws all steps, with the same noise, from what the last pass made
            before each of them; S >= chunk (or length) gives the sample of chunk=1,
            recondition=True. More than 1 implies `recondition`: the next chunk and the state have
            read what was made.
        temperature: Divides the logits of every categorical and multiplies every scale that is
            drawn from.
        observe: What x is made of: the "mean" of the head (mode of a categorical one), or a
            "sample" of it. A model with latents feeds back what it returns. An autoregressive model
            always feeds back a sample. If it is a model of tokens, it returns these samples
            whatever `observe` says: the modes would not be the tokens that its later steps and its
            state follow.
        seed: Names the sample; one for all rows, or one for each, (B,). Defaults to the state's,
            else 0.
        state: Where to go on from, as returned by `generate` and `observe`.
        rows: Which rows of the noise to use, (B,); 0 to B - 1 by default. `rows=range(8, 16)` makes
            the second half of a batch of sixteen.
        cache: False recomputes the whole prefix at every step, as the paper's Transformer does.

    Returns:
        The new steps, their latents, and the state to resume from.

    Example:
        >>> from vssm import ModelConfig, build
        >>> sizes = {"width": 8, "layers": 1, "latents": 4, "classes": 5}
        >>> model = build(ModelConfig(kind="vssm", features=3, **sizes))
        >>> whole = generate(model, num=2, length=8, seed=1)
        >>> half = generate(model, num=2, length=4, seed=1)
        >>> rest = generate(model, length=4, state=half.state)
        >>> torch.allclose(whole.x, torch.cat([half.x, rest.x], 1), atol=1e-6)
        True
    """
    model = inner_model(model)
    with torch.no_grad():
        request = check_request(
            model,
            num,
            length,
            prompt,
            chunk,
            recondition,
            passes,
            temperature,
            observe,
            seed,
            state,
            rows,
            cache,
        )
        x, z, after = sample(model, *request)
        return Generation(x, z, own_state(model, after, request.source))


@torch.no_grad()
def observe(
    model: Model,
    x: Tensor,
    state: State | None = None,
    seed: int | Tensor | None = None,
    rows: Sequence[int] | Tensor | None = None,
    num: int | None = None,
) -> State:
    """Reads real data and returns the state after it, to generate from or to observe more.

    A vssm, tvae or vrnn draws latents for what it reads. Samples of the future follow the model's
    law only if each of them has latents of its own, so read the data for as many rows as you want
    to generate: `generate(model, state=observe(model, x, num=100))` gives a hundred futures of one
    sequence.

    Arguments:
        model: Any of the six models.
        x: What was observed, (B, C, D), or (B, C) tokens, C >= 1.
        state: What came before.
        seed: Names the latents that are drawn for x, and what is generated later.
        rows: Which rows of the noise to use.
        num: The number of rows of the new state. Defaults to those of x or the state. One row of x
            serves any number; a vssm or tvae reads it once and draws latents for every row.

    Example:
        >>> from vssm import ModelConfig, build, generate
        >>> sizes = {"width": 8, "layers": 1, "latents": 4, "classes": 5}
        >>> model = build(ModelConfig(kind="vssm", features=3, **sizes))
        >>> x = torch.rand(2, 6, 3)
        >>> state = observe(model, x[:, 4:], observe(model, x[:, :4]))
        >>> resumed, prompted = {"state": state}, {"prompt": x}
        >>> made = [generate(model, length=5, **start).x for start in (resumed, prompted)]
        >>> torch.allclose(*made, atol=1e-6)
        True
    """
    model = inner_model(model)
    x, before, source = check_reading(model, x, state, seed, rows, num)
    return own_state(model, read(model, x, before, source), source)


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
    chunk: int | None,
    recondition: bool,
    passes: int,
    temperature: float,
    observe: str,
    seed: int | Tensor | None,
    state: State | None,
    rows: Sequence[int] | Tensor | None,
    cache: bool,
) -> Request:
    """Checks the arguments of `generate`, of the same names."""
    resumed = state is not None
    options = _check_options(
        model, length, chunk, recondition, passes, temperature, observe, cache, resumed
    )
    device = first_weight(model).device
    if prompt is not None:
        prompt = _check_sequence(model, prompt, "prompt", device, steps=0)
    if state is not None:
        state = _check_state(model, state, device)
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
    if prompt is not None and state is not None and "blind" in state.children:
        raise ValueError(f"prompt and state together are ambiguous here: {BLIND}")
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
    x = _check_sequence(model, x, "x", device)
    if state is not None:
        state = _check_state(model, state, device)
        if "blind" in state.children:
            raise ValueError(f"x can not follow this state: {BLIND}")
    own = len(x) if state is None else state.batch
    num = own if num is None else whole_number("num", num, 1)
    if state is not None and num != own:
        raise ValueError(
            f"num={num} is not the number of rows of the state, {own}; state.repeat makes more"
        )
    if len(x) not in (1, num):
        raise ValueError(f"x has {len(x)} rows; allowed: {num}, or 1 that serves all")
    check_room(model, num, x.shape[1], device)
    source = check_noise(num, seed, rows, state, device)
    return x, state if state is not None and state.position else None, source


def shares_latents(model: Model, state: State) -> bool:
    """Says whether copies of a state could share latents that were drawn for data.

    A state that has run over empty tokens ends a sample: to go on from it many times is to continue
    that sample. Of other states nobody can tell whether they have read data or what they made
    themselves. A vssm with levels draws no latents for data.
    """
    read = state.position > 0 and "blind" not in state.children
    return read and isinstance(model, Variational | VRNN)


def check_temperature(temperature: float) -> float:
    """Returns a temperature as a float; raises `ValueError` if logits or scales overflow."""
    try:
        value = math.nan if isinstance(temperature, str | bytes) else float(temperature)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not 1e-30 <= value <= 1e6:
        raise ValueError(
            f"temperature={shown(temperature)} is not allowed; "
            "allowed: a number > 0, from 1e-30 to 1e6"
        )
    return value


def owner_of(config: ModelConfig) -> str:
    """Returns the name by which a state knows its model."""
    # Only unusual fields: a new field must not make every older state belong to another model.
    fields = [(f.name, getattr(config, f.name), f.default) for f in dataclasses.fields(config)]
    return ", ".join(
        f"{name}={value}" for name, value, usual in fields if name == "kind" or value != usual
    )


def own_state(model: Model, state: State | None, source: Noise) -> State:
    """Adds to a state what resuming needs: the noise, and the model that it belongs to."""
    children = {} if state is None else state.children
    position = 0 if state is None else state.position
    children = {**children, "seed": source.seed, "row": source.row}
    return State(children, position, owner_of(model.config))


def check_noise(
    num: int,
    seed: int | Tensor | None,
    rows: Sequence[int] | Tensor | None,
    state: State | None,
    device: torch.device,
) -> Noise:
    seed = operator.index(seed) if isinstance(seed, np.integer) else seed
    if seed is None:
        seeds = torch.zeros(num, dtype=torch.int64, device=device)
        seeds = seeds if state is None else state["seed"]
    elif isinstance(seed, int) and not isinstance(seed, bool):
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed={seed} is not allowed; allowed: a whole number of 64 bits")
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
                f"{name} has shape {tuple(given.shape)}; allowed: ({num},), one for each row"
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
    resumed: bool,
) -> Options:
    kind = model.config.kind
    length, passes = whole_number("length", length, 0), whole_number("passes", passes, 1)
    chunk = None if chunk is None else whole_number("chunk", chunk, 1)
    temperature = check_temperature(temperature)
    check_flag("recondition", recondition)
    check_flag("cache", cache)
    check_choice("observe", observe, ("mean", "sample"))
    if passes > 1 and isinstance(model, Ladder):
        raise ValueError(f"passes={passes} is for a vssm or tvae without levels; allowed: 1")
    given = {"recondition=True": recondition, f"passes={passes}": passes > 1}
    given[f"chunk={chunk}"] = chunk is not None
    name = next((name for name, there in given.items() if there), None)
    if name is not None and not isinstance(model, Variational | Ladder | AnyPart):
        raise ValueError(
            f"{name} is for models that generate in parallel, not kind={kind!r}; "
            "allowed: vssm, tvae"
        )
    if not cache and not isinstance(model, Autoregressive):
        raise ValueError(
            f"cache=False is for autoregressive models, not kind={kind!r}; "
            "allowed: transformer, ssm, rnn"
        )
    if not cache and resumed:
        raise ValueError(
            "cache=False recomputes from the first step and can not use a state; allowed: a prompt"
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


def _check_sequence(
    model: Model, x: Tensor, name: str, device: torch.device, steps: int = 1
) -> Tensor:
    model.head.validate(x, name=name, values=False, steps=steps)
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}; allowed: {device}, the device of the model")
    model.head.validate(x, name=name, steps=steps)
    return x.to(torch.int64 if model.head.tokens else first_weight(model).dtype)


def _check_state(model: Model, state: State, device: torch.device) -> State:
    """Returns a state as the model keeps it: numbers of another precision are cast."""
    if not isinstance(state, State):
        raise ValueError(
            f"state is a {type(state).__name__}; allowed: a State from generate or observe"
        )
    if state.owner != owner_of(model.config):
        raise ValueError(
            f"state belongs to another model ({state.owner or 'unknown'}); "
            f"allowed: a state of {owner_of(model.config)}"
        )
    return fitted(model, state, device)


def check_room(model: Model, num: int, length: int, device: torch.device) -> None:
    """Raises `ValueError` where x and z alone would not fit: nothing else would stop a slip of the
    keyboard before the system does, which takes the whole process with it."""
    numbers = 1 if model.head.tokens else model.config.features
    numbers += 0 if isinstance(model, Autoregressive) else model.config.latents
    check_bytes(f"num={num} and length={length}", 4 * num * length * numbers, device)


def check_bytes(what: str, needed: int, device: torch.device) -> None:
    """Raises `ValueError` where what is asked for takes more memory than a device has."""
    room = _memory(device)
    if room and needed > room:
        raise ValueError(
            f"{what} would take {needed / 1e9:,.0f} GB; "
            f"allowed: less at once, of the {room / 1e9:,.0f} GB of {device}"
        )


def _memory(device: torch.device) -> int:
    """Returns the bytes that a device has; 0 where that is not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return 0


def _check_num(num: int | None, prompt: Tensor | None, state: State | None) -> int:
    """Settles the number of rows: a prompt or state of one row serves any number."""
    given = {}
    if prompt is not None:
        given["prompt"] = len(prompt)
    if state is not None:
        given["state"] = state.batch
    total = num or max(given.values(), default=1)
    for name, batch in given.items():
        if batch not in (1, total) or not batch:
            raise ValueError(f"{name} has {batch} rows; allowed: 1 or {total or 'more'}")
    return total
