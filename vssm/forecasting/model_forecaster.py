"""Forecasting: sample paths of what comes after a history, in the units of the data.

A model reads the history in its own scale (`vssm.data.scale`), as `observe` does. A transformer,
ssm, rnn or vssm with levels reads it once, and the S paths of a series start from copies of that
state. A vssm or tvae also reads it once, but every path draws its own latents of the history, so
the decoder runs over the history for every path (`vssm.sampling.paths`). A vrnn reads it for every
path.

Legend: B series of N steps and D columns; C `context`; H `horizon`; S `samples`; x (B, N, D).
"""

import warnings
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vssm.checks import check_choice, check_type, whole_number
from vssm.data import Meta, read_meta
from vssm.data.scale import Scale
from vssm.engine import Engine
from vssm.forecasting.history import (
    LARGEST,
    History,
    Reader,
    check_order,
    continued,
    dates_of,
    numbers,
)
from vssm.models import VRNN, Model, Variational, inner_model
from vssm.nn import State
from vssm.noise import fork
from vssm.runs import pretrained
from vssm.runs.checkpoint import load_finite
from vssm.sampling.paths import Task, divided, paths_from
from vssm.sampling.request import check_room, check_temperature

__all__ = ["Forecast", "ModelForecaster", "Stream", "forecast"]

_NAMED = 3  # columns in a repr


@dataclass(frozen=True)
class Forecast:
    """Holds the sample paths of a forecast."""

    samples: Tensor
    """(B, S, H, D) in the units of the data, on the device of the model; (S, H, D) of one series.
    In float64 if a history is so far from zero that all paths in float32 would be one number."""
    columns: tuple[str, ...]
    times: np.ndarray | None = None
    """The dates of the H steps, if the dates of the history are known."""

    def __repr__(self) -> str:
        *series, paths, steps, _ = self.samples.shape
        parts = [*(f"{num} series" for num in series), f"{paths} paths", f"{steps} steps"]
        dates = "" if self.times is None else f", from {self.times[0]} to {self.times[-1]}"
        return f"Forecast({' x '.join(parts)} of {_named(self.columns)}{dates})"

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
        times: The dates of the history, (N,) datetime64; a model with time features needs them.
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
    if isinstance(model, ModelForecaster):
        return model.forecast(history, horizon, samples, times, seed, **options)
    return ModelForecaster(model, meta).forecast(history, horizon, samples, times, seed, **options)


def _named(columns: tuple[str, ...]) -> str:
    more = len(columns) - _NAMED
    return ", ".join(columns[:_NAMED]) + (f" and {more} more" if more > 0 else "")


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
        self.engine = Engine(model)
        self.model, self.device = self.engine.model, self.engine.device
        self.meta, self.columns = meta, meta.columns
        self.channels = 1 if meta.separate else len(meta.columns)
        self._reader = Reader(model.head, meta, self.device)

    def __repr__(self) -> str:
        meta = self.meta
        steps = f", context={meta.context}, horizon={meta.horizon}" if meta.context else ""
        kind = self.model.config.kind
        return f"ModelForecaster({kind} of {_named(self.columns)}{steps}, on {self.device})"

    @classmethod
    def load(cls, run: str | Path, device: torch.device | str = "cpu") -> "ModelForecaster":
        """Reads a run folder of data set series.

        Arguments:
            run: The folder, or "hf://OWNER/NAME[@REVISION]" on the hub.
            device: Where the model goes.

        Returns:
            The forecaster of the run, with the names and the scale of its columns.

        Example:
            >>> import tempfile
            >>> from vssm.config import ModelConfig, RunConfig, TrainConfig
            >>> from vssm.data import DataConfig, SeriesConfig
            >>> from vssm.training.progress import Progress
            >>> from vssm.training import train
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     wave = np.sin(np.arange(40))
            ...     np.savetxt(f"{folder}/wave.csv", wave, header="load", comments="")
            ...     series = SeriesConfig(path=f"{folder}/wave.csv", context=4, horizon=2)
            ...     config = RunConfig(
            ...         data=DataConfig(name="series", series=series),
            ...         model=ModelConfig(kind="ssm", features=1, head="auto", width=8, layers=1),
            ...         train=TrainConfig(max_steps=1, batch=4, samples=0, num_valid=4),
            ...     )
            ...     own = ModelForecaster.load(train(config, f"{folder}/run", progress=Progress()))
            >>> own.columns, own.forecast(np.zeros((4, 1)), samples=3).samples.shape
            (('load',), torch.Size([3, 2, 1]))
        """
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
        """Draws sample paths of the steps after a history, as `vssm.forecast` does.

        Arguments:
            history: (N, D) steps of one series or (B, N, D) of several, as for `vssm.forecast`.
            horizon: H, the steps to forecast; by default those of training.
            samples: S, the number of paths of every series.
            times: The dates of the history, (N,) datetime64.
            seed: Selects the paths.
            options: `chunk`, `recondition` and `temperature`, as in `generate`.

        Returns:
            The paths, with their quantiles.

        Example:
            >>> from vssm import ModelConfig, build
            >>> own = ModelForecaster(build(ModelConfig(kind="ssm", features=2, width=8, layers=1)))
            >>> days = np.arange("2024-02-26", "2024-02-29", dtype="M8[D]")
            >>> made = own.forecast(np.zeros((3, 2)), horizon=2, samples=5, times=days)
            >>> made.samples.shape, made.times.astype("M8[D]").astype(str).tolist()
            (torch.Size([5, 2, 2]), ['2024-02-29', '2024-03-01'])
        """
        horizon, samples = self._check_request(horizon, samples, options)
        x, _, times, single = self._reader.read(history, times)
        scale = self._reader.scale_of(x, samples, horizon)
        rows, clock = self._reader.rows(x), self._reader.clock(times)
        paths = self._draw_paths(rows, clock, scale, seed, horizon, samples, options)
        paths = self._reader.by_column(paths, len(x))
        times = continued(times, horizon)
        return Forecast(paths[0] if single else paths, self.columns, times)

    def stream(
        self, history: History, times: np.ndarray | None = None, seed: int = 0, samples: int = 100
    ) -> "Stream":
        """Starts to follow one series, point by point.

        Arguments:
            history: (N, D) steps of the series so far.
            times: Their dates, (N,) datetime64; then points have dates too.
            seed: Selects the paths.
            samples: S, the number of paths of a forecast. A vssm, tvae or vrnn follows the series
                with as many rows, because every path draws its own latents of the past.

        Returns:
            The stream, which has read the history.

        Example:
            >>> from vssm import ModelConfig, build
            >>> own = ModelForecaster(build(ModelConfig(kind="ssm", features=2, width=8, layers=1)))
            >>> stream = own.stream(np.zeros((3, 2)))
            >>> stream.observe([0.5, 1.0])
            >>> stream.position, stream.forecast(horizon=2, samples=5).samples.shape
            (4, torch.Size([5, 2, 2]))
        """
        return Stream(self, history, times, seed, samples)

    def _check_request(
        self, horizon: int | None, samples: int, options: dict[str, Any]
    ) -> tuple[int, int]:
        """Returns horizon and samples, checked; the horizon of training is the default."""
        for name in options:
            check_choice("option", name, ("chunk", "recondition", "temperature"))
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
        return horizon, whole_number("samples", samples, 1)

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
        `vssm.sampling.paths`; all other cases use `generate`.
        """
        num, steps = len(rows), self._steps(horizon)
        length = rows.shape[1] // self.meta.patch + steps
        slab, at_once = divided(self.model, num, samples, length)
        one_seed = type(seed) is int and -(2**63) <= seed < 2**63
        parallel = one_seed and set(options) <= {"temperature"}
        paths: Tensor | None = None

        def finish(made: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
            nonlocal paths
            made = self._points(made, horizon)
            if paths is None:
                dtype = torch.float64 if scale.far else made.dtype
                paths = made.new_empty(num, *made.shape[1:], dtype=dtype)
            return scale.place(made, factor, shift, out=paths[own])

        for first in range(0, num, slab):
            first = min(first, num - slab)  # slabs of one size replay one recorded graph
            own = slice(first, first + slab)
            x = rows[own]
            if parallel and isinstance(self.model, Variational):
                temperature = check_temperature(options.get("temperature", 1.0))
                cycles = 0 if clock is None else clock.shape[1]
                task = Task(x.shape, x.dtype, cycles, scale, samples, steps, temperature, at_once)
                self.engine.paths(task, x, clock, seed, first, finish)
            else:
                finish(*self._generate(x, clock, scale, seed, first, steps, samples, options))
        assert paths is not None
        return paths

    def _generate(
        self,
        x: Tensor,
        clock: Tensor | None,
        scale: Scale,
        seed: int,
        first: int,
        steps: int,
        samples: int,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns new steps of histories from row `first` on, (rows, S, T, features), and units."""
        x = x.to(self.device)
        factor, shift = scale.units(x, first)
        prompt = scale.steps(x, factor, shift, None if clock is None else clock.to(self.device))
        rows = torch.arange(first, first + len(x), device=self.device)
        if self._draws_latents:  # every path draws its own latents of the history
            prompt, rows = prompt.repeat_interleave(samples, 0), fork(rows, samples).flatten()
            start: dict[str, Any] = {"prompt": prompt, "seed": seed, "rows": rows}
        else:
            start = {"state": self.engine.observe(prompt, seed=seed, rows=rows).repeat(samples)}
        made = self.engine.generate(length=steps, observe="sample", **start, **options)
        return made.x.unflatten(0, (len(x), samples)), factor, shift

    @property
    def _draws_latents(self) -> bool:
        """Whether the model draws latents of what it reads."""
        return isinstance(self.model, Variational | VRNN)

    def _steps(self, horizon: int) -> int:
        """Returns how many steps of the model cover a horizon."""
        return -(-horizon // self.meta.patch)

    def _points(self, x: Tensor, horizon: int) -> Tensor:
        """Returns steps of the model, (rows, S, T, features), as points, (rows, S, H, channels)."""
        return self.meta.to_rows(x)[..., :horizon, : self.channels]


class Stream:
    """Follows one series: `observe` new points, `forecast` at any time; the past is not read again.

    The state covers at most a window of training. When it would cover more, it is renewed from the
    last `context` points, with their scale. If a step of the model is a patch of points, points are
    read when a forecast needs them, since a patch may end anywhere. So a point takes bounded time
    and memory, however long the stream is.
    """

    def __init__(
        self,
        forecaster: ModelForecaster,
        history: History,
        times: np.ndarray | None = None,
        seed: int = 0,
        samples: int = 100,
    ) -> None:
        self._forecaster, self._seed = forecaster, seed
        self.samples = whole_number("samples", samples, 1)
        """The number of paths of a forecast."""
        self._points, self._known, self._times, single = forecaster._reader.read(history, times)
        if not single:
            raise ValueError("history is of several series; allowed: one, (steps, columns)")
        self.renewed = -1
        """How often the state was renewed."""
        self._renew()

    @property
    def position(self) -> int:
        """The number of steps of the model that the state has read; a step is `patch` points.

        Points that are not read yet, or were read before the last renewal, do not count.
        """
        return self._state.position

    def observe(self, points: History, times: np.ndarray | None = None) -> None:
        """Reads new points, (k, D) or (D,) for one; NaN for missing values.

        If one point is refused, none is read.

        Arguments:
            points: The points, in order.
            times: Their dates, (k,); a model with time features needs them.
        """
        given = numbers("points", points, self._forecaster.columns)
        given = given[None] if given.ndim == 1 else given
        if given.ndim != 2:
            raise ValueError(
                f"points has shape {tuple(given.shape)}; allowed: (points, columns) or (columns,)"
            )
        times = dates_of(times, len(given), "points")
        before = vars(self).copy()  # a new state leaves the one before it as it was
        try:
            for k, point in enumerate(given):
                self._observe(point, None if times is None else times[k : k + 1])
        except BaseException:  # else a second try would read the first points twice
            vars(self).update(before)
            raise

    def _observe(self, point: Tensor, time: np.ndarray | None) -> None:
        columns, meta = self._forecaster.columns, self._forecaster.meta
        if (time is None) != (self._times is None):
            raise ValueError("times must be given for all points or for none, as in the history")
        if len(point) != len(columns):
            allowed = f"({len(columns)},), the columns {', '.join(columns)}"
            raise ValueError(f"points has shape ({len(point)},) a point; allowed: {allowed}")
        known = torch.isfinite(point)
        gap = torch.zeros_like(point) if meta.fill == "zero" else self._points[0, -1]
        point = torch.where(known, point, gap)  # the past fills gaps, never the future
        context = meta.context or self._points.shape[1]
        points = torch.cat([self._points, point[None, None]], 1)[:, -context:]
        known = torch.cat([self._known, known[None, None]], 1)[:, -context:]
        self._forecaster._reader.check_known(known)
        if time is not None and self._times is not None:
            check_order(np.concatenate([self._times[-1:], time]))
            self._times = np.concatenate([self._times, time])[-context:]
        if point.abs().max() > LARGEST:
            raise ValueError("points has values above 1e30; allowed: up to 1e30")
        self._points, self._known = points, known
        self._read_last(time)

    def _read_last(self, time: np.ndarray | None) -> None:
        """Takes the state past the last point."""
        forecaster, meta = self._forecaster, self._forecaster.meta
        if meta.patch > 1:
            self._stale = True
            return
        if meta.length and self.position >= meta.length:
            self._renew()
            return
        last = forecaster._reader.rows(self._points[:, -1:])
        x = forecaster._reader.prompt(last, self._factor, self._shift, time, self._since)
        x = x.repeat_interleave(self.samples, 0) if forecaster._draws_latents else x
        self._state = forecaster.engine.observe(x, self._state)
        self._since += 1

    def _renew(self) -> None:
        reader = self._forecaster._reader
        prompt, self._factor, self._shift = reader.scaled(self._points, self._times)
        self._state = self._read(prompt)
        self.renewed, self._stale, self._since = self.renewed + 1, False, 0

    def _read(self, prompt: Tensor) -> State:
        """Returns the state after the past, (rows, C, features), for every path of every row."""
        engine, rows = self._forecaster.engine, torch.arange(len(prompt), device=prompt.device)
        if not self._forecaster._draws_latents:
            return engine.observe(prompt, seed=self._seed, rows=rows)
        check_room(engine.model, len(rows) * self.samples, prompt.shape[1], prompt.device)
        rows = fork(rows, self.samples).flatten()
        if len(prompt) > 1:  # a single row is read once for all of its copies
            prompt = prompt.repeat_interleave(self.samples, 0)
        return engine.observe(prompt, seed=self._seed, rows=rows, num=len(rows))

    def forecast(
        self,
        horizon: int | None = None,
        samples: int | None = None,
        **options: Any,  # noqa: ANN401
    ) -> Forecast:
        """Draws sample paths of what comes next; the stream stays where it is.

        Arguments:
            horizon: H, the steps to forecast; by default those of training.
            samples: The number of paths; by default those of the stream. A vssm, tvae or vrnn can
                not draw more.
            options: `chunk`, `recondition` and `temperature`, as in `generate`.
        """
        forecaster = self._forecaster
        samples = self.samples if samples is None else samples
        horizon, samples = forecaster._check_request(horizon, samples, options)
        if samples > self.samples and forecaster._draws_latents:
            raise ValueError(
                f"samples={samples} is more than the {self.samples} paths that this stream follows;"
                f" start it with stream(..., samples={samples})"
            )
        if self._stale:
            self._renew()
        scale = forecaster._reader.scale_of(self._points, samples, horizon)
        made = self._draw_paths(forecaster._steps(horizon), samples, options)
        made = forecaster._points(made, horizon)
        paths = scale.place(made, self._factor, self._shift, first=self._since)
        times = continued(self._times, horizon)
        return Forecast(forecaster._reader.by_column(paths, 1)[0], forecaster.columns, times)

    @torch.no_grad()
    def _draw_paths(self, steps: int, samples: int, options: dict[str, Any]) -> Tensor:
        """Returns new steps in the scale of the model, (rows, S, T, features)."""
        engine, state = self._forecaster.engine, self._state
        if not self._forecaster._draws_latents:
            state = state.repeat(samples)
        elif samples < self.samples:
            rows = torch.arange(state.batch, device=state.device).view(-1, self.samples)
            state = state.select(rows[:, :samples].flatten())
        if isinstance(engine.model, Variational) and set(options) <= {"temperature"}:
            temperature = check_temperature(options.get("temperature", 1.0))
            return paths_from(engine.model, state, samples, steps, temperature)
        made = engine.generate(length=steps, state=state, observe="sample", **options)
        return made.x.unflatten(0, (-1, samples))
