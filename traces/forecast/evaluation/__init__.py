"""Backtests of forecasters: scores of processes and of jobs, and the tables of both."""

from fedstale.traces.forecast.evaluation.backtest import (
    brier,
    by_horizon,
    log_loss,
    mean_with_interval,
    reliability,
    rolling,
)
from fedstale.traces.forecast.evaluation.e_process import ALARM, WAYS, log_e_values
from fedstale.traces.forecast.evaluation.jobs import decision
from fedstale.traces.forecast.evaluation.report import (
    SURVIVAL_S,
    TITLES,
    backtested,
    error_text,
    job_tables,
    printed,
    process_tables,
    span_text,
    why_empty,
)
from fedstale.traces.forecast.evaluation.verdict import verdict

__all__ = [
    "ALARM",
    "SURVIVAL_S",
    "TITLES",
    "WAYS",
    "backtested",
    "brier",
    "by_horizon",
    "decision",
    "error_text",
    "job_tables",
    "log_e_values",
    "log_loss",
    "mean_with_interval",
    "printed",
    "process_tables",
    "reliability",
    "rolling",
    "span_text",
    "verdict",
    "why_empty",
]
