"""Rules that combine updates although some clients are adversarial."""

from fedstale.strategies.robust.base import (
    CTMA,
    CentredClipping,
    GeometricMedian,
    Median,
    Rule,
    TrimmedMean,
    aggregate,
    heaviest,
)
from fedstale.strategies.robust.krum import Bulyan, Krum, MultiKrum

__all__ = [
    "CTMA",
    "Bulyan",
    "CentredClipping",
    "GeometricMedian",
    "Krum",
    "Median",
    "MultiKrum",
    "Rule",
    "TrimmedMean",
    "aggregate",
    "heaviest",
]
