"""Forecasting: sample paths of series in the units of the data, from tables and arrays.

| file | what |
| --- | --- |
| `forecaster` | `Forecaster`: fit, predict, evaluate, fill, update on pandas tables |
| `panel` | tables of many series in and out, and their checks |
| `windows` | windows of a panel in their own scale |
| `linear` | a ridge regression, which the model corrects |
| `network` | the model: its loss and its sample paths on windows |
| `fitting` | early stopping, the final fit, conformal calibration |
| `backtest`, `metrics`, `charts` | rolling windows, scores, pictures |
| `model_forecaster`, `gluonts` | forecasts of a run of `vssm train` |
| `files` | tables from and to files |
"""

from vssm.forecasting.forecaster import Forecaster as Forecaster
from vssm.forecasting.model_forecaster import Forecast as Forecast
from vssm.forecasting.model_forecaster import ModelForecaster as ModelForecaster
from vssm.forecasting.model_forecaster import forecast as forecast
