"""Rounds pick by pick: what both environments share.

A round is as many picks as the server has free slots. Candidates are shown packed and in random
order, so that a place in the observation means nothing. When the last pick is made, jobs are sent
and the world goes on to the next choice. From each round's reward is taken what `ExpectedUtility`
earns in the same round of the same window, which no choice can change: what is left is about
the choice and not about the hour.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedstale.agents.env.episodes import Episodes
from fedstale.agents.env.scenario import Stage
from fedstale.agents.env.simulator import Reward
from fedstale.agents.play import heuristic, rewards_by_round
from fedstale.agents.policy.features import CONTEXT, N_CONTEXT, N_FEATURES
from fedstale.traces.arrays import Array, Index, Mask

Observation: TypeAlias = dict[str, npt.NDArray[np.float32]]

_PICKED = CONTEXT.index("picked_share")
# Episodes that are drawn, and played by the heuristic, at a time; and how often each is then used,
# in a new order every time: choices differ, so nothing repeats.
_DRAWN, _USES = 256, 4


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Closed:
    """Rounds that a pick has closed."""

    rows: Index
    """Their episodes; shape (m,)."""
    terms: dict[str, Array]
    """Terms of their rewards, each of shape (m,)."""
    ended: Mask
    """Whether the episode is over; shape (m,)."""


class Rounds:
    """The state of b episodes between picks.

    Args:
        stage: where episodes take place.
        b: episodes at a time.
        n_max: candidates that are shown; of more, so many are shown at random.
        reward: prices.
        baseline: whether to take off what the heuristic earns.
        rng: of everything drawn.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        b: int,
        n_max: int,
        reward: Reward,
        baseline: bool,
        rng: np.random.Generator,
    ) -> None:
        self.stage, self.b, self.n_max, self.reward = stage, b, n_max, reward
        self.world = stage.world(b)
        self._other = stage.world(min(_DRAWN, b)) if baseline else None
        self.rng = rng
        self._pool: Episodes | None = None
        self._pool_rewards = np.zeros((0, 1))
        self._order = np.zeros(0, dtype=np.int64)
        self._used = 0
        rounds = stage.settings.rounds
        self._expected = np.zeros((b, rounds))
        self.columns = np.zeros((b, n_max), dtype=np.int64)
        self.left = np.zeros(b, dtype=np.int64)
        self._asked = np.ones(b, dtype=np.int64)
        self._picked = np.zeros((b, self.world.n), dtype=bool)
        self.mask = np.zeros((b, n_max), dtype=bool)
        """Who may be picked now; shape (b, n_max)."""
        self.seen: Observation = {
            "features": np.zeros((b, n_max, N_FEATURES), dtype=np.float32),
            "context": np.zeros((b, N_CONTEXT), dtype=np.float32),
            "prior": np.zeros((b, n_max), dtype=np.float32),
            "mask": np.zeros((b, n_max), dtype=np.float32),
        }
        """What the agent sees now; the same arrays are written again at the next pick."""

    def reseed(self, rng: np.random.Generator) -> None:
        """Draw everything that follows anew."""
        self.rng, self._pool = rng, None

    def begin(self, rows: Index) -> None:
        """Begin new episodes."""
        # An episode in which nobody can be asked has no choice in it.
        waiting = rows
        for _ in range(100):
            self._begin(waiting)
            waiting = waiting[self.world.done[waiting]]
            if not waiting.size:
                break
        self.look(rows)

    def _begin(self, rows: Index) -> None:
        at = 0
        while at < rows.size:
            if self._pool is None or self._used >= self._order.size:
                self._refill()
            assert self._pool is not None
            take = self._order[self._used : self._used + rows.size - at]
            some = rows[at : at + take.size]
            self.world.reset(self._pool.take(take), some)
            self._expected[some] = self._pool_rewards[take]
            self._used += take.size
            at += take.size

    def _refill(self) -> None:
        n = min(_DRAWN, self.b)
        self._pool, self._used = self.stage.draw(n, self.rng), 0
        self._order = np.concatenate([self.rng.permutation(n) for _ in range(_USES)])
        self._pool_rewards = np.zeros((n, self.stage.settings.rounds))
        if self._other is not None:
            self._pool_rewards = rewards_by_round(
                self._other, self._pool, heuristic, reward=self.reward
            )

    def look(self, rows: Index) -> None:
        """Show the next choice of some episodes."""
        mask = self.world.mask[rows]
        keys = np.where(mask, self.rng.random(mask.shape), 2.0)
        if mask.shape[1] > self.n_max:
            order = np.argpartition(keys, self.n_max, axis=1)[:, : self.n_max]
        else:
            order = np.argsort(keys, axis=1)
        columns = np.zeros((rows.size, self.n_max), dtype=np.int64)
        columns[:, : order.shape[1]] = order
        shown = np.zeros(columns.shape, dtype=bool)
        shown[:, : order.shape[1]] = np.take_along_axis(mask, order, axis=1)
        self.columns[rows], self.mask[rows] = columns, shown
        self._picked[rows] = False
        self.left[rows] = np.minimum(self.world.slots[rows], shown.sum(axis=1))
        self._asked[rows] = np.maximum(self.left[rows], 1)
        features, context, prior = self.world.observed(rows, columns)
        seen = self.seen
        seen["features"][rows] = features * shown[..., None]
        seen["context"][rows] = context
        seen["prior"][rows], seen["mask"][rows] = prior * shown, shown

    def pick(self, actions: npt.NDArray[np.int64]) -> Closed:
        """Make one pick in each episode; who may not be picked is nobody, and uses up the pick.

        Args:
            actions: places in the observation; shape (b,).

        Returns:
            The rounds that are closed by it; their next choices are shown already.
        """
        every = np.arange(self.b)
        legal = self.mask[every, actions]
        row, place = every[legal], actions[legal]
        self._picked[row, self.columns[row, place]] = True
        self.mask[row, place] = False
        self.seen["mask"][row, place] = 0.0
        self.left -= 1
        closing = (self.left <= 0) | ~self.mask.any(axis=1)
        rows = every[closing]
        self.seen["context"][:, _PICKED] = 1.0 - self.left / self._asked
        return self._close(rows)

    def _close(self, rows: Index) -> Closed:
        if not rows.size:
            return Closed(rows=rows, terms={}, ended=np.zeros(0, dtype=bool))
        world = self.world
        turn = world.n_rounds[rows].copy()
        world.dispatch(rows, self._picked[rows])
        made = world.advance(rows)
        terms = self.reward.terms(made, world.usual_s[rows], world.buffer_size[rows])
        ended = world.done[rows]
        expected = self._expected[rows, turn]
        # The heuristic may have had more rounds in its window.
        later = np.arange(self._expected.shape[1]) > turn[:, None]
        rest = (self._expected[rows] * later).sum(axis=1)
        terms["baseline"] = -(expected + np.where(ended, rest, 0.0))
        terms["reward"] += terms["baseline"]
        for name in ("progress", "time_s", "wasted_s", "sent", "merged", "failed", "forgotten"):
            terms[name] = getattr(made, name)
        self.look(rows)
        return Closed(rows=rows, terms=terms, ended=ended)
