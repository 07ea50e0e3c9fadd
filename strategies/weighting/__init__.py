"""How much a stale update counts: by its age, by the gap, by what it adds."""

from fedstale.strategies.weighting.base import (
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
from fedstale.strategies.weighting.cached import CachedUpdates
from fedstale.strategies.weighting.euclidean import EuclideanStaleness
from fedstale.strategies.weighting.gap import DirectionalGap, Gap
from fedstale.strategies.weighting.relevance import RelevanceAware

__all__ = [
    "ByAge",
    "CachedUpdates",
    "DirectionalGap",
    "EuclideanStaleness",
    "Gap",
    "RelevanceAware",
    "Update",
    "Weighting",
    "constant",
    "exponential",
    "hinge",
    "inverse",
    "inverse_root",
    "polynomial",
    "staleness_aware",
]
