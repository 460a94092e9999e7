"""Forecasting: sample paths of series in the units of the data, from tables and arrays.

| file | what |
| --- | --- |
| `forecaster` | `Forecaster`: fit, predict, evaluate, fill, update on pandas tables |
| `panel` | tables of many series in and out, and their checks |
| `windows` | windows of a panel in their own scale |
| `linear` | a ridge regression, from which the direct forecast starts |
| `direct` | the direct forecast, a small network, which the model corrects |
| `network` | the model: its loss and its sample paths on windows |
| `fitting` | early stopping, the final fit, conformal calibration |
| `backtest`, `metrics`, `charts` | rolling windows, scores, pictures |
| `files`, `gluonts` | tables from and to files; a forecaster as a predictor of GluonTS |
"""

from vssm.forecasting.forecaster import Forecaster as Forecaster
