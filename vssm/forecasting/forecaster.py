"""Forecasting: sample paths of what comes after a history, in the units of the data.

A model reads the history in its own scale (`vssm.data.scale`), as `observe` does. A transformer, ssm, rnn or
vssm with levels reads it once, and the S paths of a series start from copies of that state. A vssm or tvae
also reads it once, but every path draws latents of the history for itself, so the decoder runs over the
history for every path (`vssm.sampling.paths`). A vrnn reads it for every path. One pass over the paths puts
them into the units of the data.

Legend: B series of N steps and D columns; C `context`; H `horizon`; S `samples`; x (B, N, D).
"""

from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vssm.checks import check_type, whole_number
from vssm.data import Meta, read_meta
from vssm.data.scale import Scale
from vssm.engine import Engine
from vssm.engine.paths import Finish
from vssm.forecasting.inputs import (
    History,
    check_horizon,
    check_options,
    check_order,
    continued,
    dates_of,
    double,
    is_seed,
    numbers,
)
from vssm.forecasting.reader import LARGEST, Reader
from vssm.models import VRNN, Model, Variational, inner_model
from vssm.nn import State
from vssm.noise import fork
from vssm.runs import pretrained
from vssm.runs.checkpoint import load_finite
from vssm.sampling.generation import check_room, check_temperature
from vssm.sampling.paths import Task, divided, paths_from

__all__ = ["Forecast", "Forecaster", "Stream", "forecast"]

_REQUESTS = 64  # remembered by a forecaster
_NAMED = 3  # columns in a repr


@dataclass(frozen=True)
class Forecast:
    """Holds the sample paths of a forecast."""

    samples: Tensor
    """(B, S, H, D) in the units of the data, on the device of the model; (S, H, D) of a single series.

    In float32, or in float64 where a history is so far from zero that all paths would be one number."""
    columns: tuple[str, ...]
    times: np.ndarray | None = None
    """The dates of the H steps, where those of the history are known."""

    def __repr__(self) -> str:
        *series, paths, steps, _ = self.samples.shape
        parts = [*(f"{num} series" for num in series), f"{paths} paths", f"{steps} steps"]
        dates = (
            "" if self.times is None or not steps else f", from {self.times[0]} to {self.times[-1]}"
        )
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
    model: "Model | Forecaster | str | Path",
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
        model: A run folder of data set series, a `Forecaster`, or a model.
        history: (N, D) steps of one series or (B, N, D) of several, in the units of the data; NaN where a
            value is missing. Of a pandas DataFrame the columns of the run are taken by their names. The model
            reads the last `context` steps that it was trained with.
        horizon: H, the steps to forecast; by default those of training. More is extrapolation, and warned of.
        samples: S, the number of paths of every series.
        meta: How the data was scaled; with a model only, which then forecasts what it reads, unscaled.
        times: The dates of the history, (N,) datetime64; needed by a model with time features.
        seed: Names the paths.
        options: `chunk`, `recondition` and `temperature`, as in `generate`.

    Returns:
        The paths, with their quantiles.

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="vssm", features=2, width=8, layers=1, latents=2, classes=4))
        >>> made = forecast(model, torch.zeros(20, 2), horizon=5, samples=7)
        >>> made.samples.shape, made.quantile(0.1).shape
        (torch.Size([7, 5, 2]), torch.Size([5, 2]))
    """
    if isinstance(model, str | Path):
        model = Forecaster.load(model)
    if isinstance(model, Forecaster):
        return model.forecast(history, horizon, samples, times, seed, **options)
    modes = [(part, part.training) for part in inner_model(model).modules()]
    try:
        return Forecaster(model, meta).forecast(history, horizon, samples, times, seed, **options)
    finally:  # a model in training goes on as it was
        for part, training in modes:
            part.training = training


def _named(columns: tuple[str, ...]) -> str:
    more = len(columns) - _NAMED
    return ", ".join(columns[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class Forecaster:
    """Joins a model with what is known of its data, so that it reads and writes the units of the data.

    Arguments:
        model: Any of the six models, of numbers; it is put in evaluation mode.
        meta: What the run says of its data; a plain model has features without names and no scale.

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="ssm", features=2, width=8, layers=1))
        >>> known = {"name": "series", "length": 6, "suggested_head": "gaussian-learned"}
        >>> own = Forecaster(model, Meta(**known, features=2, columns=("load", "heat"), context=4, horizon=2))
        >>> made = own.forecast(np.zeros((4, 2)), samples=3)
        >>> made.columns, made.samples.shape
        (('load', 'heat'), torch.Size([3, 2, 2]))
    """

    def __init__(self, model: Model, meta: Meta | None = None) -> None:
        model = inner_model(model)
        if meta is not None:
            check_type("meta", meta, Meta, "the Meta of a data set")
        if model.head.tokens:
            raise ValueError(f"model has head {model.config.head!r}; allowed: a model of numbers")
        if meta is None:
            features = model.config.features
            columns = tuple(map(str, range(features)))
            meta = Meta(
                name="series", features=features, length=0, suggested_head="", columns=columns
            )
        if meta.columns is None or meta.features != model.config.features:
            raise ValueError(
                f"meta is of data set {meta.name!r} with {meta.features} features; allowed: data set 'series'"
                f" with {model.config.features}, those of the model"
            )
        self.model, self.meta, self.columns = model.eval(), meta, meta.columns
        self.device = next(model.parameters()).device
        self.channels = 1 if meta.separate else len(meta.columns)
        self._reader = Reader(model.head, meta, self.device)
        self._scale = self._reader.scale
        self.engine = Engine(model)

    def __repr__(self) -> str:
        steps = (
            f", context={self.meta.context}, horizon={self.meta.horizon}"
            if self.meta.context
            else ""
        )
        return f"Forecaster({self.model.config.kind} of {_named(self.columns)}{steps}, on {self.device})"

    @classmethod
    def load(cls, run: str | Path, device: torch.device | str = "cpu") -> "Forecaster":
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
            ...     np.savetxt(f"{folder}/wave.csv", np.sin(np.arange(40)), header="load", comments="")
            ...     series = SeriesConfig(path=f"{folder}/wave.csv", context=4, horizon=2)
            ...     config = RunConfig(
            ...         data=DataConfig(name="series", series=series),
            ...         model=ModelConfig(kind="ssm", features=1, head="auto", width=8, layers=1),
            ...         train=TrainConfig(max_steps=1, batch=4, samples=0, num_valid=4),
            ...     )
            ...     own = Forecaster.load(train(config, f"{folder}/run", progress=Progress()))
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
            seed: Names the paths.
            options: `chunk`, `recondition` and `temperature`, as in `generate`.

        Returns:
            The paths, with their quantiles.

        Example:
            >>> from vssm import ModelConfig, build
            >>> own = Forecaster(build(ModelConfig(kind="ssm", features=2, width=8, layers=1)))
            >>> days = np.arange("2024-02-26", "2024-02-29", dtype="M8[D]")
            >>> made = own.forecast(np.zeros((3, 2)), horizon=2, samples=5, times=days)
            >>> made.samples.shape, made.times.astype("M8[D]").astype(str).tolist()
            (torch.Size([5, 2, 2]), ['2024-02-29', '2024-03-01'])
        """
        check_options(options)
        horizon = check_horizon(horizon, samples, self.meta.horizon)
        x, _, times, single = self._reader.read(history, times)
        rows, clock = self._reader.rows(x), self._reader.clock(times)
        num = len(rows)
        scale = self._reader.scale_of(x, samples, horizon)
        slab, _ = divided(
            self.model, num, samples, rows.shape[1] // self.meta.patch + self._steps(horizon)
        )
        paths: Tensor | None = None

        def finish(made: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
            """Copies the paths of the slab to theirs."""
            nonlocal paths
            made = scale.exact(self._points(made, horizon))
            if paths is None:
                paths = made.new_empty(num, *made.shape[1:])
            return scale.place(made, factor, shift, out=paths[own])

        for first in range(0, num, slab):
            # Slabs of one size replay one recording: the last one makes some paths again.
            first = max(0, min(first, num - slab))
            own = slice(first, min(first + slab, num))
            self._paths_after(
                rows[own], clock, scale, seed, first, horizon, samples, options, finish
            )
        assert paths is not None
        out = self._reader.by_column(paths, len(x))
        return Forecast(out[0] if single else out, self.columns, continued(times, horizon))

    def stream(
        self, history: History, times: np.ndarray | None = None, seed: int = 0, samples: int = 100
    ) -> "Stream":
        """Starts to follow one series, point by point.

        Arguments:
            history: (N, D) steps of the series so far.
            times: Their dates, (N,) datetime64; then points have dates too.
            seed: Names the paths.
            samples: S, the number of paths of a forecast. A vssm, tvae or vrnn follows the series with as
                many rows, because every path draws latents of the past for itself.

        Returns:
            The stream, which has read the history.

        Example:
            >>> from vssm import ModelConfig, build
            >>> own = Forecaster(build(ModelConfig(kind="ssm", features=2, width=8, layers=1)))
            >>> stream = own.stream(np.zeros((3, 2)))
            >>> stream.observe([0.5, 1.0])
            >>> stream.position, stream.forecast(horizon=2, samples=5).samples.shape
            (4, torch.Size([5, 2, 2]))
        """
        return Stream(self, history, times, seed, samples)

    @torch.no_grad()
    def _paths_after(
        self,
        x: Tensor,
        clock: Tensor | None,
        scale: Scale,
        seed: int,
        first: int,
        horizon: int,
        samples: int,
        options: dict[str, Any],
        finish: Finish,
    ) -> None:
        """Gives `finish` new steps of histories from row `first` on, (rows, S, T, features)."""
        if (
            is_seed(seed)
            and isinstance(self.model, Variational)
            and not set(options) - {"temperature"}
        ):
            temperature = check_temperature(options.get("temperature", 1.0))
            task = self._task(x, clock, scale, horizon, samples, temperature)
            self.engine.paths(task, x, clock, seed, first, finish)
            return
        x = double(x).to(self.device)
        factor, shift = scale.units(x, first)
        prompt = scale.steps(x, factor, shift, None if clock is None else clock.to(self.device))
        rows = torch.arange(first, first + len(x), device=self.device)
        if isinstance(self.model, Variational | VRNN):  # every path draws latents of the history
            prompt, rows = prompt.repeat_interleave(samples, 0), fork(rows, samples).flatten()
            start: dict[str, Any] = {"prompt": prompt, "seed": seed, "rows": rows}
        else:
            start = {"state": self.engine.observe(prompt, seed=seed, rows=rows).repeat(samples)}
        made = self.engine.generate(
            length=self._steps(horizon), observe="sample", **start, **options
        )
        finish(made.x.unflatten(0, (len(x), samples)), factor, shift)

    def _task(
        self,
        rows: Tensor,
        clock: Tensor | None,
        scale: Scale,
        horizon: int,
        samples: int,
        temperature: float,
    ) -> Task:
        cycles = 0 if clock is None else clock.shape[1]
        steps = self._steps(horizon)
        _, at_once = divided(
            self.model, len(rows), samples, rows.shape[1] // self.meta.patch + steps
        )
        return Task(rows.shape, rows.dtype, cycles, scale, samples, steps, temperature, at_once)

    def _steps(self, horizon: int) -> int:
        """Returns how many steps of the model hold a horizon."""
        return -(-horizon // self.meta.patch)

    def _points(self, x: Tensor, horizon: int) -> Tensor:
        """Returns steps of the model, (rows, S, T, features), as points, (rows, S, H, channels)."""
        return self.meta.to_rows(x)[..., :horizon, : self.channels]


class Stream:
    """Follows one series: `observe` what arrives, `forecast` at any time, without reading the past again.

    The state grows no older than a window of training: when it would, it is made anew from the last `context`
    points, with their scale. A model whose step is a patch of points reads them when it is asked to forecast,
    since a patch may end anywhere. So time and memory of a point are bounded, however long the stream.
    """

    def __init__(
        self,
        forecaster: Forecaster,
        history: History,
        times: np.ndarray | None = None,
        seed: int = 0,
        samples: int = 100,
    ) -> None:
        self._forecaster, self._seed = forecaster, seed
        self.samples = whole_number("samples", samples, 1)
        """The number of paths of a forecast."""
        self._draws = isinstance(forecaster.model, Variational | VRNN)  # latents of what it reads
        x, known, times, single = forecaster._reader.read(history, times)
        if not single:
            raise ValueError("history is of several series; allowed: one, (steps, columns)")
        self._points, self._times = double(x), times
        self._known = torch.ones_like(x, dtype=torch.bool) if known is None else known
        self.renewed = -1
        """How often the state was made anew."""
        self._renew()

    @property
    def position(self) -> int:
        """The number of steps of the model that the state has read; a step is `patch` points.

        Points that are yet to be read, and those before the state was last made anew, do not count.
        """
        return self._state.position

    def observe(self, points: History, times: np.ndarray | None = None) -> None:
        """Reads new points, (k, D) or (D,) for one; missing values are NaN.

        When one is refused, none is read.

        Arguments:
            points: The points, in order.
            times: Their dates, (k,); needed by a model with time features.
        """
        given = numbers("points", points, self._forecaster.columns)
        given = given[None] if given.ndim == 1 else given
        if given.ndim != 2:
            raise ValueError(
                f"points has shape {tuple(given.shape)}; allowed: (points, columns) or (columns,)"
            )
        times = dates_of(times, len(given), "points")
        before = vars(self).copy()  # a new state leaves the one before it whole
        try:
            for k in range(len(given)):
                self._observe(given[k], None if times is None else times[k : k + 1])
        except BaseException:  # else a second try would read the points before this one twice
            vars(self).update(before)
            raise

    def _observe(self, point: Tensor, time: np.ndarray | None) -> None:
        forecaster, meta = self._forecaster, self._forecaster.meta
        if (time is None) != (self._times is None):
            raise ValueError("times must be given for all points or for none, as in the history")
        point = point.to("cpu", torch.float64)
        if tuple(point.shape) != (len(forecaster.columns),):
            allowed = f"({len(forecaster.columns)},), the columns {', '.join(forecaster.columns)}"
            raise ValueError(f"points has shape {tuple(point.shape)} a point; allowed: {allowed}")
        context = meta.context or self._points.shape[1]
        known = torch.isfinite(point)
        whole = torch.cat([self._points, point[None, None]], 1)[:, -context:]
        there = torch.cat([self._known, known[None, None]], 1)[:, -context:]
        forecaster._reader.check_known(there)
        times = None
        if time is not None and self._times is not None:
            check_order(np.concatenate([self._times[-1:], time]))
            times = np.concatenate([self._times, time])[-context:]
        if not known.all():  # the past fills it, never the future
            filled = torch.zeros_like(point) if meta.fill == "zero" else self._points[0, -1]
            whole[0, -1] = torch.where(known, point, filled)
        if float(whole[0, -1].abs().max()) > LARGEST:
            raise ValueError("points has values above 1e30; allowed: up to 1e30")
        self._points, self._known, self._times = whole, there, times
        self._read_last(time)

    def _read_last(self, time: np.ndarray | None) -> None:
        """Takes the state past the last point."""
        forecaster, meta = self._forecaster, self._forecaster.meta
        if meta.patch > 1:  # a step of the model may end at any point: read when asked for
            self._stale = True
            return
        if meta.length and self.position >= meta.length:
            self._renew()
            return
        last = forecaster._reader.rows(self._points[:, -1:])
        x = forecaster._reader.prompt(last, self._factor, self._shift, time, self._since)
        x = x.repeat_interleave(self.samples, 0) if self._draws else x
        self._state = forecaster.engine.observe(x, self._state)
        self._since += 1

    def _renew(self) -> None:
        forecaster = self._forecaster
        prompt, self._factor, self._shift = forecaster._reader.scaled(self._points, self._times)
        self._state = self._read(prompt)
        self.renewed, self._stale, self._since = self.renewed + 1, False, 0

    def _read(self, prompt: Tensor) -> State:
        """Returns the state after the past, (rows, C, features), of all copies of every row."""
        model, rows = self._forecaster.model, torch.arange(len(prompt), device=prompt.device)
        if not self._draws:
            return self._forecaster.engine.observe(prompt, seed=self._seed, rows=rows)
        check_room(model, len(rows) * self.samples, prompt.shape[1], prompt.device)
        rows = fork(rows, self.samples).flatten()
        if len(prompt) > 1:  # one row would be read once for all of its copies
            prompt = prompt.repeat_interleave(self.samples, 0)
        return self._forecaster.engine.observe(prompt, seed=self._seed, rows=rows, num=len(rows))

    def forecast(
        self,
        horizon: int | None = None,
        samples: int | None = None,
        **options: Any,  # noqa: ANN401
    ) -> Forecast:
        """Draws sample paths of what comes next; the stream stays where it is.

        Arguments:
            horizon: H, the steps to forecast; by default those of training.
            samples: The number of paths; by default, and for a vssm, tvae or vrnn at most, those of the
                stream.
            options: `chunk`, `recondition` and `temperature`, as in `generate`.
        """
        check_options(options)
        forecaster = self._forecaster
        samples = self.samples if samples is None else samples
        horizon = check_horizon(horizon, samples, forecaster.meta.horizon)
        if samples > self.samples and self._draws:
            raise ValueError(
                f"samples={samples} is more than the {self.samples} paths that this stream follows; "
                f"start it with stream(..., samples={samples})"
            )
        if self._stale:
            self._renew()
        scale, steps = (
            forecaster._reader.scale_of(self._points, samples, horizon),
            forecaster._steps(horizon),
        )
        made = forecaster._points(self._paths(steps, samples, options), horizon)
        made = scale.exact(made)
        units = self._factor.to(made), self._shift.to(made)
        paths = scale.place(made, *units, first=self._since)
        times = continued(self._times, horizon)
        return Forecast(forecaster._reader.by_column(paths, 1)[0], forecaster.columns, times)

    @torch.no_grad()
    def _paths(self, steps: int, samples: int, options: dict[str, Any]) -> Tensor:
        """Returns new steps in the scale of the model, (rows, S, T, features)."""
        model, state = self._forecaster.model, self._state
        if not self._draws:
            state = state.repeat(samples)
        elif samples < self.samples:
            rows = torch.arange(state.batch, device=state.device).view(-1, self.samples)[
                :, :samples
            ]
            state = state.select(rows.flatten())
        if isinstance(model, Variational) and not set(options) - {"temperature"}:
            return paths_from(
                model, state, samples, steps, check_temperature(options.get("temperature", 1.0))
            )
        made = self._forecaster.engine.generate(
            length=steps, state=state, observe="sample", **options
        )
        return made.x.unflatten(0, (-1, samples))
