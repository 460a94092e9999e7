"""The scale of series: what a model reads of a window, and sample paths in the units of the data.

    x' = (x - m_d) / s_d       columns d, over the training rows (`Meta.mean`, `Meta.std`)
    x'' = (x' - m) / s         windows, over the C steps of their context (`Meta.windowed`). m is
                               the mean or the last of them, and each step of a season may have its
                               own m (`Meta.season`)

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

from vssm.data.meta import Meta

__all__ = ["Scale", "centre_of_steps", "window_scale", "window_scale_of_known"]

_LEAST_SPREAD = 0.1  # least deviation of a window, relative to its column: it may be constant
_LARGEST = 1e38  # certainly inside float32
_FAR = 1e4  # deviations from zero beyond which float32 has few digits left


def window_scale(
    x: Tensor, centre: str = "window", season: int = 1, least: Tensor | float = _LEAST_SPREAD**2
) -> tuple[Tensor, Tensor]:
    """Returns the centres of every window, (B, P, D), and its deviation, (B, 1, D).

    Arguments:
        x: The contexts of windows, (B, C, D).
        centre: "window" for the mean, and the deviation from it; "last" for the last value, and the
            deviation that a random walk with the same steps has after C of them.
        season: P, steps of a season, each with a centre of its own. C is at least P; steps beyond
            whole seasons, at the start, do not count.
        least: Added to the variance, (D,) or (B, 1, D).
    """
    x = x[:, x.shape[1] % season :].unflatten(1, (-1, season))  # (B, seasons, P, D)
    if centre == "last":
        middle, variance = x[:, -1], x.diff(dim=1).square().sum(1)
    else:
        middle = x.mean(1)
        variance = (x - middle[:, None]).square().mean(1)
    return middle, (variance.mean(1, keepdim=True) + least).sqrt()


def window_scale_of_known(
    x: Tensor, centre: str = "window", season: int = 1, least: Tensor | float = _LEAST_SPREAD**2
) -> tuple[Tensor, Tensor]:
    """Does what `window_scale` does, and skips values that are NaN.

    A step of a season without any value has the centre of the others. A window without any value
    has centre 0 and deviation 1, like its whole column.

    Example:
        >>> x = torch.tensor([[[1.0], [torch.nan], [3.0], [torch.nan]]])
        >>> [scale.flatten().tolist() for scale in window_scale_of_known(x, least=0.0)]
        [[2.0], [1.0]]
        >>> [scale.flatten().tolist() for scale in window_scale_of_known(x, "last", least=0.0)]
        [[3.0], [2.0]]
    """
    x = x[:, x.shape[1] % season :].unflatten(1, (-1, season))  # (B, seasons, P, D)
    if centre == "last":
        steps = torch.arange(x.shape[1], device=x.device).view(-1, 1, 1)
        last = torch.where(x.isnan(), 0, steps).cummax(1).values
        x = x.gather(1, last)  # the last known value at every step; NaN before the first
        middle, variance = x[:, -1], x.diff(dim=1).square().nansum(1)
        variance = torch.where(middle.isnan(), torch.nan, variance)
    else:
        middle = x.nanmean(1)
        variance = (x - middle[:, None]).square().nanmean(1)
    middle = torch.where(middle.isnan(), middle.nanmean(1, keepdim=True), middle)
    variance = variance.nanmean(1, keepdim=True).nan_to_num(1.0)
    return middle.nan_to_num(0.0), (variance + least).sqrt()


def centre_of_steps(centres: Tensor, first: int, num: int) -> Tensor:
    """Returns the centres (B, P, D) of a season for `num` steps, (B, num, D).

    Step `first` is counted from the end of the context.

    Example:
        >>> centre_of_steps(torch.tensor([[[0.0], [1.0], [2.0]]]), -1, 5).flatten().tolist()
        [2.0, 0.0, 1.0, 2.0, 0.0]
    """
    if centres.shape[1] == 1:
        return centres.expand(-1, num, -1)
    return centres[:, torch.arange(first, first + num, device=centres.device) % centres.shape[1]]


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
        self._least_variance = (_LEAST_SPREAD * self.std).square()
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
