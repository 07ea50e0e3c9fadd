"""Counts of what a reader repaired, filled or dropped, by kind."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType


def frozen(counts: Counter[str]) -> Mapping[str, int]:
    """Return the counts that are not 0, in alphabetical order of their kind, as a fixed mapping.

    Example:
        >>> dict(frozen(Counter({"sorted": 2, "dropped: no length": 0, "cut": 1})))
        {'cut': 1, 'sorted': 2}
    """
    return MappingProxyType({kind: int(counts[kind]) for kind in sorted(counts) if counts[kind]})
