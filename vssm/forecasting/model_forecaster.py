"""Forecasts of a trained model: sample paths of what follows a history, in the units of the data.

A model reads the history in its own scale (`vssm.data.scale`). A transformer, ssm, rnn or vssm with
levels reads it once, and the S paths of a series start from copies of that state. A vssm or tvae
also reads it once, but every path draws its own latents of the history, so the decoder runs over
the history for every path (`vssm.forecasting.paths`). A vrnn reads it for every path.

Legend: B series of N steps and D columns; C `context`; H `horizon`; S `samples`; x (B, C, D); rows
(B, C, D), or (B D, C, 1) if each column is a series of its own.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vssm.checks import check_choice, check_number, check_type, whole_number
from vssm.data import Meta, read_meta
from vssm.data.dates import next_dates, uneven_dates
from vssm.data.series import phases
from vssm.data.table import fill_gaps
from vssm.engine import Engine
from vssm.forecasting.panel import forecast_table
from vssm.forecasting.paths import Task, divided, paths_after
from vssm.forecasting.scale import Scale
from vssm.models import VRNN, Model, Variational, inner_model
from vssm.nn import State
from vssm.noise import fork
from vssm.runs import pretrained
from vssm.runs.checkpoint import load_finite
from vssm.sampling.request import check_bytes, check_temperature

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

__all__ = ["Forecast", "ModelForecaster", "forecast"]

_LARGEST = 1e30  # number that is read

History = Tensor | np.ndarray | Sequence[Any]


@dataclass(frozen=True)
class Forecast:
    """Holds the sample paths of a forecast."""

    samples: Tensor = field(repr=False)
    """(B, S, H, D) in the units of the data, on the device of the model; (S, H, D) of one series.
    In float64 if a history is so far from zero that all paths in float32 would be one number."""
    columns: tuple[str, ...]
    times: np.ndarray | None = field(default=None, repr=False)
    """The dates of the H steps, if the dates of the history are known."""

    @property
    def mean(self) -> Tensor:
        """The mean of the paths, (B, H, D)."""
        return self.samples.mean(-3)

    def quantile(self, level: float) -> Tensor:
        """Returns a quantile of every value to come, (B, H, D).

        Example:
            >>> paths = torch.arange(11.0)[:, None, None]
            >>> Forecast(paths, ("a",)).quantile(0.9)
            tensor([[9.]])
        """
        if not isinstance(level, Real | Tensor) or np.ndim(level) or not 0 <= level <= 1:
            raise ValueError(f"level={level!r} is not allowed; allowed: a number from 0 to 1")
        return self.samples.quantile(float(level), dim=-3)

    def to_frame(self, quantiles: Sequence[float] = (0.1, 0.5, 0.9)) -> "pandas.DataFrame":
        """Returns the forecast of one series as a long table, as `Forecaster.predict` does.

        `unique_id` is the name of a column, `ds` the date, or the step from 1 on without dates.
        """
        paths = self.samples.double().cpu().numpy()
        dates = np.arange(1, paths.shape[1] + 1) if self.times is None else self.times
        made = {name: (dates, paths[..., k]) for k, name in enumerate(self.columns)}
        return forecast_table(made, quantiles)

    def plot(
        self, history: np.ndarray, times: np.ndarray | None = None, path: str | Path | None = None
    ) -> "Figure":
        """Draws the paths of one series after its history, (N, D), with the dates of the history.

        `path` saves the picture.
        """
        from vssm.forecasting.charts import Fan, draw_fans

        before, ahead = np.arange(-len(history), 0), np.arange(self.samples.shape[1])
        if times is not None and self.times is not None:
            before, ahead = times, self.times
        paths = self.samples.cpu().numpy()
        fans = [
            Fan(name, before, history[:, k], [(ahead, paths[..., k])])
            for k, name in enumerate(self.columns)
        ]
        return draw_fans(fans, path)


def forecast(
    model: "Model | ModelForecaster | str | Path",
    history: History,
    horizon: int | None = None,
    samples: int = 100,
    meta: Meta | None = None,
    times: np.ndarray | None = None,
    seed: int = 0,
    **options: Any,  # noqa: ANN401
) -> Forecast:
    """Draws sample paths of the steps after a history.

    Arguments:
        model: A run folder of data set series, a `ModelForecaster`, or a model.
        history: (N, D) steps of one series or (B, N, D) of several, in the units of the data; NaN
            for missing values. A pandas DataFrame gives the columns of the run by name. The model
            reads the last `context` steps.
        horizon: H, the steps to forecast; by default those of training. More is extrapolation, and
            gives a warning.
        samples: S, the number of paths of every series.
        meta: How the data was scaled, for a plain model. Without it, the model forecasts unscaled
            numbers.
        times: The dates of the history, (N,) datetime64; by default the DatetimeIndex of a
            DataFrame. A model with time features needs them.
        seed: Selects the paths.
        options: `chunk`, `recondition` and `temperature`, as in `generate`.

    Returns:
        The paths, with their quantiles.

    Example:
        >>> from vssm import ModelConfig, build
        >>> config = ModelConfig(kind="vssm", features=2, width=8, layers=1, latents=2, classes=4)
        >>> made = forecast(build(config), torch.zeros(20, 2), horizon=5, samples=7)
        >>> made.samples.shape, made.quantile(0.1).shape
        (torch.Size([7, 5, 2]), torch.Size([5, 2]))
    """
    if isinstance(model, str | Path):
        model = ModelForecaster.load(model)
    elif not isinstance(model, ModelForecaster):
        model = ModelForecaster(model, meta)
    return model.forecast(history, horizon, samples, times, seed, **options)


class ModelForecaster:
    """Joins a model with the metadata of its data, to read and write the units of the data.

    Arguments:
        model: Any of the six models, of numbers. The forecaster keeps a frozen copy of it.
        meta: The metadata of the data set; without it, columns have no names and no scale.

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="ssm", features=2, width=8, layers=1))
        >>> known = {"name": "series", "length": 6, "suggested_head": "gaussian-learned"}
        >>> meta = Meta(**known, features=2, columns=("load", "heat"), context=4, horizon=2)
        >>> made = ModelForecaster(model, meta).forecast(np.zeros((4, 2)), samples=3)
        >>> made.columns, made.samples.shape
        (('load', 'heat'), torch.Size([3, 2, 2]))
    """

    model: Model
    device: torch.device
    meta: Meta
    columns: tuple[str, ...]

    def __init__(self, model: Model, meta: Meta | None = None) -> None:
        model = inner_model(model)
        features = model.config.features
        if meta is None:
            columns = tuple(map(str, range(features)))
            known = {"name": "series", "length": 0, "suggested_head": ""}
            meta = Meta(**known, features=features, columns=columns)
        check_type("meta", meta, Meta, "the Meta of a data set")
        if model.head.tokens:
            raise ValueError(f"model has head {model.config.head!r}; allowed: a model of numbers")
        if meta.columns is None or meta.features != features:
            raise ValueError(
                f"meta is of data set {meta.name!r} with {meta.features} features; allowed: data"
                f" set 'series' with {features}, as the model has"
            )
        self.engine: Engine = Engine(model)
        self.model, self.device = self.engine.model, self.engine.device
        self.meta, self.columns = meta, meta.columns
        self._scale = Scale(meta, self.device)

    @classmethod
    def load(cls, run: str | Path, device: torch.device | str = "cpu") -> "ModelForecaster":
        """Reads a run folder of data set series, or "hf://OWNER/NAME[@REVISION]" on the hub."""
        folder = pretrained.find(run)
        model = load_finite(folder, device)
        meta = read_meta(folder)
        if meta is None or meta.columns is None:
            name = "unknown data" if meta is None else repr(meta.name)
            raise ValueError(
                f"{str(run)!r} was trained on {name}; allowed: a run of data set 'series'"
            )
        return cls(model, meta)

    def forecast(
        self,
        history: History,
        horizon: int | None = None,
        samples: int = 100,
        times: np.ndarray | None = None,
        seed: int = 0,
        **options: Any,  # noqa: ANN401
    ) -> Forecast:
        """Draws sample paths of the steps after a history; `vssm.forecast` has the arguments.

        Example:
            >>> from vssm import ModelConfig, build
            >>> own = ModelForecaster(build(ModelConfig(kind="ssm", features=2, width=8, layers=1)))
            >>> days = np.arange("2024-02-26", "2024-02-29", dtype="M8[D]")
            >>> made = own.forecast(np.zeros((3, 2)), horizon=2, samples=5, times=days)
            >>> made.samples.shape, made.times.astype("M8[D]").astype(str).tolist()
            (torch.Size([5, 2, 2]), ['2024-02-29', '2024-03-01'])
        """
        for name in options:
            check_choice("option", name, ("chunk", "recondition", "temperature"))
        check_number("seed", seed, -(2**63), below=2**63, whole=True)
        samples, horizon = whole_number("samples", samples, 1), self._horizon(horizon)
        x, times, single = self._read(history, times)
        scale = self._scale.of(x.numpy())
        size = len(x) * samples * horizon * len(self.columns) * (8 if scale.far else 4)
        what = f"samples={samples} and horizon={horizon} of {len(x)} series"
        check_bytes(what, size, self.device)
        clock = None
        if self.meta.cycles:
            assert times is not None
            clock = torch.from_numpy(phases(times, self.meta.cycles))
        paths = self._draw_paths(self._rows(x), clock, scale, int(seed), horizon, samples, options)
        if self.meta.separate:  # (B D, S, H, 1) to (B, S, H, D)
            paths = paths.unflatten(0, (len(x), -1)).squeeze(-1).movedim(1, -1)
        return Forecast(paths[0] if single else paths, self.columns, _continued(times, horizon))

    def _horizon(self, horizon: int | None) -> int:
        """Returns a horizon, checked; that of training is the default."""
        trained = self.meta.horizon
        if horizon is None and trained is None:
            raise ValueError(
                "horizon=None needs a run that knows its own; allowed: a whole number >= 1"
            )
        horizon = whole_number("horizon", trained if horizon is None else horizon, 1)
        if trained is not None and horizon > trained:
            warnings.warn(
                f"horizon={horizon} is longer than the {trained} steps of training: from step"
                f" {trained + 1} on this is extrapolation",
                stacklevel=4,
            )
        return horizon

    def _read(
        self, history: History, times: np.ndarray | None
    ) -> tuple[Tensor, np.ndarray | None, bool]:
        """Returns the last C steps of a history without gaps, (B, C, D), their dates, and whether
        the history is one series."""
        meta, num = self.meta, len(self.columns)
        x = _numbers(history, self.columns)
        shape, single = tuple(x.shape), x.ndim == 2
        x = x[None] if single else x
        if x.ndim != 3 or 0 in x.shape or x.shape[2] != num:
            raise ValueError(
                f"history has shape {shape}; allowed: (steps, {num}) or (series, steps, {num}), one"
                f" step and one series or more, of the columns {', '.join(self.columns)}"
            )
        times = _dates(history, times, x.shape[1])
        if times is None and meta.cycles:
            raise ValueError(
                "times is needed: the model was trained with the time features of its data"
            )
        context = meta.context or x.shape[1]
        x, times = x[:, -context:], None if times is None else times[-context:]
        for least, what in ((meta.season, "a season of the run"), (meta.patch, "a step")):
            if x.shape[1] < least:
                raise ValueError(
                    f"history has {x.shape[1]} steps; allowed: {least} or more, {what} of the model"
                )
        x = self._fill(x)
        if (largest := float(x.abs().max())) > _LARGEST:
            raise ValueError(f"history has values up to {largest:g}; allowed: up to 1e30")
        if not self._scale.fits(largest):
            scale, rows = Scale(meta), self._rows(x)
            self.model.head.validate(scale.steps(rows, *scale.units(rows)))
        return x, times, single

    def _fill(self, x: Tensor) -> Tensor:
        """Fills missing values as in training, linearly by default."""
        known, steps = ~x.isnan(), x.shape[1]
        if known.all() and not x.isinf().any():
            return x
        for series, step, column in x.isinf().nonzero().tolist():
            raise ValueError(
                f"history is infinite at series {series}, step {step - steps}, column"
                f" {self.columns[column]!r}; give numbers, and NaN where one is missing"
            )
        missing = (~known).sum(1)
        for series, column in (2 * missing > steps).nonzero().tolist():
            raise ValueError(
                f"history of series {series}, column {self.columns[column]!r} is missing in"
                f" {missing[series, column]} of the last {steps} steps; allowed: half of them"
            )
        if self.meta.fill is None:
            note = f"history is missing {int(missing.sum())} of {x.numel()} values"
            warnings.warn(f"{note}; they are interpolated", stacklevel=5)
        pairs = zip(x.numpy(), known.numpy(), strict=True)
        return torch.from_numpy(
            np.stack([fill_gaps(*pair, self.meta.fill or "linear") for pair in pairs])
        )

    def _rows(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)[..., None] if self.meta.separate else x

    @torch.no_grad()
    def _draw_paths(
        self,
        rows: Tensor,
        clock: Tensor | None,
        scale: Scale,
        seed: int,
        horizon: int,
        samples: int,
        options: dict[str, Any],
    ) -> Tensor:
        """Returns paths after histories in the units of the data, (rows, S, H, channels).

        The histories go through the model in slabs, so that memory is bounded. A vssm or tvae uses
        `vssm.forecasting.paths`; all other cases use `generate`.
        """
        engine, patch = self.engine, self.meta.patch
        num, channels, steps = len(rows), rows.shape[2], -(-horizon // patch)
        slab, at_once = divided(self.model, num, samples, rows.shape[1] // patch + steps)
        paths: Tensor | None = None

        def finish(made: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
            nonlocal paths
            made = self.meta.to_rows(made)[..., :horizon, :channels]
            if paths is None:
                dtype = torch.float64 if scale.far else made.dtype
                paths = made.new_empty(num, *made.shape[1:], dtype=dtype)
            return scale.place(made, factor, shift, out=paths[own])

        for first in range(0, num, slab):
            first = min(first, num - slab)  # slabs of one size replay one recorded graph
            own = slice(first, first + slab)
            x = rows[own]
            if isinstance(self.model, Variational) and set(options) <= {"temperature"}:
                temperature = check_temperature(options.get("temperature", 1.0))
                task = Task(scale, samples, steps, temperature, at_once)
                given = State({"x": x} if clock is None else {"x": x, "clock": clock})
                numbers = {"seed": seed, "first": first}
                made = engine.run(paths_after, task, given.to(self.device), numbers)
                finish(made["x"], made["factor"], made["shift"])
                continue
            x = x.to(self.device)
            factor, shift = scale.units(x, first)
            prompt = scale.steps(x, factor, shift, None if clock is None else clock.to(x.device))
            row = torch.arange(first, first + slab, device=self.device)
            if isinstance(self.model, Variational | VRNN):  # every path draws its own latents
                prompt, row = prompt.repeat_interleave(samples, 0), fork(row, samples).flatten()
                start: dict[str, Any] = {"prompt": prompt, "seed": seed, "rows": row}
            else:
                start = {"state": engine.observe(prompt, seed=seed, rows=row).repeat(samples)}
            made = engine.generate(length=steps, observe="sample", **start, **options).x
            finish(made.unflatten(0, (slab, samples)), factor, shift)
        assert paths is not None
        return paths


def _numbers(history: Any, columns: tuple[str, ...]) -> Tensor:  # noqa: ANN401
    """Returns a history in float64 on the CPU; a pandas table gives its columns by name."""
    if isinstance(history, Tensor):
        if history.is_complex():
            raise ValueError("history is complex; allowed: numbers, rows of equal length")
        return history.detach().to("cpu", torch.float64)
    names = list(getattr(history, "columns", ()))
    if any(isinstance(name, str) for name in names) and not all(map(str.isdecimal, columns)):
        if missing := [column for column in columns if column not in names]:
            allowed = f"{', '.join(columns)}, in any order"
            raise ValueError(f"history has no column {missing[0]!r}; allowed: {allowed}")
        history = history[list(columns)]
    try:
        if isinstance(history, list | tuple) and hasattr(next(iter(history), None), "columns"):
            return torch.stack([_numbers(table, columns) for table in history])
        values = np.ma.asarray(history, np.float64)
        return torch.from_numpy(np.array(values.filled(np.nan), order="C"))
    except (TypeError, ValueError, RuntimeError) as error:  # words, or rows of different lengths
        kind = f"a {type(history).__name__} of other things"
        raise ValueError(f"history is {kind}; allowed: numbers, rows of equal length") from error


def _dates(history: Any, times: Any, num: int) -> np.ndarray | None:  # noqa: ANN401
    """Returns the dates of a history, checked: the given ones, or those of its DatetimeIndex."""
    index = getattr(history, "index", None)
    if times is None and hasattr(index, "tz_localize"):
        times = index.tz_localize(None)  # type: ignore[union-attr]
    if times is None:
        return None
    dates = np.asarray(times).reshape(-1)
    if dates.dtype.kind != "M":
        raise ValueError(f"times is {dates.dtype}; allowed: datetime64, one for each step")
    if len(dates) != num:
        raise ValueError(f"times has {len(dates)} dates; allowed: {num}, the steps of history")
    if (missing := np.isnat(dates)).any():
        raise ValueError(f"times has no date at step {missing.argmax()}; allowed: all of them")
    if (late := dates[1:] <= dates[:-1]).any():
        k = int(late.argmax()) + 1
        what = "is there twice" if dates[k] == dates[k - 1] else f"comes after {dates[k - 1]}"
        raise ValueError(f"times: {dates[k]} {what}; allowed: each date once and in order")
    return dates


def _continued(times: np.ndarray | None, horizon: int) -> np.ndarray | None:
    """Returns the dates of the steps to come; warns if the dates of the history are uneven."""
    if times is None or len(times) < 2:
        return None
    if uneven := uneven_dates(times):
        warnings.warn(f"{uneven}; dates of the forecast go on in the usual step", stacklevel=4)
    return next_dates(times, horizon)
