"""What a device adds to its ClientApp: forecasts of itself, and arrays as one object."""

from fedstale.client.mods import ForecastingApp, ForecastMod, PackMod
from fedstale.strategies.selection.forecast_request import JOB_RECORD, QUERY
from fedstale.strategies.server.validation import FORECAST_RECORD

__all__ = ["FORECAST_RECORD", "JOB_RECORD", "QUERY", "ForecastMod", "ForecastingApp", "PackMod"]
