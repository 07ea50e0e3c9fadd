"""Play whole episodes with a selector or a scoring function, and say what came of each.

A round is played at once: the selector picks as many as there are slots, as it would on a server.
A scoring function scores the candidates of all episodes together; a `Selector` is asked once for
each episode and round, by a copy of its own.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedstale.agents.env.episodes import Episodes, online_share
from fedstale.agents.env.simulator import Reward, Round, World
from fedstale.agents.policy.features import Single
from fedstale.strategies.selection import Selector
from fedstale.traces.arrays import Array, Index, Mask

Score = Callable[[Single, Single, Single, Mask], npt.NDArray[np.floating]]
"""From features (m, n, f), context (m, g), prior (m, n) and mask (m, n) to scores (m, n)."""

TERMS = ("reward", "gain", "time", "waste")
"""Terms of the reward that a table has, each summed over an episode."""


def heuristic(features: Single, context: Single, prior: Single, mask: Mask) -> Single:
    """Return the prior, which picks as `ExpectedUtility` does."""
    del features, context, mask
    return prior


def play(
    world: World,
    episodes: Episodes,
    policy: Selector | Score,
    *,
    seed: int = 0,
    reward: Reward | None = None,
) -> pd.DataFrame:
    """Play every episode to its end.

    Args:
        world: with room for the episodes; as many of them at a time as it holds.
        episodes: to play.
        policy: who picks.
        seed: of the selector's choices, and of ties between scores.
        reward: prices of time and waste; the defaults if None.

    Returns:
        One row for each episode: the terms of the reward; progress (fall of the log loss);
        valid_ratio (updates merged over jobs ended), wasted_s and spent_s (device-seconds), sent,
        merged, failed, forgotten, rounds, time_s; unique (devices with a merged update over
        devices), gini (of the number of jobs sent to each device), low_share (share of the merged
        updates from the third of the devices that is online least), staleness (mean of the merged).
    """
    tables = [
        _played(
            world, episodes.take(np.arange(i, min(i + world.b, len(episodes)))), policy, s, reward
        )
        for s, i in zip(
            _seeds(seed, len(episodes), world.b), range(0, len(episodes), world.b), strict=True
        )
    ]
    return pd.concat([table for table, _ in tables], ignore_index=True)


def rewards_by_round(
    world: World, episodes: Episodes, policy: Selector | Score, *, reward: Reward, seed: int = 0
) -> Array:
    """Return the reward of each round, 0 after the last; shape (b, most rounds).

    Args:
        world: with room for all episodes at a time.
        episodes: to play.
        policy: who picks.
        reward: prices.
        seed: of choices.
    """
    return _played(world, episodes, policy, np.random.SeedSequence(seed), reward)[1]


def _seeds(seed: int, n: int, at_a_time: int) -> list[np.random.SeedSequence]:
    return np.random.SeedSequence(seed, spawn_key=(43,)).spawn(-(-n // at_a_time))


def _played(
    world: World,
    episodes: Episodes,
    policy: Selector | Score,
    seed: np.random.SeedSequence,
    reward: Reward | None,
) -> tuple[pd.DataFrame, Array]:
    reward = reward or Reward()
    rows = np.arange(len(episodes))
    world.done[len(rows) :] = True
    world.reset(episodes, rows)
    rngs = [np.random.default_rng(s) for s in seed.spawn(rows.size + 1)]
    own = [deepcopy(policy) for _ in rows] if isinstance(policy, Selector) else []
    total = {f.name: np.zeros(rows.size) for f in fields(Round)}
    terms = {name: np.zeros(rows.size) for name in TERMS}
    by_round = np.zeros((rows.size, int(episodes.rounds.max(initial=1))))
    while True:
        live = rows[~world.done[rows]]
        if not live.size:
            break
        turn = world.n_rounds[live].copy()
        if isinstance(policy, Selector):
            picked = _asked(world, live, own, rngs)
        else:
            picked = top(
                _scores(world, live, policy, rngs[-1]), world.mask[live], world.slots[live]
            )
        world.dispatch(live, picked)
        made = world.advance(live)
        paid = reward.terms(made, world.usual_s[live], world.buffer_size[live])
        for name, values in total.items():
            values[live] += getattr(made, name)
        for name, values in terms.items():
            values[live] += paid[name]
        by_round[live, turn] = paid["reward"]
    return _table(world, rows, episodes, total, terms), by_round


def _scores(world: World, live: Index, policy: Score, rng: np.random.Generator) -> Array:
    if policy is heuristic:
        scores = world.priors(live)
    else:
        features, context, prior = world.observed(live)
        scores = np.asarray(policy(features, context, prior, world.mask[live]), dtype=np.float64)
    # Chance breaks ties; scores that are no number come last.
    return np.nan_to_num(scores, nan=-1e9) + 1e-6 * rng.random(scores.shape)


def _asked(world: World, live: Index, own: list[Selector], rngs: list[np.random.Generator]) -> Mask:
    picked, slots = np.zeros((live.size, world.n), dtype=bool), world.slots
    for i, row in enumerate(live):
        candidates = world.candidates(int(row))
        chosen = own[row].select(candidates, int(slots[row]), float(world.now[row]), rngs[row])
        picked[i, np.asarray(chosen, dtype=np.int64)] = True
    return picked


def top(scores: npt.NDArray[np.floating], mask: Mask, k: Index) -> Mask:
    """Return who is among the k highest scores of each row.

    Args:
        scores: shape (m, n).
        mask: who may be picked; shape (m, n).
        k: how many; shape (m,).

    Example:
        >>> top(np.array([[0.1, 0.5, 0.9]]), np.array([[True, True, False]]), np.array([1]))
        array([[False,  True, False]])
    """
    order = np.argsort(np.where(mask, -scores, np.inf), axis=1, kind="stable")
    picked = np.zeros(mask.shape, dtype=bool)
    np.put_along_axis(picked, order, np.arange(mask.shape[1]) < k[:, None], axis=1)
    return picked & mask


def _table(
    world: World,
    rows: Index,
    episodes: Episodes,
    total: dict[str, Array],
    terms: dict[str, Array],
) -> pd.DataFrame:
    present, known = world.present[rows], world.known
    sent = known["times_picked"][rows] * present
    finished = known["times_finished"][rows] * present
    n = present.sum(axis=1)
    online = online_share(
        world.traces, world.devices[rows], world.started[rows], world.end[rows], looks=100
    )
    share = np.where(present, online, np.inf)
    rank = np.argsort(np.argsort(share, axis=1, kind="stable"), axis=1, kind="stable")
    low = present & (rank < n[:, None] / 3.0)
    ended = total["merged"] + total["failed"] + total["forgotten"]
    with np.errstate(divide="ignore", invalid="ignore"):
        columns = {
            **terms,
            **{k: v for k, v in total.items() if k not in {*TERMS, "staleness"}},
            "rounds": world.n_rounds[rows],
            "valid_ratio": total["merged"] / ended,
            "unique": (finished > 0).sum(axis=1) / n,
            "gini": gini(sent, present),
            "low_share": np.where(low, finished, 0).sum(axis=1) / finished.sum(axis=1),
            "staleness": total["staleness"] / total["merged"],
            "devices": n,
            "concurrency": episodes.concurrency,
            "late": episodes.keeps,
            "asks": episodes.asks,
        }
    return pd.DataFrame(columns)


def gini(counts: npt.NDArray[np.int64], present: Mask) -> Array:
    """Return the Gini coefficient of counts over who is present: 0 is equal, near 1 is one for all.

    Args:
        counts: >= 0; shape (m, n).
        present: shape (m, n).

    Returns:
        Shape (m,); NaN where all counts are 0.

    Example:
        >>> gini(np.array([[1, 1, 0], [3, 0, 9]]), np.array([[True, True, False], [True] * 3]))
        array([0. , 0.5])
    """
    x = np.sort(np.where(present, counts, np.inf), axis=1)
    n = present.sum(axis=1)
    rank = np.arange(1, x.shape[1] + 1)
    inside = rank <= n[:, None]
    x = np.where(inside, x, 0.0)
    weights = np.where(inside, 2 * rank - n[:, None] - 1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((weights * x).sum(axis=1) / (n * x.sum(axis=1)))
