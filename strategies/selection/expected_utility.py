"""What a job sent now is expected to bring, for what it takes: one formula, some named settings.

    score = p^a U^b / (d^c (1 + n)^e (1 + s)^f)

with p the chance to finish, U Oort's statistical utility, d the expected duration of a job, n how
often a node was picked, and s how many versions its last update was behind. The highest scores are
picked, or nodes are drawn by them.

Reference:
    Lai et al. Oort: Efficient Federated Learning via Guided Participant Selection. OSDI 2021 (U).
    Jiang, Wang, Li, Li. Pisces: Efficient Federated Learning via Guided Asynchronous Training.
    SoCC 2022 (U over staleness).
    Gumbel. Statistical Theory of Extreme Values and Some Practical Applications. 1954 (the draw).
"""

from dataclasses import dataclass

import numpy as np

from fedstale.strategies.selection.base import Selector, largest
from fedstale.strategies.types import Candidates, Floats, NotNegative, check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponents:
    """The exponents of a score; each finite and >= 0, 0 leaves its term out."""

    chance: NotNegative = 1.0
    """a, of the chance to finish."""
    utility: NotNegative = 1.0
    """b, of the utility."""
    duration: NotNegative = 0.0
    """c, of the duration of a job."""
    picked: NotNegative = 0.0
    """e, of the number of jobs sent before, plus 1."""
    staleness: NotNegative = 0.0
    """f, of the staleness of the last update, plus 1."""
    temperature: NotNegative = 0.0
    """Nodes are drawn without replacement by score^(1 / temperature); 0 takes the highest."""

    def __post_init__(self) -> None:
        check_fields(self)


BALANCED = Exponents(chance=3.0, utility=0.7, duration=2.0, picked=1.5, temperature=0.1)
"""Likely to finish, soon, useful, and not always the same ones; drawn.

The exponents are near the fewest device-hours of real trainings on devices that agents learn from
(`benchmarks/agent/exponents.py`); half or twice any of them costs a few percent.
"""


class ExpectedUtility(Selector):
    """Picks by what a job sent now is expected to bring; p_finish x utility by default.

    A node without a utility yet gets the largest known, so that every node is tried. The chance is
    the device's own forecast where it sends one, corrected by what came of its earlier ones. The
    duration is the device's forecast, or the median of those observed; that of a node of which
    neither is known is the median over the candidates, of logarithms.

    Example:
        >>> nodes = Candidates.of([7, 8], forecast_p_finish=[0.9, 0.8], times_picked=[4, 0])
        >>> rng = np.random.default_rng(0)
        >>> ExpectedUtility().select(nodes, 1, 0.0, rng)
        [7]
        >>> ExpectedUtility(Exponents(picked=1.0)).select(nodes, 1, 0.0, rng)
        [8]
    """

    def __init__(self, exponents: Exponents = Exponents()) -> None:
        """Set the exponents of the score."""
        self.exponents = exponents

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick the highest scores, or draw by them; ties are broken by chance."""
        scores = scores_of(candidates, self.exponents)
        if temperature := self.exponents.temperature:
            with np.errstate(divide="ignore"):
                scores = np.log(scores) / temperature + rng.gumbel(size=scores.size)
        return largest(candidates, scores, k, rng)


def scores_of(candidates: Candidates, exponents: Exponents) -> Floats:
    """Return the score of each candidate, >= 0; shape (n,)."""
    utility = candidates.utility
    known = utility[~np.isnan(utility)]
    scores = np.where(np.isnan(utility), known.max() if known.size else 1.0, utility)
    scores = scores**exponents.utility * candidates.p_finish**exponents.chance
    if exponents.duration:
        scores = scores / expected_duration_s(candidates) ** exponents.duration
    if exponents.picked:
        scores = scores / (1.0 + candidates.times_picked) ** exponents.picked
    if exponents.staleness:
        staleness = np.nan_to_num(candidates.staleness, nan=0.0)
        scores = scores / (1.0 + staleness) ** exponents.staleness
    return scores


def expected_duration_s(candidates: Candidates) -> Floats:
    """Return the expected duration of each candidate's job, in s; 1 where nothing is known.

    It is what is known of the candidate itself, and the median over the others where nothing is.
    """
    found = own_duration_s(candidates)
    known = np.log(found[~np.isnan(found)])
    return np.where(np.isnan(found), np.exp(np.median(known)) if known.size else 1.0, found)


def own_duration_s(candidates: Candidates) -> Floats:
    """Return the duration of each candidate's job by its forecast or record, in s; else NaN."""
    stated = candidates.forecast_duration_s
    found = np.where(np.isnan(stated), candidates.duration_s, stated)
    return np.where(found > 0.0, found, np.nan)
