"""Windows of a panel: what a model reads, in units of the window itself.

    x_t = (y_t - m_t) / s         m the centre and s the scale of the known values of the window

A window has C steps of history and H of horizon, in patches of P. The centre is one of `CENTRES`:
the mean or the last of the known values, of all steps or of each step of a season by itself. The
model learns what differs from the centre, so the centre alone is already a naive forecast. A
positive series whose spread grows with its level is read as log y.

Forecasts keep to values that a series can have. A series of whole numbers gets whole numbers. A
series that is never below zero, and at zero now and then, gets nothing below zero.

Legend: B windows of L = C + (H rounded up to patches) points, T = L / P steps of the model; y and
known (B, L); x (B, T, P); given (B, T, G).
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.forecasting.panel import Panel

CENTRES = ("mean", "last", "season", "season-level", "season-last")
LEAST_SCALE = 0.1  # of a window, in deviations of its series
_MOST_REGRESSORS = 2000  # of a linear forecast; with more, it reads the history only
_LARGEST = 30.0  # of what a model reads
_ZEROS = 0.01  # share of zeros that marks zero as the end of a scale
_CYCLES = {"day": 86_400, "week": 604_800, "year": 31_556_952}  # seconds


@dataclass(frozen=True)
class Layout:
    """The sizes of a window, and how its values are centred."""

    horizon: int
    season: int
    patch: int
    context: int
    centre: str = "mean"
    log: bool = False

    @property
    def history_steps(self) -> int:
        """Steps of the model before the horizon."""
        return self.context // self.patch

    @property
    def steps(self) -> int:
        """T, all steps of the model."""
        return self.history_steps + -(-self.horizon // self.patch)

    @property
    def length(self) -> int:
        """L, points of a window."""
        return self.steps * self.patch

    @property
    def ahead(self) -> slice:
        """The points of the horizon."""
        return slice(self.context, self.context + self.horizon)

    def split(self, there: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the history and the horizon of what is there in windows, (B, L) each."""
        known, made = there.clone(), torch.zeros_like(there)
        known[:, self.context :] = False
        made[:, self.ahead] = there[:, self.ahead]
        return known, made


Direct = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From what is read of windows (B, I), `Windows.regressors`, to the centre and the mean error of
each step of the horizon, (B, H) each, in units of the window (`vssm.forecasting.direct`)."""


class Batch(NamedTuple):
    """Windows, with what is known and what is to be made."""

    x: Tensor
    """(B, T, P) float32, zero where nothing is known or to be made."""
    known: Tensor
    """(B, T, P) bool."""
    made: Tensor
    """(B, T, P) bool."""
    given: Tensor
    """Covariates, (B, T, G) float32."""
    centre: Tensor
    """(B, L) float64."""
    scale: Tensor
    """(B, L) float64."""

    def to(self, device: torch.device) -> "Batch":
        """Returns the windows on a device."""
        return Batch(*(part.to(device) for part in self))


def centre_and_scale(
    y: Tensor, known: Tensor, layout: Layout, least: Tensor, centre: str | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the centre of every point, (B, L), and the scale of every window, (B, 1).

    `least` (B, 1) bounds the scale from below: a history may be constant. The centre is one of
    `CENTRES`; by default the one that the layout names.

    Example:
        >>> layout = Layout(horizon=2, season=2, patch=2, context=4, centre="season")
        >>> y, known = torch.tensor([[1.0, 5, 3, 7, 0, 0]]), torch.arange(6)[None] < 4
        >>> centre_and_scale(y, known, layout, torch.zeros(1, 1))
        (tensor([[2., 6., 2., 6., 2., 6.]]), tensor([[1.]]))
    """
    centre = centre or layout.centre
    season = layout.season if centre.startswith("season") else 1
    length, front = y.shape[1], -layout.context % season
    edges = front, -(front + length) % season
    v = F.pad(torch.where(known, y, 0), edges).unflatten(1, (-1, season))  # (B, n, season)
    m = F.pad(known, edges).unflatten(1, (-1, season))
    mean = v.sum((1, 2)) / m.sum((1, 2)).clamp(min=1)
    count = m.sum(1)
    if centre.endswith("last"):
        order = torch.arange(1, m.shape[1] + 1, device=y.device)[:, None]
        middle = v.gather(1, (m * order).argmax(1, keepdim=True)).squeeze(1)
    else:
        middle = v.sum(1) / count.clamp(min=1)
    middle = torch.where(count > 0, middle, mean[:, None])[:, None]  # (B, 1, season)
    error = torch.where(m, v - middle, 0)
    if centre == "season-level":  # the usual season, at the level of the last one
        order = torch.arange(1, m.shape[1] + 1, device=y.device)
        last = (m.any(2) * order).argmax(1)[:, None, None].expand(-1, 1, season)
        level = error.gather(1, last).sum(2) / m.gather(1, last).sum(2).clamp(min=1)
        middle = middle + level[..., None]
    variance = error.square().sum((1, 2)) / m.sum((1, 2)).clamp(min=1)
    if centre.endswith("last"):  # that of a random walk of seasons at the end of the horizon
        pairs = m[:, 1:] & m[:, :-1]
        steps = torch.where(pairs, v.diff(dim=1), 0).square().sum((1, 2))
        ahead = max(1.0, layout.horizon / season)
        walk = ahead * steps / pairs.sum((1, 2)).clamp(min=1)
        variance = torch.where(pairs.any(2).any(1), walk, variance)
    whole = middle.expand(-1, m.shape[1], -1).flatten(1)[:, front : front + length]
    return whole, (variance[:, None] + least.square()).sqrt()


def pairs(cuts: Sequence[range]) -> Tensor:
    """Returns each series with each of its cuts, (W, 2).

    Example:
        >>> pairs([range(5, 7), range(0), range(8, 9)]).tolist()
        [[0, 5], [0, 6], [2, 8]]
    """
    parts = [torch.arange(one.start, max(one.start, one.stop), one.step) for one in cuts]
    series = torch.arange(len(cuts)).repeat_interleave(torch.tensor(list(map(len, parts))))
    return torch.stack([series, torch.cat(parts)], 1)


def phases(times: np.ndarray, cycles: Sequence[str]) -> np.ndarray:
    """Returns sine and cosine of the time within each cycle, (..., 2 x cycles), in [-1/2, 1/2].

    Example:
        >>> night = np.array(["2020-01-01T03:00"], "datetime64[s]")
        >>> phases(night, ["day"]).round(3).tolist()
        [[0.354, 0.354]]
    """
    microseconds = times.astype("datetime64[us]").astype(np.int64)
    periods = [_CYCLES[cycle] * 10**6 for cycle in cycles]
    angles = [2 * np.pi * (microseconds % period) / period for period in periods]
    return np.stack([part / 2 for angle in angles for part in (np.sin(angle), np.cos(angle))], -1)


@dataclass(frozen=True)
class GivenScale:
    """The mean and the deviation of every covariate, and the cycles of the calendar."""

    moving: list[list[float]]
    static: list[list[float]]
    cycles: list[str]

    @classmethod
    def of(cls, panel: Panel, patch: int) -> "GivenScale":
        """Returns the scale of a panel."""

        def scale(values: np.ndarray) -> list[list[float]]:
            known = [column[np.isfinite(column)] for column in values.T]
            return [[float(v.mean()), float(v.std()) or 1.0] if len(v) else [0, 1] for v in known]

        longest = max(panel.series, key=lambda one: len(one.y)).dates
        seconds = (longest[-1] - longest[0]).total_seconds()
        step = patch * seconds / max(1, len(longest) - 1)
        cycles = [name for name, size in _CYCLES.items() if 2 * step <= size <= seconds / 2]
        moving = np.concatenate([one.covariates for one in panel.series])
        return cls(scale(moving), scale(np.stack([one.static for one in panel.series])), cycles)

    def features(self, patch: int) -> int:
        """G, the given numbers of a step."""
        return patch * len(self.moving) + 2 * len(self.cycles) + len(self.static)


def _scaled(values: np.ndarray, scale: list[list[float]]) -> np.ndarray:
    """Returns covariates in deviations from their mean, zero where missing."""
    centre, spread = np.array(scale).reshape(-1, 2).T
    return np.clip(np.nan_to_num((values - centre) / spread), -10, 10)


class Windows:
    """All windows of a panel.

    Arguments:
        panel: The series.
        layout: The sizes of a window.
        scale: That of the covariates.
        direct: The forecast that centres the horizon; none by default.
        ahead: The known covariates of the H dates after each series, (H, F).
        seen: The number of first rows of each series that bound the scale of its windows; all by
            default. What is held out must not.
    """

    def __init__(
        self,
        panel: Panel,
        layout: Layout,
        scale: GivenScale,
        direct: Direct | None = None,
        ahead: Sequence[np.ndarray] | None = None,
        seen: Sequence[int] | None = None,
    ) -> None:
        self.panel: Panel = panel
        self.layout: Layout = layout
        self.scale: GivenScale = scale
        self.direct: Direct | None = direct
        room = layout.length  # before and after each series, so that every window fits
        self.lengths: Tensor = torch.tensor([len(one.y) for one in panel.series])
        ends = (self.lengths + 2 * room).cumsum(0)
        self.offset: Tensor = ends - room - self.lengths
        parts, moving, clock, least, lowest, whole = [], [], [], [], [], []
        for k, one in enumerate(panel.series):
            values = np.log(np.maximum(one.y, 1e-300)) if layout.log else one.y
            parts.append(np.pad(values, room, constant_values=np.nan))
            rows = slice(None if seen is None else seen[k])
            there = values[rows][np.isfinite(values[rows])]
            there = there if len(there) else np.zeros(1)
            least.append(max(LEAST_SCALE * there.std(), 1e-9 * np.abs(there).max(), 1e-12))
            there = one.y[rows][np.isfinite(one.y[rows])]
            ends = len(there) and there.min() == 0 and (there == 0).mean() >= _ZEROS
            lowest.append(0.0 if ends else -np.inf)
            whole.append(len(there) > 0 and bool((there == there.round()).all()))
            covariates = one.covariates
            if ahead is not None:  # past covariates end with the series
                missing = np.full((len(ahead[k]), len(panel.columns.past)), np.nan)
                covariates = np.concatenate([covariates, np.hstack([ahead[k], missing])])
            after = room + len(values) - len(covariates)
            moving.append(np.pad(_scaled(covariates, scale.moving), ((room, after), (0, 0))))
            clock.append(self._clock(one.dates))
        y = np.concatenate(parts)
        self.y: Tensor = torch.from_numpy(np.nan_to_num(y))
        self.known: Tensor = torch.from_numpy(np.isfinite(y))
        self.moving: Tensor = torch.from_numpy(np.concatenate(moving)).float()
        self.clock: Tensor = torch.from_numpy(np.concatenate(clock)).float()
        self.least: Tensor = torch.tensor(least, dtype=torch.float64)
        self.lowest: Tensor = torch.tensor(lowest, dtype=torch.float64)
        self.whole: Tensor = torch.tensor(whole)
        static = _scaled(np.stack([one.static for one in panel.series]), scale.static)
        self.static: Tensor = torch.from_numpy(static).float()

    def _clock(self, dates: Any) -> np.ndarray:  # noqa: ANN401
        """Returns the phases of the dates of a series and of the room around it."""
        import pandas

        room, step = self.layout.length, self.panel.step
        if not self.scale.cycles:
            return np.empty((len(dates) + 2 * room, 0))
        before = pandas.date_range(end=dates[0], periods=room + 1, freq=step)[:-1]
        after = pandas.date_range(dates[-1], periods=room + 1, freq=step)[1:]
        times: Any = before.append([dates, after])
        return phases(times.tz_localize(None).to_numpy(), self.scale.cycles)

    def centred(self, centre: str, direct: Direct | None = None) -> "Windows":
        """Returns the same windows with another centre."""
        other = copy(self)
        other.layout, other.direct = replace(self.layout, centre=centre), direct
        return other

    def cuts(self, least: int) -> Tensor:
        """Returns the series and the first point of the horizon of all windows, (W, 2).

        A window has `least` points of history or more, and a whole horizon if the series has one.
        """
        cuts = []
        for num in self.lengths.tolist():
            first = min(least, max(1, num - 1))
            cuts.append(range(first, max(first, num - self.layout.horizon) + 1))
        return pairs(cuts)

    def values(self, cuts: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the points of windows and which of them are in the data, (W, L)."""
        places = self._places(cuts)
        return self.y[places], self.known[places]

    def dates(self, cuts: Tensor, ahead: Sequence[int] | None = None) -> Tensor:
        """Returns the dates of the horizons of windows, or of other steps, int64 microseconds."""
        stamps = [torch.tensor(one.dates.as_unit("us").asi8) for one in self.panel.series]
        steps = torch.arange(self.layout.horizon) if ahead is None else torch.tensor(ahead)
        return torch.stack([stamps[k][cut + steps] for k, cut in cuts.tolist()])

    def _places(self, cuts: Tensor) -> Tensor:
        start = self.offset[cuts[:, 0]] + cuts[:, 1] - self.layout.context
        return start[:, None] + torch.arange(self.layout.length)

    def forecasts(self, cuts: Tensor, blind: bool = False) -> Batch:
        """Returns windows in which the history is known and the horizon is to be made.

        With `blind` all points of the horizon are to be made, not only those in the data.
        """
        y, there = self.values(cuts)
        known, made = self.layout.split(there)
        made[:, self.layout.ahead] |= blind
        return self.batch(cuts, y, known, made)

    def batch(self, cuts: Tensor, y: Tensor, known: Tensor, made: Tensor) -> Batch:
        """Returns windows with any part known and any part to be made."""
        layout = self.layout
        centre, scale = centre_and_scale(y, known, layout, self.least[cuts[:, :1]])
        scale = scale.expand_as(y)
        if self.direct is not None:
            centre, scale = self._add_direct(cuts, y, known, centre, scale)
        x = torch.where(known | made, (y - centre) / scale, 0).clamp(-_LARGEST, _LARGEST)
        shape = (len(y), layout.steps, layout.patch)
        x, known, made = (part.reshape(shape) for part in (x.float(), known, made))
        return Batch(x, known, made, self._given(cuts), centre, scale)

    def direct_task(self, cuts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns what a direct forecast reads (B, I), the horizon in units of its windows (B, H),
        what is known of it, and a unit of each window in deviations of its series (B, 1)."""
        batch, own = self.forecasts(cuts), self.layout.ahead
        x, made = batch.x.flatten(1), batch.made.flatten(1)
        read = self.regressors(cuts, x[:, : own.start])
        size = batch.scale[:, :1] / self.least[cuts[:, :1]] * LEAST_SCALE
        return read, x[:, own], made[:, own], size

    def regressors(self, cuts: Tensor, past: Tensor) -> Tensor:
        """Returns what a direct forecast reads, (B, I): the history (B, C) and covariates."""
        moving = self._covariates(cuts).flatten(1)
        if past.shape[1] + moving.shape[1] > _MOST_REGRESSORS:
            return past
        return torch.cat([past, moving.to(past)], 1)

    def _covariates(self, cuts: Tensor) -> Tensor:
        """Returns moving covariates, (B, L, F + past); past ones stop before the horizon."""
        moving = self.moving[self._places(cuts)]
        moving[:, self.layout.context :, len(self.panel.columns.future) :] = 0
        return moving

    @torch.no_grad()
    def _add_direct(
        self, cuts: Tensor, y: Tensor, known: Tensor, centre: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Moves the centre of horizons of which nothing is known, and sets their scale."""
        assert self.direct is not None
        past, own = slice(0, self.layout.context), slice(self.layout.context, None)
        free = ~known[:, own].any(1, keepdim=True)
        u = torch.where(known, (y - centre) / scale, 0).clamp(-_LARGEST, _LARGEST)[:, past]
        more = centre.shape[1] - self.layout.context - self.layout.horizon
        m, b = self.direct(self.regressors(cuts, u))
        m, b = F.pad(m.double(), (0, more)), F.pad(b.double(), (0, more), value=1.0)
        centre, scale = centre.clone(), scale.clone()
        centre[:, own] += torch.where(free, m * scale[:, own], 0)
        scale[:, own] *= torch.where(free, b, 1)
        return centre, scale

    def _given(self, cuts: Tensor) -> Tensor:
        layout = self.layout
        moving = self._covariates(cuts).unflatten(1, (layout.steps, layout.patch)).flatten(2)
        clock = self.clock[self._places(cuts)[:, :: layout.patch]]
        static = self.static[cuts[:, 0]][:, None].expand(-1, layout.steps, -1)
        return torch.cat([moving, clock, static], 2)

    def to_units(self, paths: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
        """Returns paths (B, S, L) in the units of the data; centre and scale are (B, L)."""
        y = centre[:, None] + scale[:, None] * paths.double()
        return y.clamp(max=700).exp() if self.layout.log else y

    def possible(self, y: Tensor, cuts: Tensor) -> Tensor:
        """Returns the nearest values to y (B, S, L) that the series of the windows can have."""
        whole, lowest = (part[cuts[:, 0], None, None] for part in (self.whole, self.lowest))
        return torch.where(whole, y.round(), y).maximum(lowest)
