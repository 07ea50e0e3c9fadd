"""What a server honestly knows of a node when it chooses: what the node said and did before.

Nothing here comes from a device's future or its true state: forecasts are the device's own, with
their age; durations, losses and failures are those that the server has seen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, nan, sqrt
from statistics import median

Forecast = Mapping[str, float | list[float]]

# Durations of the last jobs that are kept of a node; memory stays bounded by the number of nodes.
_DURATIONS_KEPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One node as the server knows it; what it does not know is NaN, or empty."""

    node_id: int
    """Flower's id of the node."""
    forecast: Forecast = field(default_factory=dict)
    """Last forecast that the device sent of itself, as it sent it."""
    forecast_at: float = nan
    """Instant in s when that arrived."""
    durations_s: tuple[float, ...] = ()
    """Time from sending to reply of its last finished jobs in s, oldest first."""
    loss: float = nan
    """Mean training loss of its last reply."""
    square_loss: float = nan
    """Mean of squared per-example losses over its last round."""
    examples: float = nan
    """Training examples of its last reply."""
    staleness: float = nan
    """Versions that its last merged reply was behind."""
    times_picked: int = 0
    """Jobs sent to it."""
    times_finished: int = 0
    """Good replies from it."""
    times_failed: int = 0
    """Error replies, refused replies and timeouts."""
    last_version: float = nan
    """Model version at its last good reply."""

    @property
    def duration_s(self) -> float:
        """Median of the known durations in s, or NaN."""
        return median(self.durations_s) if self.durations_s else nan

    @property
    def p_finish(self) -> float:
        """Probability that a job sent now comes back in time.

        It is the device's own forecast where there is one; else the share of finished jobs, with
        one success and one failure added, so that an unknown node has 1/2.
        """
        forecast = self.forecast.get("p_finish", nan)
        if isinstance(forecast, int | float) and isfinite(forecast):
            return float(min(max(forecast, 0.0), 1.0))
        return (self.times_finished + 1) / (self.times_finished + self.times_failed + 2)

    @property
    def utility(self) -> float:
        """Oort's statistical utility |B| sqrt(mean of squared losses), or NaN.

        Where a device reports only its mean loss, that takes the root's place; it is never larger.
        """
        root = sqrt(self.square_loss) if self.square_loss >= 0.0 else self.loss
        return self.examples * root


class History:
    """Remembers every node that has ever been seen."""

    def __init__(self) -> None:
        """Know nobody."""
        self._known: dict[int, Candidate] = {}

    def __getitem__(self, node_id: int) -> Candidate:
        """Return what is known of a node."""
        known = self._known.get(node_id)
        if known is None:
            known = self._known[node_id] = Candidate(node_id=node_id)
        return known

    def candidates(self, node_ids: Iterable[int]) -> list[Candidate]:
        """Return what is known of some nodes, in their order."""
        known = self._known
        return [known.get(node_id) or self[node_id] for node_id in node_ids]

    def picked(self, node_id: int) -> None:
        """Note that a job was sent."""
        known = self[node_id]
        self._known[node_id] = replace(known, times_picked=known.times_picked + 1)

    def failed(self, node_id: int) -> None:
        """Note that a job ended without a good reply."""
        known = self[node_id]
        self._known[node_id] = replace(known, times_failed=known.times_failed + 1)

    def finished(
        self,
        node_id: int,
        *,
        duration_s: float,
        examples: float,
        loss: float,
        square_loss: float,
        staleness: int,
        version: int,
    ) -> None:
        """Note a good reply; arguments as in `Candidate`."""
        known = self[node_id]
        self._known[node_id] = replace(
            known,
            durations_s=(*known.durations_s, duration_s)[-_DURATIONS_KEPT:],
            examples=examples,
            loss=loss,
            square_loss=square_loss,
            staleness=float(staleness),
            last_version=float(version),
            times_finished=known.times_finished + 1,
        )

    def forecast(self, node_id: int, forecast: Forecast, now: float) -> None:
        """Note what a device expects of itself."""
        self._known[node_id] = replace(self[node_id], forecast=dict(forecast), forecast_at=now)
