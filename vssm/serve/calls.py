"""A request as a series of calls of bounded size.

A generator yields each `Call`, gets its result, and returns the result of the request. The calls of
other requests are computed between them, and calls of several requests that agree are computed as
one. Neither changes a result (to float rounding), because each call continues from the state of the
call before it, and noise is a function of (seed, row, position).
"""

from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vssm.nn import State
from vssm.serve.models import Served

_STEPWISE = 32  # most steps of a call that makes them one by one


@dataclass(frozen=True, eq=False)
class Call:
    """A function, and sequences to call it with."""

    name: str  # of the model
    function: Callable[..., "Result"]
    inputs: "tuple[Tensor | State | None, ...]" = ()
    """Tensors and states with a row for each sequence, or states with one row for all."""
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 1
    most: int = 1  # rows that are computed together
    last: bool = True  # of the request

    @property
    def key(self) -> Hashable:
        """Calls with equal keys can be computed as one."""
        options = tuple(sorted(self.options.items()))
        return self.name, self.function, options, *map(_layout, self.inputs)


Result = tuple[Any, State | None]  # x, the new steps or whatever was asked for; where to resume
Calls = Generator[Call, Result, Result]


def make_steps(
    served: Served,
    seed: Tensor,
    row: Tensor,
    length: int,
    prompt: Tensor | None = None,
    state: State | None = None,
    every: int | None = None,
    **options: Any,  # noqa: ANN401
) -> Calls:
    """Reads the prompt, if any, and makes `length` new steps, if any.

    Seed and row (B,) name the noise of each sequence; the state has B rows or one for all. No call
    goes past a multiple of `every` new steps. The options are those of `generate`.
    """
    most, made, xs = max(1, served.cells // len(row)), 0, []
    while made < length or prompt is not None:
        make = min(length - made, _most_steps(served, most, length - made, options))
        make = make if every is None else min(make, every - made % every)
        unread = read = 0 if prompt is None else prompt.shape[1]
        if unread and (not make or unread + make > most):
            read, make = min(unread, most), 0
        x, state = yield Call(
            name=served.name,
            function=served.make,
            inputs=(seed, row, None if prompt is None else prompt[:, :read], state),
            options={"length": make, **options},
            rows=len(row),
            most=served.cells // (read + make),
            last=read == unread and made + make == length,
        )
        prompt = None if prompt is None or read == unread else prompt[:, read:]
        made += make
        xs += [x] if make else []
    return (torch.cat(xs, 1) if xs else None), state


def _most_steps(served: Served, most: int, left: int, options: dict[str, Any]) -> int:
    """Returns the most steps of a call that makes them, of which `left` are left."""
    if not served.parallel:
        return min(most, _STEPWISE)
    if not options.get("recondition"):
        return most
    chunk = max(1, min(options["chunk"] or left, left))  # a chunk is read before the next is made
    return chunk * max(1, min(most, _STEPWISE) // chunk)


def fill_gaps(
    served: Served,
    seed: Tensor,
    row: Tensor,
    x: Tensor,
    known: Tensor,
    **options: Any,  # noqa: ANN401
) -> Calls:
    """Fills the gaps of x, a few sequences in a call; the options are those of `fill`."""
    most, parts = max(1, served.cells // (x.shape[1] * options.get("passes", 1))), []
    for first in range(0, len(x), most):
        inputs = tuple(whole[first : first + most] for whole in (seed, row, x, known))
        rows, last = len(inputs[0]), first + most >= len(x)
        part, _ = yield Call(served.name, served.fill, inputs, options, rows, most, last)
        parts.append(part)
    return torch.cat(parts), None


def compute(batch: list[Call]) -> list[Result]:
    """Computes calls with equal keys as one."""
    inputs = [_join(values, batch) for values in zip(*(c.inputs for c in batch), strict=True)]
    x, state = batch[0].function(*inputs, **batch[0].options)
    if len(batch) == 1:
        return [(x, state)]
    rows = torch.arange(sum(call.rows for call in batch)).split([call.rows for call in batch])
    return [(None if x is None else x[r], None if state is None else state.select(r)) for r in rows]


def _join(values: tuple[Any, ...], batch: list[Call]) -> Any:  # noqa: ANN401
    if values[0] is None:
        return None
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    pairs = zip(values, batch, strict=True)
    return State.cat(
        [state if state.batch == call.rows else state.repeat(call.rows) for state, call in pairs]
    )


def _layout(value: Tensor | State | None) -> Hashable:
    """Returns what inputs must have in common to form a batch: position, names and shapes."""
    if isinstance(value, State):
        children = sorted(value.children.items())
        return value.position, *((name, _layout(child)) for name, child in children)
    return None if value is None else value.shape[1:]
