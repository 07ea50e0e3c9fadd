"""Windows of a seed, the choices of many episodes that play them, and who makes these.

A seed names an endless list of windows, so window 5 of seed 3 is the same on every machine, in
whatever environment and beside whichever others it is played. Windows are drawn in blocks, and
what the heuristic earns in them is found for many at a time. Candidates are shown packed, in an
order that is drawn for the window and turned at each choice, so that a place means nothing.

A choice is as many picks as the server has free slots; a policy, a selector or a scoring function,
makes all picks of a choice at once, as a server does.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from fedstale.agents.env.episodes import CHOICES, Episodes
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward, RoundOutcome, Simulator
from fedstale.agents.policy import (
    N_CONTEXT,
    N_FEATURES,
    Floats,
    Observation,
    Score,
    by_heuristic,
    drawn,
)
from fedstale.errors import ConfigError, TraceError
from fedstale.strategies.selection import Selector
from fedstale.strategies.types import is_count
from fedstale.traces import Array, Index, Mask, joined, outline, stream, taken

Action = Literal["scores", "ranking"]

BLOCK = 16
"""Windows that are drawn at a time; windows of a seed change with it."""

# The heuristic plays so many windows ahead, or of so many devices together: that costs little more
# than a few.
_AHEAD, _DEVICES_AHEAD = 256, 32_768
# Blocks in which no window has a choice are drawn anew, so often at most.
_DRAWS = 100
# By the golden ratio: turned by it, an order never comes again.
_TURN = 0.5 * (5.0**0.5 - 1.0)

Policy: TypeAlias = Selector | Score
Pick: TypeAlias = Callable[[Index], Mask]
"""From episodes (m,) to the devices that are picked; shape (m, n)."""

TERMS = ("reward", "gain", "time", "waste")
"""Terms of the reward that a rollout has, each summed over an episode."""

# For training, episodes are scored in so many groups, by their number of candidates.
_GROUPS = 6


@dataclass(frozen=True, eq=False, slots=True)
class Windows:
    """Some windows."""

    episodes: Episodes
    """m episodes of at most n devices."""
    order: Array
    """Order in which devices are shown, in [0, 1); shape (m, n)."""
    expected: Array
    """What the heuristic earns from each choice to the next; shape (m, choices)."""

    __repr__ = outline


class WindowList:
    """The windows of a seed, one after the other.

    Args:
        scenario: where they are.
        ahead: how many are drawn at once at most, about; it changes no window.
        reward: prices.
        baseline: whether what the heuristic earns is wanted; 0 if not.
    """

    def __init__(self, scenario: Scenario, *, ahead: int, reward: Reward, baseline: bool) -> None:
        self._scenario, self._reward, self._baseline = scenario, reward, baseline
        self._most = -(-ahead // BLOCK)
        self._simulator = scenario.simulator(self._most * BLOCK)
        self.begin(0)

    def begin(self, seed: int, part: int = 0, first: int = 0) -> None:
        """Go to a window.

        Args:
            seed: of the list, >= 0.
            part: which of several lists of the seed.
            first: number of the window in the list, >= 0.
        """
        self._seed, self._part, self.next = seed, part, first
        self._block, self._blocks = first // BLOCK, 1
        self._ready: Windows | None = None

    def take(self, n: int) -> Windows:
        """Return the next n windows."""
        parts: list[Windows] = [] if self._ready is None else [self._ready]
        while (missing := n - sum(len(part.episodes) for part in parts)) > 0:
            # The first window of a list does not wait for many that nobody may ask for.
            count = min(max(self._blocks, -(-missing // BLOCK)), self._most)
            drawn, self._blocks = self._drawn(self._block, count), 2 * count
            self._block += count
            # The list may begin within a block.
            skipped = 0 if parts else self.next % BLOCK
            parts.append(taken(drawn, np.arange(skipped, count * BLOCK)))
        together = joined(parts)
        rest = np.arange(n, len(together.episodes))
        self._ready = taken(together, rest) if rest.size else None
        self.next += n
        return taken(together, np.arange(n))

    def _drawn(self, first: int, count: int) -> Windows:
        """Return the windows of some blocks."""
        drawn = joined([self._block_of(number) for number in range(first, first + count)])
        if self._baseline:
            simulator, order = self._simulator, drawn.order

            def pick(rows: Index) -> Mask:
                # Ties fall by the order of the window alone.
                ties = turned(order[rows], simulator.n_choices[rows])
                scores = simulator.heuristic(rows) + 1e-6 * ties
                return top(scores, simulator.mask[rows], simulator.slots[rows])

            played = rollout(simulator, drawn.episodes, pick, self._reward)
            drawn = replace(drawn, expected=played.by_choice)
        return drawn

    def _block_of(self, number: int) -> Windows:
        """Return the windows of a block; one without a choice is replaced by another of it.

        Raises:
            TraceError: nobody can be picked in any window.
        """
        simulator, rows = self._simulator, np.arange(BLOCK)
        for attempt in range(_DRAWS):
            rng = stream(self._seed, 8, self._part, number, attempt)
            episodes = self._scenario.draw(BLOCK, rng)
            simulator.reset(episodes, rows)
            good = np.flatnonzero(~simulator.done[rows])
            if good.size:
                which = np.where(simulator.done[rows], rng.choice(good, BLOCK), rows)
                return Windows(
                    episodes.take(which),
                    rng.random((BLOCK, simulator.n)),
                    np.zeros((BLOCK, self._scenario.settings.choices)),
                )
        raise TraceError(
            f"no device may be picked in any of {_DRAWS * BLOCK} windows: expected traces with "
            "devices that come online in them"
        )


def turned(order: Array, turn: Index) -> Array:
    """Return an order as it is at a choice: turned, so that another device comes first.

    Args:
        order: of devices, in [0, 1); shape (m, n).
        turn: number of the choice; shape (m,).
    """
    return np.mod(order + _TURN * turn[:, None], 1.0)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ClosedRounds:
    """The rounds of one step."""

    rows: Index
    """Their episodes, those that were not over; shape (m,)."""
    terms: dict[str, Array]
    """Terms of their rewards, and counts of their jobs, each of shape (m,)."""
    ended: Mask
    """Whether the episode is over now; shape (m,)."""


class Rounds:
    """The state of b episodes between choices.

    Args:
        scenario: where episodes take place.
        b: episodes at a time.
        rollouts: episodes in a row that play the same window; b is a multiple of it.
        n_max: candidates that are shown; of more, so many are shown at random.
        reward: prices; the defaults if None.
        baseline: whether to subtract what the heuristic earns.
        action: what an action is.

    Raises:
        ConfigError: a number of episodes or candidates is no integer >= 1, b is no multiple, or
            there is no such kind of action.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        b: int,
        rollouts: int = 1,
        n_max: int,
        reward: Reward | None,
        baseline: bool,
        action: Action,
    ) -> None:
        for name, value in (("num_envs", b), ("n_max", n_max), ("rollouts", rollouts)):
            if not is_count(value):
                raise ConfigError(f"{name} = {value!r}: expected an integer >= 1")
        if b % rollouts:
            raise ConfigError(f"num_envs = {b}: expected a multiple of rollouts = {rollouts}")
        if action not in get_args(Action):
            raise ConfigError(f"action = {action!r}: expected one of {', '.join(get_args(Action))}")
        self.b, self.n_max = b, n_max
        self.reward = reward or Reward()
        self.simulator = scenario.simulator(b)
        ahead = b // rollouts
        if baseline:
            ahead = max(ahead, min(_AHEAD, _DEVICES_AHEAD // self.simulator.n))
        self.windows = WindowList(scenario, ahead=ahead, reward=self.reward, baseline=baseline)
        self._rollouts, self._baseline, self._by_scores = rollouts, baseline, action == "scores"
        self._expected = np.zeros((b, scenario.settings.choices))
        self._order = np.zeros((b, self.simulator.n))
        self._columns = np.zeros((b, n_max), dtype=np.int64)
        self.window = np.zeros(b, dtype=np.int64)
        """Number of the window that each episode plays; shape (b,)."""
        self.observation: Observation = {
            "features": np.zeros((b, n_max, N_FEATURES), dtype=np.float32),
            "context": np.zeros((b, N_CONTEXT), dtype=np.float32),
            "heuristic": np.zeros((b, n_max), dtype=np.float32),
            "mask": np.zeros((b, n_max), dtype=np.float32),
            "slots": np.zeros((b, 1), dtype=np.float32),
            "clock": np.ones((b, 1), dtype=np.float32),
        }
        """The current observation; the same arrays are written again at the next choice."""

    def renew(self, rows: Index) -> None:
        """Begin the next windows in some episodes, a multiple of `rollouts`; shape (m,)."""
        n, first = rows.size // self._rollouts, self.windows.next
        each = np.repeat(np.arange(n), self._rollouts)
        windows = taken(self.windows.take(n), each)
        self.simulator.reset(windows.episodes, rows)
        self._order[rows], self._expected[rows] = windows.order, windows.expected
        self.window[rows] = first + each

    def show(self, rows: Index) -> None:
        """Show the next choice of some episodes; of one that is over, zeros; shape (m,)."""
        simulator = self.simulator
        for values in self.observation.values():
            values[rows] = 0
        self.observation["clock"][rows, 0] = simulator.clock[rows]
        rows = rows[~simulator.done[rows]]
        if not rows.size:
            return
        mask = simulator.mask[rows]
        # Most devices are offline or busy at most times: only candidates are looked at.
        width = min(int(mask.sum(axis=1).max()), self.n_max)
        keys = np.where(mask, turned(self._order[rows], simulator.n_choices[rows]), 2.0)
        columns = keys.argsort(axis=1)[:, :width]
        shown = mask[np.arange(rows.size)[:, None], columns]
        features, context, heuristic = simulator.observation(rows, columns)
        self._columns[rows, :width] = columns
        self.observation["features"][rows, :width] = features
        self.observation["context"][rows] = context
        self.observation["heuristic"][rows, :width] = heuristic
        self.observation["mask"][rows, :width] = shown
        self.observation["slots"][rows, 0] = np.minimum(simulator.slots[rows], shown.sum(axis=1))

    def play(self, actions: npt.NDArray[Any]) -> ClosedRounds:
        """Play one choice of each episode that is not over.

        Args:
            actions: scores of the places, of which the highest that may be picked are; or places in
                falling order of preference, of which the first `slots` that may be picked are, and
                others and repeated ones are ignored; shape (b, n_max).
        """
        simulator = self.simulator
        rows = np.flatnonzero(~simulator.done)
        if not rows.size:
            return ClosedRounds(rows=rows, terms={}, ended=np.zeros(0, dtype=bool))
        turn = simulator.n_choices[rows].copy()
        simulator.dispatch(rows, self._picked(rows, actions[rows]))
        outcome = simulator.advance(rows)
        terms = simulator.reward_terms(rows, outcome, self.reward)
        ended = simulator.done[rows]
        if self._baseline:
            # The heuristic may have had more choices in its window.
            later = np.arange(self._expected.shape[1]) > turn[:, None]
            rest = (self._expected[rows] * later).sum(axis=1)
            terms["baseline"] = -(self._expected[rows, turn] + np.where(ended, rest, 0.0))
            terms["reward"] = terms["reward"] + terms["baseline"]
        for name in ("progress", "time_s", "wasted_s", "sent", "aggregated", "failed", "discarded"):
            terms[name] = getattr(outcome, name)
        return ClosedRounds(rows=rows, terms=terms, ended=ended)

    def _picked(self, rows: Index, actions: npt.NDArray[Any]) -> Mask:
        """Return the devices that actions pick; shape (m, n)."""
        scores, allowed = actions, self.observation["mask"][rows] > 0
        if not self._by_scores:
            worst = actions.shape[1]
            rank = np.full((rows.size, self.n_max), worst)
            # Of equal indices the last one written holds: the best rank.
            each = np.broadcast_to(np.arange(worst)[::-1], actions.shape)
            np.put_along_axis(rank, actions[:, ::-1], each, axis=1)
            scores, allowed = -rank, allowed & (rank < worst)
        best = top(scores.astype(np.float64), allowed, self.observation["slots"][rows, 0])
        picked = np.zeros((rows.size, self.simulator.n), dtype=bool)
        row, place = np.nonzero(best)
        picked[row, self._columns[rows[row], place]] = True
        return picked


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Rollout:
    """Episodes that were played to their end."""

    terms: dict[str, Array]
    """`TERMS`, summed over each episode; shape (b,) each."""
    outcome: RoundOutcome
    """Sums over the choices of each episode."""
    by_choice: Array
    """Reward from each choice to the next, 0 after the last; shape (b, most choices)."""

    __repr__ = outline


def rollout(simulator: Simulator, episodes: Episodes, pick: Pick, reward: Reward) -> Rollout:
    """Play every episode to its end.

    Args:
        simulator: with room for all episodes at a time.
        episodes: to play.
        pick: picks the devices of a choice; see `picks_of` and `training_picks_of`.
        reward: prices.
    """
    rows = np.arange(len(episodes))
    simulator.done[rows.size :] = True
    simulator.reset(episodes, rows)
    played = Rollout(
        terms={name: np.zeros(rows.size) for name in TERMS},
        outcome=RoundOutcome.zeros(rows.size),
        by_choice=np.zeros((rows.size, CHOICES * int(episodes.rounds.max(initial=1)))),
    )
    live = rows[~simulator.done[rows]]
    while live.size:
        turn = simulator.n_choices[live].copy()
        simulator.dispatch(live, pick(live))
        outcome = simulator.advance(live)
        terms = simulator.reward_terms(live, outcome, reward)
        played.outcome.add(live, outcome)
        for name, values in played.terms.items():
            values[live] += terms[name]
        played.by_choice[live, turn] = terms["reward"]
        live = rows[~simulator.done[rows]]
    return played


def picks_of(simulator: Simulator, policy: Policy, n: int, seed: np.random.SeedSequence) -> Pick:
    """Return the picks of a policy, as a server would make them.

    Args:
        simulator: the episodes.
        policy: a `Selector`, of which each episode gets a copy, or a `Score`, which is given the
            candidates of all episodes together.
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
            scores: Floats = drawn(simulator.heuristic(rows), rngs[-1])
        else:
            found = score(simulator.observation(rows), mask, rngs[-1])
            scores = np.asarray(found, dtype=np.float64)
        # Chance breaks ties; scores that are no number come last.
        scores = np.nan_to_num(scores, nan=-1e9) + 1e-6 * rngs[-1].random(scores.shape)
        return top(scores, mask, simulator.slots[rows])

    return by_score


def training_picks_of(simulator: Simulator, score: Score, rng: np.random.Generator) -> Pick:
    """Return the picks of a `Score`, computed fast; ties fall to the first device.

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
            given = simulator.observation(rows[some], packed)
            best = top(score(given, inside, rng), inside, slots[some])
            row = np.broadcast_to(some[:, None], packed.shape)
            picked[row[best], packed[best]] = True
        return picked

    return pick


def top(scores: Floats, mask: Mask, k: Index | Floats) -> Mask:
    """Mark the k highest scores of each row.

    Args:
        scores: shape (m, n).
        mask: which may be picked; shape (m, n).
        k: how many; shape (m,).

    Example:
        >>> top(np.array([[0.1, 0.5, 0.9]]), np.array([[True, True, False]]), np.array([1]))
        array([[False,  True, False]])
    """
    order = np.where(mask, -scores, np.inf).argsort(axis=1, kind="stable")
    picked = np.zeros(mask.shape, dtype=bool)
    picked[np.arange(len(mask))[:, None], order] = np.arange(mask.shape[1]) < k[:, None]
    return picked & mask
