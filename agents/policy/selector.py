"""The trained agent as a `Selector`: it scores all candidates at once and draws k by the scores.

It needs NumPy alone. Whatever is wrong with its files or its numbers, a run on real devices goes
on: the log and the summary say so, and the heuristic that the agent was trained to beat decides
instead. A simulation ends where the files are missing or refused, unless it is to go on so.

A policy of one's own, whatever has trained it, picks as an agent does: it sees the `observation`
that the environments show.
"""

import logging
from collections.abc import Callable
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.agents.policy.features import N_MAX, Inputs, Observation, Single, features
from fedstale.agents.policy.scorer import Agent, Floats, digest, drawn, embedded, load, score
from fedstale.errors import FedstaleError
from fedstale.strategies.selection import (
    BALANCED,
    SURE,
    ExpectedUtility,
    Selector,
    enough,
    name_of_class,
)
from fedstale.strategies.types import Candidates, Count, PositiveShare, Share, require
from fedstale.traces import Index, Mask

logger = logging.getLogger(__name__)

OwnPolicy = Callable[[Observation], npt.NDArray[Any]]
"""From an observation of b choices to scores of their places, of which the highest are picked;
shape (b, n_max)."""

_WITHOUT = "the agent is not used, the balanced rule decides"
# Time limits of the jobs that agents are trained on are 3 to 8 times what the median device takes.
_PATIENCE = 5.0


def top(scores: Floats, k: int, rng: np.random.Generator) -> Index:
    """Return the positions of the k largest scores, in falling order; chance breaks ties.

    Very many scores are not sorted.

    Args:
        scores: finite; shape (n,).
        k: how many; all if there are fewer.
        rng: of the choice among the scores equal to the least one that is picked.

    Example:
        >>> top(np.array([1.0, 3.0, 2.0]), 2, np.random.default_rng(0)).tolist()
        [1, 2]
    """
    n = scores.size
    if k <= 0:
        return np.zeros(0, dtype=np.int64)
    if k >= n:
        chosen = rng.permutation(n)
    else:
        least = scores[np.argpartition(scores, n - k)[n - k]]
        better = np.flatnonzero(scores > least)
        equal = np.flatnonzero(scores == least)
        chosen = np.concatenate([better, rng.choice(equal, k - better.size, replace=False)])
    return chosen[np.argsort(-scores[chosen], kind="stable")].astype(np.int64)


class AgentSelector(Selector):
    """Draws candidates by the scores of a trained agent, see `fedstale.agents.policy.scorer`.

    Args:
        path: folder of agent.toml and agent.safetensors, or an agent; None takes the one that comes
            with fedstale. Or a policy of your own: a function from an `observation` to scores of
            its places, shape (1, n_max), the highest of which are picked.
        n_max: places that a policy of your own sees; of more candidates, so many at random, as in
            training, and as many times as it takes to pick enough.
        fairness: share of the picks that goes to those picked least often, in [0, 1].
        sure: chance in (0, 1] that the next server step gets what it still misses, where jobs that
            are late for it are cancelled: no more are sent than that takes, see `Enough`; 1 sends
            all that is asked for.
        fallback: whether a simulation goes on by the heuristic where the agent cannot be read; real
            deployments do anyway.

    Example:
        >>> nodes = Candidates.of([7, 8, 9], forecast_p_finish=[0.1, 0.9, 0.5])
        >>> sorted(AgentSelector().select(nodes, 2, 0.0, np.random.default_rng(0)))
        [8, 9]
        >>> lowest = AgentSelector(lambda seen: -seen["heuristic"])
        >>> lowest.select(nodes, 1, 0.0, np.random.default_rng(0))
        [7]
    """

    def __init__(
        self,
        path: str | Path | Agent | OwnPolicy | None = None,
        *,
        n_max: Count = N_MAX,
        fairness: Share = 0.0,
        sure: PositiveShare = SURE,
        fallback: bool = False,
    ) -> None:
        """Read the agent; one that cannot be read is replaced by the heuristic, see the module."""
        self.path, self.fairness, self.n_max = path, fairness, n_max
        self.sure, self.fallback = sure, fallback
        self._heuristic = ExpectedUtility(BALANCED)
        self._agent: Agent | None = None
        self._policy: OwnPolicy | None = None
        self._warned = False
        try:
            if callable(path):
                self._policy = path
            else:
                self._agent = path if isinstance(path, Agent) else load(path or embedded())
        except FedstaleError as problem:
            self.fault = f"{_WITHOUT}: {problem}"

    def described(self) -> dict[str, Any]:
        """Return its settings, and which agent it is by the digest of its weights."""
        if self._policy is not None:
            return super().described()
        if self._agent is None:
            return self._heuristic.described()
        settings = {name: getattr(self, name) for name in ("fairness", "sure")}
        name = name_of_class(type(self))
        return {"class": name, "settings": settings, "weights": digest(self._agent.weights)}

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Draw as many as the next server step is likely to need; the rule decides alone."""
        if self.fault:
            self._warn(self.fault)
            return self._heuristic.select(candidates, k, now, rng)
        return enough(candidates, now, self.sure, lambda: self._drawn(candidates, k, now, rng))

    def _drawn(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick the share for fairness, and draw the others, the best first."""
        k = min(k, len(candidates))
        own = self._policy and self._by_policy(self._policy, candidates, k, now, rng)
        scores = self.scores(candidates, k, now) if own is None else own
        if scores is None:
            return self._heuristic.select(candidates, k, now, rng)
        free = np.ones(len(candidates), dtype=np.bool_)
        # Rounded at random, so that a small share of few picks is not lost.
        fair_share = self.fairness * k
        n_fair = min(int(fair_share + rng.random()), k) if fair_share else 0
        if n_fair:
            fair = _of(free, -candidates.times_picked.astype(np.float64), n_fair, rng)
            free[fair] = False
        scores = drawn(scores, rng) if own is None else scores
        chosen = _of(free, scores, k - n_fair, rng)
        if n_fair:
            # Whichever are kept of all, a share of them is these.
            chosen = np.insert(chosen, rng.integers(chosen.size + 1, size=n_fair), fair)
        return [int(node) for node in candidates.node_ids[chosen]]

    def scores(self, candidates: Candidates, k: int, now: float) -> Floats | None:
        """Return the score of every candidate, shape (n,), or None where the agent has none.

        Args:
            candidates: nodes that may be picked.
            k: how many are to be picked.
            now: the instant in s.
        """
        if self._agent is None:
            return None
        given = inputs_of(candidates, k, now)
        return self._finite(score(self._agent.weights, *(values[0] for values in given)))

    def _by_policy(
        self,
        policy: OwnPolicy,
        candidates: Candidates,
        k: int,
        now: float,
        rng: np.random.Generator,
    ) -> Floats | None:
        """Return the scores of an own policy, the lowest of all for whom it does not see.

        Raises:
            ConfigError: it returns something else.
        """
        n_parts = -(-k // self.n_max)
        shown = rng.permutation(len(candidates))[: n_parts * self.n_max]
        found = np.full(len(candidates), -np.inf)
        for part in np.array_split(shown, n_parts):
            seen = observation(candidates.take(part), -(-k // n_parts), now, n_max=self.n_max)
            scores = np.asarray(policy(seen), dtype=np.float64)
            accepted = f"a function that returns scores of shape {(1, self.n_max)}"
            require(scores.shape == (1, self.n_max), "selector.path", policy, accepted)
            found[part] = scores[0, : part.size]
        return None if self._finite(found[shown]) is None else found

    def _finite(self, scores: Floats) -> Floats | None:
        if np.isfinite(scores).all():
            return scores
        self._warn(
            f"{_WITHOUT}: {np.count_nonzero(~np.isfinite(scores))} of {scores.size} scores are no "
            "numbers"
        )
        return None

    def _warn(self, problem: str) -> None:
        if not self._warned:
            logger.warning("%s", problem)
        self._warned = True


def inputs_of(candidates: Candidates, k: int, now: float) -> Inputs:
    """Return the inputs of one choice, as an agent is given them.

    Args:
        candidates: nodes that may be picked.
        k: how many are to be picked.
        now: the instant in s.
    """
    at = candidates.context
    return features(
        candidates,
        np.ones((1, len(candidates)), dtype=np.bool_),
        now=now,
        k=k,
        n_in_flight=at.n_in_flight,
        version=at.version,
        n_missing=at.n_missing,
        n_expected=float(candidates.in_flight.p_finish.sum()),
        # Training always has a limit.
        deadline_s=at.deadline_s if isfinite(at.deadline_s) else _patience(candidates),
    )


def observation(
    candidates: Candidates, k: int, now: float, *, n_max: int | None = None
) -> Observation:
    """Compute the environments' observation of one choice, in arrays with a first axis of 1.

    Args:
        candidates: nodes that may be picked, each at the place that it has among them.
        k: how many are to be picked.
        now: the instant in s.
        n_max: places; those without a candidate are 0. None takes one for each candidate.

    Returns:
        `features`, `context`, `heuristic`, `mask`, `slots` and `clock`, see `SelectionEnv`; the
        clock is 0, since nobody knows when a run will be over.

    Raises:
        ConfigError: there are fewer places than candidates.

    Example:
        >>> seen = observation(Candidates.of([7, 8, 9]), 2, 0.0, n_max=64)
        >>> {name: values.shape for name, values in seen.items()}  # doctest: +NORMALIZE_WHITESPACE
        {'features': (1, 64, 23), 'context': (1, 9), 'heuristic': (1, 64), 'mask': (1, 64),
         'slots': (1, 1), 'clock': (1, 1)}
    """
    n = len(candidates)
    room = n if n_max is None else n_max
    require(room >= n, "n_max", room, f"at least {n}, a place for each candidate")
    given = inputs_of(candidates, k, now)

    def placed(values: Single) -> Single:
        return np.pad(values, [(0, 0), (0, room - n), *[(0, 0)] * (values.ndim - 2)])

    return {
        "features": placed(given.features),
        "context": given.context,
        "heuristic": placed(given.heuristic),
        "mask": placed(np.ones((1, n), dtype=np.float32)),
        "slots": np.full((1, 1), min(k, n), dtype=np.float32),
        "clock": np.zeros((1, 1), dtype=np.float32),
    }


def _patience(candidates: Candidates) -> float:
    """Return a time limit in s that fits the candidates, inf if no duration is known."""
    durations = candidates.duration_s
    known = durations[np.isfinite(durations)]
    if not known.size:
        forecast = candidates.forecast_duration_s
        known = forecast[np.isfinite(forecast)]
    return _PATIENCE * float(np.median(known)) if known.size else inf


def _of(free: Mask, scores: Floats, n: int, rng: np.random.Generator) -> Index:
    """Return the n best of those that are free."""
    if free.all():
        return top(scores, n, rng)
    where = np.flatnonzero(free)
    return where[top(scores[where], n, rng)]
