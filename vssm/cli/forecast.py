"""`vssm forecast` forecasts what follows a table; `vssm backtest` scores such forecasts."""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from vssm.checks import whole_number
from vssm.cli.samples import check_files
from vssm.forecasting.files import read_frame, write_forecast
from vssm.forecasting.forecaster import Forecaster
from vssm.forecasting.panel import check_quantiles, read_ahead, read_panel
from vssm.runs.checkpoint import check_target


@dataclass(kw_only=True)
class _SeriesOptions:
    """How a forecaster is trained on a table."""

    freq: str | None = None
    """Time between dates, as pandas writes it: h, D, MS, ...; found in the dates by default."""
    season: int | None = None
    """Steps of a season; from the frequency by default."""
    kind: str = "vssm"
    """The model: vssm, or transformer, ssm, rnn, tvae or vrnn."""
    future_columns: tuple[str, ...] = ()
    """Columns of the table that are known in the future."""
    max_steps: int = 1000
    """The most training steps; early stopping may end sooner."""
    seed: int = 0
    """Fixes the weights and the paths, 0 to 2^63 - 1."""
    device: str = "cpu"
    """Where the model is trained and run: cpu, cuda or auto."""

    def given(self) -> list[str]:
        """Returns the options of the training that are not at their defaults."""
        options = [option for option in fields(_SeriesOptions) if option.name != "device"]
        changed = [each.name for each in options if getattr(self, each.name) != each.default]
        return [f"--{name.replace('_', '-')}" for name in changed]

    def forecaster(self, horizon: int) -> Forecaster:
        options = {option.name: getattr(self, option.name) for option in fields(_SeriesOptions)}
        return Forecaster(horizon=horizon, **options)


@dataclass
class Forecast(_SeriesOptions):
    """Forecasts what follows a table file: quantiles and a fan chart."""

    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="DATA|FOLDER")]]
    """A table to train on and forecast: CSV or Parquet, long (unique_id, ds, y) or wide. Or a
    folder that --save wrote."""
    path: Path | None = None
    """A table with the history, for a trained FOLDER; by default the table of its training."""
    horizon: int | None = None
    """Steps to forecast: 24 by default, or as in training."""
    samples: int = 500
    """Sample paths to draw."""
    quantiles: tuple[float, ...] = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)
    """The quantiles to write, from 0 to 1, each once."""
    future: Path | None = None
    """A table with the --future-columns of the dates to come."""
    save: Path | None = None
    """A folder for the trained forecaster, to use it again."""
    out: Path = Path("forecast.csv")
    """Where the quantiles go: .csv or .parquet; the fan chart goes beside them."""

    def run(self) -> None:
        check_quantiles(self.quantiles)
        whole_number("samples", self.samples, 1)
        if self.save is not None:
            check_target(self.save)
        source = self.source
        picture = _check_out(self.out, data=source, path=self.path, future=self.future)
        future = None if self.future is None else read_frame(self.future)
        table = None if source.is_dir() else read_frame(source)
        history = None if self.path is None else read_frame(self.path)
        if table is None:
            own = Forecaster.load(source, self.device)
            if ignored := ", ".join(self.given()):
                note = f"{str(source)!r} keeps the settings of its training and ignores {ignored}"
                print(f"note: {note}", file=sys.stderr)
            if self.horizon not in (None, own.horizon):
                raise ValueError(
                    f"horizon={self.horizon} was {own.horizon} in training; train again"
                )
        else:
            if self.future_columns and future is None:
                names = ", ".join(self.future_columns)
                raise ValueError(f"--future is missing; give a table with the dates and {names}")
            horizon = whole_number("horizon", 24 if self.horizon is None else self.horizon, 1)
            if future is not None:  # checked before the training
                known = read_panel(table, self.freq, self.future_columns, (), ())
                if history is not None:
                    known = read_panel(history, known.step, self.future_columns, (), ())
                read_ahead(known, horizon, future)
            own = self.forecaster(horizon).fit(table)
            print(f"fit: {own.steps_} steps, {own.seconds_:.0f} s")
        if self.save is not None:
            own.save(self.save)
        made = own.predict(history, self.samples, self.quantiles, future)
        write_forecast(made, self.out)
        own.plot(history, picture, self.samples, future)
        print(f"forecast: {self.out}  {own.horizon} steps\nfan chart: {picture}")


@dataclass
class Backtest(_SeriesOptions):
    """Scores forecasts of a table's last windows, next to naive forecasts."""

    data: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="DATA")]]
    """The table: CSV or Parquet, long (unique_id, ds, y) or wide."""
    horizon: int = 24
    """Steps of a forecast."""
    windows: int = 5
    """Windows of each series, one horizon apart; training sees what comes before them."""
    samples: int = 200
    """Sample paths to draw."""
    out: Path = Path("backtest.csv")
    """Where the scores go; the picture goes beside them."""

    def run(self) -> None:
        picture = _check_out(self.out, data=self.data)
        own = self.forecaster(self.horizon)
        made = own.backtest(read_frame(self.data), self.windows, self.samples)
        write_forecast(made.table.rename_axis("model").reset_index(), self.out)
        made.plot(picture)
        print(f"fit: {own.steps_} steps, {own.seconds_:.0f} s")
        print(made.table.round(4).to_string())
        print(f"scores: {self.out}\npicture: {picture}")


def _check_out(out: Path, **reads: Path | None) -> Path:
    """Returns where the picture beside a table goes; raises unless both can be written."""
    if out.suffix not in (".csv", ".parquet"):
        raise ValueError(f"out={str(out)!r} must end in .csv or .parquet")
    picture = out.with_suffix(".png")
    check_files({"out": out, "picture": picture}, reads)
    return picture
