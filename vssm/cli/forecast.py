"""`vssm forecast`: what follows a table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from vssm.cli.options import check_seed
from vssm.cli.samples import check_files

__all__ = ["Forecast"]


@dataclass
class Forecast:
    """Forecasts what follows a table file: quantiles and a fan chart."""

    run_folder: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    """A run folder of data set series, or hf://OWNER/NAME."""
    path: Path
    """The history: a CSV, .npy or Parquet file with the columns of the run."""
    time: str | None = None
    """Column of dates; by default the one of training, none leaves dates out."""
    horizon: int | None = None
    """Steps to forecast; by default as in training, more is extrapolation."""
    samples: int = 500
    """Sample paths to draw."""
    quantiles: tuple[float, ...] = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)
    """The quantiles to write, from 0 to 1, each once."""
    chunk: int | None = None
    """Generate so many steps at a time (vssm, tvae)."""
    recondition: bool = False
    """Read each generated chunk before making the next (vssm, tvae); of use with --chunk."""
    seed: int = 0
    """Names the paths, 0 to 2^63 - 1."""
    temperature: float = 1.0
    """Above 1 for wider intervals."""
    out: Path = Path("forecast.csv")
    """Where the quantiles go: .csv or .parquet; the fan chart goes beside them."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""

    def run(self) -> None:
        from vssm.checks import choose_device
        from vssm.forecasting.files import check_quantiles, draw_fan, forecast_file, write_quantiles
        from vssm.forecasting.model_forecaster import ModelForecaster

        check_seed(self.seed)
        picture = self.out.with_suffix(".png") if self.out.name else self.out
        check_files({"out": self.out, "picture": picture}, {"path": self.path})
        check_quantiles(self.out, self.quantiles)
        forecaster = ModelForecaster.load(self.run_folder, choose_device(self.device))
        usual: dict[str, Any] = {"chunk": None, "recondition": False, "temperature": 1.0}
        options = {
            name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]
        }
        made, history = forecast_file(
            forecaster, self.path, self.horizon, self.samples, self.seed, self.time, **options
        )
        write_quantiles(made, self.out, self.quantiles)
        draw_fan(made, history, picture, forecaster.meta.context or 96)
        steps, columns = made.mean.shape[0], len(made.columns)
        print(f"forecast: {self.out}  {steps} steps of {columns} columns\nfan chart: {picture}")
