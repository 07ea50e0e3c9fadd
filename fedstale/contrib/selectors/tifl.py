"""TiFL: nodes of one speed at a time, slow and fast ones in turns.

Reference:
    Chai et al. TiFL: A Tier-based Federated Learning System. HPDC 2020.
"""

import numpy as np

from fedstale.strategies.selection import Selector, expected_duration_s
from fedstale.strategies.types import Candidates, Count, Floats, Index


class TiFL(Selector):
    """Draws a tier of equally fast nodes, and picks some of them by chance.

    A choice that begins with no job in flight, or at another version of the model, draws a tier;
    what fills up the same round is of the same tier. Each `interval` rounds the tiers get new
    chances if the tier that was drawn last has not got better since: the worse a tier is, the more
    often it is drawn. A tier without credits is drawn no more while another has some.

    Differences from the paper:
        Tiers are parts of the candidates of equal size, by forecast or observed duration, made
        anew at each choice; devices are not profiled beforehand. How well a tier does is the mean
        training loss of its nodes' last replies, and not the accuracy on their test data. A tier
        with too few candidates is filled up from those of the nearest speed.
    """

    saved = ("_round", "_version", "_tier", "_shares", "_credits", "_losses")

    def __init__(self, tiers: Count = 5, *, interval: Count = 20, credits: Count = 10**6) -> None:
        """Set the number of tiers, rounds between looks at them, and credits of each; all >= 1."""
        self.tiers, self.interval, self.credits = tiers, interval, credits
        self._round = self._version = self._tier = 0
        self._shares = np.full(tiers, 1.0 / tiers)
        self._credits = np.full(tiers, credits)
        self._losses = np.full(tiers, np.inf)
        """Mean losses of the tiers at the last look."""

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Draw a tier if a round begins, and pick."""
        tier_of = self._tiers_of(candidates, rng)
        context = candidates.context
        if not self._round or context.begins_round(self._version):
            self._begin_round(candidates, tier_of, rng)
            self._version = context.version
        away = np.abs(tier_of - self._tier)
        order = np.lexsort((rng.random(away.size), away))
        return [int(node) for node in candidates.node_ids[order[:k]]]

    def _tiers_of(self, candidates: Candidates, rng: np.random.Generator) -> Index:
        """Return the tier of each candidate, 0 the fastest; shape (n,)."""
        durations = expected_duration_s(candidates)
        place = np.argsort(np.lexsort((rng.random(durations.size), durations)))
        return place * self.tiers // durations.size

    def _begin_round(
        self, candidates: Candidates, tier_of: Index, rng: np.random.Generator
    ) -> None:
        losses = self._losses_of(candidates, tier_of)
        if self._round and self._round % self.interval == 0:
            if not losses[self._tier] < self._losses[self._tier]:
                # The tier with the largest loss has the largest share; one without any, too.
                rank = np.argsort(np.argsort(np.nan_to_num(losses, nan=np.inf)))
                self._shares = (rank + 1.0) / (rank + 1.0).sum()
            self._losses = losses
        self._round += 1
        shares = np.where(self._credits > 0, self._shares, 0.0)
        shares = shares if shares.any() else self._shares
        self._tier = int(rng.choice(self.tiers, p=shares / shares.sum()))
        self._credits[self._tier] -= 1

    def _losses_of(self, candidates: Candidates, tier_of: Index) -> Floats:
        known = ~np.isnan(candidates.loss)
        n = np.bincount(tier_of[known], minlength=self.tiers)
        total = np.bincount(tier_of[known], candidates.loss[known], minlength=self.tiers)
        return np.where(n > 0, total / np.maximum(n, 1), np.nan)
