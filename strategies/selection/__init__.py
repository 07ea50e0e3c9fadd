"""Which nodes get the next jobs, from what the server knows of them."""

from fedstale.strategies.selection.base import (
    ExpectedUtility,
    Fastest,
    Filtered,
    LeastAvailable,
    MostReliable,
    PowerOfChoice,
    Probing,
    Random,
    Selector,
    name_of_class,
)
from fedstale.strategies.selection.credits import Credits
from fedstale.strategies.selection.oort import PAPER, RELEASED, Oort, OortSettings
from fedstale.strategies.types import Candidate, Candidates, SelectionContext

__all__ = [
    "PAPER",
    "RELEASED",
    "Candidate",
    "Candidates",
    "Credits",
    "ExpectedUtility",
    "Fastest",
    "Filtered",
    "LeastAvailable",
    "MostReliable",
    "Oort",
    "OortSettings",
    "PowerOfChoice",
    "Probing",
    "Random",
    "SelectionContext",
    "Selector",
    "name_of_class",
]
