"""Checks of what users pass. They are called where users come in, and nowhere else.

Each raises `ValueError`, in one line: what is wrong, what was given, and what is allowed.
"""

import difflib
import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "check_choice",
    "check_device",
    "check_flag",
    "check_number",
    "check_path",
    "check_type",
    "choose_device",
    "name_allowed",
    "plain_number",
    "printable",
    "shown",
    "whole_number",
    "whole_numbers",
]

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_HUGE = 1e100  # no setting is so large, and whole numbers of JSON may be larger than any float


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises `ValueError` when the value is not one of the allowed, and suggests the nearest one.

    >>> check_choice("kind", "vsm", ("ssm", "vssm"))
    Traceback (most recent call last):
    ValueError: kind='vsm' is unknown; allowed: 'ssm', 'vssm' (did you mean 'vssm'?)
    """
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={shown(value)} is unknown; {name_allowed(value, allowed)}")


def check_type(name: str, value: object, types: Any, allowed: str) -> None:  # noqa: ANN401
    """Raises `ValueError` when the value is not of one of the types.

    >>> check_type("lengths", [3, 1], torch.Tensor, "a tensor")
    Traceback (most recent call last):
    ValueError: lengths is a list; allowed: a tensor
    """
    if not isinstance(value, types):
        raise ValueError(f"{name} is a {type(value).__name__}; allowed: {allowed}")


def check_flag(name: str, value: object) -> None:
    """Raises `ValueError` unless the value is True or False: "no" would count as True."""
    check_type(name, value, (bool, np.bool_), "True, False")


def check_path(name: str, value: object) -> None:
    """Raises `ValueError` unless the value is a path."""
    check_type(name, value, (str, os.PathLike), "a path")


def whole_number(name: str, value: object, least: int) -> int:
    """Returns a whole number as an int, be it Python's, NumPy's or a tensor's; raises `ValueError` otherwise.

    >>> whole_number("length", 2.5, least=0)
    Traceback (most recent call last):
    ValueError: length=2.5 is not allowed; allowed: a whole number >= 0
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(
            f"{name}={shown(value)} is not allowed; allowed: a whole number >= {least}"
        )
    return number


def whole_numbers(name: str, values: Sequence[int] | Tensor | int, device: torch.device) -> Tensor:
    """Returns numbers as an int64 tensor; fractions are refused, not cut off."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        tensor = None
    if tensor is None or tensor.dtype not in _INTEGERS:
        given = (
            type(values).__name__ if tensor is None else str(tensor.dtype).removeprefix("torch.")
        )
        raise ValueError(f"{name} is {given}; allowed: whole numbers of 64 bits")
    return tensor.to(device, torch.int64)


def shown(value: object) -> str:
    """Returns a value as it is written, in one line.

    >>> shown(torch.zeros(2, 2))
    'tensor([[0., 0.], [0., 0.]])'
    """
    return " ".join(repr(value).split())[:200]


def printable(text: str) -> str:
    r"""Returns a text with its control characters as escapes, which a terminal does not obey.

    >>> printable("a\tb\n\x1b[2J")
    'a\tb\n\\x1b[2J'
    """
    return "".join(
        char if char.isprintable() or char in "\t\n" else char.encode("unicode_escape").decode()
        for char in text
    )


def check_device(device: object) -> torch.device:
    """Returns the device that a name means; raises `ValueError` when it is none that this machine has.

    >>> check_device("gpu")
    Traceback (most recent call last):
    ValueError: device='gpu' is not there; allowed: 'cpu'...
    """
    try:
        found = torch.device(device)  # type: ignore[arg-type]
        if found.type == "cuda":  # counted, not tried: that would take memory of the first GPU
            found = found if (found.index or 0) < torch.cuda.device_count() else None
        else:
            found = None if found.type == "meta" else torch.empty(0, device=found).device
    except (RuntimeError, AssertionError, TypeError):  # unknown; not compiled in; not even a name
        found = None
    if found is None:
        there = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ValueError(
            f"device={str(device)!r} is not there; allowed: {', '.join(map(repr, there))}"
        )
    return (
        torch.device("cpu") if found.type == "cpu" else found
    )  # "cpu:0" is not a name to all libraries


def choose_device(name: str) -> torch.device:
    """Returns the device that a name means; "auto" is CUDA where there is one, else the CPU.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return check_device(name)
    except ValueError:  # lists the devices, but not "auto"
        there = ["auto", "cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        allowed = ", ".join(map(repr, there))
        raise ValueError(f"device={name!r} is not there; allowed: {allowed}") from None


def check_number(
    name: str,
    value: object,
    least: float,
    below: float = _HUGE,
    whole: bool = False,
    above: bool = False,
) -> None:
    """Raises unless `least` <= value < `below` (`least` < value when `above`), be it Python's or NumPy's."""
    # Not NumPy's unsigned ones as weights: one less than 0 is not -1 there.
    types = (int, np.integer) if whole else (int, float, np.signedinteger, np.floating)
    number = isinstance(value, types) and not isinstance(value, bool)
    value = plain_number(value)
    if number and (value > least if above else value >= least) and value < below:  # type: ignore[operator]
        return
    allowed = f"a {'whole ' if whole else ''}number {'>' if above else '>='} {least}"
    raise ValueError(
        f"{name}={shown(value)} is not allowed; allowed: {allowed}"
        + (f" and < {below}" if below < _HUGE or (number and value >= _HUGE) else "")  # type: ignore[operator]
    )


def plain_number(value: object) -> object:
    """Returns a number of NumPy as one of Python, which JSON knows, and all else as it is."""
    if isinstance(value, np.integer):
        return operator.index(value)
    return float(value) if isinstance(value, np.floating) else value


def name_allowed(value: object, allowed: tuple[str, ...]) -> str:
    """Returns the allowed names for an error message, with the nearest one as a hint."""
    nearest = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return f"allowed: {', '.join(map(repr, allowed))}{hint}"
