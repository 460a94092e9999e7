"""The history of a forecast: checked numbers and dates, in the scale of the model.

Legend: B series of N steps and D columns; C `context`; T steps of the model; x (B, C, D) float64;
rows (B, C, D), or (B D, C, 1) if each column is a series of its own.
"""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vssm.data import Meta
from vssm.data.dates import next_dates, uneven_dates
from vssm.data.scale import Scale
from vssm.data.series import phases
from vssm.data.table import fill_gaps
from vssm.distributions import Head
from vssm.sampling.request import check_bytes

__all__ = ["LARGEST", "History", "Reader", "check_order", "continued", "dates_of", "numbers"]

LARGEST = 1e30
"""The largest number that is read."""

History = Tensor | np.ndarray | Sequence


def numbers(name: str, values: History, columns: tuple[str, ...]) -> Tensor:
    """Returns real numbers as a float64 tensor on the CPU.

    Arguments:
        name: What messages call the numbers.
        values: The numbers. A pandas table, a list of tables, or a row of one gives `columns`.
        columns: The names of the columns, in order.
    """
    values = _by_name(name, values, columns)
    if isinstance(values, np.ma.MaskedArray):
        values = np.where(np.ma.getmaskarray(values), np.nan, np.ma.getdata(values))
    if isinstance(values, Tensor):
        if values.is_complex():
            raise ValueError(f"{name} is complex; allowed: numbers, rows of equal length")
        return values.detach().to("cpu", torch.float64)
    try:
        return torch.from_numpy(np.array(values, np.float64, order="C"))
    except (TypeError, ValueError) as error:  # words, or rows of different lengths
        kind = f"a {type(values).__name__} of other things"
        raise ValueError(f"{name} is {kind}; allowed: numbers, rows of equal length") from error


def _by_name(name: str, values: History, columns: tuple[str, ...]) -> History:
    """Returns the columns of a pandas table, or the cells of a row, in order; others unchanged."""
    if isinstance(values, list | tuple) and values and hasattr(values[0], "columns"):
        return [np.asarray(_by_name(name, table, columns)) for table in values]
    labels = getattr(values, "columns", getattr(values, "index", ()))
    labels = () if callable(labels) else list(labels)  # the index of a list is a method
    if not any(isinstance(label, str) for label in labels) or all(map(str.isdecimal, columns)):
        return values  # the table, or the model, has no names
    if missing := [column for column in columns if column not in labels]:
        allowed = f"{', '.join(columns)}, in any order"
        raise ValueError(f"{name} has no column {missing[0]!r}; allowed: {allowed}")
    return values[list(columns)]  # type: ignore[index]


def dates_of(times: np.ndarray | None, num: int, of: str) -> np.ndarray | None:
    """Returns the dates of `num` steps, checked."""
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
    """Raises unless all dates are known and ascend."""
    if (missing := np.isnat(dates)).any():
        raise ValueError(f"times has no date at step {missing.argmax()}; allowed: all of them")
    if (late := dates[1:] <= dates[:-1]).any():
        k = int(late.argmax()) + 1
        what = "is there twice" if dates[k] == dates[k - 1] else f"comes after {dates[k - 1]}"
        raise ValueError(f"times: {dates[k]} {what}; allowed: each date once and in order")


def continued(times: np.ndarray | None, horizon: int) -> np.ndarray | None:
    """Returns the dates of the steps to come; warns if the dates of the history are uneven."""
    if times is None or len(times) < 2:
        return None
    if uneven := uneven_dates(times):
        warnings.warn(f"{uneven}; dates of the forecast go on in the usual step", stacklevel=4)
    return next_dates(times, horizon)


class Reader:
    """Reads histories for a model with this head and data, on this device."""

    def __init__(self, head: Head, meta: Meta, device: torch.device) -> None:
        assert meta.columns is not None
        self._head, self._meta, self._device, self._columns = head, meta, device, meta.columns
        self._on_host, self.scale = Scale(meta), Scale(meta, device)

    def read(
        self, history: History, times: np.ndarray | None
    ) -> tuple[Tensor, Tensor, np.ndarray | None, bool]:
        """Returns the last C steps of a history with gaps filled, (B, C, D).

        Also returns which values are known, the dates, and whether the history is one series.
        """
        x = numbers("history", history, self._columns)
        shape, num = tuple(x.shape), len(self._columns)
        single = x.ndim == 2
        x = x[None] if single else x
        if x.ndim != 3 or 0 in x.shape or x.shape[2] != num:
            raise ValueError(
                f"history has shape {shape}; allowed: (steps, {num}) or (series, steps, {num}), one"
                f" step and one series or more, of the columns {', '.join(self._columns)}"
            )
        times = dates_of(times, x.shape[1], "history")
        if times is None and self._meta.cycles:
            raise ValueError(
                "times is needed: the model was trained with the time features of its data"
            )
        context = self._meta.context or x.shape[1]
        x, times = x[:, -context:], None if times is None else times[-context:]
        for least, what in (
            (self._meta.season, "a season of the run"),
            (self._meta.patch, "a step"),
        ):
            if x.shape[1] < least:
                raise ValueError(
                    f"history has {x.shape[1]} steps; allowed: {least} or more, {what} of the model"
                )
        known = torch.isfinite(x)
        if not known.all():
            self.check_known(known)
            parts = zip(x.numpy(), known.numpy(), strict=True)
            x = torch.from_numpy(np.stack([fill_gaps(v, k, self._meta.fill) for v, k in parts]))
        largest = float(x.abs().max())
        if largest > LARGEST:
            raise ValueError(f"history has values up to {largest:g}; allowed: up to 1e30")
        if not self.scale.fits(largest):
            self.scaled(x, times)  # raises if a value leaves float32
        return x, known, times, single

    def check_known(self, known: Tensor) -> None:
        """Raises if more is missing than the run can fill."""
        steps = known.shape[1]
        if self._meta.fill is None and not known.all():
            series, step, column = (~known).nonzero()[0].tolist()
            raise ValueError(
                f"history is missing or not finite at series {series}, step {step - steps}, column"
                f" {self._columns[column]!r}; allowed: no gaps, or a run with --series.fill"
            )
        missing = (~known).sum(1)
        for series, column in (2 * missing > steps).nonzero().tolist():
            raise ValueError(
                f"history of series {series}, column {self._columns[column]!r} is missing in"
                f" {missing[series, column]} of the last {steps} steps; allowed: half of them"
            )

    def scale_of(self, x: Tensor, samples: int, horizon: int) -> Scale:
        """Returns the scale of histories; raises if the paths after them do not fit in memory."""
        scale = self.scale.of(x.numpy())
        size = len(x) * samples * horizon * len(self._columns) * (8 if scale.far else 4)
        what = f"samples={samples} and horizon={horizon} of {len(x)} series"
        check_bytes(what, size, self._device)
        return scale

    def scaled(self, x: Tensor, times: np.ndarray | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what the model reads of (B, C, D), (rows, T, features), and factor and shift."""
        rows = self.rows(x)
        factor, shift = self._on_host.units(rows)
        return self.prompt(rows, factor, shift, times), factor, shift

    def prompt(
        self,
        rows: Tensor,
        factor: Tensor,
        shift: Tensor,
        times: np.ndarray | None,
        since: int | None = None,
    ) -> Tensor:
        """Returns what the model reads of rows, on its device; `since` as for `Scale.steps`."""
        x = self._on_host.steps(rows, factor, shift, self.clock(times), since)
        self._head.validate(x)  # on the CPU, since a check on the device would wait for it
        return x.to(self._device)

    def clock(self, times: np.ndarray | None) -> Tensor | None:
        """Returns the time features of dates, (C, 2 x cycles), if the model has some."""
        if not self._meta.cycles:
            return None
        assert times is not None
        return torch.from_numpy(phases(times, self._meta.cycles))

    def rows(self, x: Tensor) -> Tensor:
        """Returns (B, C, D) as rows."""
        return x.transpose(1, 2).flatten(0, 1)[..., None] if self._meta.separate else x

    def by_column(self, paths: Tensor, num: int) -> Tensor:
        """Returns paths (rows, S, H, channels) of `num` series as (B, S, H, D)."""
        if self._meta.separate:
            return paths.unflatten(0, (num, -1)).squeeze(-1).movedim(1, -1)
        return paths
