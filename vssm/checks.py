"""Checks of user input, called where users come in and nowhere else.

Each raises `ValueError` in one line: what is wrong, what was given, and what to do.
"""

import difflib
import operator
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_HUGE = 1e100  # no setting is so large; whole numbers in JSON may be larger than any float


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises `ValueError` when the value is not one of the allowed, and suggests the nearest one.

    >>> check_choice("kind", "vsm", ("ssm", "vssm"))
    Traceback (most recent call last):
    ValueError: kind='vsm' is unknown; choose from 'ssm', 'vssm' (did you mean 'vssm'?)
    """
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={shown(value)} is unknown; {name_allowed(value, allowed)}")


def check_type(name: str, value: object, types: Any, allowed: str) -> None:  # noqa: ANN401
    """Raises `ValueError` when the value is not of one of the types.

    >>> check_type("lengths", [3, 1], torch.Tensor, "a tensor")
    Traceback (most recent call last):
    ValueError: lengths has type list; it must be a tensor
    """
    if not isinstance(value, types):
        raise ValueError(f"{name} has type {type(value).__name__}; it must be {allowed}")


def check_flag(name: str, value: object) -> None:
    """Raises `ValueError` unless the value is True or False: "no" would count as True."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is {shown(value)}; it must be True or False")


def check_path(name: str, value: object) -> None:
    """Raises `ValueError` unless the value is a path."""
    check_type(name, value, (str, os.PathLike), "a path")


def check_model(model: Any) -> Any:  # noqa: ANN401
    """Returns a model, or the model inside a compiled module of `torch.compile`.

    Warns if `torch.compile` had no effect: it compiles `forward`, which a vssm or tvae does not
    have.

    >>> check_model("mnist-small")
    Traceback (most recent call last):
    ValueError: model has type str; use a model from vssm.build or vssm.load
    """
    parts = model.modules() if isinstance(model, nn.Module) else ()
    found: Any = next((part for part in parts if "owner" in vars(part)), None)
    if found is None or getattr(model, "config", None) != found.config:
        raise ValueError(
            f"model has type {type(model).__name__}; use a model from vssm.build or vssm.load"
        )
    compiled = found._compiled_call_impl is not None or hasattr(model, "_orig_mod")
    if compiled and found.config.kind in ("vssm", "tvae"):
        warnings.warn(
            f"torch.compile has no effect on a {found.config.kind} model as a whole, so it runs "
            "uncompiled; compile a function that calls vssm.objective(model, x), or train with "
            "--train.compile",
            stacklevel=3,
        )
    return found


def check_sequence(
    model: Any,  # noqa: ANN401
    x: Tensor,
    name: str = "x",
    steps: int = 1,
    wait: bool = True,
) -> Tensor:
    """Returns sequences that fit a model, of `steps` or more, tokens as int64; raises for others.

    Without `wait`, values on a GPU are not checked.
    """
    device = next(model.parameters()).device
    model.head.validate(x, name, values=False, steps=steps)
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}; move it to {device}, where the model is")
    if wait or device.type == "cpu":
        model.head.validate(x, name, steps=steps)
    return x.long() if model.head.tokens else x


def whole_number(name: str, value: object, least: int) -> int:
    """Returns a whole number of Python, NumPy or a tensor as an int; else raises `ValueError`.

    >>> whole_number("length", 2.5, least=0)
    Traceback (most recent call last):
    ValueError: length is 2.5; it must be a whole number >= 0
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name} is {shown(value)}; it must be a whole number >= {least}")
    return number


def whole_numbers(name: str, values: Sequence[int] | Tensor | int, device: torch.device) -> Tensor:
    """Returns numbers as an int64 tensor; raises for fractions instead of cutting them off."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        tensor = None
    if tensor is None or (tensor.numel() and tensor.dtype not in _INTEGERS):
        given = type(values).__name__ if tensor is None else str(tensor.dtype)[6:]
        raise ValueError(f"{name} has type {given}; it must hold 64-bit whole numbers")
    return tensor.to(device, torch.int64)


def shown(value: object) -> str:
    """Returns the repr of a value in one line, cut after 200 characters.

    >>> shown(torch.zeros(2, 2))
    'tensor([[0., 0.], [0., 0.]])'
    """
    return " ".join(repr(plain_number(value)).split())[:200]


def check_device(device: object, names: Sequence[str] = ("cpu",)) -> torch.device:
    """Returns the device of a name; raises `ValueError` when this machine does not have it.

    >>> check_device("gpu")
    Traceback (most recent call last):
    ValueError: device='gpu' is not available here; choose from 'cpu'...
    """
    try:
        found = torch.device(device)  # type: ignore[arg-type]
        if found.type == "cuda":  # counted, since trying would take memory of the first GPU
            found = found if (found.index or 0) < torch.cuda.device_count() else None
        else:
            found = None if found.type == "meta" else torch.empty(0, device=found).device
    except (RuntimeError, AssertionError, TypeError):  # unknown; not compiled in; not even a name
        found = None
    if found is None:
        names = [*names, *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        choices = ", ".join(map(repr, names))
        raise ValueError(f"device={str(device)!r} is not available here; choose from {choices}")
    # Not "cpu:0", which some libraries do not know.
    return torch.device("cpu") if found.type == "cpu" else found


def choose_device(name: str) -> torch.device:
    """Returns the device of a name; "auto" is CUDA if there is a GPU, else the CPU.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return check_device(name, ["auto", "cpu"])


def check_number(
    name: str,
    value: object,
    least: float,
    below: float = _HUGE,
    whole: bool = False,
    above: bool = False,
) -> None:
    """Raises unless a number of Python or NumPy is >= `least` (> with `above`) and < `below`."""
    # Not NumPy's unsigned numbers as weights: 0 - 1 is not -1 there.
    types = (int, np.integer) if whole else (int, float, np.signedinteger, np.floating)
    number: Any = plain_number(value)
    valid = isinstance(value, types) and not isinstance(value, bool)
    if valid and (number > least if above else number >= least) and number < below:
        return
    allowed = f"a {'whole ' if whole else ''}number {'>' if above else '>='} {least}"
    if below < _HUGE or (valid and number >= below):
        allowed += f" and < {below}"
    raise ValueError(f"{name} is {shown(number)}; it must be {allowed}")


def plain_number(value: object) -> object:
    """Returns a NumPy number as a Python number, which JSON knows, and anything else unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def name_allowed(value: object, allowed: tuple[str, ...]) -> str:
    """Returns the allowed names for an error message, with the nearest one as a hint."""
    nearest = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return f"choose from {', '.join(map(repr, allowed))}{hint}"
