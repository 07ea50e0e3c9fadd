"""Delay-adaptive: FedBuff whose step is smaller while its stalest update is beyond a bound.

Reference:
    Wang, Wang, Lu, Chen. FADAS: Towards Federated Adaptive Asynchronous Optimization. ICML 2024;
    its rule of rates alone, without AMSGrad.
"""

from typing import Any

from fedstale.strategies import FedBuff
from fedstale.strategies.server_optimizer import SGD, DelayAdaptive

RATES = (1.0, 2.0, 4.0, 8.0, 16.0)


def strategy(scenario: Any, rate: float) -> FedBuff:
    """Return FedBuff with the rule; the bound is the staleness where all jobs take as long."""
    jobs, size = scenario.concurrency, scenario.buffer_size
    optimizer = DelayAdaptive(SGD(rate), tau_c=-(-jobs // size))
    return FedBuff(jobs, size, server_optimizer=optimizer, seed=scenario.seed)
