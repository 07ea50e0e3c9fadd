"""Windows that are each played by a scorer of its own: how a population of agents is judged."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.agents.env.episodes import Episodes
from fedstale.agents.env.simulator import Reward, World
from fedstale.agents.play import TERMS, top
from fedstale.agents.policy.features import N_CONTEXT, N_FEATURES, Single
from fedstale.agents.policy.scorer import Weights, score, unflat
from fedstale.traces.arrays import Array, Index, Mask

Floats = npt.NDArray[np.floating[Any]]
RowScore = Callable[[Index, Single, Single, Single, Mask], Floats]
"""From rows (m,), features (m, c, f), context (m, g), prior (m, c), mask (m, c) to scores."""

# Windows are scored in so many groups, by their number of candidates.
_GROUPS = 6


def rewards(world: World, episodes: Episodes, by: RowScore, reward: Reward) -> dict[str, Array]:
    """Return the terms of the reward of windows; equal scores fall to the first device.

    Args:
        world: with room for all windows at a time.
        episodes: windows.
        by: scores the candidates, and is told which windows they belong to.
        reward: prices.

    Returns:
        "reward" and its terms, summed over each window; arrays of shape (b,).
    """
    rows = np.arange(len(episodes))
    world.done[rows.size :] = True
    world.reset(episodes, rows)
    total = {name: np.zeros(rows.size) for name in TERMS}
    live = rows[~world.done[rows]]
    while live.size:
        world.dispatch(live, _picked(world, live, by))
        made = world.advance(live)
        paid = reward.terms(made, world.usual_s[live], world.buffer_size[live])
        for name, values in total.items():
            values[live] += paid[name]
        live = rows[~world.done[rows]]
    return total


def _picked(world: World, live: Index, by: RowScore) -> Mask:
    """Return who is picked; shape (m, n).

    Most devices are away or at work at most times, so candidates are moved together first, and
    windows with about as many of them are scored together.
    """
    mask, slots = world.mask[live], world.slots[live]
    count = mask.sum(axis=1)
    columns = np.argsort(~mask, axis=1, kind="stable")
    picked = np.zeros(mask.shape, dtype=np.bool_)
    for some in np.array_split(np.argsort(count, kind="stable"), _GROUPS):
        if not some.size:
            continue
        packed = columns[some, : max(int(count[some].max()), 1)]
        inside = np.take_along_axis(mask[some], packed, axis=1)
        seen = world.observed(live[some], packed)
        best = top(by(live[some], *seen, inside), inside, slots[some])
        rows = np.broadcast_to(some[:, None], packed.shape)
        picked[rows[best], packed[best]] = True
    return picked


def by_agent(weights: Weights) -> RowScore:
    """Return the scores of one agent."""

    def scores(rows: Index, features: Single, context: Single, prior: Single, mask: Mask) -> Floats:
        del rows
        return score(weights, features, context, prior, mask)

    return scores


def by_population(vectors: Floats, each: int) -> RowScore:
    """Return the scores of many agents, each of which plays some windows in a row.

    Args:
        vectors: flat weights of the agents; shape (agents, d).
        each: windows of an agent.
    """

    def scores(rows: Index, features: Single, context: Single, prior: Single, mask: Mask) -> Floats:
        weights = unflat(vectors[rows // each], N_FEATURES, N_CONTEXT)
        return score(weights, features, context, prior, mask)

    return scores
