"""Which nodes get the next jobs: the interface, and the published rules of a few lines.

A selector sees candidates, that is, what the server honestly knows, and returns some of their ids.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from inspect import signature
from math import inf, isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.strategies.types import Candidate, Candidates, Floats, Part, require, require_count


class Selector(Part, ABC):
    """Picks nodes for the next jobs."""

    @abstractmethod
    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Return ids of distinct candidates.

        Args:
            candidates: nodes that are online and free; at least one.
            k: how many to pick, >= 1; may exceed the number of candidates.
            now: the instant in s.
            rng: the only source of randomness.

        Returns:
            min(k, number of candidates) ids, or fewer where the rule leaves some out. If it returns
            none, the server asks again later.
        """

    def described(self) -> dict[str, Any]:
        """Return its class and settings in plain values, as a record of its picks has them.

        Settings are the arguments of its constructor that are attributes. One that no other process
        could make from plain values, such as a function, is {"opaque": its type}. A subclass whose
        picks depend on a file says by a digest which.
        """
        names = signature(type(self)).parameters
        settings = {name: _plain(getattr(self, name)) for name in names if hasattr(self, name)}
        missing = {name: {"opaque": "nothing"} for name in names if name not in settings}
        return {"class": name_of_class(type(self)), "settings": settings | missing}


class Random(Selector):
    """Picks uniformly at random, as FedAvg does."""

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick without replacement."""
        n = len(candidates)
        chosen = rng.choice(n, size=min(k, n), replace=False)
        return candidates.take(chosen).node_ids.tolist()


class Fastest(Selector):
    """FedCS: picks the fastest candidates of those that can meet the deadline.

    Differences from the paper:
        Devices are not asked for their resources: the median of observed durations stands for
        them. A node never observed is taken to be as fast as the deadline allows, after all that
        are known to meet it.

    Reference:
        Nishio, Yonetani. Client Selection for Federated Learning with Heterogeneous Resources in
        Mobile Edge. ICC 2019.
    """

    def __init__(self, deadline_s: float = inf) -> None:
        """Set the deadline in s, > 0."""
        require(deadline_s > 0, "selector.deadline_s", deadline_s, "seconds > 0")
        self.deadline_s = deadline_s

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick in the order of duration; ties are broken by chance."""
        durations = _known_or(candidates.duration_s, self.deadline_s)
        return _largest(candidates, -durations, k, rng, allowed=durations <= self.deadline_s)


class PowerOfChoice(Selector):
    """Draws d candidates by their number of examples, and picks those with the largest loss.

    Differences from the paper:
        The loss is that of a node's last reply (the paper's cheaper variant), and a node without
        one comes first, with the mean number of examples.

    Reference:
        Cho, Wang, Joshi. Towards Understanding Biased Client Selection in Federated Learning.
        AISTATS 2022.
    """

    def __init__(self, d: int) -> None:
        """Set the number of candidates to draw, d >= 1."""
        require_count("selector.d", d, "an integer >= 1, larger than the number to pick")
        self.d = d

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Draw, then pick."""
        examples = candidates.examples
        known = examples[~np.isnan(examples)]
        examples = _known_or(examples, known.mean() if known.size else 1.0)
        n = min(max(self.d, k), len(candidates))
        drawn = rng.choice(len(candidates), size=n, replace=False, p=examples / examples.sum())
        pool = candidates.take(np.sort(drawn))
        return _largest(pool, _known_or(pool.loss, inf), k, rng)


class MostReliable(Selector):
    """Picks the nodes that are most likely to finish, whatever their utility.

    The probability is the device's own forecast where it sends one, corrected by what came of its
    earlier ones. The same reliable devices are picked each time, so it suits data that many hold.
    """

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick the highest probabilities; ties are broken by chance."""
        return _largest(candidates, candidates.p_finish, k, rng)


class ExpectedUtility(Selector):
    """Picks by p_finish x utility: what a job sent now is expected to bring.

    The utility is Oort's statistical utility. A node without one gets the largest known, so that
    every node is tried. The probability is the device's own forecast where it sends one, corrected
    by what came of its earlier ones.
    """

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick the highest products; ties are broken by chance."""
        utilities = candidates.utility
        known = utilities[~np.isnan(utilities)]
        utilities = _known_or(utilities, known.max() if known.size else 1.0)
        return _largest(candidates, utilities * candidates.p_finish, k, rng)


class LeastAvailable(Selector):
    """REFL's intelligent participant selection: first those that will rarely be online again.

    The forecaster's probability `p_available` stands in the oracle's place; a node that forecasts
    nothing counts as always available.

    Reference:
        Abdelmoniem et al. REFL: Resource-Efficient Federated Learning. EuroSys 2023.
    """

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick the lowest probabilities; ties are broken by chance."""
        return _largest(candidates, -_known_or(candidates.forecast_p_available, 1.0), k, rng)


class Filtered(Selector):
    """Lets another selector choose among the candidates that meet a condition.

    Example:
        >>> Filtered(lambda c: c.times_failed == 0, Random()).then
        Random()
    """

    saved = ("then",)

    def __init__(self, where: Callable[[Candidate], bool], then: Selector) -> None:
        """Set the condition, and the selector that chooses among those that meet it."""
        self.where, self.then = where, then

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Filter, then pick."""
        kept = np.array([self.where(candidate) for candidate in candidates], dtype=np.bool_)
        return self.then.select(candidates.take(kept), k, now, rng) if kept.any() else []


class Probing(Selector):
    """Gives a share of the picks to nodes whose record is better than what they state.

    Who states a low chance is picked by no rule that goes by chances, so nobody would ever find out
    that it keeps more. A probe is drawn with a probability in proportion to the share of its jobs
    that a node has finished, less its `p_finish`, where that is positive; a node without a record
    has the share 1/2. All other picks, and those that no such node is there for, are the other
    selector's. What rounding takes from probes is carried over.

    Example:
        >>> modest = Candidates.of([7, 8], forecast_p_finish=[0.9, 0.0])
        >>> Probing(MostReliable(), 1.0).select(modest, 1, 0.0, np.random.default_rng(0))
        [8]
    """

    saved = ("selector", "_owed")

    def __init__(self, selector: Selector, share: float = 0.05) -> None:
        """Set the selector of the other picks, and the share of probes in [0, 1]."""
        require(0 <= share <= 1, "selector.share", share, "a share of the picks in [0, 1]")
        self.selector, self.share = selector, share
        self._owed = 0.0
        """Probes that rounding has taken so far, in [-0.5, 0.5]."""

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Probe, then pick."""
        k = min(k, len(candidates))
        better_by = np.maximum(candidates.share_finished - candidates.p_finish, 0.0)
        owed = self._owed + k * self.share
        n = min(round(owed), k, int((better_by > 0).sum()))
        self._owed = min(max(owed - n, -0.5), 0.5)
        if not n:
            return self.selector.select(candidates, k, now, rng)
        probed = rng.choice(len(candidates), size=n, replace=False, p=better_by / better_by.sum())
        is_left = np.ones(len(candidates), dtype=np.bool_)
        is_left[probed] = False
        probes: list[int] = candidates.take(probed).node_ids.tolist()
        if n == k:
            return probes
        return [*probes, *self.selector.select(candidates.take(is_left), k - n, now, rng)]


def name_of_class(kind: type) -> str:
    """Return the name of a class in a record: one of fedstale's own without its module.

    Example:
        >>> name_of_class(Random), name_of_class(dict)
        ('Random', 'builtins.dict')
    """
    is_own = kind.__module__.startswith("fedstale.")
    return kind.__qualname__ if is_own else f"{kind.__module__}.{kind.__qualname__}"


def _plain(value: object) -> object:
    if isinstance(value, Selector):
        return value.described()
    if is_dataclass(value) and not isinstance(value, type):
        settings = {name: _plain(inner) for name, inner in asdict(value).items()}
        return {"class": name_of_class(type(value)), "settings": settings}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and isfinite(value):
        return float(value)
    return "inf" if value == inf else {"opaque": type(value).__name__}


def _known_or(values: Floats, otherwise: float) -> Floats:
    return np.where(np.isnan(values), otherwise, values)


def _largest(
    candidates: Candidates,
    scores: Floats,
    k: int,
    rng: np.random.Generator,
    *,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> list[int]:
    """Return the ids with the largest scores, in falling order; chance breaks ties."""
    order = np.lexsort((rng.random(len(candidates)), -scores))
    if allowed is not None:
        order = order[allowed[order]]
    return [int(node) for node in candidates.node_ids[order[:k]]]
