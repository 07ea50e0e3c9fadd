"""What a device adds to its ClientApp: forecasts, smaller messages, less work, packed arrays."""

from fedstale.client.mods import CompactMod, ForecastingApp, ForecastMod, PackMod
from fedstale.client.working import local_steps
from fedstale.strategies.selection.forecast_request import JOB_RECORD, QUERY
from fedstale.strategies.server import FORECAST_RECORD

__all__ = [
    "FORECAST_RECORD",
    "JOB_RECORD",
    "QUERY",
    "CompactMod",
    "ForecastMod",
    "ForecastingApp",
    "PackMod",
    "local_steps",
]
