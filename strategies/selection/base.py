"""Which nodes get the next jobs: the interface, and the published rules of a few lines.

A selector sees candidates, that is, what the server honestly knows, and returns some of their ids.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from inspect import signature
from math import inf, isfinite
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from fedstale.strategies.types import Candidates, Count, Floats, Part, Seconds

Drawn = Annotated[Count, "an integer >= 1, larger than the number to pick"]


class Selector(Part, ABC):
    """Picks nodes for the next jobs."""

    fault: str = ""
    """Why it does not pick as it was asked to, such as an agent that cannot be read."""
    fallback: bool = False
    """Whether a simulation goes on although there is a fault, as real deployments do."""

    def faulty(self) -> Iterator["Selector"]:
        """Yield those with a fault: of this one, and of the selectors in it."""
        if self.fault:
            yield self
        for part in vars(self).values():
            if isinstance(part, Selector):
                yield from part.faulty()

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

    def __init__(self, deadline_s: Seconds = inf) -> None:
        """Set the deadline in s, > 0."""
        self.deadline_s = deadline_s

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick in the order of duration; ties are broken by chance."""
        durations = _known_or(candidates.duration_s, self.deadline_s)
        return largest(candidates, -durations, k, rng, allowed=durations <= self.deadline_s)


class PowerOfChoice(Selector):
    """Draws d candidates by their number of examples, and picks those with the largest loss.

    Differences from the paper:
        The loss is that of a node's last reply (the paper's cheaper variant), and a node without
        one comes first, with the mean number of examples.

    Reference:
        Cho, Wang, Joshi. Towards Understanding Biased Client Selection in Federated Learning.
        AISTATS 2022.
    """

    def __init__(self, d: Drawn) -> None:
        """Set the number of candidates to draw, d >= 1."""
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
        return largest(pool, _known_or(pool.loss, inf), k, rng)


class MostReliable(Selector):
    """Picks the nodes that are most likely to finish, whatever their utility.

    The probability is the device's own forecast where it sends one, corrected by what came of its
    earlier ones. The same reliable devices are picked each time, so it suits data that many hold.
    """

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick the highest probabilities; ties are broken by chance."""
        return largest(candidates, candidates.p_finish, k, rng)


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
        return largest(candidates, -_known_or(candidates.forecast_p_available, 1.0), k, rng)


class LeastRecent(Selector):
    """Picks those whose last job was sent longest ago; first, by chance, those without any."""

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick in the order of the last pick; ties are broken by chance."""
        return largest(candidates, -_known_or(candidates.picked_at, -inf), k, rng)


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


def largest(
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
