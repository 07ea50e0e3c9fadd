"""Strategies of a server: selection of nodes, schedules, weighting of updates, server steps.

The strategies are here; their parts are in `selection`, `schedule`, `pace`, `weighting`, `robust`
and `server_optimizer`: `weighting.Gap()`, `schedule.k_async(20, 5)`.
"""

from fedstale.strategies import (
    pace,
    robust,
    schedule,
    selection,
    server_optimizer,
    stages,
    weighting,
)
from fedstale.strategies.expression import parse, with_arguments, with_whole_paths
from fedstale.strategies.methods import (
    CA2FL,
    FADAS,
    REFL,
    AsyncFedED,
    DirectionAware,
    FedAdagrad,
    FedAdam,
    FedAsync,
    FedAvg,
    FedAvgM,
    FedAvgOverSelected,
    FedBuff,
    FedProx,
    FedStale,
    FedYogi,
    GapAware,
)
from fedstale.strategies.server import (
    Callback,
    Checkpoints,
    Options,
    Runtime,
    StaleStrategy,
    Validation,
    read_checkpoint,
)
from fedstale.strategies.stages import (
    Compression,
    ForecastRequest,
    LocalWork,
    OlderClients,
    Privacy,
    Stage,
)
from fedstale.strategies.types import Checks

__all__ = [
    "CA2FL",
    "FADAS",
    "REFL",
    "AsyncFedED",
    "Callback",
    "Checkpoints",
    "Compression",
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
    "ForecastRequest",
    "GapAware",
    "LocalWork",
    "OlderClients",
    "Options",
    "Privacy",
    "Runtime",
    "Stage",
    "StaleStrategy",
    "Validation",
    "pace",
    "parse",
    "read_checkpoint",
    "robust",
    "schedule",
    "selection",
    "server_optimizer",
    "stages",
    "weighting",
    "with_arguments",
    "with_whole_paths",
]

Checks.are_on = True
