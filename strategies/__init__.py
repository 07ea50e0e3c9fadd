"""What the server does with updates: whom to ask, when to wait, how to weigh, how to step."""

from fedstale.strategies.adasync import AdaSync
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
from fedstale.strategies.asking import Ask
from fedstale.strategies.asyncfeded import EuclideanStaleness
from fedstale.strategies.candidate import Candidate, Candidates, Situation
from fedstale.strategies.checkpoint import Checkpoints, read_checkpoint
from fedstale.strategies.clock import Clock
from fedstale.strategies.ctma import CTMA
from fedstale.strategies.fadas import DelayAdaptive
from fedstale.strategies.gap_aware import DirectionalGap, Gap
from fedstale.strategies.gate import Gate
from fedstale.strategies.krum import Bulyan, Krum, MultiKrum
from fedstale.strategies.memory import Memory
from fedstale.strategies.observer import Observer
from fedstale.strategies.oort import Oort
from fedstale.strategies.progress import Progress, StopWhen
from fedstale.strategies.robust import (
    CentredClipping,
    GeometricMedian,
    Median,
    Rule,
    TrimmedMean,
)
from fedstale.strategies.saa import Deviation
from fedstale.strategies.schedule import (
    LearntDeadline,
    Schedule,
    k_async,
    k_batch_async,
    k_batch_sync,
    k_sync,
    over_selection,
    semi_synchronous,
)
from fedstale.strategies.selection import (
    Fastest,
    LeastAvailable,
    Likeliest,
    LikelyAndUseful,
    Only,
    PowerOfChoice,
    Random,
    Selector,
)
from fedstale.strategies.server_optimizer import (
    SGD,
    Adagrad,
    Adam,
    AMSGrad,
    Momentum,
    ServerOptimizer,
    Yogi,
)
from fedstale.strategies.stale import StaleStrategy
from fedstale.strategies.weighting import (
    ByAge,
    Update,
    Weighting,
    constant,
    exponential,
    hinge,
    inverse,
    inverse_root,
    polynomial,
    staleness_aware,
)

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
    "Ask",
    "AsyncFedED",
    "Bulyan",
    "ByAge",
    "Candidate",
    "Candidates",
    "CentredClipping",
    "Checkpoints",
    "Clock",
    "DelayAdaptive",
    "Deviation",
    "DirectionAware",
    "DirectionalGap",
    "EuclideanStaleness",
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
    "Gap",
    "GapAware",
    "Gate",
    "GeometricMedian",
    "Krum",
    "LearntDeadline",
    "LeastAvailable",
    "Likeliest",
    "LikelyAndUseful",
    "Median",
    "Memory",
    "Momentum",
    "MultiKrum",
    "Observer",
    "Only",
    "Oort",
    "PowerOfChoice",
    "Progress",
    "Random",
    "Rule",
    "Schedule",
    "Selector",
    "ServerOptimizer",
    "Situation",
    "StaleStrategy",
    "StopWhen",
    "TrimmedMean",
    "Update",
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
