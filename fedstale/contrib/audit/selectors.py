"""Credits under which it is best for a device to state its chance to finish as it is.

The selection is an auction for k places in which a device bids a chance. The price of a place is
what the best device without one would have brought, and a device that is picked is credited what
its job brings if it finishes: then the expected profit is that of Vickrey's auction, and a report
decides only whether there is one. No strategy uses it unless it is passed as its selector.

Reference:
    Vickrey. Counterspeculation, Auctions, and Competitive Sealed Tenders. Journal of Finance 16(1),
    1961 (multiple units, one to each bidder).
    Porter, Ronen, Shoham, Tennenholtz. Fault Tolerant Mechanism Design. Artificial Intelligence
    172(15), 2008 (chances to finish, paid for when tasks have ended).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedstale.errors import ConfigError
from fedstale.strategies.selection import Selector
from fedstale.strategies.types import Candidates, Finite, Floats, NotNegative, Share

Worth = NotNegative | Callable[[Candidates], npt.ArrayLike]
Values = Finite | Callable[[Candidates], npt.ArrayLike]
"""A number for all candidates, or what returns one for each; shape (n,)."""


class _Place(NamedTuple):
    """What is owed for a job that is out."""

    utility: float
    price: float
    finished: int
    failed: int
    """Jobs of the node that had ended so when it was picked."""


class Credits(Selector):
    """Picks the k largest p u - c, with p as a device states it, and keeps what is owed to each.

    u is what a finished job is worth and c what a job costs its device, in the same unit; the
    server knows both, and no device states them. A picked device is credited u - t if it finishes
    and -t if not, with t the largest p u - c among those that were not picked, 0 if all were. Its
    expected profit, credit less cost, is then p u - c - t with its true p: at least 0 exactly if it
    should have been picked, and its report changes nothing of it.

    That holds for each selection alone, whatever the others report, for a device that neither
    changes u, c or n by what it does nor acts together with others. It does not hold over several
    selections (a device may wait for a cheaper place), where stragglers are cancelled (such a job
    is neither credited nor charged), where u is made of stated losses or examples, or for a
    selector that corrects p by a record, such as the agent.

    A device that states nothing has the share of its jobs that finished for p.

    Example:
        >>> rule = Credits(utility=10.0, cost=1.0)
        >>> nodes = Candidates.of([7, 8, 9], forecast_p_finish=[0.9, 0.5, 0.2])
        >>> rule.select(nodes, 1, 0.0, np.random.default_rng(0))
        [7]
        >>> rule.settle(Candidates.of([7], times_finished=[1]))
        >>> rule.balance
        {7: 6.0}
    """

    saved = ("balance", "_open")

    def __init__(self, utility: Worth, cost: Values = 0.0) -> None:
        """Set u >= 0 and c, each finite."""
        self.utility, self.cost = utility, cost
        self.balance: dict[int, float] = {}
        """Credits of each node for its jobs that have ended, by its id."""
        self._open: dict[int, tuple[float, float, int, int]] = {}

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Settle what has ended, and pick; ties are broken by chance.

        Raises:
            ConfigError: u or c of a candidate is not what it must be.
        """
        self.settle(candidates)
        utility, cost = self._values(candidates, "utility"), self._values(candidates, "cost")
        stated = candidates.forecast_p_finish
        p = np.where(np.isnan(stated), candidates.share_finished, stated)
        scores = p * utility - cost
        order = np.lexsort((rng.random(len(candidates)), -scores))
        price = float(scores[order[k]]) if k < len(candidates) else 0.0
        chosen: list[int] = candidates.node_ids[order[:k]].tolist()
        for i, node in zip(order[:k].tolist(), chosen, strict=True):
            ended = int(candidates.times_finished[i]), int(candidates.times_failed[i])
            self._open[node] = _Place(float(utility[i]), price, *ended)
        return chosen

    def settle(self, candidates: Candidates) -> None:
        """Credit the nodes among some whose job has ended; one that was cancelled is dropped."""
        if not self._open:
            return
        picked = np.isin(candidates.node_ids, np.fromiter(self._open, dtype=np.uint64))
        for i in np.flatnonzero(picked).tolist():
            node = int(candidates.node_ids[i])
            place = _Place(*self._open.pop(node))
            has_finished = int(candidates.times_finished[i]) > place.finished
            if has_finished or int(candidates.times_failed[i]) > place.failed:
                credit = place.utility * has_finished - place.price
                self.balance[node] = self.balance.get(node, 0.0) + credit

    def _values(self, candidates: Candidates, name: str) -> Floats:
        given: Values = getattr(self, name)
        values = np.asarray(given(candidates) if callable(given) else given, dtype=np.float64)
        if values.shape not in {(), (len(candidates),)}:
            raise ConfigError(
                f"selector.{name} has the shape {values.shape}: expected a number for each of "
                f"{len(candidates)} candidates"
            )
        least, accepted = (0.0, " >= 0") if name == "utility" else (-np.inf, "")
        values = np.broadcast_to(values, len(candidates))
        if (wrong := values[~(np.isfinite(values) & (values >= least))]).size:
            raise ConfigError(
                f"selector.{name} = {wrong[0]}: expected a finite number{accepted} for each "
                "candidate"
            )
        return values


class Probing(Selector):
    """Gives a share of the picks to nodes with a better record than they state.

    Who states a low chance is picked by no rule that goes by chances, so nobody would ever find out
    that it keeps more. A probe is drawn with a probability in proportion to the share of its jobs
    that a node has finished, less the chance that it states, where that is positive; a node without
    a record has the share 1/2. All other picks, and those that no such node is there for, are the
    other selector's. What rounding takes from probes is carried over.

    Example:
        >>> from fedstale.strategies.selection import MostReliable
        >>> modest = Candidates.of([7, 8], forecast_p_finish=[0.9, 0.0])
        >>> Probing(MostReliable(), 1.0).select(modest, 1, 0.0, np.random.default_rng(0))
        [8]
    """

    saved = ("selector", "_owed")

    def __init__(self, selector: Selector, share: Share = 0.05) -> None:
        """Set the selector of the other picks, and the share of probes in [0, 1]."""
        self.selector, self.share = selector, share
        self._owed = 0.0
        """Probes that rounding has taken so far, in [-0.5, 0.5]."""

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Probe, then pick."""
        k = min(k, len(candidates))
        better_by = np.fmax(candidates.share_finished - candidates.forecast_p_finish, 0.0)
        owed = self._owed + k * self.share
        n = min(round(owed), k, int((better_by > 0).sum()))
        self._owed = min(max(owed - n, -0.5), 0.5)
        if not n:
            return self.selector.select(candidates, k, now, rng)
        probed = rng.choice(len(candidates), size=n, replace=False, p=better_by / better_by.sum())
        is_left = np.ones(len(candidates), dtype=np.bool_)
        is_left[probed] = False
        probes: list[int] = candidates.take(probed).node_ids.tolist()
        if n == k:
            return probes
        return [*probes, *self.selector.select(candidates.take(is_left), k - n, now, rng)]
