"""The scale of series: what a model reads of a window, and sample paths in the units of the data.

    x' = (x - m_d) / s_d       columns d, over the training rows (`Meta.mean`, `Meta.std`)
    x'' = (x' - m) / s         windows, over the C steps of their context (`vssm.data.scale`)

Both are one factor and one shift, x = factor x'' + shift. A window that is centred does not depend
on m_d, and its least deviation is a tenth of s_d.

Shapes: x (rows, C, channels) float64; factor (rows, 1, channels); shift (rows, P, channels), P
steps of a season; clock (C, 2 x cycles). A row is a series, or one column of it if columns are
separate.
"""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vssm.data import Meta
from vssm.data.scale import LEAST_SPREAD, centre_of_steps, window_scale

__all__ = ["Scale"]

_LARGEST = 1e38  # certainly inside float32
_FAR = 1e4  # deviations from zero beyond which float32 has few digits left


class Scale:
    """The scale of a data set on a device.

    Equal scales are equal keys, so that a recorded program serves both. A scale is `far` if its
    data are so far from zero that all paths in float32 would be one number.
    """

    meta: Meta
    device: torch.device
    mean: Tensor
    std: Tensor

    def __init__(self, meta: Meta, device: torch.device | str = "cpu", far: bool = False) -> None:
        assert meta.columns is not None
        num = len(meta.columns)
        mean, std = meta.mean or (0.0,) * num, meta.std or (1.0,) * num
        self.far: bool = far or any(abs(m) > _FAR * s for m, s in zip(mean, std, strict=True))
        self._key = mean, std, meta.windowed, meta.season, meta.patch, meta.separate, self.far
        self._hash = hash(self._key)
        self.meta, self.device = meta, torch.device(device)
        self.mean, self.std = (
            torch.tensor(v, dtype=torch.float64, device=device) for v in (mean, std)
        )
        self._least_variance = (LEAST_SPREAD * self.std).square()
        self._reach = _FAR * np.array(std)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Scale) and self._key == other._key)

    def fits(self, largest: float) -> bool:
        """Says whether any history with numbers up to `largest` is finite in float32."""
        # A number is at most twice the largest from the centre, in tenths of a deviation.
        mean, std, *_ = self._key
        reach = 20 * largest if self.meta.windowed else largest + max(map(abs, mean))
        return reach <= _LARGEST * min(std)

    def of(self, histories: np.ndarray) -> "Scale":
        """Returns the scale for histories (..., steps, columns): a `far` one if they are far."""
        if self.far or self.meta.windowed is None:
            return self
        far = np.abs(histories.reshape(-1, len(self._reach))).max(0) > self._reach
        return self._far_scale if far.any() else self

    @cached_property
    def _far_scale(self) -> "Scale":
        return Scale(self.meta, self.device, far=True)

    def units(self, x: Tensor, first: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Returns factor and shift of histories; the first of them is row number `first`."""
        mean, std, least = self.mean, self.std, self._least_variance
        if self.meta.separate and len(std) > 1:
            column = (torch.arange(len(x), device=x.device) + first) % len(std)
            mean, std, least = (value[column][:, None, None] for value in (mean, std, least))
        if self.meta.windowed is None:
            return std.expand(len(x), 1, -1), mean.expand(len(x), 1, -1)
        if self.meta.windowed == "window" and self.meta.season == 1:  # the same in fewer kernels
            variance, shift = torch.var_mean(x, 1, correction=0, keepdim=True)
            return (variance + least).sqrt(), shift
        shift, factor = window_scale(x, self.meta.windowed, self.meta.season, least)
        return factor, shift

    def steps(
        self, x: Tensor, factor: Tensor, shift: Tensor, clock: Tensor | None = None
    ) -> Tensor:
        """Returns what the model reads of histories, (rows, C / patch, features) in float32.

        `clock` holds the time features, if the model has some.
        """
        x = (x - centre_of_steps(shift, -x.shape[1], x.shape[1])) / factor
        if clock is not None:
            x = torch.cat([x, clock.expand(len(x), -1, -1)], -1)
        patch = self.meta.patch
        return x[:, x.shape[1] % patch :].unflatten(1, (-1, patch)).flatten(2).float()

    def place(
        self, made: Tensor, factor: Tensor, shift: Tensor, first: int = 0, out: Tensor | None = None
    ) -> Tensor:
        """Returns paths (rows, S, H, channels) in the units of the data, in float64 if `far`.

        `first` counts the steps from the end of the window to the paths.
        """
        made = made.double() if self.far else made
        shift = centre_of_steps(shift.to(made), first, made.shape[2])
        return torch.addcmul(shift[:, None], made, factor[:, None].to(made), out=out)
