"""How the model steps along the aggregated update."""

from fedstale.strategies.server_optimizer.base import (
    SGD,
    Adagrad,
    Adam,
    AMSGrad,
    Beyond,
    DelayAdaptive,
    Momentum,
    Rate,
    ServerOptimizer,
    Yogi,
)

__all__ = [
    "SGD",
    "AMSGrad",
    "Adagrad",
    "Adam",
    "Beyond",
    "DelayAdaptive",
    "Momentum",
    "Rate",
    "ServerOptimizer",
    "Yogi",
]
