"""The trained agent as a `Selector`: it scores all candidates at once and picks the best k.

It needs NumPy alone. Whatever is wrong with its files or its numbers, a run goes on: one line of
the log says so, and the heuristic that the agent was trained to beat decides instead.
"""

import logging
from math import inf, isfinite
from pathlib import Path

import numpy as np

from fedstale.agents.policy.features import features
from fedstale.agents.policy.files import Agent, embedded, load
from fedstale.agents.policy.scorer import Floats, score
from fedstale.errors import FedstaleError
from fedstale.strategies.selection import ExpectedUtility, Selector
from fedstale.strategies.server.clients import Candidates
from fedstale.strategies.settings import require
from fedstale.traces.arrays import Index


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


# Time limits of the jobs that agents are trained on are 3 to 8 times what the median device takes.
_PATIENCE = 5.0

logger = logging.getLogger(__name__)


class AgentSelector(Selector):
    """Picks the candidates that a trained agent scores highest.

    Args:
        path: folder of agent.toml and agent.safetensors; None takes the agent that comes with
            fedstale.
        exploration: share of the picks that goes to candidates never picked before, by chance (to
            all candidates where there are none), in [0, 1].
        fairness: share of the picks that goes to those picked least often, in [0, 1].

    Example:
        >>> nodes = Candidates.of([7, 8, 9], forecast_p_finish=[0.1, 0.9, 0.5])
        >>> AgentSelector().select(nodes, 2, 0.0, np.random.default_rng(0))
        [8, 9]
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        exploration: float = 0.0,
        fairness: float = 0.0,
    ) -> None:
        """Read the agent; one that cannot be read is replaced by the heuristic, see the module."""
        require(0 <= exploration <= 1, "selector.exploration", exploration, "a share in [0, 1]")
        require(
            0 <= fairness <= 1 - exploration,
            *("selector.fairness", fairness, "a share in [0, 1 - exploration]"),
        )
        self.path, self.exploration, self.fairness = path, exploration, fairness
        self._heuristic = ExpectedUtility()
        self._agent: Agent | None = None
        self._warned = False
        try:
            self._agent = load(embedded() if path is None else path)
        except FedstaleError as problem:
            self._warn(str(problem))

    @property
    def falls_back(self) -> bool:
        """Whether the agent could not be read, so that the heuristic decides."""
        return self._agent is None

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick the shares for exploration and fairness first, then the highest scores."""
        k = min(k, len(candidates))
        scores = self.scores(candidates, k, now)
        if scores is None:
            return self._heuristic.select(candidates, k, now, rng)
        free = np.ones(len(candidates), dtype=np.bool_)
        parts: list[Index] = []
        picked = candidates.times_picked
        n_explore = _share(self.exploration * k, rng)
        n_fair = min(_share(self.fairness * k, rng), k - n_explore)
        for n, wanted in ((n_explore, np.minimum(picked, 1)), (n_fair, picked)):
            if n:
                part = _of(free, -wanted.astype(np.float64), n, rng)
                free[part] = False
                parts.append(part)
        best = _of(free, scores, k - n_explore - n_fair, rng)
        chosen = np.concatenate([best, *parts])
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
        at = candidates.situation
        observation = features(
            candidates,
            now=now,
            k=k,
            n_in_flight=at.n_in_flight,
            version=at.version,
            # Training always has a limit.
            deadline_s=at.deadline_s if isfinite(at.deadline_s) else _patience(candidates),
        )
        scores = score(self._agent.weights, *observation)
        if np.isfinite(scores).all():
            return scores
        self._warn(
            f"{np.count_nonzero(~np.isfinite(scores))} of {scores.size} scores are no numbers"
        )
        return None

    def _warn(self, problem: str) -> None:
        if not self._warned:
            logger.warning("the agent is not used, p_finish x utility decides: %s", problem)
        self._warned = True


def _patience(candidates: Candidates) -> float:
    """Return a time limit in s that fits the candidates, inf if no duration is known."""
    durations = candidates.duration_s
    known = durations[np.isfinite(durations)]
    if not known.size:
        forecast = candidates.forecast_duration_s
        known = forecast[np.isfinite(forecast)]
    return _PATIENCE * float(np.median(known)) if known.size else inf


def _share(expected: float, rng: np.random.Generator) -> int:
    """Return a whole number with this mean, so that a small share of few picks is not lost."""
    if not isfinite(expected) or expected <= 0:
        return 0
    return int(expected + rng.random())


def _of(free: np.ndarray, scores: Floats, n: int, rng: np.random.Generator) -> Index:
    """Return the n best of those that are free."""
    if free.all():
        return top(scores, n, rng)
    where = np.flatnonzero(free)
    return where[top(scores[where], n, rng)]
