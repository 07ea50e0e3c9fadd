"""What a device adds to a ClientApp: forecasts, small messages, less work, what stays."""

from fedstale.client.local_work import StepRecorder, local_steps
from fedstale.client.mods import CompressionMod, ForecastingApp, ForecastMod, PackMod
from fedstale.client.moments import keeping_moments
from fedstale.client.resident import resident
from fedstale.strategies.stages import JOB_RECORD, QUERY, at_rank
from fedstale.strategies.types import FORECAST_RECORD

__all__ = [
    "FORECAST_RECORD",
    "JOB_RECORD",
    "QUERY",
    "CompressionMod",
    "ForecastMod",
    "ForecastingApp",
    "PackMod",
    "StepRecorder",
    "at_rank",
    "keeping_moments",
    "local_steps",
    "resident",
]
