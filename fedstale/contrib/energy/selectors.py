"""Choose nodes while their electricity is clean."""

import logging
from typing import Any

import numpy as np

from fedstale.contrib.energy.carbon import SYNTHETIC, Intensity
from fedstale.errors import ConfigError
from fedstale.strategies.selection import Random, Selector
from fedstale.strategies.types import Array, Candidates, PositiveShare, Seconds, require

logger = logging.getLogger(__name__)

DAY_S, HOUR_S = 86_400.0, 3600.0


class LowCarbon(Selector):
    """Lets another selector choose among nodes whose electricity is clean for the day to come.

    A node may be chosen while the intensity of its region is among the lowest `share` of those of
    the next 24 hours there, so that each region takes part at its own clean hours. If that leaves
    nobody for `patience_s`, one choice is among all. A node whose region is not known is not held
    back, nor is any once the intensities have come to their end.

    Instant 0 of the intensities is the first choice of the training. A node states its region by
    `ForecastMod(properties=["region"])`.
    """

    saved = ("then", "_began_at", "_held_since")

    def __init__(
        self,
        intensity: str = SYNTHETIC,
        share: PositiveShare = 0.5,
        *,
        patience_s: Seconds = DAY_S / 2,
        epoch: str | None = None,
        then: Selector | None = None,
    ) -> None:
        """Set where intensities are, and how long to wait for clean hours.

        Args:
            intensity: file of them, or `synthetic`; see `Intensity.read`.
            share: of the hours of a day at which nodes of a region are chosen.
            patience_s: for how long nobody may be chosen, in s; inf waits for ever.
            epoch: date of the first choice, needed where the file has dates.
            then: the selector that chooses; `Random()` if None.
        """
        self.intensity, self.share, self.patience_s = intensity, share, patience_s
        self.epoch, self.then = epoch, then or Random()
        try:
            self._known = Intensity.read(intensity, epoch=epoch)
        except ConfigError as problem:
            accepted = f"a file of intensities, or '{SYNTHETIC}'; {problem}"
            require(False, "LowCarbon.intensity", intensity, accepted)
        self._began_at = self._held_since = np.nan
        self._has_warned = False

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Let the other pick among nodes with clean electricity; none if none has, for a while."""
        if np.isnan(self._began_at):
            self._began_at = now
        is_clean = self._is_clean(now - self._began_at)
        regions = self.regions_of(candidates).tolist()
        fits = np.array([is_clean.get(region, True) for region in regions], np.bool_)
        if fits.any():
            self._held_since = np.nan
            return self.then.select(candidates.take(fits), k, now, rng)
        if np.isnan(self._held_since):
            self._held_since = now
        if now - self._held_since < self.patience_s:
            return []
        self._held_since = np.nan
        return self.then.select(candidates, k, now, rng)

    def regions_of(self, candidates: Candidates) -> Any:
        """Return the region of each candidate, None where it is not known; shape (n,)."""
        if self._known.regions == ("",):
            return np.full(len(candidates), "", object)
        return candidates.properties.get("region", np.full(len(candidates), None))

    def _is_clean(self, at_s: float) -> dict[str, bool]:
        """Return of each region whether its electricity is clean at an instant in s."""
        ahead: Array = self._known.at(at_s + np.arange(0.0, DAY_S, HOUR_S))
        if np.isnan(ahead[:, 0]).any():
            if not self._has_warned:
                self._has_warned = True
                logger.warning("LowCarbon: %s has come to its end", self.intensity)
            return {}
        limits = np.nanquantile(ahead, self.share, axis=1)
        clean = ahead[:, 0] <= limits
        return dict(zip(self._known.regions, clean.tolist(), strict=True))
