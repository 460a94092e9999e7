"""How a forecaster is fitted: the sizes of its windows, and when to stop.

The newest part of each series is held out first. Its windows choose when to stop, by CRPS, and
calibrate the forecasts. The final fit then takes as many steps on all data.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from vssm.config import ModelConfig
from vssm.forecasting.linear import spread_evenly
from vssm.forecasting.metrics import crps
from vssm.forecasting.network import build_model, draw_paths, loss_of
from vssm.forecasting.panel import Panel
from vssm.forecasting.windows import LEAST_SCALE, Batch, Layout, Windows, pairs
from vssm.models import Model
from vssm.nn import join_weights
from vssm.objectives.masks import random_masks
from vssm.training.progress import shows_bars

_SEASONS = {"min": 60, "h": 24, "B": 5, "D": 7, "W": 52, "M": 12, "Q": 4}
_MOST_STEPS_AHEAD = 4  # steps of the model in a horizon
_HELD_OUT = 0.2  # share of a series
_VALID_WINDOWS, _VALID_PATHS = 128, 8
_PATIENCE = 5  # validations without a better one
_BETTER = 0.005  # share by which a better one is better: validation is noisy
_JITTER = 0.1  # noise on what is known, in scales of a window: few windows are soon learnt by heart
_FILL_SHARE = 0.15  # of the windows of a step
_EMA = 0.99
_WARMUP = 20  # steps
_AT_LEAST = 100  # steps before validations count against patience


def season_of(step: Any, lengths: list[int]) -> int:  # noqa: ANN401
    """Returns the steps of a season that a frequency suggests, 1 if most series are too short."""
    import pandas

    if type(step) is pandas.DateOffset:  # it has no letters: the 15th of each month, say
        season, num = 12, step.kwds.get("months", 12)
    else:
        name = step.rule_code.split("-")[0].removesuffix("E").removesuffix("S")
        season, num = _SEASONS.get(name, 1), step.n
        if name == "min" and 60 % num == 0 and num > 1:
            season = 24 * 60  # the day, for a step of some minutes
    season = season // num if season % num == 0 else 1
    return season if np.median(lengths) >= 3 * season else 1


def choose_layout(
    panel: Panel,
    horizon: int,
    season: int | None,
    patch: int | None,
    context: int | None,
    transform: str,
) -> Layout:
    """Returns the sizes of windows: as given, or else chosen by frequency and length."""
    lengths = [len(one.y) for one in panel.series]
    season = season_of(panel.step, lengths) if season is None else season
    if patch is None:
        patch = max(p for p in range(1, season + 1) if season % p == 0 and p <= max(1, horizon))
        while patch > 48 and patch % 2 == 0:
            patch //= 2
        patch *= max(1, math.ceil(horizon / patch / _MOST_STEPS_AHEAD))
    if context is None:
        context = max(3 * season, min(14 * season, 336), 2 * horizon, 8 * patch)
        # else few windows have a whole history; many series make up for it
        share = 3 if len(lengths) < 20 else 2
        most = (int(np.median(lengths)) - horizon) // share
        context = min(context, 24 * patch, max(most, patch))
    context = -(-context // patch) * patch
    log = transform == "log" or (transform == "auto" and _spread_grows(panel, season))
    return Layout(horizon, season, patch, context, log=log)


def _spread_grows(panel: Panel, season: int) -> bool:
    """Says whether a panel is positive and its spread in a season grows with its level."""
    if not all((one.y[np.isfinite(one.y)] > 0).all() for one in panel.series):
        return False
    gains, size = [], max(season, 4)
    for one in panel.series:
        y = one.y[len(one.y) % size :].reshape(-1, size)
        y = y[np.isfinite(y).all(1)]
        if len(y) < 4:
            continue
        level, spread = y.mean(1), y.std(1)
        if spread.mean() > 0:
            relative = spread / level
            gains.append(relative.std() / relative.mean() / (spread.std() / spread.mean() + 1e-9))
    return bool(gains) and float(np.median(gains)) < 0.8


def hold_out(panel: Panel, layout: Layout) -> tuple[Panel, Tensor]:
    """Returns the panel without the newest part of each series, and the windows of that part.

    Series that are too short are not held out. The windows are (W, 2), as `Windows.cuts` has them.
    """
    least = 2 * layout.season + layout.horizon
    series, cuts = [], []
    for one in panel.series:
        num = len(one.y)
        out = max(layout.horizon, int(_HELD_OUT * num))
        if num - out < max(least, 8):
            out = layout.horizon
        if num - out < max(2 * layout.season, layout.horizon // 2, 8):
            out = 0
        series.append(one.before(num - out))
        cuts.append(range(num - out, num - layout.horizon + 1 if out else num))
    return replace(panel, series=tuple(series)), pairs(cuts)


def progress_bar(wanted: bool) -> Any:  # noqa: ANN401
    """Returns a bar of rich with the time left; hidden unless on a terminal or in a notebook."""
    from rich import console, progress

    hidden = not (wanted and shows_bars(sys.stderr))
    return progress.Progress(console=console.Console(stderr=True), disable=hidden)


def train(
    config: ModelConfig,
    windows: Windows,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    device: torch.device,
    bar: Any,  # noqa: ANN401
    name: str,
    validate: Callable[[Model], float] | None = None,
) -> tuple[Model, int]:
    """Trains a model from fresh weights; with `validate`, until it gets no better.

    Returns the model, and the step after which it was best. A bar of rich, labelled with the name,
    shows the steps and the best validation.

    The result is a moving average of the weights, so it does not depend on a schedule: training
    again for as many steps on more data gives a comparable model.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_model(config).to(device)
    noise = generator if device.type == "cpu" else torch.Generator(device).manual_seed(seed)
    average = AveragedModel(model, avg_fn=_moving_average)
    join_weights(average)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.01)
    cuts = windows.cuts(least=max(windows.layout.season, 2))
    every, best, waited = max(10, min(50, steps // 10)), math.inf, 0
    kept, kept_step, task = None, steps, bar.add_task(name, total=steps)
    for step in range(1, steps + 1):
        chosen = cuts[torch.randint(len(cuts), (batch,), generator=generator)]
        loss = loss_of(model, _random_tasks(windows, chosen, generator), noise)
        optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, step / _WARMUP)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if math.isfinite(loss.item()):
            optimizer.step()
            average.update_parameters(model)
        if validate is not None and (step % every == 0 or step == steps):
            score = validate(average.module)  # type: ignore[arg-type]
            if score < (1 - _BETTER) * best:
                best, waited, kept_step = score, 0, step
                kept = {k: v.clone() for k, v in average.module.state_dict().items()}
            else:
                waited += step > _AT_LEAST
        crps_shown = f", crps {best:.3f}" if kept else ""
        bar.update(task, completed=step, description=name + crps_shown)
        if waited >= _PATIENCE:
            break
    made: Any = average.module
    if kept is not None:
        made.load_state_dict(kept)
    return made.eval(), kept_step


def _moving_average(average: Tensor, new: Tensor, count: Tensor | int) -> Tensor:
    """Weighs all steps alike at first, then the last 1 / (1 - _EMA) of them or so."""
    return average + (new - average) * max(1 - _EMA, 1 / (1 + float(count)))


def _random_tasks(windows: Windows, cuts: Tensor, generator: torch.Generator) -> Batch:
    """Returns windows to forecast; a few of them are to be filled instead."""
    num = round(len(cuts) * _FILL_SHARE)
    y, there = windows.values(cuts)
    known, made = windows.layout.split(there)
    if num:
        shape = (num, windows.layout.steps, windows.layout.patch)

        def uniform(*sizes: int) -> Tensor:
            return torch.rand(num, *sizes, generator=generator)

        seen = random_masks(*shape, uniform).flatten(1)
        known[:num], made[:num] = there[:num] & seen, there[:num] & ~seen
    batch = windows.batch(cuts, y, known, made)
    noise = _JITTER * torch.randn(batch.x.shape, generator=generator)
    return batch._replace(x=torch.where(batch.known, batch.x + noise, batch.x))


def validation(windows: Windows, cuts: Tensor, seed: int) -> Callable[[Model], float]:
    """Returns the mean CRPS of a model on windows, in deviations of their series."""
    cuts = spread_evenly(cuts, _VALID_WINDOWS)
    batch = windows.forecasts(cuts)
    made, size = batch.made.flatten(1), batch.scale / windows.least[cuts[:, :1]] * LEAST_SCALE

    def score(model: Model) -> float:
        paths = draw_paths(model, batch, windows.layout, _VALID_PATHS, seed)
        error = crps(paths, batch.x.flatten(1))
        return float((error * size)[made].mean())

    return score
