"""Whole episodes, played by a policy: a selector, or a scoring function.

A choice is as many picks as the server has free slots; a policy makes all picks of a choice at
once, as a server does.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fedstale.agents.env.episodes import CHOICES, Episodes
from fedstale.agents.env.simulator import Reward, RoundOutcome, Simulator
from fedstale.agents.policy import Floats, Score, by_heuristic, drawn
from fedstale.strategies.selection import Selector
from fedstale.traces import Array, Index, Mask, outline

Policy: TypeAlias = Selector | Score
Pick: TypeAlias = Callable[[Index], Mask]
"""From episodes (m,) to the devices that are picked; shape (m, n)."""

TERMS = ("reward", "gain", "time", "waste")
"""Terms of the reward that a rollout has, each summed over an episode."""

# For training, episodes are scored in so many groups, by their number of candidates.
_GROUPS = 6


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
