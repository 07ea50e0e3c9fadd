"""A linear bandit on the agent's features, which learns from its own picks; to be compared with.

It needs no training on traces. The trained agent earns more on every fleet (docs/results/agent.md).
"""

import numpy as np

from fedstale.agents.policy.features import N_FEATURES
from fedstale.agents.policy.scorer import Floats
from fedstale.agents.policy.selector import inputs_of, top
from fedstale.strategies.selection import Selector
from fedstale.strategies.types import Candidates, require


class LinUCB(Selector):
    """Picks by an upper confidence bound of a job's reward, linear in its candidate's features.

    With x the features of a candidate and a constant, A = ridge I + sum x x' and b = sum r x over
    the jobs that ended, the score is

        theta' x + alpha sqrt(x' A^-1 x),    theta = A^-1 b.

    The reward r of a job is 0 if it failed, and else the utility of its node over the largest that
    is known, so that it has the scale of `ExpectedUtility`.

    Differences from the paper:
        All candidates share one theta, since they come and go. The k best are picked together, with
        the A of before. How a job ended is seen when its node is a candidate again.

    Reference:
        Li, Chu, Langford, Schapire. A Contextual-Bandit Approach to Personalized News Article
        Recommendation. WWW 2010 (algorithm 1).

    Args:
        alpha: weight of the uncertainty, >= 0; the default is the best of 0, 0.05, 0.1, 0.2 and 0.5
            on 150 validation windows of recorded phones.
        ridge: how strongly theta is held at 0, > 0.

    Example:
        >>> nodes = Candidates.of([7, 8, 9], forecast_p_finish=[0.1, 0.9, 0.5])
        >>> len(LinUCB().select(nodes, 2, 0.0, np.random.default_rng(0)))
        2
    """

    saved = ("covariance", "response", "_in_flight")

    def __init__(self, alpha: float = 0.1, *, ridge: float = 1.0) -> None:
        """Start without any job."""
        require(alpha >= 0, "selector.alpha", alpha, "a number >= 0")
        require(ridge > 0, "selector.ridge", ridge, "a number > 0")
        self.alpha, self.ridge = alpha, ridge
        self.covariance: Floats = ridge * np.eye(N_FEATURES + 1)
        """A; shape (features + 1, features + 1)."""
        self.response: Floats = np.zeros(N_FEATURES + 1)
        """b; shape (features + 1,)."""
        # Of each pick in flight: its features, and its node's finished and failed jobs before.
        self._in_flight: dict[int, tuple[Floats, int, int]] = {}

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Learn from the jobs that have ended, then pick the largest bounds."""
        self._learn(candidates)
        k = min(k, len(candidates))
        x = inputs_of(candidates, k, now).features[0].astype(np.float64)
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        solved = np.linalg.solve(self.covariance, np.column_stack([self.response, x.T]))
        spread = np.sqrt(np.maximum((x * solved[:, 1:].T).sum(axis=1), 0.0))
        chosen = top(x @ solved[:, 0] + self.alpha * spread, k, rng)
        for i in chosen:
            before = int(candidates.times_finished[i]), int(candidates.times_failed[i])
            self._in_flight[int(candidates.node_ids[i])] = (x[i], *before)
        return [int(node) for node in candidates.node_ids[chosen]]

    def _learn(self, candidates: Candidates) -> None:
        utility = candidates.utility
        largest = float(np.nanmax(utility, initial=0.0))
        nodes = np.fromiter(self._in_flight, dtype=np.uint64, count=len(self._in_flight))
        for i in np.flatnonzero(np.isin(candidates.node_ids, nodes)):
            node = int(candidates.node_ids[i])
            x, finished, failed = self._in_flight[node]
            reward = 0.0
            if candidates.times_finished[i] > finished:
                worth = utility[i] / largest if largest > 0 else 1.0
                reward = float(worth) if np.isfinite(worth) else 1.0
            elif candidates.times_failed[i] <= failed:
                continue
            self.covariance = self.covariance + np.outer(x, x)
            self.response = self.response + reward * x
            del self._in_flight[node]
