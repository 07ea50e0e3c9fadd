"""Forecasts of what a device will do next, from its own history."""

from fedstale.traces.forecast.base import (
    KINDS,
    FleetStatistics,
    Forecaster,
    embedded,
    forecaster_class,
)
from fedstale.traces.forecast.baselines import (
    Ewma,
    Hour,
    LastValue,
    Oracle,
    Persistence,
)
from fedstale.traces.forecast.conformal import Adaptation, Calibration, fleet_scores
from fedstale.traces.forecast.dataset import (
    Examples,
    Split,
    draw,
    examples_at,
    log_span,
    record_s,
    split,
)
from fedstale.traces.forecast.lstm import LSTM, Perceptron
from fedstale.traces.forecast.observation import Observation, TraceObserver
from fedstale.traces.forecast.survival import DeviceForecast, JobForecast

__all__ = [
    "KINDS",
    "LSTM",
    "Adaptation",
    "Calibration",
    "DeviceForecast",
    "Ewma",
    "Examples",
    "FleetStatistics",
    "Forecaster",
    "Hour",
    "JobForecast",
    "LastValue",
    "Observation",
    "Oracle",
    "Perceptron",
    "Persistence",
    "Split",
    "TraceObserver",
    "draw",
    "embedded",
    "examples_at",
    "fleet_scores",
    "forecaster_class",
    "log_span",
    "record_s",
    "split",
]
