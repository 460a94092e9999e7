"""Forecasting: sample paths of series in the units of the data, from files, arrays and streams."""

from vssm.forecasting.forecaster import Forecast as Forecast
from vssm.forecasting.forecaster import Forecaster as Forecaster
from vssm.forecasting.forecaster import Stream as Stream
from vssm.forecasting.forecaster import forecast as forecast
