"""The scale of forecasts: what a model reads of a history, and its paths in the units of the data.

    x' = (x - m_d) / s_d                 columns d, over the training rows (`Meta.mean`, `Meta.std`)
    x'' = (x' - m) / s                   windows, over the last C steps of the history (`Meta.windowed`);
                                         m may be the last of them instead of their mean, and each step of a
                                         season may have its own (`Meta.season`)

Both are one factor and one shift, x = factor x'' + shift. A window that is centred does not depend on m_d,
and its least deviation is a tenth of s_d.

Shapes: x (rows, C, channels) float64; factor (rows, 1, channels); shift (rows, P, channels), P steps of a
season; clock (C, 2 x cycles). Rows are series, or columns of them where these are apart.
"""

import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vssm.data.dataset import LEAST_SPREAD, Meta, in_season, spread

__all__ = ["Scale"]

_LARGEST = 1e38  # what is certainly inside float32
_FAR = 1e4  # deviations from zero, beyond which float32 has few digits left for them


class Scale:
    """Creates the scale of some data on a device.

    Equal scales are equal keys, in little time: what was recorded with one serves the other. A scale is `far`
    where its data are so far from zero that paths in float32 would be one number.
    """

    def __init__(self, meta: Meta, device: torch.device | str = "cpu", far: bool = False) -> None:
        assert meta.columns is not None
        num = len(meta.columns)
        mean, std = meta.mean or (0.0,) * num, meta.std or (1.0,) * num
        self.far = far or any(abs(m) > _FAR * s for m, s in zip(mean, std, strict=True))
        self._fixed = mean, std, meta.windowed, meta.season, meta.patch, meta.separate, self.far
        self._hash = hash(self._fixed)
        self.meta, self.device = meta, torch.device(device)
        self.mean, self.std = (
            torch.tensor(v, dtype=torch.float64, device=device) for v in (mean, std)
        )
        self._variance = (LEAST_SPREAD * self.std).square()
        self._least, self._most = min(std), max(map(abs, mean))
        self._reach = _FAR * np.array(std)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Scale) and self._fixed == other._fixed)

    def fits(self, largest: float) -> bool:
        """Says whether histories with numbers up to `largest` are finite in float32, whatever they are."""
        # At most twice the largest from the centre of a window, in tenths of a deviation.
        reach = 20 * largest if self.meta.windowed else largest + self._most
        return reach <= _LARGEST * self._least

    def of(self, histories: np.ndarray, largest: float = math.inf) -> "Scale":
        """Returns the scale of histories (..., steps, columns): one that is `far`, if their windows are.

        Arguments:
            histories: In the units of the data.
            largest: The largest number of them, where that is known.
        """
        if self.far or self.meta.windowed is None or largest <= _FAR * self._least:
            return self
        flat = histories.reshape(-1, len(self._reach))
        reach = np.maximum(flat.max(0), -flat.min(0))
        return self._afar if (reach > self._reach).any() else self

    @cached_property
    def _afar(self) -> "Scale":
        return Scale(self.meta, self.device, far=True)

    def units(self, x: Tensor, first: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Returns factor and shift of histories, of which the first is of row `first`."""
        mean, std, least = self.mean, self.std, self._variance
        if self.meta.separate and len(std) > 1:
            column = (torch.arange(len(x), device=x.device) + first) % len(std)
            mean, std, least = (value[column][:, None, None] for value in (mean, std, least))
        if self.meta.windowed is None:
            return std.expand(len(x), 1, -1), mean.expand(len(x), 1, -1)
        if self.meta.windowed == "window" and self.meta.season == 1:  # the same in few kernels
            variance, shift = torch.var_mean(x, 1, correction=0, keepdim=True)
            return (variance + least).sqrt(), shift
        shift, factor = spread(x, self.meta.windowed, self.meta.season, least)
        return factor, shift

    def steps(
        self,
        x: Tensor,
        factor: Tensor,
        shift: Tensor,
        clock: Tensor | None = None,
        since: int | None = None,
    ) -> Tensor:
        """Returns what the model reads, (rows, C / patch, features) in float32.

        Arguments:
            x: The histories.
            factor: Theirs.
            shift: Theirs.
            clock: The time features, where there are some.
            since: Steps between the window and x; by default x is the window.
        """
        since = -x.shape[1] if since is None else since
        x = (x - in_season(shift, since, x.shape[1])) / factor
        if clock is not None:
            x = torch.cat([x, clock.expand(len(x), -1, -1)], -1)
        patch = self.meta.patch
        return x[:, x.shape[1] % patch :].unflatten(1, (-1, patch)).flatten(2).float()

    def exact(self, made: Tensor) -> Tensor:
        """Returns paths in a type that has the digits of the data: float64 where these are far from zero."""
        return made.double() if self.far else made

    def place(
        self, made: Tensor, factor: Tensor, shift: Tensor, first: int = 0, out: Tensor | None = None
    ) -> Tensor:
        """Returns paths (rows, S, H, channels) in the units of the data; `first` as for `in_season`.

        They are of the type of `made`, which is to be `exact`.
        """
        shift = in_season(shift.to(made), first, made.shape[2])
        return torch.addcmul(shift[:, None], made, factor[:, None].to(made), out=out)
