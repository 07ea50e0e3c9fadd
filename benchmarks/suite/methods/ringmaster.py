"""Ringmaster ASGD: a step at each update that is less than R versions behind; others are dropped.

R is the number of jobs in flight. Of its two forms this is the one that lets jobs finish.

Reference:
    Maranjyan, Tyurin, Richtarik. Ringmaster ASGD: The First Asynchronous SGD with Optimal Time
    Complexity. ICML 2025.
"""

from typing import Any

from fedstale.strategies import FedBuff, Validation
from fedstale.strategies.weighting import constant

RATES = (0.075, 0.15, 0.3, 0.6, 1.2)


def strategy(scenario: Any, rate: float) -> FedBuff:
    """Return steps at each reply, all of one rate."""
    jobs, fresh = scenario.concurrency, Validation(max_staleness=scenario.concurrency - 1)
    return FedBuff(jobs, 1, staleness=constant(), eta=rate, validation=fresh, seed=scenario.seed)
