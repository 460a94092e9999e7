"""`Forecaster`: from a pandas table of series to sample paths, quantiles and backtests.

    fit        chooses the sizes of windows, trains with early stopping, calibrates, fits all data
    predict    draws sample paths of the dates after each series, each with its own latents
    evaluate   scores rolling windows beside the seasonal naive forecast

One model serves all series of a panel, each window in its own scale, so it also forecasts series
that it never saw.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vssm.checks import (
    check_choice,
    check_flag,
    check_number,
    check_path,
    check_type,
    choose_device,
    shown,
    whole_number,
)
from vssm.config import KINDS
from vssm.data.storage import read_object, read_tensors, write_atomically, write_tensors
from vssm.data.table import exact_numbers
from vssm.forecasting.backtest import Backtest, rolling_cuts, score
from vssm.forecasting.calibration import Calibration
from vssm.forecasting.direct import Direct, choose_direct, fit_direct
from vssm.forecasting.fitting import choose_layout, hold_out, progress_bar, train, validation
from vssm.forecasting.linear import is_more_exact, spread_evenly, windows_apart
from vssm.forecasting.network import draw_paths, model_config
from vssm.forecasting.panel import (
    Panel,
    Series,
    check_quantiles,
    day,
    forecast_table,
    read_ahead,
    read_panel,
)
from vssm.forecasting.windows import GivenScale, Layout, Windows, pairs
from vssm.models import AnyPart
from vssm.nn.show import html_table
from vssm.runs.checkpoint import load_finite
from vssm.runs.checkpoint import save as save_model

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_CALIBRATION_WINDOWS, _PATHS = 256, 100
_PATHS_AT_ONCE = 4096
_DIRECT_STEPS = 3  # of the direct forecast for each step of the model, at most
_FORMAT = 4  # of forecaster.json


@dataclass(repr=False, eq=False)
class Forecaster:
    """Forecasts the series of a pandas table, long or wide, with one model for all of them.

    Parameters are kept as given, and checked by `fit`: `get_params`, `set_params`, `repr` and
    scikit-learn's `clone` work.

    Arguments:
        horizon: H, the dates to forecast.
        freq: The time from one date to the next, in pandas's letters; found in the dates if None.
        kind: "vssm", or one of the other five models for comparison, which know no covariates.
        season: Steps of a season; chosen from the frequency if None.
        patch: Points in a step of the model; chosen from season and horizon if None.
        context: Points of history that the model reads; chosen if None.
        transform: "log" for series whose spread grows with their level, "none", or "auto".
        future_columns: Covariates that are known in the future, such as prices and holidays.
        past_columns: Covariates that are known up to now; see `read_panel` for None.
        static_columns: Columns with one number for each series; see `read_panel` for None.
        calibrate: Whether intervals are widened or narrowed to fit held-out windows.
        refit: Whether the final fit uses all data, after held-out windows chose when to stop.
        width: Width of the model.
        layers: Blocks of the model.
        latents: Discrete latents of each step.
        classes: Classes of a latent.
        max_steps: The most training steps; early stopping may end sooner.
        batch: Windows in a step.
        learning_rate: Of AdamW.
        seed: Fixes weights, batches and paths.
        device: Where the model is trained and run: "cpu", "cuda" or "auto".
        progress: Whether to draw a progress bar, on a terminal or in a notebook with ipywidgets.

    Example:
        >>> import pandas
        >>> days = pandas.date_range("2024-01-01", periods=60, freq="D")
        >>> table = pandas.DataFrame({"shop": np.arange(60) % 7.0}, index=days)
        >>> own = Forecaster(horizon=7, max_steps=3, width=16).fit(table)
        >>> own.predict_samples(samples=5).shape
        (1, 5, 7)
        >>> own.predict()["shop"].columns.tolist()
        ['mean', '0.1', '0.5', '0.9']
        >>> own
        Forecaster(horizon=7, max_steps=3, width=16)
    """

    horizon: int = 24
    freq: str | None = None
    kind: str = "vssm"
    _: KW_ONLY
    season: int | None = None
    patch: int | None = None
    context: int | None = None
    transform: str = "auto"
    future_columns: Sequence[str] = ()
    past_columns: Sequence[str] | None = None
    static_columns: Sequence[str] | None = None
    calibrate: bool = True
    refit: bool = True
    width: int = 64
    layers: int = 1
    latents: int = 1
    classes: int = 64
    max_steps: int = 1000
    batch: int = 32
    learning_rate: float = 2e-3
    seed: int = 0
    device: str = "cpu"
    progress: bool = True

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns the parameters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def set_params(self, **params: Any) -> "Forecaster":  # noqa: ANN401
        """Sets parameters by name."""
        for name, value in params.items():
            check_choice("parameter", name, tuple(self.get_params()))
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        own = (f"{name}={value!r}" for name, value in sorted(self._own_params().items()))
        return f"Forecaster({', '.join(own)})"

    def _repr_html_(self) -> str:
        rows = self._own_params()
        if hasattr(self, "model_"):
            series, seconds = len(self.panel_.series), f"{self.seconds_:.0f}"
            fitted = {"series": series, "training steps": self.steps_, "seconds": seconds}
            rows |= {**fitted, "model": self.model_}
        return html_table("Forecaster", rows)

    def _own_params(self) -> dict[str, Any]:
        """Returns the parameters that are not the default ones."""
        usual = {field.name: field.default for field in fields(self)}
        return {n: value for n, value in self.get_params().items() if value != usual[n]}

    def fit(self, df: "pandas.DataFrame") -> "Forecaster":
        """Trains on all series of a table.

        Arguments:
            df: Long (unique_id, ds, y and covariates) or wide (a column for each series).

        Returns:
            This forecaster, with `panel_`, `layout_`, `model_`, `calibration_`, `steps_` (those
            of the training that was best) and `seconds_`.
        """
        return self._fit(self._read_new(df))

    def _read_new(self, df: "pandas.DataFrame") -> Panel:
        """Returns the panel of a table to train on."""
        self._check_params()
        return read_panel(
            df, self.freq, self.future_columns, self.past_columns, self.static_columns
        )

    def _fit(self, panel: Panel) -> "Forecaster":
        began = time.monotonic()
        sizes = self.horizon, self.season, self.patch, self.context
        longest = max(len(one.y) for one in panel.series)
        for name in ("horizon", "patch", "context"):
            if (getattr(self, name) or 1) > longest:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, and the longest series has {longest} rows;"
                    f" give {name}={longest} or less"
                )
        layout = choose_layout(panel, *sizes, self.transform)
        for one in panel.series:
            if len(one.y) < 2 * layout.season:
                raise ValueError(
                    f"series {shown(one.id)} has {len(one.y)} rows, less than two seasons of"
                    f" {layout.season}; drop it, or give season=1"
                )
        _check_values(panel, layout)
        older, cuts = hold_out(panel, layout)
        scale = GivenScale.of(panel, layout.patch)
        seen = [len(one.y) for one in older.series]

        def windows_of(layout: Layout) -> tuple[Windows, Windows]:
            return Windows(older, layout, scale), Windows(panel, layout, scale, seen=seen)

        windows, whole = windows_of(layout)
        positive = all((one.y[np.isfinite(one.y)] > 0).all() for one in panel.series)
        if self.transform == "auto" and positive and not layout.log and len(cuts):
            logs = windows_of(replace(layout, log=True))
            if is_more_exact(logs, (windows, whole), cuts):
                windows, whole = logs
        sizes = self.width, self.layers, self.latents, self.classes
        config = model_config(self.kind, layout, scale.features(layout.patch), *sizes)
        options = (self.batch, self.learning_rate, self.seed, choose_device(self.device))
        self.panel_: Panel = panel
        self.scale_: GivenScale = scale
        self.calibration_: Calibration | None = None
        steps = self.max_steps if len(cuts) else min(self.max_steps, 300)
        with progress_bar(self.progress) as bar:
            direct_steps = _DIRECT_STEPS * self.max_steps
            choice, direct = choose_direct(windows, whole, cuts, direct_steps, self.seed, bar)
            self.direct_: Direct = direct
            windows = windows.centred(choice.centre, direct)
            self.layout_: Layout = windows.layout
            if len(cuts):
                held = whole.centred(choice.centre, self.direct_)
                judge = validation(held, cuts, self.seed)
                self.model_, steps = train(config, windows, steps, *options, bar, "fit", judge)
                if self.calibrate:
                    own = spread_evenly(cuts, _CALIBRATION_WINDOWS)
                    paths, y, _, _ = self._draw(held, own, _PATHS)
                    series, apart = len(cuts[:, 0].unique()), windows_apart(cuts, self.horizon)
                    self.calibration_ = Calibration.of(paths, y, held.dates(own), series, apart)
            if self.refit or not len(cuts):
                whole = Windows(panel, windows.layout, scale)
                self.direct_ = fit_direct(choice, whole, self.seed, bar)
                whole = whole.centred(choice.centre, self.direct_)
                self.model_, _ = train(config, whole, steps, *options, bar, "fit all data")
        self.steps_: int = steps
        self.seconds_: float = time.monotonic() - began
        return self

    def predict(
        self,
        df: "pandas.DataFrame | None" = None,
        samples: int = 200,
        quantiles: Sequence[float] = (0.1, 0.5, 0.9),
        future: "pandas.DataFrame | None" = None,
    ) -> "pandas.DataFrame":
        """Forecasts the H dates after each series.

        Arguments:
            df: The histories, of known or new series; by default those given to `fit` and `update`.
            samples: Paths of each series.
            quantiles: From 0 to 1, each once.
            future: The covariates that are known in the future: unique_id, ds and a column for
                each; without unique_id the same for all series.

        Returns:
            For a long table unique_id, ds, mean and one column for each quantile, named by its
            number; for a wide table the same with a column level for the series.
        """
        check_quantiles(quantiles)
        panel = self._read(df)
        paths = self._paths(panel, samples, future)
        dates = [panel.next_dates(one, self.horizon) for one in panel.series]
        made = dict(zip(panel.ids, zip(dates, paths, strict=True), strict=True))
        return forecast_table(made, quantiles, panel.wide)

    def predict_samples(
        self,
        df: "pandas.DataFrame | None" = None,
        samples: int = 200,
        future: "pandas.DataFrame | None" = None,
    ) -> np.ndarray:
        """Returns the sample paths that `predict` summarises, (series, paths, H)."""
        return self._paths(self._read(df), samples, future)

    def _read(self, df: "pandas.DataFrame | None") -> Panel:
        """Returns the panel of a table, or the panel of training if there is no table."""
        self._check_fitted()
        if df is None:
            return self.panel_
        columns = self.panel_.columns
        panel = read_panel(df, self.panel_.step, columns.future, columns.past, columns.static)
        _check_values(panel, self.layout_)
        return panel

    def _paths(
        self, panel: Panel, samples: int, future: "pandas.DataFrame | None" = None
    ) -> np.ndarray:
        samples = whole_number("samples", samples, 1)
        ahead = read_ahead(panel, self.horizon, future)
        windows = self._windows(panel, ahead)
        cuts = torch.stack([torch.arange(len(panel.series)), windows.lengths], 1)
        return self._paths_of(windows, cuts, samples).numpy()

    def _windows(
        self,
        panel: Panel,
        ahead: Sequence[np.ndarray] | None = None,
        seen: Sequence[int] | None = None,
    ) -> Windows:
        return Windows(panel, self.layout_, self.scale_, self.direct_, ahead, seen)

    def _draw(self, windows: Windows, cuts: Tensor, samples: int) -> tuple[Tensor, ...]:
        """Returns paths of windows before calibration, (W, S, H), what came, centre and scale."""
        own, parts = self.layout_.ahead, []
        num = max(1, _PATHS_AT_ONCE // samples)
        for first in range(0, len(cuts), num):
            some = cuts[first : first + num]
            batch = windows.forecasts(some, blind=True)
            paths = draw_paths(self.model_, batch, self.layout_, samples, self.seed, first)
            y = torch.where(windows.values(some)[1], batch.x.flatten(1), torch.nan)
            parts.append((paths[..., own], y[:, own], batch.centre[:, own], batch.scale[:, own]))
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    def _paths_of(
        self, windows: Windows, cuts: Tensor, samples: int, rolling: bool = False
    ) -> Tensor:
        """Returns calibrated paths of windows, (W, S, H), in the units of the data.

        With `rolling`, each window is also calibrated by those that had ended before it.
        """
        paths, y, centre, scale = self._draw(windows, cuts, samples)
        if (held := self.calibration_) is not None:
            if rolling:
                held = held.with_windows(paths, y, windows.dates(cuts))
            paths = held.apply(paths, windows.dates(cuts, [-1])[:, 0] + 1)
        return windows.possible(windows.to_units(paths, centre, scale), cuts)

    def evaluate(
        self,
        df: "pandas.DataFrame",
        windows: int = 5,
        samples: int = 200,
        stride: int | None = None,
    ) -> "pandas.DataFrame":
        """Scores forecasts of the last `windows` windows of each series of a table.

        The model is used as it is: give newer data than it was trained on, or use `backtest`. Each
        window is calibrated by what came before it, as after `update`.

        Arguments:
            df: The table.
            windows: Of each series.
            samples: Paths of each window.
            stride: Dates from one window to the next; the horizon by default.

        Returns:
            One row for this forecaster and one for the seasonal naive forecast, with the columns
            crps, wql, mase and coverage80 (see `vssm.forecasting.metrics`).
        """
        return self._roll(self._read(df), *self._rolling(windows, samples, stride)).table

    def backtest(
        self,
        df: "pandas.DataFrame",
        windows: int = 5,
        samples: int = 200,
        stride: int | None = None,
    ) -> Backtest:
        """Fits on the rows before the last `windows` windows of a table, then scores those windows.

        Takes the arguments of `evaluate`. The result holds its `table`, and draws a `plot`.
        """
        panel = self._read_new(df)
        windows, samples, stride = self._rolling(windows, samples, stride)
        test = self.horizon + (windows - 1) * stride
        older = []
        for one in panel.series:
            if len(one.y) < test + self.horizon:
                raise ValueError(
                    f"series {shown(one.id)} has {len(one.y)} rows, too few for {windows}"
                    f" windows of {self.horizon}; give fewer windows"
                )
            older.append(one.before(len(one.y) - test))
        self._fit(replace(panel, series=tuple(older)))
        return self._roll(panel, windows, samples, stride)

    def _rolling(self, windows: int, samples: int, stride: int | None) -> tuple[int, int, int]:
        """Returns these numbers, checked, with the horizon as the default stride."""
        stride = self.horizon if stride is None else whole_number("stride", stride, 1)
        return whole_number("windows", windows, 1), whole_number("samples", samples, 1), stride

    def _roll(self, panel: Panel, windows: int, samples: int, stride: int) -> Backtest:
        cuts = rolling_cuts(panel, self.layout_, windows, stride)
        seen = [len(one.y) for one in panel.series]
        for k, cut in reversed(cuts.tolist()):
            seen[k] = cut  # the first window of a series is the last to be seen here
        own = self._windows(panel, seen=seen)
        return score(own, cuts, self._paths_of(own, cuts, samples, rolling=True), self.kind)

    def fill(self, df: "pandas.DataFrame | None" = None, samples: int = 50) -> "pandas.DataFrame":
        """Returns a table with its missing values filled by the mean of `samples` draws.

        Rows that are missing between two dates are added. Known values stay as they are. Only a
        vssm can fill, because it conditions on any known part.
        """
        panel = self._read(df)
        samples = whole_number("samples", samples, 1)
        if not isinstance(self.model_, AnyPart):
            raise ValueError(f"kind={self.kind!r} cannot fill gaps; use kind='vssm'")
        windows = self._windows(panel)
        values = [self._filled(windows, k, one, samples) for k, one in enumerate(panel.series)]
        table: Any = panel.to_frame(values)
        if not panel.wide:
            return table
        return table.pivot(index="ds", columns="unique_id", values="y")[panel.ids]

    def _filled(self, windows: Windows, k: int, one: Series, samples: int) -> np.ndarray:
        y, length = one.y.copy(), self.layout_.length
        gaps = np.flatnonzero(np.isnan(y))
        while len(gaps):  # a window for the next gaps, with known values on both sides
            start = max(0, min(int(gaps[0]) - length // 4, len(y) - length))
            stop = len(y) if start + length >= len(y) else start + 3 * length // 4
            own, gaps = gaps[gaps < stop], gaps[gaps >= stop]
            cuts = torch.tensor([[k, start + self.layout_.context]])
            points, there = windows.values(cuts)
            made = torch.zeros_like(there)
            made[0, torch.from_numpy(own - start)] = True
            batch = windows.batch(cuts, points, there, made)
            paths = draw_paths(self.model_, batch, self.layout_, samples, self.seed, first=start)
            found = windows.to_units(paths, batch.centre, batch.scale)
            found = windows.possible(found, cuts)[0].mean(0).numpy()
            y[own] = found[own - start]
        return y

    def update(self, df: "pandas.DataFrame") -> "Forecaster":
        """Adds new points and new series to the history, without training.

        A row for a date that is known already replaces the old one. Windows that end in the new
        points calibrate the forecasts to come.
        """
        import pandas

        new, old = self._read(df), self.panel_
        table = pandas.concat([old.to_frame(), new.to_frame()], ignore_index=True)
        table = table.drop_duplicates(["unique_id", "ds"], keep="last")
        self.panel_: Panel = replace(self._read(table), wide=old.wide)
        if self.calibration_ is not None:
            known = {one.id: len(one.y) for one in old.series}
            windows = self._windows(self.panel_)
            cuts = []
            for one in self.panel_.series:
                num = len(one.y)
                first = max(known.get(one.id, num) - self.horizon, self.layout_.season)
                cuts.append(range(first + 1, num - self.horizon + 1))
            if len(cuts := pairs(cuts)):
                cuts = spread_evenly(cuts, _CALIBRATION_WINDOWS)
                paths, y, _, _ = self._draw(windows, cuts, _PATHS)
                self.calibration_ = self.calibration_.with_windows(paths, y, windows.dates(cuts))
        return self

    def save(self, folder: str | Path) -> None:
        """Writes the model, its settings and its history to a folder."""
        self._check_fitted()
        check_path("folder", folder)
        folder, panel = Path(folder), self.panel_
        save_model(self.model_, folder)
        tensors, held = self.direct_.state_dict(), None
        if self.calibration_ is not None:
            held = self.calibration_._asdict()
            tensors |= {name: held.pop(name) for name in ("scores", "dates")}
        write_tensors(folder / "forecaster.safetensors", tensors)
        table = panel.to_frame()
        ids = [one.id.item() if isinstance(one.id, np.generic) else one.id for one in panel.series]
        table["unique_id"] = np.repeat(np.arange(len(ids)), [len(one.y) for one in panel.series])
        write_atomically(folder / "history.csv", lambda path: table.to_csv(path, index=False))
        settings = {
            "format": _FORMAT,
            "params": self.get_params(),
            "layout": asdict(self.layout_),
            "scale": asdict(self.scale_),
            "calibration": held,
            "ids": ids,
            "freq": getattr(panel.step, "kwds", {}).get("months") or panel.step.freqstr,
            "columns": asdict(panel.columns),
            "wide": panel.wide,
            "steps": self.steps_,
            "seconds": self.seconds_,
        }
        text = json.dumps(settings, indent=1)
        write_atomically(folder / "forecaster.json", lambda path: path.write_text(text))

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> "Forecaster":
        """Reads a folder that `save` wrote; the model goes to a device."""
        import pandas

        check_path("folder", folder)
        folder = Path(folder)
        if not (folder / "forecaster.json").is_file():
            raise ValueError(f"{str(folder)!r} has no forecaster.json; give a folder of `save`")
        held = read_object(folder / "forecaster.json")
        if held.get("format") != _FORMAT:
            raise ValueError(f"{str(folder)!r} has format {held.get('format')}; this is {_FORMAT}")
        lists = {k: tuple(v) for k, v in held["params"].items() if isinstance(v, list)}
        own = cls(**{**held["params"], **lists, "device": device})  # JSON has no tuples
        own.model_ = load_finite(folder, choose_device(device)).eval()
        tensors = read_tensors(folder / "forecaster.safetensors")[0]
        past: Any = {name: tensors.pop(name) for name in ("scores", "dates") if name in tensors}
        own.direct_ = Direct.from_tensors(tensors)
        own.layout_ = Layout(**held["layout"])
        own.scale_ = GivenScale(**held["scale"])
        own.calibration_ = None
        if held["calibration"] is not None:
            own.calibration_ = Calibration(**held["calibration"], **past)
        table: Any = pandas.read_csv(folder / "history.csv", **exact_numbers())
        table["unique_id"] = table["unique_id"].map(dict(enumerate(held["ids"])))
        months = isinstance(held["freq"], int)  # the 15th of each month, say, has no letters
        step = pandas.DateOffset(months=held["freq"]) if months else held["freq"]
        panel = read_panel(table, step, **held["columns"])
        own.panel_ = replace(panel, wide=held["wide"])
        own.steps_, own.seconds_ = held["steps"], held["seconds"]
        return own

    def plot(
        self,
        df: "pandas.DataFrame | None" = None,
        path: str | Path | None = None,
        samples: int = 200,
        future: "pandas.DataFrame | None" = None,
    ) -> "Figure":
        """Draws the end of each series and the middle 50, 80 and 95 % of its forecast.

        Arguments:
            df: The histories; by default those given to `fit` and `update`.
            path: Where to save the picture, if anywhere.
            samples: Paths of each series.
            future: As for `predict`.

        Returns:
            The matplotlib figure, of the first twelve series.
        """
        from vssm.forecasting.charts import Fan, draw_fans

        panel = self._read(df)
        paths = self._paths(panel, samples, future)
        shown, fans = max(3 * self.horizon, self.layout_.context), []
        for one, made in zip(panel.series, paths, strict=True):
            ahead = [(panel.next_dates(one, self.horizon), made)]
            fans.append(Fan(str(one.id), one.dates[-shown:], one.y[-shown:], ahead))
        return draw_fans(fans, path)

    def _check_fitted(self) -> None:
        if not hasattr(self, "model_"):
            raise ValueError("this forecaster is not fitted; call fit(df) first")

    def _check_params(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_choice("transform", self.transform, ("auto", "log", "none"))
        for name in ("horizon", "width", "layers", "latents", "max_steps", "batch"):
            whole_number(name, getattr(self, name), 1)
        for name in ("season", "patch", "context"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        check_number("seed", self.seed, 0, below=2**63, whole=True)
        check_number("learning_rate", self.learning_rate, 0, above=True)
        for name in ("calibrate", "refit", "progress"):
            check_flag(name, getattr(self, name))
        for name in ("future_columns", "past_columns", "static_columns"):
            if getattr(self, name) is not None:
                check_type(name, getattr(self, name), (list, tuple), "a list of names")
        if self.future_columns and self.kind != "vssm":
            raise ValueError(f"kind={self.kind!r} takes no future_columns; use kind='vssm'")


def _check_values(panel: Panel, layout: Layout) -> None:
    for one in panel.series:
        there = one.y[np.isfinite(one.y)]
        if not len(there):
            raise ValueError(f"series {shown(one.id)} has no value; drop it")
        if layout.log and not (there > 0).all():
            k = int((one.y <= 0).argmax())
            raise ValueError(
                f"series {shown(one.id)} is {one.y[k]:g} on {day(one.dates[k])}, and this"
                " forecaster reads logarithms; give transform='none' before fit"
            )
