"""Checks of the states that a call of `generate` or `observe` continues from."""

import torch
from torch import Tensor

from vssm.checks import whole_number
from vssm.models import VRNN, Model, Variational
from vssm.nn import State

_FLOAT32 = ("ssm", "last", "open")  # these parts of a state do not have the dtype of the weights


def check_reads(state: State, refusal: str) -> None:
    """Raises `ValueError` if no data can follow a state, since it has run over empty tokens."""
    if "blind" in state.children:
        raise ValueError(
            f"{refusal}: it has run over empty tokens, after which the model was never trained to "
            "read data; use a state from observe, or from generate with recondition=True or "
            "passes > 1"
        )


def check_state(model: Model, state: State, weight: Tensor) -> State:
    """Returns a state in the precision of a weight of the model."""
    if not isinstance(state, State):
        raise ValueError(f"state has type {type(state).__name__}; use one from generate or observe")
    if state.owner != model.owner:
        raise ValueError(
            f"state belongs to another model ({state.owner or 'unknown'}); "
            f"use a state of this one ({model.owner})"
        )
    whole_number("state.position", state.position, 0)
    rows = len(state["row"])
    for name, tensor in state.flatten()[0].items():
        if tensor.shape[:1] != (rows,):
            shape = tuple(tensor.shape)
            raise ValueError(f"state has {name!r} of shape {shape}; it must have {rows} rows")
        if tensor.device != weight.device:
            raise ValueError(f"state is on {tensor.device}; use state.to({str(weight.device)!r})")
    return _cast(state, weight.dtype, torch.is_autocast_enabled(weight.device.type))


def _cast(state: State, dtype: torch.dtype, autocast: bool) -> State:
    def cast(name: str, child: Tensor | State) -> Tensor | State:
        if isinstance(child, State):
            return _cast(child, dtype, autocast)
        fits = name in _FLOAT32 or not child.is_floating_point()
        fits = fits or (autocast and child.dtype != torch.float64)  # follows the products
        return child if fits else child.to(dtype)

    children = {name: cast(name, child) for name, child in state.children.items()}
    return State(children, state.position, state.owner)


def with_rows(model: Model, state: State, num: int) -> State:
    """Returns a state of `num` rows; raises `ValueError` if they would share latents of data."""
    if state.batch == num:
        return state
    if shares_latents(model, state):
        raise ValueError(
            f"num={num} sequences would share the latents behind this state of one row. If "
            f"it has read data, pass num={num} to observe, so that each draws its own; to "
            f"continue one sample in {num} ways, pass state.repeat({num})"
        )
    return state.repeat(num)


def shares_latents(model: Model, state: State) -> bool:
    """Says whether copies of a state could share latents that were drawn for data.

    A state that has run over empty tokens is the end of a sample, and copies may share that sample.
    Any other state may have read data. A vssm with levels draws no latents for data.
    """
    read = state.position > 0 and "blind" not in state.children
    return read and isinstance(model, Variational | VRNN)
