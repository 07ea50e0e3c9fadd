"""Two ways to choose devices by the carbon intensity of their power; neither pays: see run.md."""

from collections.abc import Mapping

import numpy as np

from fedstale.contrib.energy import Intensity
from fedstale.strategies.selection import Random, Selector
from fedstale.strategies.types import Array, Candidates
from fedstale.traces.arrays import DAY_S


class CleanFirst(Selector):
    """Draws nodes in the regions whose electricity is cleanest now.

    Regions are taken in the order of their intensity until they have as many candidates as are
    wanted, so nothing waits.
    """

    def __init__(self, intensity: Intensity, regions: Mapping[int, str]) -> None:
        """Set the intensities, and the region of each node."""
        self.intensity, self.regions, self.draw = intensity, regions, Random()

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Draw among the cleanest nodes."""
        g_per_kwh = self.of_nodes(candidates, self.intensity.at(np.array([now]))[:, 0])
        dirtiest = np.sort(g_per_kwh)[min(k, len(g_per_kwh)) - 1]
        return self.draw.select(candidates.take(g_per_kwh <= dirtiest), k, now, rng)

    def of_nodes(self, candidates: Candidates, of_regions: Array) -> Array:
        """Return for each candidate what its region has; shape (n,)."""
        of = dict(zip(self.intensity.regions, of_regions.tolist(), strict=True))
        return np.array([of[self.regions[node]] for node in candidates.node_ids.tolist()])


class CleanHours(CleanFirst):
    """Draws among nodes whose electricity is clean for the day to come.

    A node may be chosen while the intensity of its region is among the lowest half of those of the
    next 24 hours there. If that leaves nobody for half a day, one choice is among all.
    """

    share, patience_s = 0.5, DAY_S / 2
    held_since = np.nan

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Draw among nodes in their clean hours; none if there are none."""
        ahead = self.intensity.at(now + np.arange(0.0, DAY_S, 3600.0))
        clean = ahead[:, 0] <= np.quantile(ahead, self.share, axis=1)
        fits = self.of_nodes(candidates, clean.astype(np.float64)) > 0
        if not fits.any():
            self.held_since = now if np.isnan(self.held_since) else self.held_since
            if now - self.held_since < self.patience_s:
                return []
            fits[:] = True
        self.held_since = np.nan
        return self.draw.select(candidates.take(fits), k, now, rng)
