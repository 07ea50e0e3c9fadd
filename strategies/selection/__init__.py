"""Which nodes get the next jobs, from what the server knows of them."""

from fedstale.strategies.selection.base import (
    Fastest,
    LeastAvailable,
    LeastRecent,
    MostReliable,
    PowerOfChoice,
    Random,
    Selector,
    name_of_class,
)
from fedstale.strategies.selection.combined import SURE, Enough, Likely, enough
from fedstale.strategies.selection.expected_utility import (
    BALANCED,
    ExpectedUtility,
    Exponents,
    expected_duration_s,
    own_duration_s,
)
from fedstale.strategies.selection.oort import PAPER, RELEASED, Oort, OortSettings
from fedstale.strategies.types import Candidates, SelectionContext

__all__ = [
    "BALANCED",
    "PAPER",
    "RELEASED",
    "SURE",
    "Candidates",
    "Enough",
    "ExpectedUtility",
    "Exponents",
    "Fastest",
    "LeastAvailable",
    "LeastRecent",
    "Likely",
    "MostReliable",
    "Oort",
    "OortSettings",
    "PowerOfChoice",
    "Random",
    "SelectionContext",
    "Selector",
    "enough",
    "expected_duration_s",
    "name_of_class",
    "own_duration_s",
]
