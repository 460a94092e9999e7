"""What a forecast is given: numbers and dates as users have them, checked.

Legend: one date for each step, of a regular calendar or not; H steps to come.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vssm.checks import check_choice, whole_number
from vssm.data.dates import calendar_step, plain_dates, uneven_dates, usual_step

__all__ = [
    "Asked",
    "History",
    "asked_for",
    "check_horizon",
    "check_options",
    "check_order",
    "continued",
]
__all__ += ["dates_of", "double", "is_seed", "largest_of", "numbers"]

History = Tensor | np.ndarray | Sequence


def numbers(name: str, values: History, columns: tuple[str, ...]) -> Tensor:
    """Returns real numbers as a tensor; what is none is named.

    Arguments:
        name: What the message calls them.
        values: The numbers; of a table whose columns have names, or of a row of it, those that are wanted.
        columns: The names that are wanted, in order.
    """
    values = _by_name(name, values, columns)
    try:
        x = values if isinstance(values, Tensor) else torch.from_numpy(_array(values))
    except (TypeError, ValueError):  # words, or rows of different lengths
        x = None
    if x is None or x.is_complex():
        given = "complex" if x is not None else f"a {type(values).__name__} of other things"
        raise ValueError(f"{name} is {given}; allowed: numbers, rows of equal length")
    return x


def _array(values: object) -> np.ndarray:
    """Returns numbers as PyTorch takes them; what a mask hides is missing."""
    if isinstance(values, np.ma.MaskedArray):
        values = np.where(np.ma.getmaskarray(values), np.nan, np.ma.getdata(values))
    array = np.ascontiguousarray(np.asarray(values, np.float64))  # not backwards
    return array if array.flags.writeable else array.copy()


def _by_name(name: str, values: History, columns: tuple[str, ...]) -> History:
    """Returns the columns of a table of pandas, or the cells of a row, in order; other values as they are."""
    if (
        isinstance(values, list | tuple) and values and hasattr(values[0], "columns")
    ):  # tables of many series
        return [np.asarray(_by_name(name, table, columns)) for table in values]
    labels = getattr(values, "columns", getattr(values, "index", ()))
    labels = () if callable(labels) else list(labels)  # a list has a method of that name
    if not any(
        isinstance(label, str) for label in labels
    ):  # numbers of columns and dates of rows name none
        return values
    missing = [column for column in columns if column not in labels]
    if not missing:
        return values[list(columns)]  # type: ignore[index]
    if all(map(str.isdecimal, columns)):  # what the model was trained on had no names
        return values
    raise ValueError(
        f"{name} has no column {missing[0]!r}; allowed: {', '.join(columns)}, in any order"
    )


# By NumPy, which calls no other threads: to wake them takes longer than to do it.
def double(x: Tensor) -> Tensor:
    """Returns numbers on a CPU in float64."""
    return (
        torch.from_numpy(x.numpy().astype(np.float64)) if x.dtype == torch.float32 else x.double()
    )


def largest_of(values: np.ndarray) -> float:
    """Returns the largest magnitude of some numbers, NaN if one is."""
    return max(-float(values.min()), float(values.max()))  # NumPy compares single numbers slowly


def dates_of(times: np.ndarray | None, num: int, of: str) -> np.ndarray | None:
    """Returns dates, one for each step, or None; what is none is named."""
    if times is None:
        return None
    dates = np.asarray(times).reshape(-1)
    if dates.dtype.kind != "M":
        raise ValueError(f"times is {dates.dtype}; allowed: datetime64, one for each step")
    if len(dates) != num:
        raise ValueError(f"times has {len(dates)} dates; allowed: {num}, the steps of {of}")
    check_order(dates)
    return dates


def check_order(dates: np.ndarray) -> None:
    """Raises unless dates are known and follow each other."""
    if np.isnat(dates).any():
        raise ValueError(
            f"times has no date at step {int(np.isnat(dates).argmax())}; allowed: all of them"
        )
    late = ~(dates[1:] > dates[:-1])
    if late.any():
        k = int(late.argmax()) + 1
        what = "is there twice" if dates[k] == dates[k - 1] else f"comes after {dates[k - 1]}"
        raise ValueError(f"times: {dates[k]} {what}; allowed: each date once and in order")


def continued(times: np.ndarray | None, horizon: int) -> np.ndarray | None:
    """Returns the dates of the steps to come, each after the usual step; that of a calendar is in months.

    Dates that are not evenly apart are warned of.

    Example:
        >>> continued(np.array(["2023-10-31", "2023-11-30", "2023-12-31"], "M8[s]"), 2).astype("M8[D]")
        array(['2024-01-31', '2024-02-29'], dtype='datetime64[D]')
    """
    if times is None or len(times) < 2:
        return None
    times = plain_dates(times)
    uneven = uneven_dates(times)
    if uneven is not None:
        warnings.warn(f"{uneven}; dates of the forecast go on in the usual step", stacklevel=4)
    ahead, month = np.arange(1, horizon + 1), np.timedelta64(1, "M")
    calendar = calendar_step(times)
    if calendar is None:
        return times[-1] + usual_step(times) * ahead
    months, from_end = calendar
    last = times[-1].astype("datetime64[M]")
    new = last + months * ahead * month
    if from_end:
        return (new + month).astype("datetime64[s]") - (
            (last + month).astype("datetime64[s]") - times[-1]
        )
    return new.astype("datetime64[s]") + (times[-1] - last.astype("datetime64[s]"))


def check_horizon(horizon: int | None, samples: int, trained: int | None) -> int:
    """Returns the horizon, by default that of training, where it and the samples are numbers that can be."""
    if horizon is None:
        horizon = trained
    if horizon is None:
        raise ValueError(
            "horizon=None needs a run that knows its own; allowed: a whole number >= 1"
        )
    horizon, _ = whole_number("horizon", horizon, 1), whole_number("samples", samples, 1)
    if trained is not None and horizon > trained:
        warnings.warn(
            f"horizon={horizon} is longer than the {trained} steps of training: from step"
            f" {trained + 1} on this is extrapolation",
            stacklevel=4,
        )
    return horizon


def check_options(options: dict[str, Any]) -> None:
    """Raises unless these are options of a forecast."""
    for name in options:
        check_choice("option", name, ("chunk", "recondition", "temperature"))


class Asked(NamedTuple):
    """What a forecast is asked for beside seed and values, where that is as usual."""

    shape: torch.Size
    """Of the history."""
    dtype: torch.dtype
    horizon: int | None
    samples: int
    temperature: float


def asked_for(
    history: History,
    horizon: int | None,
    samples: int,
    times: np.ndarray | None,
    seed: int,
    options: dict[str, Any],
) -> Asked | None:
    """Returns what is asked for if it can be told from what was asked before, or None."""
    if (
        type(history) is not Tensor
        or not history.is_cpu
        or history.requires_grad
        or times is not None
    ):
        return None
    temperature = options.get("temperature", 1.0)
    if (
        len(options) > ("temperature" in options)
        or type(temperature) is not float
        or not is_seed(seed)
    ):
        return None
    # Types are looked at since True, 1 and 1.0 are equal, but not equally right.
    if type(samples) is not int or not (horizon is None or type(horizon) is int):
        return None
    return Asked(history.shape, history.dtype, horizon, samples, temperature)


def is_seed(seed: object) -> bool:
    """Says whether a seed is one whole number of 64 bits."""
    return type(seed) is int and -(2**63) <= seed < 2**63
