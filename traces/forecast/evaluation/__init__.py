"""Backtests of forecasters: scores of processes and of jobs, and the tables of both."""

from fedstale.traces.forecast.evaluation.backtest import by_horizon, mean_with_interval, rolling
from fedstale.traces.forecast.evaluation.jobs import decision
from fedstale.traces.forecast.evaluation.report import (
    TITLES,
    backtested,
    job_tables,
    printed,
    process_tables,
    why_empty,
)

__all__ = [
    "TITLES",
    "backtested",
    "by_horizon",
    "decision",
    "job_tables",
    "mean_with_interval",
    "printed",
    "process_tables",
    "rolling",
    "why_empty",
]
