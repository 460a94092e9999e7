"""Sampling where any part may be known: in one or a few parallel passes, at once or in windows.

    x_{R_s} ~ p(x_{R_s} | x_{K_s}),   K_1 = K,   K_{s+1} = K_s + R_s          s = 1 ... S

The unknown entries of each window are divided at random into R_1 ... R_S of equal size. One pass
draws everything at once; as many passes as entries draw one entry after the other. The latents of a
pass, the observations and the division are functions of (seed, row, position, component, pass). So
the batch split never changes the sample of a seed, nor do the chunks and resume points of
`generate`.

`generate` is the case in which a prefix is known. Windows are drawn one after the other, or many at
once, with the same result: each pass carries its own state from window to window. A state that ends
inside a window keeps the steps of that window and the state before it. Resuming draws the window
again, which gives the same steps again.

Legend: x (B, T, D) or tokens (B, T); known K, of the shape of x, bool; S `passes`; W `window`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vssm import noise
from vssm.distributions import Latents
from vssm.models.anypart import AnyPart, Part, order_of_passes
from vssm.nn import State
from vssm.noise import Noise
from vssm.sampling.request import Options, Result


def make_part(
    model: AnyPart,
    part: Part,
    source: Noise,
    options: Options,
    position: int,
    states: list[State | None] | None,
) -> tuple[Tensor, Tensor, list[State | None]]:
    """Draws the entries R of whole windows in S passes.

    Arguments:
        model: The model.
        part: The windows, with their known entries and the entries to draw.
        source: The noise.
        options: The passes, the temperature, and what to observe.
        position: The absolute position of the first step.
        states: The state of each pass after the windows before.

    Returns:
        x, the latents (B, T, Z) of the last pass that drew at each step, and the state after each
        pass. Without `states`, a pass that has nothing to draw is left out of them.
    """
    x, known, unknown, _ = part
    order = torch.where(unknown, 0, -1)
    if options.passes > 1:
        columns = 1 if x.ndim == 2 else x.shape[2]
        u = source.uniform(position, x.shape[1], columns, noise.ORDER).view(x.shape)
        order = order_of_passes(unknown, u, model.config.window, options.passes)
    z = torch.zeros(*x.shape[:2], model.config.latents, dtype=torch.int64, device=x.device)
    after: list[State | None] = []
    for s in range(options.passes):
        if states is None and x.device.type == "cpu" and not (order == s).any():
            continue  # a pass without entries changes nothing
        now = model.part_of_pass(x, known, order, s, options.passes)
        before = None if states is None else states[s]
        values, own_z, state = _make_pass(model, now, source, options, position, s, before)
        x = torch.where(order == s, values.to(x.dtype), x)
        z = z if own_z is None else torch.where(now.live[..., None], own_z, z)
        after.append(state)
    return x, z, after


def _make_pass(
    model: AnyPart,
    part: Part,
    source: Noise,
    options: Options,
    position: int,
    s: int,
    state: State | None,
) -> tuple[Tensor, Tensor | None, State]:
    """Returns x and the latents, if any, of all steps in pass s, and the state after them."""
    length, temperature = part.x.shape[1], options.temperature
    u = source.uniform(position, length, model.config.latents, noise.LATENT, s)
    draws, zs = u.chunk(model.config.levels, -1), []

    def draw(level: int, p_z: Latents, query: Tensor) -> Tensor:
        span = model.spans[level]
        z = p_z.sample(draws[level][:, ::span], temperature)
        zs.append(z if span == 1 else z.repeat_interleave(span, 1))
        return z

    p_x, after = model.descend(part, draw if part.latent else None, state)
    x = p_x.mean
    if options.sample:
        size = model.head.noise_size
        x = p_x.sample(source.uniform(position, length, size, noise.OBSERVATION, s), temperature)
    if model.config.given:
        x = torch.cat([x, part.x[..., model.head.features :].to(x)], -1)
    return x, torch.cat(zs, -1) if zs else None, after


class _Open(NamedTuple):
    """A window that is not complete: the states before it, and its first steps."""

    states: list[State | None]
    """The state of each pass before the window; one state if only data came before."""
    x: Tensor
    """The steps of the window so far, (B, n, ...), n < W."""
    known: Tensor
    """Which of their entries were given; the others were drawn."""


def _opened(model: AnyPart, state: State | None, batch: int, device: torch.device) -> _Open:
    """Takes apart a state of `generate` or `observe`."""
    if state is None:
        tail = () if model.head.tokens else (model.config.features,)
        dtype = torch.int64 if model.head.tokens else torch.float32
        x = torch.zeros(batch, 0, *tail, dtype=dtype, device=device)
        return _Open([None], x, x.bool())
    names = sorted(name for name in state.children if name.startswith("pass"))
    states: list[State | None] = [state.child(name) for name in names] or [None]
    steps = state.position % model.config.window
    return _Open(states, state["open"][:, :steps], state["open_known"][:, :steps].bool())


def _closed(model: AnyPart, opened: _Open, position: int) -> State:
    """Puts a state together; the open window has a constant size."""
    children: dict[str, Tensor | State] = {
        f"pass{s:04}": state for s, state in enumerate(opened.states) if state is not None
    }
    for name, values in (("open", opened.x), ("open_known", opened.known.to(torch.int64))):
        children[name] = _extend(values, model.config.window)
    return State(children, position)


def _extend(values: Tensor, steps: int) -> Tensor:
    """Returns a copy of values (B, n, ...) with zeros after them up to a number of steps."""
    room = values.new_zeros(len(values), steps, *values.shape[2:])
    room[:, : values.shape[1]] = values
    return room


def read_any_part(model: AnyPart, x: Tensor, state: State | None, num: int) -> State:
    """Reads data; this model draws no latents for data."""
    opened = _opened(model, state, num, x.device)
    position = x.shape[1] + (0 if state is None else state.position)
    x = torch.cat([opened.x.to(x.dtype), x.expand(num, *x.shape[1:])], 1)
    known = torch.ones_like(x, dtype=torch.bool)
    known[:, : opened.known.shape[1]] = opened.known
    whole = x.shape[1] - x.shape[1] % model.config.window
    states = opened.states
    if whole:
        states = _read_windows(model, x[:, :whole], states)
    return _closed(model, _Open(states, x[:, whole:], known[:, whole:]), position)


def _read_windows(model: AnyPart, x: Tensor, states: list[State | None]) -> list[State | None]:
    """Reads whole windows, of which every entry is known, after each state."""
    part = Part(x, torch.ones_like(x, dtype=torch.bool), torch.zeros_like(x, dtype=torch.bool))
    return [model.descend(part, None, state)[1] for state in states]


def sample_any_part(
    model: AnyPart,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
) -> Result:
    """Continues a prefix: `generate` for models with known="any"."""
    if prompt is not None:
        state = read_any_part(model, prompt, state, source.num)
    opened = _opened(model, state, source.num, source.row.device)
    states = opened.states * options.passes if len(opened.states) == 1 else opened.states
    if len(states) != options.passes:
        raise ValueError(
            f"passes={options.passes} does not fit this state, which has {len(states)} passes; "
            f"use passes={len(states)}"
        )
    window, position = model.config.window, 0 if state is None else state.position
    start, end = position - opened.x.shape[1], position + options.length
    steps = -(-(end - start) // window) * window
    x, known = _extend(opened.x, steps), _extend(opened.known, steps)
    zs, first = [], 0
    before, chunk = states, max(1, -(-options.chunk // window)) * window
    last = (end - start) // window * window  # where the window begins in which making ends
    while first < steps:
        stop = min(first + chunk, steps if first >= last else last)
        before = states
        now = slice(first, stop)
        part = Part(x[:, now], known[:, now], ~known[:, now])
        x[:, now], z, states = make_part(model, part, source, options, start + first, states)
        if options.recondition and stop <= last:
            states = _read_windows(model, x[:, now], before[:1]) * options.passes
        zs.append(z)
        first = stop
    rest = slice(last, end - start)
    kept = states if last == steps else before
    after = _closed(model, _Open(kept, x[:, rest], known[:, rest]), end)
    new = slice(position - start, end - start)
    return x[:, new], torch.cat(zs, 1)[:, new], after
