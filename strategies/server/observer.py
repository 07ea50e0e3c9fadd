"""Who is told what a strategy did with each reply, and what it measured.

A grid that records runs answers these calls itself; otherwise they go to the log. A strategy never
reads anything back, so watching it cannot change it.
"""

import logging
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from flwr.app import ArrayRecord

logger = logging.getLogger(__name__)


@runtime_checkable
class Observer(Protocol):
    """Is told how every job ended and what every model version scored."""

    def job_aggregated(
        self, message_id: str, *, base_version: int, version: int, staleness: int, weight: float
    ) -> None:
        """Hear that a reply went into `version`; the weight is the mean over parameters."""
        ...

    def job_rejected(self, message_id: str, *, reason: str) -> None:
        """Hear that a reply was not used, and why."""
        ...

    def aggregated(self, *, version: int, arrays: ArrayRecord) -> None:
        """Hear of a new model; the arrays are those that are sent out and must not be changed."""
        ...

    def measured(self, *, version: int, source: str, metrics: Mapping[str, float]) -> None:
        """Hear metrics of a version; the source is "train", "evaluate" or "server"."""
        ...


class LogObserver:
    """Writes to the log: jobs at DEBUG, refusals and metrics at INFO."""

    def job_aggregated(
        self, message_id: str, *, base_version: int, version: int, staleness: int, weight: float
    ) -> None:
        """Log a merged reply."""
        logger.debug(
            "%s: trained from %d, merged into %d, staleness %d, weight %.4g",
            *(message_id, base_version, version, staleness, weight),
        )

    def job_rejected(self, message_id: str, *, reason: str) -> None:
        """Log a refused reply."""
        logger.info("%s: refused: %s", message_id, reason)

    def aggregated(self, *, version: int, arrays: ArrayRecord) -> None:
        """Log that there is a new model."""
        logger.debug("version %d: %d arrays", version, len(arrays))

    def measured(self, *, version: int, source: str, metrics: Mapping[str, float]) -> None:
        """Log metrics."""
        logger.info("version %d, %s: %s", version, source, dict(metrics))


def observer_of(grid: object) -> Observer:
    """Return the grid if it observes, else an observer that logs."""
    return grid if isinstance(grid, Observer) else LogObserver()
