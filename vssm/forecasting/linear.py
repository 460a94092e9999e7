"""The linear forecast of a window, from which the direct forecast starts.

    u_{C+h} = sum_i a_i W_{ih}        u the values of a window in its own scale, zero where missing
                                      a the history u_1 ... u_C and the covariates of the window

W is a ridge regression over the windows of all series. The penalty and the centre of windows are
chosen to forecast held-out windows best; with an infinite penalty the forecast is the centre.

Legend: W windows of C steps of history and H of horizon, with I inputs.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vssm.forecasting.windows import CENTRES, Windows

_PENALTIES = (0.003, 0.03, 0.3, 3.0, 30.0)  # in mean variances of an input
_FIT_WINDOWS, _MOST_FIT_WINDOWS, _EACH = 6000, 20_000, 40  # _EACH of a series where many are
_TEST_WINDOWS = 1000
_DOUBT, _CLEAR = 0.5, 2.0  # standard errors
_LARGEST = 10.0  # of u in the regression: a few wild windows must not decide it


class Linear(NamedTuple):
    """A linear forecast of the horizon, in units of a window."""

    weight: Tensor
    """(I, H) float64, one row for each input (`Windows.regressors`)."""
    spread: Tensor
    """The mean error of each step, (H,) float64."""

    def __call__(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the forecasts and mean errors, (B, H) each, from inputs (B, I)."""
        return a.double() @ self.weight, self.spread.expand(len(a), -1)


class Choice(NamedTuple):
    """How windows are centred, and the penalty of their linear forecast."""

    centre: str
    penalty: float


def choose_linear(older: Windows, whole: Windows, cuts: Tensor) -> Choice:
    """Returns the centre and the penalty that forecast held-out windows best.

    Held-out windows overlap, so a small lead says little: the largest penalty is taken whose error
    is within half a standard error of the smallest. If no windows of the whole panel are held out,
    only the centre is chosen, by windows of `older`.
    """
    test = whole if len(cuts) else older
    apart = windows_apart(cuts, older.layout.horizon)
    cuts = spread_evenly(cuts if len(cuts) else older.cuts(older.layout.season), _TEST_WINDOWS)
    penalties = (*_PENALTIES, math.inf) if test is whole else (math.inf,)
    names = CENTRES if older.layout.season > 1 else CENTRES[:2]
    errors: dict[Choice, Tensor] = {}
    for name in names:
        past, ahead, due, size = _units(test.centred(name), cuts)
        size = size * due / due.sum(1, keepdim=True).clamp(min=1)
        found = _solve(older.centred(name), penalties)
        for penalty, weight in zip(penalties, found, strict=True):
            errors[Choice(name, penalty)] = ((ahead - past @ weight).abs() * size).sum(1)
    means = {choice: float(error.mean()) for choice, error in errors.items()}
    best = min(means, key=means.__getitem__)
    ordered = sorted(means, key=lambda one: (-one.penalty, means[one]))
    return next(choice for choice in ordered if is_close(errors[choice], errors[best], apart))


def is_more_exact(
    logs: tuple[Windows, Windows], plain: tuple[Windows, Windows], cuts: Tensor
) -> bool:
    """Says whether linear forecasts of logarithms are clearly closer to held-out windows.

    Logarithms and plain values come as the older windows and all windows, with the same cuts.
    """
    errors = []
    some, apart = spread_evenly(cuts, _TEST_WINDOWS), windows_apart(cuts, plain[0].layout.horizon)
    for older, whole in (plain, logs):
        centre, penalty = choose_linear(older, whole, cuts)
        held = whole.centred(centre, fit_linear(older.centred(centre), penalty))
        batch, (y, _) = held.forecasts(some), plain[1].values(some)
        middle = held.to_units(torch.zeros(1, 1, 1), batch.centre, batch.scale)[:, 0]
        error = torch.where(batch.made.flatten(1), (y - middle).abs(), 0).sum(1)
        errors.append(error / plain[1].least[some[:, 0]])
    return not is_close(errors[0], errors[1], apart, _CLEAR)


def is_close(error: Tensor, best: Tensor, apart: float, doubt: float = _DOUBT) -> bool:
    """Says whether the mean error of windows is within `doubt` standard errors of the best.

    `apart` is how many windows without overlap the same data would give.
    """
    behind = error - best
    return float(behind.mean()) <= doubt * float(behind.std(correction=0)) / max(1, apart) ** 0.5


def windows_apart(cuts: Tensor, horizon: int) -> float:
    """Returns how many windows without overlap the same data would give."""
    series = len(cuts[:, 0].unique())
    return (len(cuts) - series) / horizon + series


def fit_linear(windows: Windows, penalty: float) -> Linear:
    """Returns the linear forecast of windows, with the mean error of each step."""
    (weight,) = _solve(windows, (penalty,))
    past, ahead, due, _ = _units(windows, _fit_cuts(windows))
    error = ((ahead - past @ weight).abs() * due).sum(0) / due.sum(0).clamp(min=1)
    return Linear(weight.contiguous(), error.clamp(min=0.05))


def spread_evenly(cuts: Tensor, num: int) -> Tensor:
    """Returns at most `num` of the windows, spread evenly."""
    if len(cuts) <= num:
        return cuts
    return cuts[torch.linspace(0, len(cuts) - 1, num).round().long()]


def _solve(windows: Windows, penalties: tuple[float, ...]) -> list[Tensor]:
    """Returns the weights (I, H) for each penalty."""
    past, ahead, due, _ = _units(windows, _fit_cuts(windows))
    past, ahead = past.clamp(-_LARGEST, _LARGEST), ahead.clamp(-_LARGEST, _LARGEST) * due
    values, vectors = torch.linalg.eigh(past.T @ past / len(past))
    pairs = vectors.T @ (past.T @ ahead) / len(past)
    mean = float(values.mean()) or 1.0
    return [vectors @ (pairs / (values.clamp(min=0) + p * mean)[:, None]) for p in penalties]


def _fit_cuts(windows: Windows) -> Tensor:
    num = min(max(_FIT_WINDOWS, _EACH * len(windows.lengths)), _MOST_FIT_WINDOWS)
    return spread_evenly(windows.cuts(max(windows.layout.season, 2)), num)


def _units(windows: Windows, cuts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    read, ahead, due, size = windows.direct_task(cuts)
    return read.double(), ahead.double(), due, size
