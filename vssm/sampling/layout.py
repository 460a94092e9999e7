"""What each model keeps in a state, and whether a state that is given is such.

A state may come from a file, from another model or from somebody's own code. What does not fit is
named here, before a kernel reads it. A change of what a block or model keeps is a change of
`_layout`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vssm.checks import shown, whole_number
from vssm.config import ModelConfig
from vssm.models import AnyPart, Ladder, Model, first_weight
from vssm.nn import State

__all__ = ["fitted"]

_INTEGER = (torch.int64,)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fitted(model: Model, state: State, device: torch.device) -> State:
    """Returns a state as the model keeps it: numbers of another precision are cast.

    Raises `ValueError` that names what is wrong.
    """
    whole_number("state.position", state.position, 0)
    seed, blind = state.children.get("seed"), "blind" in state.children
    if seed is not None and not (isinstance(seed, Tensor) and seed.ndim == 1):
        raise ValueError("state has no seed for each row in 'seed'; allowed: a tensor (rows,)")
    rows = 1 if seed is None else len(seed)  # that there is none is said below
    steps = state.position if model.config.block == "attention" else min(state.position, 1)
    last = len(model.decoder.blocks) if isinstance(model, Ladder) else model.config.layers
    dtypes = (first_weight(model).dtype,)
    if torch.is_autocast_enabled(device.type):  # states follow the precision of products
        dtypes += _FLOATS[:3]
    if isinstance(model, AnyPart):
        return _fitted_any_part(model, state, rows, dtypes, device)
    layout = _layout(model.config, blind, last, rows, steps, dtypes)
    return _fitted(state, layout, state.position, device)


def _fitted_any_part(
    model: AnyPart, state: State, rows: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> State:
    """Does what `fitted` does for a model with known="any": its passes are at a window's start."""
    config = model.config
    start = state.position - state.position % config.window
    passes = [name for name in state.children if name.startswith("pass")] if start else []
    if start and not passes:
        raise ValueError("state has no 'pass0000'; use a state from generate or observe")
    count = config.layers + config.levels + len(model.last_blocks)
    ssm = _Kept((rows, config.inner, config.state_size), _FLOATS)
    block = {"conv": _Kept((rows, config.conv - 1, config.inner), dtypes), "ssm": ssm}
    forwards = dict.fromkeys(map(str, range(0, count, 2)), block)
    for name in passes:
        _fitted(state.child(name), forwards, start, device, f"{name}/")
    layout: _Layout = dict.fromkeys(("seed", "row"), _Kept((rows,), _INTEGER))
    if state.position:
        tail = () if model.head.tokens else (config.features,)
        shape = rows, config.window, *tail
        layout["open"] = _Kept(shape, _INTEGER if model.head.tokens else _FLOATS)
        layout["open_known"] = _Kept(shape, _INTEGER)
    own = {name: child for name, child in state.children.items() if name not in passes}
    if not state.position:  # nothing was read: a state holds an empty window at most
        own = {name: child for name, child in own.items() if not name.startswith("open")}
    _fitted(State(own, state.position), layout, state.position, device)
    return state


class _Kept(NamedTuple):
    """What a model keeps under a name."""

    shape: tuple[int | range, ...]
    dtypes: tuple[torch.dtype, ...]
    """Others are cast to the first of them."""


_Layout = dict[str, Any]  # of _Kept, and of the layouts of nested states


def _layout(
    config: ModelConfig,
    blind: bool,
    last: int,
    rows: int,
    steps: int,
    dtypes: tuple[torch.dtype, ...],
) -> _Layout:
    """Returns what is in a state that has read `steps`; `last` blocks come last, after those of
    levels.
    """
    noise: _Layout = dict.fromkeys(("seed", "row"), _Kept((rows,), _INTEGER))
    if steps == 0:
        return noise
    width, inner = config.width, config.inner
    if config.block == "attention":
        cache = _Kept((rows, config.heads, steps, width // config.heads), dtypes)
        block = {"k": cache, "v": cache}
    elif config.block == "gru":
        block = {"h": _Kept((rows, width), dtypes)}
    else:
        ssm = _Kept((rows, inner, config.state_size), _FLOATS)
        block = {"conv": _Kept((rows, config.conv - 1, inner), dtypes), "ssm": ssm}
    stack, decoder = (dict.fromkeys(map(str, range(n)), block) for n in (config.layers, last))
    if config.kind == "vrnn":
        return {"stack": stack, "h": _Kept((rows, 1, width), dtypes), **noise}
    if config.levels > 1:
        levels: _Layout = dict.fromkeys(map(str, range(config.levels)), block)
        for i, span in enumerate(config.spans if blind else ()):
            if span > 1:
                shape = rows, range(1, span), config.latents // config.levels
                levels[f"held{i}"] = _Kept(shape, _INTEGER)
        return {"blind" if blind else "trunk": {**levels, "decoder": decoder}, **noise}
    if config.kind in ("tvae", "vssm"):
        return {"blind" if blind else "partial": stack, "decoder": decoder, **noise}
    tokens = config.head == "categorical"
    x = _Kept((rows, 1), _INTEGER) if tokens else _Kept((rows, 1, config.features), _FLOATS)
    return {"stack": stack, "last": x, **noise}


def _fitted(
    state: State, layout: _Layout, position: int, device: torch.device, path: str = ""
) -> State:
    """Returns the state itself where nothing is to be cast; raises `ValueError` that names what is
    wrong.
    """
    children, cast = state.children, {}
    if children.keys() != layout.keys():
        _check_names(children, layout, path)
    if state.position != position:
        raise ValueError(
            f"state is at position {shown(state.position)} in {path!r}; allowed: {position}"
        )
    for name, child in children.items():
        kept = layout[name]
        if isinstance(child, State) and isinstance(kept, dict):
            fitted = _fitted(child, kept, position, device, f"{path}{name}/")
        elif isinstance(child, Tensor) and isinstance(kept, _Kept):
            if child.shape == kept.shape and child.dtype in kept.dtypes and child.device == device:
                continue  # as almost always, and a call that is replayed has little time
            fitted = _fitted_tensor(child, kept, device, path + name)
        else:
            wanted = "a State" if isinstance(kept, dict) else "a tensor"
            raise ValueError(
                f"state has a {type(child).__name__} in {path + name!r}; allowed: {wanted}"
            )
        if fitted is not child:
            cast[name] = fitted
    return State({**children, **cast}, state.position, state.owner) if cast else state


def _check_names(children: dict[str, Tensor | State], layout: _Layout, path: str) -> None:
    # A state need not hold latents that speak for steps to come.
    missing = [n for n in layout if n not in children and not n.startswith("held")]
    unknown = [n for n in children if n not in layout]
    if missing or unknown:
        wrong = f"no {path + missing[0]!r}" if missing else f"an unknown {path + str(unknown[0])!r}"
        raise ValueError(
            f"state has {wrong}; allowed: {', '.join(repr(path + name) for name in layout)}"
        )


def _fitted_tensor(tensor: Tensor, kept: _Kept, device: torch.device, name: str) -> Tensor:
    if tensor.device != device:
        raise ValueError(f"state is on {tensor.device}; allowed: {device}, the device of the model")
    if not _within(tensor.shape, kept.shape):
        allowed = ", ".join(
            f"{n[0]} to {n[-1]}" if isinstance(n, range) else str(n) for n in kept.shape
        )
        raise ValueError(f"state has {name!r} of shape {tuple(tensor.shape)}; allowed: ({allowed})")
    if tensor.dtype in kept.dtypes:
        return tensor
    if not tensor.is_floating_point() or kept.dtypes == _INTEGER:
        given, allowed = (
            str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, kept.dtypes[0])
        )
        raise ValueError(f"state has {name!r} of dtype {given}; allowed: {allowed}")
    return tensor.to(kept.dtypes[0])


def _within(shape: Sequence[int], wanted: tuple[int | range, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        n in size if isinstance(size, range) else n == size
        for n, size in zip(shape, wanted, strict=True)
    )
