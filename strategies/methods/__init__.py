"""The published methods: classes that compose the parts of a `StaleStrategy`.

A class adds no behaviour of its own. It takes its own settings first, then any option of
`StaleStrategy`, which replaces the part that the class would have composed:
`FedBuff(20, 5, selector=Oort())`. The parts, which go with any method, are in `selection`,
`schedule`, `weighting`, `robust` and `server_optimizer`.
"""

from fedstale.strategies.methods.fedavg import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedAvgOverSelected,
    FedProx,
    FedStale,
    FedYogi,
)
from fedstale.strategies.methods.fedbuff import (
    CA2FL,
    FADAS,
    AsyncFedED,
    DirectionAware,
    FedAsync,
    FedBuff,
    GapAware,
)
from fedstale.strategies.methods.refl import REFL

__all__ = [
    "CA2FL",
    "FADAS",
    "REFL",
    "AsyncFedED",
    "DirectionAware",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedAvgOverSelected",
    "FedBuff",
    "FedProx",
    "FedStale",
    "FedYogi",
    "GapAware",
]
