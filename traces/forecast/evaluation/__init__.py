"""Backtests of forecasters: scores of processes and of jobs, and the tables of both."""

from fedstale.traces.forecast.evaluation.backtest import by_horizon, cold_start, rolling
from fedstale.traces.forecast.evaluation.jobs import decision, job_scores
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
    "cold_start",
    "decision",
    "job_scores",
    "job_tables",
    "process_tables",
    "rolling",
    "wide",
]
