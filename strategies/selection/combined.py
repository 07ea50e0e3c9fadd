"""Selectors around another selector: those likely to finish, and as many as are enough."""

from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from fedstale.strategies.selection.base import Selector, largest
from fedstale.strategies.selection.expected_utility import own_duration_s
from fedstale.strategies.types import Candidates, Chance, Floats, Share

SURE = 0.5
"""Chance with which what is sent is enough. A job that fails is replaced at once, so falling short
costs time now and then; in real trainings of the learning part 0.9 took 10 % more device-hours, and
about as many hours."""


class Likely(Selector):
    """Lets another selector choose among the candidates that are likely to finish.

    Where too few are, the most likely of the others fill up.

    Example:
        >>> from fedstale.strategies.selection import Random
        >>> nodes = Candidates.of([7, 8, 9], forecast_p_finish=[0.95, 0.6, 0.5])
        >>> Likely(0.9, Random()).select(nodes, 2, 0.0, np.random.default_rng(0))
        [7, 8]
    """

    saved = ("then",)

    def __init__(self, least: Share, then: Selector) -> None:
        """Set the least chance to finish, in [0, 1], and the selector that chooses."""
        self.least, self.then = least, then

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick by the other selector, and fill up."""
        is_likely = candidates.p_finish >= self.least
        likely, others = candidates.take(is_likely), candidates.take(~is_likely)
        picked = self.then.select(likely, k, now, rng) if len(likely) else []
        if (n_left := k - len(likely)) <= 0:
            return picked
        return [*picked, *largest(others, others.p_finish, n_left, rng)]


class Enough(Selector):
    """Sends no more jobs than the next server step is likely to need.

    Of what another selector picks, the first are kept until, with those in flight, the updates
    that the step still misses arrive with a given chance. Jobs end independently of one another.
    Over-selection then adapts to how reliable the picked nodes are. All picks are kept where jobs
    that are late for a step count in a later one, and where a deadline alone makes a step.

    Example:
        >>> from fedstale.strategies.selection import MostReliable, SelectionContext
        >>> step = SelectionContext(buffer_size=2, n_missing=2)
        >>> nodes = Candidates.of([7, 8, 9, 10], step, forecast_p_finish=[1.0, 0.9, 0.8, 0.5])
        >>> Enough(MostReliable(), 0.95).select(nodes, 4, 0.0, np.random.default_rng(0))
        [7, 8, 9]
    """

    saved = ("then",)

    def __init__(self, then: Selector, sure: Chance = SURE) -> None:
        """Set the selector that picks, and the chance in (0, 1) that the updates arrive."""
        self.then, self.sure = then, sure

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Keep as many picks of the other as are needed; none if those in flight are enough."""
        return enough(candidates, now, self.sure, lambda: self.then.select(candidates, k, now, rng))


def enough(
    candidates: Candidates, now: float, sure: float, pick: Callable[[], list[int]]
) -> list[int]:
    """Return the first of some picks, as many as the next server step is likely to need.

    A job that is out for more than twice as long as was expected is not waited for.

    Args:
        candidates: nodes that may be picked.
        now: the instant in s.
        sure: chance that the missing updates arrive, in (0, 1]; 1 keeps all picks.
        pick: returns node ids, the best first; not called if those in flight are enough.
    """
    step = candidates.context
    if step.keeps_stragglers or not step.buffer_size or sure == 1.0:
        return pick()
    out = candidates.in_flight
    late = now - out.picked_at > _OVERDUE * own_duration_s(out)
    # Of a job that is late it no longer counts that it arrives.
    in_time = candidates.p_within(_OVERDUE)
    working = in_time * out.p_finish[~late]
    if _n_enough(working, np.zeros(0), step.n_missing, sure) == 0:
        return []
    picked = pick()
    ids = candidates.node_ids
    here = np.flatnonzero(np.isin(ids, np.array(picked, dtype=ids.dtype)))
    chances = dict(zip(ids[here].tolist(), candidates.p_finish[here].tolist(), strict=True))
    found = in_time * np.array([chances[node] for node in picked])
    return picked[: _n_enough(working, found, step.n_missing, sure)]


_OVERDUE = 2.0
"""Expected durations after which a job in flight no longer counts."""
_EXACT = 64
"""Updates missing up to which chances are exact; beyond, a normal distribution is near enough."""


def _n_enough(working: Floats, picked: Floats, n_missing: int, sure: float) -> int:
    """Return the number of picks that are enough, or one more than there are.

    Args:
        working: chances of the jobs in flight; shape (m,).
        picked: chances of the picks, in their order; shape (n,).
        n_missing: updates that are to arrive.
        sure: chance with which they are to.
    """
    if n_missing > _EXACT:
        every = np.concatenate([working, picked])
        mean, square = np.cumsum(every), np.cumsum(every * (1.0 - every))
        far = NormalDist().inv_cdf(sure)
        is_enough = mean - n_missing + 0.5 >= far * np.sqrt(square)
        first = int(np.argmax(is_enough)) + 1 if is_enough.any() else every.size + 1
        return max(first - working.size, 0)
    arrived = np.zeros(n_missing + 1)
    arrived[0] = 1.0
    for p in working.tolist():
        arrived = _with_another(arrived, p)
    for n, p in enumerate([*picked.tolist(), 0.0]):
        if arrived[-1] >= sure:
            return n
        arrived = _with_another(arrived, p)
    return picked.size + 1


def _with_another(arrived: Floats, p: float) -> Floats:
    """Return chances that 0, 1, ... updates arrive, the last of enough, with one more job."""
    more = (1.0 - p) * arrived
    more[1:] += p * arrived[:-1]
    more[-1] += p * arrived[-1]
    return more
