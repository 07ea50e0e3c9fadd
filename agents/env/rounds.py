"""Rounds of a simulator: played at once by a policy, or pick by pick by an environment.

A round is as many picks as the server has free slots. `rollout` makes all picks of a round at once,
as a server does. The Gymnasium environments make them one by one (`Rounds`): candidates are shown
packed and in random order, so that a place in the observation means nothing; after the last pick
jobs are sent, and the simulator goes on to the next choice. From each round's reward is subtracted
what `ExpectedUtility` earns in the same round of the same window, which no choice can change: what
is left is due to the choice and not to the hour.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedstale.agents.env.episodes import Episodes
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward, RoundOutcome, Simulator
from fedstale.agents.policy.features import CONTEXT, N_CONTEXT, N_FEATURES
from fedstale.agents.policy.scorer import Floats, Score, by_heuristic
from fedstale.strategies.selection.base import Selector
from fedstale.traces.arrays import Array, Index, Mask

Observation: TypeAlias = dict[str, npt.NDArray[np.float32]]
Policy: TypeAlias = Selector | Score
Pick: TypeAlias = Callable[[Index], Mask]
"""From episodes (m,) to the devices that are picked; shape (m, n)."""

TERMS = ("reward", "gain", "time", "waste")
"""Terms of the reward that a rollout has, each summed over an episode."""

_PICKED = CONTEXT.index("picked_share")
# Episodes that are drawn, and played by the heuristic, at a time; and how often each is then used,
# in a new order every time: choices differ, so nothing repeats.
_DRAWN, _USES = 256, 4
# For training, episodes are scored in so many groups, by their number of candidates.
_GROUPS = 6


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Rollout:
    """Episodes that were played to their end."""

    terms: dict[str, Array]
    """`TERMS`, summed over each episode; shape (b,) each."""
    outcome: RoundOutcome
    """Sums over the rounds of each episode."""
    by_round: Array
    """Reward of each round, 0 after the last; shape (b, most rounds)."""


def rollout(simulator: Simulator, episodes: Episodes, pick: Pick, reward: Reward) -> Rollout:
    """Play every episode to its end.

    Args:
        simulator: with room for all episodes at a time.
        episodes: to play.
        pick: picks the devices of a round; see `picks_of` and `training_picks_of`.
        reward: prices.
    """
    rows = np.arange(len(episodes))
    simulator.done[rows.size :] = True
    simulator.reset(episodes, rows)
    played = Rollout(
        terms={name: np.zeros(rows.size) for name in TERMS},
        outcome=RoundOutcome.zeros(rows.size),
        by_round=np.zeros((rows.size, int(episodes.rounds.max(initial=1)))),
    )
    live = rows[~simulator.done[rows]]
    while live.size:
        turn = simulator.n_rounds[live].copy()
        simulator.dispatch(live, pick(live))
        outcome = simulator.advance(live)
        terms = simulator.reward_terms(live, outcome, reward)
        played.outcome.add(live, outcome)
        for name, values in played.terms.items():
            values[live] += terms[name]
        played.by_round[live, turn] = terms["reward"]
        live = rows[~simulator.done[rows]]
    return played


def picks_of(simulator: Simulator, policy: Policy, n: int, seed: np.random.SeedSequence) -> Pick:
    """Return the picks of a policy, as a server would make them.

    Args:
        simulator: the episodes.
        policy: a `Selector`, of which each episode gets a copy, or a scoring function, which scores
            the candidates of all episodes together.
        n: number of episodes.
        seed: of the selector's choices, and of ties between scores.
    """
    rngs = [np.random.default_rng(s) for s in seed.spawn(n + 1)]
    if isinstance(policy, Selector):
        copies = [deepcopy(policy) for _ in range(n)]

        def by_selector(rows: Index) -> Mask:
            picked, slots = np.zeros((rows.size, simulator.n), dtype=bool), simulator.slots
            for i, row in enumerate(rows):
                candidates, now = simulator.candidates(int(row)), float(simulator.now[row])
                chosen = copies[row].select(candidates, int(slots[row]), now, rngs[row])
                picked[i, np.asarray(chosen, dtype=np.int64)] = True
            return picked

        return by_selector
    score = policy

    def by_score(rows: Index) -> Mask:
        mask = simulator.mask[rows]
        if score is by_heuristic:
            scores: Floats = simulator.heuristic(rows)
        else:
            observation = simulator.observation(rows)
            scores = np.asarray(score(rows, *observation, mask), dtype=np.float64)
        # Chance breaks ties; scores that are no number come last.
        scores = np.nan_to_num(scores, nan=-1e9) + 1e-6 * rngs[-1].random(scores.shape)
        return top(scores, mask, simulator.slots[rows])

    return by_score


def training_picks_of(simulator: Simulator, score: Score) -> Pick:
    """Return the picks of a scoring function, computed fast; ties fall to the first device.

    Most devices are offline or busy at most times, so candidates are moved together first, and
    episodes with about as many of them are scored together.
    """

    def pick(rows: Index) -> Mask:
        mask, slots = simulator.mask[rows], simulator.slots[rows]
        count = mask.sum(axis=1)
        columns = np.argsort(~mask, axis=1, kind="stable")
        picked = np.zeros(mask.shape, dtype=np.bool_)
        for some in np.array_split(np.argsort(count, kind="stable"), _GROUPS):
            if not some.size:
                continue
            packed = columns[some, : max(int(count[some].max()), 1)]
            inside = np.take_along_axis(mask[some], packed, axis=1)
            observation = simulator.observation(rows[some], packed)
            best = top(score(rows[some], *observation, inside), inside, slots[some])
            row = np.broadcast_to(some[:, None], packed.shape)
            picked[row[best], packed[best]] = True
        return picked

    return pick


def top(scores: Floats, mask: Mask, k: Index) -> Mask:
    """Return which devices have the k highest scores of each row.

    Args:
        scores: shape (m, n).
        mask: which may be picked; shape (m, n).
        k: how many; shape (m,).

    Example:
        >>> top(np.array([[0.1, 0.5, 0.9]]), np.array([[True, True, False]]), np.array([1]))
        array([[False,  True, False]])
    """
    order = np.argsort(np.where(mask, -scores, np.inf), axis=1, kind="stable")
    picked = np.zeros(mask.shape, dtype=bool)
    np.put_along_axis(picked, order, np.arange(mask.shape[1]) < k[:, None], axis=1)
    return picked & mask


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ClosedRounds:
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
        scenario: where episodes take place.
        b: episodes at a time.
        n_max: candidates that are shown; of more, so many are shown at random.
        reward: prices.
        baseline: whether to subtract what the heuristic earns.
        rng: of everything drawn.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        b: int,
        n_max: int,
        reward: Reward,
        baseline: bool,
        rng: np.random.Generator,
    ) -> None:
        self.scenario, self.b, self.n_max, self.reward = scenario, b, n_max, reward
        self.simulator = scenario.simulator(b)
        self._baseline = scenario.simulator(min(_DRAWN, b)) if baseline else None
        self.rng = rng
        rounds = scenario.settings.rounds
        # Episodes drawn, what the heuristic earns in their rounds, and those still to be used.
        self._pool = Episodes.empty(0, self.simulator.n)
        self._pool_rewards, self._unused = np.zeros((0, rounds)), np.zeros(0, dtype=np.int64)
        self._expected = np.zeros((b, rounds))
        self.columns = np.zeros((b, n_max), dtype=np.int64)
        self.left = np.zeros(b, dtype=np.int64)
        self._slots = np.ones(b, dtype=np.int64)
        self._picked = np.zeros((b, self.simulator.n), dtype=bool)
        self.mask = np.zeros((b, n_max), dtype=bool)
        """Which places may be picked now; shape (b, n_max)."""
        self.observation: Observation = {
            "features": np.zeros((b, n_max, N_FEATURES), dtype=np.float32),
            "context": np.zeros((b, N_CONTEXT), dtype=np.float32),
            "heuristic": np.zeros((b, n_max), dtype=np.float32),
            "mask": np.zeros((b, n_max), dtype=np.float32),
        }
        """The current observation; the same arrays are written again at the next pick."""

    def reseed(self, rng: np.random.Generator) -> None:
        """Draw everything that follows anew."""
        self.rng, self._unused = rng, self._unused[:0]

    def begin(self, rows: Index) -> None:
        """Begin new episodes."""
        # An episode without any candidate has no choice in it.
        waiting = rows
        for _ in range(100):
            self._begin(waiting)
            waiting = waiting[self.simulator.done[waiting]]
            if not waiting.size:
                break
        self._show(rows)

    def _begin(self, rows: Index) -> None:
        while rows.size:
            if not self._unused.size:
                self._refill()
            used, self._unused = self._unused[: rows.size], self._unused[rows.size :]
            some, rows = rows[: used.size], rows[used.size :]
            self.simulator.reset(self._pool.take(used), some)
            self._expected[some] = self._pool_rewards[used]

    def _refill(self) -> None:
        n = min(_DRAWN, self.b)
        self._pool = self.scenario.draw(n, self.rng)
        self._unused = np.concatenate([self.rng.permutation(n) for _ in range(_USES)])
        self._pool_rewards = np.zeros((n, self.scenario.settings.rounds))
        if self._baseline is not None:
            seed = np.random.SeedSequence(0)
            pick = picks_of(self._baseline, by_heuristic, n, seed)
            self._pool_rewards = rollout(self._baseline, self._pool, pick, self.reward).by_round

    def _show(self, rows: Index) -> None:
        """Show the next choice of some episodes."""
        mask = self.simulator.mask[rows]
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
        self.left[rows] = np.minimum(self.simulator.slots[rows], shown.sum(axis=1))
        self._slots[rows] = np.maximum(self.left[rows], 1)
        features, context, heuristic = self.simulator.observation(rows, columns)
        self.observation["features"][rows] = features * shown[..., None]
        self.observation["context"][rows] = context
        self.observation["heuristic"][rows] = heuristic * shown
        self.observation["mask"][rows] = shown

    def pick(self, actions: npt.NDArray[np.int64]) -> ClosedRounds:
        """Make one pick in each episode; a place that may not be picked uses up the pick.

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
        self.observation["mask"][row, place] = 0.0
        self.left -= 1
        rows = every[(self.left <= 0) | ~self.mask.any(axis=1)]
        self.observation["context"][:, _PICKED] = 1.0 - self.left / self._slots
        if not rows.size:
            return ClosedRounds(rows=rows, terms={}, ended=np.zeros(0, dtype=bool))
        simulator = self.simulator
        turn = simulator.n_rounds[rows].copy()
        simulator.dispatch(rows, self._picked[rows])
        outcome = simulator.advance(rows)
        terms = simulator.reward_terms(rows, outcome, self.reward)
        ended = simulator.done[rows]
        expected = self._expected[rows, turn]
        # The heuristic may have had more rounds in its window.
        later = np.arange(self._expected.shape[1]) > turn[:, None]
        rest = (self._expected[rows] * later).sum(axis=1)
        terms["baseline"] = -(expected + np.where(ended, rest, 0.0))
        terms["reward"] += terms["baseline"]
        for name in ("progress", "time_s", "wasted_s", "sent", "aggregated", "failed", "discarded"):
            terms[name] = getattr(outcome, name)
        self._show(rows)
        return ClosedRounds(rows=rows, terms=terms, ended=ended)
