"""Rules that aggregate although some updates are adversarial."""

from fedstale.strategies.robust.base import (
    CentredClipping,
    GeometricMedian,
    Median,
    Rule,
    TrimmedMean,
)
from fedstale.strategies.robust.ctma import CTMA
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
]
