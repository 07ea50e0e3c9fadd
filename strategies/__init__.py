"""What the server does with updates: whom to ask, when to wait, how to weigh, how to step."""

from fedstale.strategies.aliases import (
    CA2FL,
    FADAS,
    REFL,
    AdaptiveSync,
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
from fedstale.strategies.delay_adaptive import DelayAdaptive
from fedstale.strategies.robust.base import (
    CentredClipping,
    GeometricMedian,
    Median,
    Rule,
    TrimmedMean,
)
from fedstale.strategies.robust.ctma import CTMA
from fedstale.strategies.robust.krum import Bulyan, Krum, MultiKrum
from fedstale.strategies.schedule import (
    AdaSync,
    LearntDeadline,
    Schedule,
    k_async,
    k_batch_async,
    k_batch_sync,
    k_sync,
    over_selection,
    semi_synchronous,
)
from fedstale.strategies.selection.base import (
    ExpectedUtility,
    Fastest,
    Filtered,
    LeastAvailable,
    MostReliable,
    PowerOfChoice,
    Random,
    Selector,
)
from fedstale.strategies.selection.forecast_request import ForecastRequest
from fedstale.strategies.selection.oort import Oort
from fedstale.strategies.server.checkpoint import Checkpoints, read_checkpoint
from fedstale.strategies.server.clients import Candidate, Candidates, Situation
from fedstale.strategies.server.clock import Clock
from fedstale.strategies.server.observer import Observer
from fedstale.strategies.server.progress import Progress, StopWhen
from fedstale.strategies.server.validation import Validation
from fedstale.strategies.server_optimizer import (
    SGD,
    Adagrad,
    Adam,
    AMSGrad,
    Momentum,
    ServerOptimizer,
    Yogi,
)
from fedstale.strategies.strategy import StaleStrategy
from fedstale.strategies.weighting.base import (
    ByAge,
    ClientUpdate,
    Weighting,
    constant,
    exponential,
    hinge,
    inverse,
    inverse_root,
    polynomial,
    staleness_aware,
)
from fedstale.strategies.weighting.cached import CachedUpdates
from fedstale.strategies.weighting.euclidean import EuclideanStaleness
from fedstale.strategies.weighting.gap import DirectionalGap, Gap
from fedstale.strategies.weighting.relevance import RelevanceAware

__all__ = [
    "CA2FL",
    "CTMA",
    "FADAS",
    "REFL",
    "SGD",
    "AMSGrad",
    "AdaSync",
    "Adagrad",
    "Adam",
    "AdaptiveSync",
    "AsyncFedED",
    "Bulyan",
    "ByAge",
    "CachedUpdates",
    "Candidate",
    "Candidates",
    "CentredClipping",
    "Checkpoints",
    "ClientUpdate",
    "Clock",
    "DelayAdaptive",
    "DirectionAware",
    "DirectionalGap",
    "EuclideanStaleness",
    "ExpectedUtility",
    "Fastest",
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
    "Filtered",
    "ForecastRequest",
    "Gap",
    "GapAware",
    "GeometricMedian",
    "Krum",
    "LearntDeadline",
    "LeastAvailable",
    "Median",
    "Momentum",
    "MostReliable",
    "MultiKrum",
    "Observer",
    "Oort",
    "PowerOfChoice",
    "Progress",
    "Random",
    "RelevanceAware",
    "Rule",
    "Schedule",
    "Selector",
    "ServerOptimizer",
    "Situation",
    "StaleStrategy",
    "StopWhen",
    "TrimmedMean",
    "Validation",
    "Weighting",
    "Yogi",
    "constant",
    "exponential",
    "hinge",
    "inverse",
    "inverse_root",
    "k_async",
    "k_batch_async",
    "k_batch_sync",
    "k_sync",
    "over_selection",
    "polynomial",
    "read_checkpoint",
    "semi_synchronous",
    "staleness_aware",
]
