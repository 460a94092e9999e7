"""Calibration: how far forecasts leave their base, and how wide their intervals are.

    median  b m                       m the median of the paths, from the centre of its window on;
                                      b from 0 to 1, a shrinkage
    score   r = (y - m) / (q - m)     q the quantile 0.9 of the paths if y is above m, else 0.1;
                                      more than 1 is a miss
    factor  k = quantile of r         above the median and below, by quarters of the horizon
    path    m + a (1 + (k - 1) min(1, |a / (q - m)|))     a = x - m

The factors are conformal: the quantile is 0.9 + c / n for n past windows that do not overlap. So
few windows widen the intervals; then k also stays closer to 1. The stretch grows from the median to
q: the middle of a forecast stays as sharp as the model drew it.

Only scores of the recent past count: at first of held-out windows, later also of the windows that
`update` and `evaluate` saw. No window is calibrated by values that came after its history.

Legend: W windows, S paths, H steps of the horizon.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vssm.forecasting.linear import is_close

_SHIFTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_LEVEL, _OUTWARDS = 0.9, 0.3
_LEAST, _MOST = 0.5, 4.0  # of a factor; below 0.5 paths would change their order
_MEMORY = 0.75  # of the time that the held-out windows span
_PARTS = 4  # of the horizon
_FEWEST = 8  # scores that give a factor


class Calibration(NamedTuple):
    """The scores of past windows, which calibrate the forecasts of windows to come.

    Example:
        >>> noise = torch.Generator().manual_seed(0)
        >>> y, paths = (torch.randn(*n, generator=noise) for n in ((900, 1), (900, 200, 1)))
        >>> held = Calibration.of(paths / 2, y, torch.arange(900)[:, None], series=1, apart=900)
        >>> held.factors(900).round()
        tensor([[2.],
                [2.]])
    """

    shift: float
    """b, how far medians may leave the centre of their window."""
    scores: Tensor
    """(W, H): r above the median, -r below it; NaN where a value is missing."""
    dates: Tensor
    """When each value came, (W, H) int64."""
    memory: float
    """How long scores count, in the unit of the dates."""
    series: int
    """How many series have scores."""

    @classmethod
    def of(
        cls, paths: Tensor, y: Tensor, dates: Tensor, series: int, apart: float
    ) -> "Calibration":
        """Returns the calibration by held-out windows.

        They come as paths (W, S, H), true values y (W, H) and their dates (W, H). `apart` is how
        many windows without overlap the same data would give.
        """
        shift, memory = _choose_shift(paths, y, apart), float(dates.max() - dates.min())
        return cls(shift, _scores(paths, y, shift), dates, _MEMORY * memory, series)

    def with_windows(self, paths: Tensor, y: Tensor, dates: Tensor) -> "Calibration":
        """Returns a calibration with these windows added, and without scores that are too old."""
        kept = self.dates.amax(1) >= dates.min() - self.memory
        scores = torch.cat([self.scores[kept], _scores(paths, y, self.shift)])
        return self._replace(scores=scores, dates=torch.cat([self.dates[kept], dates]))

    def factors(self, now: int) -> Tensor:
        """Returns the factors below and above the median, (2, H), from values before `now`."""
        kept = (self.dates < now) & (self.dates >= now - self.memory)
        factors = torch.ones(2, self.dates.shape[1])
        if not kept.any():
            return factors
        span = float((self.dates[:, -1] - self.dates[:, 0]).max()) or 1.0  # of a window
        # Series move together, so that D of them tell less than D times as much.
        num = float(now - self.dates[kept].min()) / span * self.series**0.5
        level, trust = min(0.98, _LEVEL + _OUTWARDS / num), num / (num + 1)
        scores = np.where(kept.numpy(), self.scores.numpy(), np.nan)
        for part in np.array_split(np.arange(scores.shape[1]), _PARTS):
            found = scores[:, part]
            found = found[np.isfinite(found)]
            if len(found) >= _FEWEST:
                ends = -np.quantile(found, 1 - level), np.quantile(found, level)
                ends = np.clip(np.array(ends), _LEAST, _MOST)
                factors[:, part] = torch.from_numpy(1 + trust * (ends - 1)).float()[:, None]
        return factors

    def apply(self, paths: Tensor, now: Tensor) -> Tensor:
        """Returns calibrated paths (W, S, H) of windows whose history ends before `now` (W,)."""
        low, middle, high = (bound[:, None] for bound in _bounds(paths))
        times, index = torch.unique(now.clamp(max=int(self.dates.max()) + 1), return_inverse=True)
        below, above = torch.stack([self.factors(int(time)) for time in times])[index].unbind(1)
        away = paths - middle
        up = away > 0
        unit = torch.where(up, high - middle, middle - low)
        share = torch.where(unit > 0, away / unit, 0).abs().clamp(max=1)
        factor = torch.where(up, above[:, None], below[:, None])
        return self.shift * middle + away * (1 + (factor - 1) * share)


def _bounds(paths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the quantiles 0.1, 0.5 and 0.9 of paths, (W, H) each."""
    ranks = np.round(np.array([0.1, 0.5, 0.9]) * (paths.shape[1] - 1)).astype(int)
    found = np.partition(paths.numpy(), np.unique(ranks), axis=1)
    low, middle, high = (torch.from_numpy(found[:, rank]) for rank in ranks)
    return low, middle, high


def _scores(paths: Tensor, y: Tensor, shift: float) -> Tensor:
    low, middle, high = _bounds(paths)
    away = y - shift * middle
    unit = torch.where(away > 0, high - middle, middle - low)
    return torch.where(unit > 0, away / unit, torch.nan)


def _choose_shift(paths: Tensor, y: Tensor, apart: float) -> float:
    """Returns the smallest b whose error is within half a standard error of the best."""
    middle = _bounds(paths)[1]
    errors = [(y - b * middle).abs().nanmean(1).nan_to_num() for b in _SHIFTS]
    best = min(errors, key=lambda error: float(error.mean()))
    return _SHIFTS[[is_close(error, best, apart) for error in errors].index(True)]
