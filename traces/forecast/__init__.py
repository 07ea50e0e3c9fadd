"""Forecasts of what a device will do next, from its own history."""

from fedstale.traces.forecast.base import (
    KINDS,
    FleetStatistics,
    Forecaster,
    embedded,
    forecaster_class,
    forecaster_folder,
)
from fedstale.traces.forecast.baselines import Hourly, LastValue, Persistence
from fedstale.traces.forecast.dataset import (
    Examples,
    Split,
    draw,
    draw_parts,
    log_spans,
    record_s,
    split,
)
from fedstale.traces.forecast.lstm import LSTM
from fedstale.traces.forecast.observation import (
    AVAILABLE_S,
    EDGES_S,
    LEVELS,
    RATES,
    STEPS,
    Observation,
    TraceObserver,
)
from fedstale.traces.forecast.sessions import DAYS, HORIZONS_S, OwnSessions
from fedstale.traces.forecast.survival import (
    MISS,
    PHASES,
    Calibration,
    DeviceForecast,
    JobForecast,
    survival_at,
)

__all__ = [
    "AVAILABLE_S",
    "DAYS",
    "EDGES_S",
    "HORIZONS_S",
    "KINDS",
    "LEVELS",
    "LSTM",
    "MISS",
    "PHASES",
    "RATES",
    "STEPS",
    "Calibration",
    "DeviceForecast",
    "Examples",
    "FleetStatistics",
    "Forecaster",
    "Hourly",
    "JobForecast",
    "LastValue",
    "Observation",
    "OwnSessions",
    "Persistence",
    "Split",
    "TraceObserver",
    "draw",
    "draw_parts",
    "embedded",
    "forecaster_class",
    "forecaster_folder",
    "log_spans",
    "record_s",
    "split",
    "survival_at",
]
