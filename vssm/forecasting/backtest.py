"""Backtests: forecasts of rolling windows of a panel, scored next to the seasonal naive forecast.

The seasonal naive forecast repeats the last season and adds normal noise. Its deviation is the
deviation of the seasonal differences of the history, times the root of the seasons ahead.

Legend: W windows, S paths, H steps of the horizon.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vssm.forecasting.metrics import scores
from vssm.forecasting.panel import Panel
from vssm.forecasting.windows import Layout, Windows, centre_and_scale, pairs

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_LONGEST_SHOWN = 6  # horizons of history in a plot


@dataclass(frozen=True)
class Backtest:
    """Forecasts of windows, and their scores."""

    table: "pandas.DataFrame"
    """One row for the forecaster and one for the seasonal naive forecast."""
    windows: Windows
    cuts: Tensor
    """The series and the first step of the horizon of each window, (W, 2)."""
    paths: Tensor
    """(W, S, H) in the units of the data."""

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Draws the forecasts and the true values of the first twelve series."""
        from vssm.forecasting.charts import Fan, draw_fans

        horizon, fans = self.paths.shape[2], []
        for k, one in enumerate(self.windows.panel.series):
            own = self.cuts[:, 0] == k
            pairs = zip(self.cuts[own, 1].tolist(), self.paths[own].numpy(), strict=True)
            ahead = [(one.dates[cut : cut + horizon], paths) for cut, paths in pairs]
            shown = (len(ahead) + _LONGEST_SHOWN) * horizon
            fans.append(Fan(str(one.id), one.dates[-shown:], one.y[-shown:], ahead))
        return draw_fans(fans, path)


def rolling_cuts(panel: Panel, layout: Layout, num: int, stride: int) -> Tensor:
    """Returns the last `num` windows of every series, `stride` steps apart, as (W, 2)."""
    lasts = [len(one.y) - layout.horizon for one in panel.series]
    cuts = pairs([range(last - (num - 1) * stride, last + 1, stride) for last in lasts])
    cuts = cuts[cuts[:, 1] > layout.season]
    if not len(cuts):
        raise ValueError(
            f"all series are too short for a window of {layout.horizon} steps after a season of"
            f" {layout.season}; give longer series, or a shorter horizon"
        )
    return cuts


def score(windows: Windows, cuts: Tensor, paths: Tensor, name: str) -> Backtest:
    """Scores paths (W, S, H) of windows, and the seasonal naive forecast of them."""
    import pandas

    horizon, season = windows.layout.horizon, windows.layout.season
    y = torch.full((len(cuts), horizon), torch.nan, dtype=torch.float64)
    spread, naive = torch.empty(2, len(cuts), dtype=torch.float64)
    for w, (k, cut) in enumerate(cuts.tolist()):
        values = windows.panel.series[k].y
        y[w] = torch.tensor(values[cut : cut + horizon])
        past = values[: int(cuts[cuts[:, 0] == k, 1].min())]  # the same for all windows of a series
        spread[w] = float(np.nanstd(past)) or 1.0
        error = float(np.nanmean(np.abs(past[season:] - past[:-season])))
        naive[w] = error if error > 0 else 1.0  # also where it is NaN
    made = {name: paths, "seasonal naive": naive_paths(windows, cuts, paths.shape[1])}
    rows = {name: scores(own, y, spread, naive) for name, own in made.items()}
    return Backtest(pandas.DataFrame(rows).T, windows, cuts, paths)


def naive_paths(windows: Windows, cuts: Tensor, samples: int) -> Tensor:
    """Returns paths of the seasonal naive forecast, (W, S, H), in the units of the data."""
    layout, (y, there) = windows.layout, windows.values(cuts)
    known, _ = layout.split(there)
    kind = "season-last" if layout.season > 1 else "last"
    centre, scale = centre_and_scale(y, known, layout, windows.least[cuts[:, :1]] / 100, kind)
    ahead = torch.arange(layout.horizon) // layout.season + 1
    width = scale * (ahead / max(1.0, layout.horizon / layout.season)).sqrt()  # of the end
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(cuts), samples, layout.horizon, generator=generator)
    paths = centre[:, None, layout.ahead] + width[:, None] * noise
    return paths.clamp(max=700).exp() if layout.log else paths
