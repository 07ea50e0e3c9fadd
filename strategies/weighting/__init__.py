"""How much a stale update counts: by its age, by the gap, by what it adds."""

from fedstale.strategies.types import ClientUpdate
from fedstale.strategies.weighting.base import (
    AgeCurve,
    ByAge,
    EuclideanStaleness,
    RelevanceAware,
    Weighting,
    constant,
    hinge,
    inverse_root,
    polynomial,
    staleness_aware,
)
from fedstale.strategies.weighting.cached import CachedUpdates
from fedstale.strategies.weighting.gap import DirectionalGap, Gap, Grain

__all__ = [
    "AgeCurve",
    "ByAge",
    "CachedUpdates",
    "ClientUpdate",
    "DirectionalGap",
    "EuclideanStaleness",
    "Gap",
    "Grain",
    "RelevanceAware",
    "Weighting",
    "constant",
    "hinge",
    "inverse_root",
    "polynomial",
    "staleness_aware",
]
