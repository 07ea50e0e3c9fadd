"""What a device adds to a ClientApp: forecasts, small messages, less work."""

from fedstale.client.mods import CompressionMod, ForecastMod, PackMod, StepRecorder, local_steps
from fedstale.strategies.stages import JOB_RECORD, QUERY
from fedstale.strategies.types import FORECAST_RECORD

__all__ = [
    "FORECAST_RECORD",
    "JOB_RECORD",
    "QUERY",
    "CompressionMod",
    "ForecastMod",
    "PackMod",
    "StepRecorder",
    "local_steps",
]
