"""Oort: exploit the nodes whose updates are useful and fast, explore the others.

Reference:
    Lai et al. Oort: Efficient Federated Learning via Guided Participant Selection. OSDI 2021.
"""

from collections import deque
from dataclasses import dataclass
from math import inf, log

import numpy as np

from fedstale.strategies.selection.base import Selector
from fedstale.strategies.server.clients import Candidates, Floats
from fedstale.strategies.server.node_set import Index
from fedstale.strategies.settings import require


@dataclass(frozen=True, slots=True, kw_only=True)
class OortSettings:
    """The constants of Oort; the defaults are the paper's."""

    exploration: float = 0.9
    """Share of nodes to explore at first, in [0, 1]."""
    exploration_decay: float = 0.98
    """What that share is multiplied by at each selection."""
    exploration_least: float = 0.2
    """Where that share stops falling."""
    penalty: float = 2.0
    """alpha, the exponent of the penalty on slow nodes, >= 0."""
    cutoff: float = 0.95
    """c: nodes with at least this share of the last exploited node's utility may be drawn."""
    clip: float = 0.95
    """Utilities above this quantile are cut to it, in (0, 1]."""
    pacer_window: int = 20
    """W, selections between looks at the preferred duration, >= 1."""
    first_percentile: float = 0.1
    """Share of known nodes that meet the first preferred duration T, in (0, 1]."""
    pacer_step: float = 0.1
    """How much that share grows when the utility gained falls; at 1 no node is slow."""

    def __post_init__(self) -> None:
        for name in ("exploration", "exploration_decay", "exploration_least", "cutoff"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"selector.{name}", value, "a number in [0, 1]")
        for name in ("clip", "first_percentile", "pacer_step"):
            value = getattr(self, name)
            require(0 < value <= 1, f"selector.{name}", value, "a number in (0, 1]")
        require(self.penalty >= 0, "selector.penalty", self.penalty, "a number >= 0")
        require(self.pacer_window >= 1, "selector.pacer_window", self.pacer_window, ">= 1")


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

    The utility of a node that has answered is

        U = |B| sqrt(mean of squared losses), clipped and scaled to [0, 1] over the candidates,
            + sqrt(0.1 log R / L),                      how long ago it was last heard,
            x (T / t)^alpha if its duration t exceeds the preferred duration T,

    with R the number of selections and L the one after which the node was last picked. The share of
    exploration falls from selection to selection; a node within c of the utility of the last
    exploited node may be drawn, with a probability in proportion to its utility.

    Differences from the paper:
        T is a quantile of the known durations, as in the released code, and grows by a step of the
        quantile when the utility picked in the last W selections is below that of the W before.
        A device is explored with the same probability whatever its speed, if that is unknown.
        Utilities are scaled to [0, 1] before the other terms, as in the released code.

    Differences from the released code:
        Its pacer takes a step when the mean utility of the last W selections is within a tenth of
        that of the W before, and a step back when they differ fivefold; ours goes by the paper.
        L is there the round of the last answer, here that of the last pick. Its least utility is
        scaled by 0.999, and its cut-off goes by the first node not exploited.
        It explores among the five times as many nodes of the largest size and speed; FedScale's
        draws from at least ten times as many nodes as are exploited, whatever the cut-off.
    """

    saved = ("_round", "_picked_at", "_share", "_percentile", "_gained")

    def __init__(self, settings: OortSettings = PAPER) -> None:
        """Use the paper's constants, or `RELEASED`."""
        self.settings = settings
        self._round = 0
        self._picked_at: dict[int, int] = {}
        self._share = settings.exploration
        self._percentile = settings.first_percentile
        window = settings.pacer_window
        self._gained: deque[float] = deque(maxlen=2 * window)

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Exploit, then explore; what one lacks in candidates the other fills."""
        self._round += 1
        self._share = max(
            self._share * self.settings.exploration_decay, self.settings.exploration_least
        )
        answered = ~np.isnan(candidates.utility)
        known, unknown = candidates.take(answered), candidates.take(~answered)
        k = min(k, len(candidates))
        n_explore = min(len(unknown), max(round(k * self._share), k - len(known)))
        exploited = known.take(self._exploit(known, k - n_explore, rng))
        with np.errstate(divide="ignore"):
            speeds = 1.0 / unknown.forecast_duration_s
        explored = unknown.take(_draw(np.where(np.isinf(speeds), np.nan, speeds), n_explore, rng))
        chosen = [int(node) for node in (*exploited.node_ids, *explored.node_ids)]
        self._picked_at.update(dict.fromkeys(chosen, self._round))
        self._gained.append(float(exploited.utility.sum()))
        self._pace()
        return chosen

    def _exploit(self, known: Candidates, k: int, rng: np.random.Generator) -> Index:
        if not k:
            return np.zeros(0, dtype=np.int64)
        utilities = self.utilities(known)
        order = np.argsort(-utilities, kind="stable")
        least = self.settings.cutoff * utilities[order[k - 1]]
        pool = order[(np.arange(order.size) < k) | (utilities[order] >= least)]
        return pool[_draw(utilities[pool], k, rng)]

    def utilities(self, known: Candidates) -> Floats:
        """Return the utility of candidates that have answered; see the class."""
        statistical = known.utility
        least, most = statistical.min(), np.quantile(statistical, self.settings.clip)
        spread = most - least
        scaled = (np.minimum(statistical, most) - least) / spread if spread > 0 else statistical * 0
        last = [self._picked_at.get(node, self._round) for node in known.node_ids.tolist()]
        scaled += np.sqrt(0.1 * log(max(self._round, 1)) / np.maximum(last, 1))
        slow = known.duration_s > (preferred := self._preferred_duration(known))
        scaled[slow] *= (preferred / known.duration_s[slow]) ** self.settings.penalty
        return scaled

    def _preferred_duration(self, known: Candidates) -> float:
        durations = known.duration_s[~np.isnan(known.duration_s)]
        if self._percentile >= 1.0 or not durations.size:
            return inf
        return float(np.quantile(durations, self._percentile))

    def _pace(self) -> None:
        window = self.settings.pacer_window
        if self._round % window or len(self._gained) < 2 * window:
            return
        gained = list(self._gained)
        if sum(gained[:window]) > sum(gained[window:]):
            self._percentile = min(1.0, self._percentile + self.settings.pacer_step)


def _draw(shares: Floats, k: int, rng: np.random.Generator) -> Index:
    """Draw k distinct positions, with chances in proportion; unknown shares count as the mean."""
    if not k:
        return np.zeros(0, dtype=np.int64)
    known = shares[~np.isnan(shares)]
    shares = np.where(np.isnan(shares), known.mean() if known.size else 1.0, shares)
    # No share is 0, or fewer than k could be drawn.
    shares = np.maximum(shares, 1e-9 * max(float(shares.max()), 1e-9))
    return rng.choice(shares.size, size=k, replace=False, p=shares / shares.sum())
