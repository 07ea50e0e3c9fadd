"""Backtests of forecasters: scores of processes and of jobs, and the tables of both."""

from fedstale.traces.forecast.evaluation.backtest import by_horizon, mean_with_interval, rolling
from fedstale.traces.forecast.evaluation.jobs import decision
from fedstale.traces.forecast.evaluation.report import (
    SHOWN,
    backtested,
    job_tables,
    process_tables,
    wide,
)

__all__ = [
    "SHOWN",
    "backtested",
    "by_horizon",
    "decision",
    "job_tables",
    "mean_with_interval",
    "process_tables",
    "rolling",
    "wide",
]
