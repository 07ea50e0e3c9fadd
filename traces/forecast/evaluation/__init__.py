"""Backtests of forecasters: scores of processes and of jobs, and the verdict."""

from fedstale.traces.forecast.evaluation.backtest import (
    backtested,
    by_horizon,
    job_scores,
    printed,
    rolling,
    true_times,
)
from fedstale.traces.forecast.evaluation.scores import (
    brier,
    least_rates,
    log_loss,
    mean_with_interval,
    reliability,
)
from fedstale.traces.forecast.evaluation.verdict import verdict

__all__ = [
    "backtested",
    "brier",
    "by_horizon",
    "job_scores",
    "least_rates",
    "log_loss",
    "mean_with_interval",
    "printed",
    "reliability",
    "rolling",
    "true_times",
    "verdict",
]
