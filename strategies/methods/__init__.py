"""The published methods, a file each: a class that composes the parts of a `StaleStrategy`.

A class adds no behaviour of its own. It takes its own settings first, then any option of
`StaleStrategy`, which replaces the part that the class would have composed:
`FedBuff(20, 5, selector=Oort())`. The parts, which go with any method, are in `selection`,
`schedule`, `weighting`, `robust` and `server_optimizer`.
"""

from fedstale.strategies.methods.asyncfeded import AsyncFedED
from fedstale.strategies.methods.ca2fl import CA2FL
from fedstale.strategies.methods.fadas import FADAS
from fedstale.strategies.methods.fedasync import FedAsync
from fedstale.strategies.methods.fedavg import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedAvgOverSelected,
    FedProx,
    FedYogi,
)
from fedstale.strategies.methods.fedbuff import FedBuff
from fedstale.strategies.methods.fedstale import FedStale
from fedstale.strategies.methods.gap_aware import DirectionAware, GapAware
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
