"""Oort: exploit the nodes whose updates are useful and fast, explore the others.

Reference:
    Lai et al. Oort: Efficient Federated Learning via Guided Participant Selection. OSDI 2021.
"""

from collections import deque
from dataclasses import dataclass
from math import inf, log

import numpy as np

from fedstale.strategies.selection.base import Selector
from fedstale.strategies.types import (
    Candidates,
    Count,
    Floats,
    Index,
    NotNegative,
    PositiveShare,
    Share,
    check_fields,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OortSettings:
    """The constants of Oort; the defaults are the paper's."""

    exploration: Share = 0.9
    """Share of nodes to explore at first, in [0, 1]."""
    exploration_decay: Share = 0.98
    """What that share is multiplied by in each round."""
    exploration_least: Share = 0.2
    """Where that share stops falling."""
    penalty: NotNegative = 2.0
    """alpha, the exponent of the penalty on slow nodes, >= 0."""
    cutoff: Share = 0.95
    """c: nodes with at least this share of the last exploited node's utility may be drawn."""
    clip: PositiveShare = 0.95
    """Utilities above that of this share of the nodes are cut to it, in (0, 1]."""
    pacer_window: Count = 20
    """W, rounds between looks at the preferred duration, >= 1."""
    first_percentile: PositiveShare = 0.1
    """Share of known nodes that meet the first preferred duration T, in (0, 1]."""
    pacer_step: PositiveShare = 0.1
    """How much that share grows when the utility gained falls; at 1 no node is slow."""

    def __post_init__(self) -> None:
        check_fields(self)


PAPER = OortSettings()
RELEASED = OortSettings(
    exploration_least=0.3, clip=0.9, first_percentile=0.3, pacer_step=0.05, cutoff=0.05
)
"""The defaults of the authors' FedScale, as far as they have a counterpart here.

Its cut-off is 0.05 although its comment says 95%, so nearly every node may be drawn. The authors'
Oort repository has had other defaults: a least share of 0.2, clip 0.95 and 0.98, T at 10% or no
node slow, steps of 5% and 10%, a cut-off of 0.7, a decay of 0.95 and 0.98.
"""


class Oort(Selector):
    """Draws exploited nodes by utility, and explored nodes by speed where it is known.

    The utility of a node that has been tried is

        U = |B| sqrt(mean of squared losses), clipped, less the least, over the range unclipped,
            + sqrt(0.1 log R / L),                      how long ago it was last heard,
            x (T / t)^alpha if its duration t exceeds the preferred duration T,

    with R the number of the round and L the one in which the node was last picked. Of k picks the
    share of exploration goes to nodes that were never picked; what rounding takes from one
    selection it gives to the next, so that the share holds where one slot is free at a time. It
    falls from round to round. A node within c of the utility of the last exploited node may be
    drawn, with a probability in proportion to its utility.

    A round lasts from one server step to the next, or until none of its jobs is in flight: all
    selections at one version of the model that top up jobs belong to it. So the pacer compares the
    utility of W rounds, of all that was exploited in them, however many selections they had.

    A node that was picked has been explored, also if it failed or its job was cancelled. Until it
    answers, its utility is the mean of those that have.

    Differences from the paper:
        T is the duration that a share of the known nodes meets, as in the released code, and grows
        by a step of the share when the utility picked in the last W rounds is below that of the W
        before. The utility picked is what was known of a node then.
        A device is explored with the same probability whatever its speed, if that is unknown.
        Utilities are scaled to [0, 1] before the other terms, as in the released code.
        No node is left out after having been picked often.

    Differences from the released code:
        Its pacer takes a step when the mean utility of the last W rounds is within a tenth of that
        of the W before, and a step back when they differ fivefold; ours goes by the paper.
        L is there the round of the last answer, here that of the last pick. Its least utility is
        scaled by 0.999, and its cut-off goes by the first node not exploited.
        It gives a node that fails the mean utility of the round, also if it had one of its own.
        It explores among the five times as many nodes of the largest size and speed; FedScale's
        draws from at least ten times as many nodes as are exploited, whatever the cut-off.
    """

    saved = (
        *("_round", "_version", "_picked_at", "_share", "_owed"),
        *("_percentile", "_gained", "_gained_now"),
    )

    def __init__(self, settings: OortSettings = PAPER) -> None:
        """Use the paper's constants, or `RELEASED`."""
        self.settings = settings
        self._round = self._version = 0
        self._picked_at: dict[int, int] = {}
        self._share = settings.exploration
        self._owed = 0.0
        """Picks that rounding has taken from exploration so far, in [-0.5, 0.5]."""
        self._percentile = settings.first_percentile
        window = settings.pacer_window
        self._gained: deque[float] = deque(maxlen=2 * window)
        """Utility exploited in each of the last rounds, without the current one."""
        self._gained_now = 0.0

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Exploit, then explore; what one lacks in candidates the other fills."""
        context = candidates.context
        if not self._round or context.begins_round(self._version):
            self._begin_round(context.version)
        tried = candidates.times_picked + candidates.times_finished + candidates.times_failed > 0
        tried |= ~np.isnan(candidates.utility)
        known, unknown = candidates.take(tried), candidates.take(~tried)
        k = min(k, len(candidates))
        n_explore = self._n_explored(k, len(known), len(unknown))
        exploited = self._exploit(known, k - n_explore, rng)
        self._gained_now += float(_statistical(known)[exploited].sum())
        with np.errstate(divide="ignore"):
            speeds = 1.0 / unknown.forecast_duration_s
        explored = _draw(np.where(np.isinf(speeds), np.nan, speeds), n_explore, rng)
        both = (*known.node_ids[exploited], *unknown.node_ids[explored])
        chosen = [int(node) for node in both]
        self._picked_at.update(dict.fromkeys(chosen, self._round))
        return chosen

    def _begin_round(self, version: int) -> None:
        if self._round:
            self._gained.append(self._gained_now)
            self._pace()
        self._round += 1
        self._version, self._gained_now = version, 0.0
        falling = self._share * self.settings.exploration_decay
        self._share = max(falling, self.settings.exploration_least)

    def _n_explored(self, k: int, n_known: int, n_unknown: int) -> int:
        owed = self._owed + k * self._share
        n = min(n_unknown, max(round(owed), k - n_known))
        self._owed = min(max(owed - n, -0.5), 0.5)
        return n

    def _exploit(self, known: Candidates, k: int, rng: np.random.Generator) -> Index:
        if not k:
            return np.zeros(0, dtype=np.int64)
        utilities = self.utilities(known)
        order = np.argsort(-utilities, kind="stable")
        least = self.settings.cutoff * utilities[order[k - 1]]
        pool = order[(np.arange(order.size) < k) | (utilities[order] >= least)]
        return pool[_draw(utilities[pool], k, rng)]

    def utilities(self, known: Candidates) -> Floats:
        """Return the utility of candidates that have been tried; see the class."""
        statistical = _statistical(known)
        least, spread = statistical.min(), np.ptp(statistical)
        clipped = np.minimum(statistical, _at_share(statistical, self.settings.clip))
        scaled = (clipped - least) / spread if spread > 0 else statistical * 0
        last = [self._picked_at.get(node, self._round) for node in known.node_ids.tolist()]
        scaled += np.sqrt(0.1 * log(max(self._round, 1)) / np.maximum(last, 1))
        slow = known.duration_s > (preferred := self._preferred_duration(known))
        scaled[slow] *= (preferred / known.duration_s[slow]) ** self.settings.penalty
        return scaled

    def _preferred_duration(self, known: Candidates) -> float:
        durations = known.duration_s[~np.isnan(known.duration_s)]
        if self._percentile >= 1.0 or not durations.size:
            return inf
        return _at_share(durations, self._percentile)

    def _pace(self) -> None:
        """Admit slower nodes if the last W rounds gained less than the W before."""
        window = self.settings.pacer_window
        if self._round % window or len(self._gained) < 2 * window:
            return
        gained = list(self._gained)
        if sum(gained[:window]) > sum(gained[window:]):
            self._percentile = min(1.0, self._percentile + self.settings.pacer_step)


def _statistical(known: Candidates) -> Floats:
    """Return the statistical utilities, with their mean for nodes that have none yet."""
    utilities = known.utility
    missing = np.isnan(utilities)
    mean = utilities[~missing].mean() if not missing.all() else 0.0
    return np.where(missing, mean, utilities)


def _at_share(values: Floats, share: float) -> float:
    """Return the value at a share of their order, in (0, 1]; the largest at 1.

    Example:
        >>> _at_share(np.array([4.0, 1.0, 8.0, 2.0]), 0.5)
        4.0
    """
    return float(np.sort(values)[min(int(values.size * share), values.size - 1)])


def _draw(shares: Floats, k: int, rng: np.random.Generator) -> Index:
    """Draw k distinct positions, with chances in proportion; unknown shares count as the mean."""
    if not k:
        return np.zeros(0, dtype=np.int64)
    known = shares[~np.isnan(shares)]
    shares = np.where(np.isnan(shares), known.mean() if known.size else 1.0, shares)
    # No share is 0, or fewer than k could be drawn.
    shares = np.maximum(shares, 1e-9 * max(float(shares.max()), 1e-9))
    return rng.choice(shares.size, size=k, replace=False, p=shares / shares.sum())
