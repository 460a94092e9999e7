"""The history of a forecast as the model reads it: its last steps, whole, in the scale of the model.

Legend: B series of N steps and D columns; C `context`; T steps of the model; x (B, C, D); rows (B, C, D), or
(B D, C, 1) where each column is a series of its own.
"""

import math

import numpy as np
import torch
from torch import Tensor

from vssm.data import Meta
from vssm.data.scale import Scale
from vssm.data.series import phases
from vssm.data.table import fill_gaps
from vssm.distributions import Head
from vssm.forecasting.inputs import History, dates_of, double, largest_of, numbers
from vssm.sampling.generation import check_bytes

__all__ = ["LARGEST", "Reader"]

LARGEST = 1e30
"""Of what is read, before it is scaled."""


class Reader:
    """Reads histories for a model.

    Arguments:
        head: Of the model.
        meta: What is known of its data, whose columns have names.
        device: Where the model is.
    """

    def __init__(self, head: Head, meta: Meta, device: torch.device) -> None:
        assert meta.columns is not None
        self._head, self._meta, self._device, self._columns = head, meta, device, meta.columns
        self._on_host, self.scale = Scale(meta), Scale(meta, device)

    def read(
        self, history: History, times: np.ndarray | None
    ) -> tuple[Tensor, Tensor | None, np.ndarray | None, bool]:
        """Returns the last C steps of a history, (B, C, D) in float32 or float64, and their dates.

        Second is which are known, None where all are.
        """
        x = numbers("history", history, self._columns).detach()
        shape, num = tuple(x.shape), len(self._columns)
        single = x.ndim == 2
        x = x[None] if single else x
        if x.ndim != 3 or x.shape[1] < 1 or x.shape[2] != num or not len(x):
            raise ValueError(
                f"history has shape {shape}; allowed: (steps, {num}) or (series, steps, {num}), one step and"
                f" one series or more, of the columns {', '.join(self._columns)}"
            )
        times = dates_of(times, x.shape[1], "history")
        if times is None and self._meta.cycles:
            raise ValueError(
                "times is needed: the model was trained with the time features of its data"
            )
        context = self._meta.context or x.shape[1]
        x, known = x[:, -context:].cpu(), None
        x = x if x.dtype == torch.float32 else double(x)
        largest = largest_of(x.numpy())
        if not math.isfinite(largest):  # one pass tells that nothing is missing, as is usual
            x, known = double(x), torch.isfinite(x)
            self.check_known(known)
            parts = zip(x.numpy(), known.numpy(), strict=True)
            x = torch.from_numpy(np.stack([fill_gaps(v, k, self._meta.fill) for v, k in parts]))
            largest = largest_of(x.numpy())
        if largest > LARGEST:
            raise ValueError(f"history has values up to {largest:g}; allowed: up to 1e30")
        times = None if times is None else np.asarray(times)[-context:]
        self._check_steps(x.shape[1])
        if not self.scale.fits(largest):  # all of it has to be looked at
            self.scaled(double(x), times)
        return x, known, times, single

    def _check_steps(self, steps: int) -> None:
        season, patch = self._meta.season, self._meta.patch
        if steps < season:
            raise ValueError(
                f"history has {steps} steps; allowed: {season} or more, a season of the run"
            )
        if steps < patch:
            raise ValueError(
                f"history has {steps} steps; allowed: {patch} or more, a step of the model"
            )

    def check_known(self, known: Tensor) -> None:
        """Raises where more is missing than the run can fill."""
        if known.all():
            return
        steps = known.shape[1]
        if self._meta.fill is None:
            series, step, column = (~known).nonzero()[0].tolist()
            raise ValueError(
                f"history is missing or not finite at series {series}, step {step - steps}, column"
                f" {self._columns[column]!r}; allowed: whole, as in training, or a run with --series.fill"
            )
        missing = (~known).sum(1)
        if (2 * missing > steps).any():
            series, column = (2 * missing > steps).nonzero()[0].tolist()
            raise ValueError(
                f"history of series {series}, column {self._columns[column]!r} is missing in"
                f" {int(missing[series, column])} of the last {steps} steps; allowed: half of them at most"
            )

    def scale_of(self, x: Tensor, samples: int, horizon: int) -> Scale:
        """Returns the scale of histories and of the paths after them, if these fit the memory."""
        values, series = x.numpy(), len(x)
        scale = self.scale.of(values, largest_of(values))
        size = series * samples * horizon * len(self._columns) * (8 if scale.far else 4)
        check_bytes(
            f"samples={samples} and horizon={horizon} of {series} series", size, self._device
        )
        return scale

    def scaled(self, x: Tensor, times: np.ndarray | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what the model reads of (B, C, D), (rows, T, features), and its factor and shift."""
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
        """Returns what the model reads of rows, on its device."""
        x = self._on_host.steps(rows, factor, shift, self.clock(times), since)
        # Here, since it would wait for the device there; a sum that is finite says that all numbers are.
        self._head.validate(x, values=not math.isfinite(x.sum(dtype=torch.float64)))
        return x.to(self._device)

    def clock(self, times: np.ndarray | None) -> Tensor | None:
        """Returns the time features of dates, (C, 2 x cycles), where the model has some."""
        if not self._meta.cycles:
            return None
        assert times is not None
        return torch.from_numpy(phases(times, self._meta.cycles))

    def rows(self, x: Tensor) -> Tensor:
        """Returns (B, C, D) as the model has it: (B, C, D), or (B D, C, 1) when columns are apart."""
        return x.transpose(1, 2).flatten(0, 1)[..., None] if self._meta.separate else x

    def by_column(self, paths: Tensor, num: int) -> Tensor:
        """Returns paths (rows, S, H, channels) as (B, S, H, D)."""
        if self._meta.separate:
            return paths.unflatten(0, (num, -1)).squeeze(-1).movedim(1, -1)
        return paths
