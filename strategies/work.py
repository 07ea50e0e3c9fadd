"""Less work: which share of its local epochs a node is asked to do, and what it says that it did.

The config of a message says the share, in eighths, under `WORK`; a reply says by a ConfigRecord of
that name how many local steps its device took, and how many a whole job would have been. Shares are
eighths, so that messages of one version have a few contents and not one for each node.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor, inf
from typing import NamedTuple, Self, cast

from flwr.app import ConfigRecord, RecordDict
from flwr.app.typing import ConfigRecordValues

from fedstale.errors import ProtocolError
from fedstale.strategies.types import Forecast, forecast_share, median_of, require

WORK = "fedstale.work"
"""Key of the share in the config of a message, and name of the ConfigRecord in a reply."""
EIGHTHS = 8
LEAST = 1 / EIGHTHS
"""Smallest share of a job."""

_ACCEPTED = "a whole number of eighths, from 0.125 to 1"
_MOST_STEPS = 10**12


class Work(ABC):
    """Says which share of its local epochs each node is asked to do."""

    @abstractmethod
    def share_of(self, forecast: Forecast, upload: float = 1.0) -> float:
        """Return the share of a node's next job, a whole number of eighths in [1/8, 1].

        Args:
            forecast: that the node last reported of itself, see `ForecastMod`; empty if none.
            upload: bytes of the next reply over those of the reply that the forecast is of.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkShare(Work):
    """One share for all nodes.

    Example:
        >>> WorkShare(share=0.25).share_of({})
        0.25
        >>> WorkShare(share=0.1)  # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        fedstale.errors.ConfigError: strategy.work.share = 0.1: expected a whole number of eighths,
        from 0.125 to 1
    """

    share: float
    """Share of the local epochs: a whole number of eighths, from 0.125 to 1."""

    def __post_init__(self) -> None:
        require(_is_share(self.share), "work.share", self.share, _ACCEPTED)

    def share_of(self, forecast: Forecast, upload: float = 1.0) -> float:
        """Return the share of every job."""
        del forecast, upload
        return float(self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkWithin(Work):
    """The largest share with which a node's job takes at most some time, by its own forecast.

    A job takes download, share x training and upload, by medians of the forecast that the node last
    sent (`ForecastMod`). That forecast is of a job like its last one, and says which share of a
    whole job it has, so training is that of a whole job whatever the last one was.

    Example:
        >>> seconds = {"levels": [0.1, 0.5, 0.9], "training_s": [50.0, 60.0, 80.0]}
        >>> forecast = seconds | {"reporting_s": [5.0, 9.0, 20.0], "total_s": [70.0, 80.0, 110.0]}
        >>> within = WorkWithin(at_most_s=60.0)
        >>> within.share_of(forecast), within.share_of(forecast | {"share": 0.25})
        (0.625, 0.125)
        >>> within.share_of({})
        0.5
    """

    at_most_s: float
    """Longest job in s, > 0."""
    least: float = LEAST
    """No share is smaller, in [1/8, 1]; rounded up to eighths. A node that takes longer with it is
    asked for it nevertheless."""
    first: float = 0.5
    """Share of a node's jobs until it has sent a forecast: a whole number of eighths, or `least` if
    that is more. Small enough for slow nodes to answer once, since none forecasts that never does.
    """

    def __post_init__(self) -> None:
        require(0 < self.at_most_s < inf, "work.at_most_s", self.at_most_s, "seconds > 0")
        require(LEAST <= self.least <= 1, "work.least", self.least, "a number from 0.125 to 1")
        require(_is_share(self.first), "work.first", self.first, _ACCEPTED)

    def share_of(self, forecast: Forecast, upload: float = 1.0) -> float:
        """Return the share of a node's next job."""
        least = ceil(EIGHTHS * self.least) / EIGHTHS
        names = ("training_s", "reporting_s", "total_s")
        training_s, upload_s, total_s = (median_of(forecast, name) for name in names)
        if not (0.0 <= training_s <= total_s < inf and 0.0 <= upload_s < inf):
            return max(float(self.first), least)
        left_s = self.at_most_s - (total_s - training_s + (upload - 1.0) * upload_s)
        whole_s = training_s / forecast_share(forecast)
        fits = EIGHTHS * left_s / whole_s if whole_s > 0.0 else EIGHTHS * (left_s >= 0.0)
        # One eighth of a training time that is itself rounded must not be lost to rounding.
        most = floor(min(max(fits * (1.0 + 1e-9), 0.0), EIGHTHS))
        return max(most / EIGHTHS, least)


def _is_share(share: object) -> bool:
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    return (
        is_number and LEAST <= cast(float, share) <= 1 and (EIGHTHS * cast(float, share)) % 1 == 0
    )


# What server and device say to one another.


def asking(config: ConfigRecord, share: float) -> ConfigRecord:
    """Return the config of a message with a share in it, as another record."""
    values: Mapping[str, ConfigRecordValues] = {**config, WORK: share}
    return ConfigRecord(dict(values))


def is_asked(content: RecordDict) -> bool:
    """Return whether a message says anything of a share."""
    return next(_said(content), None) is not None


def _said(content: RecordDict) -> Iterator[ConfigRecordValues]:
    """Return what the records of a message say of a share."""
    for record in content.values():
        if isinstance(record, ConfigRecord) and WORK in record:
            yield record[WORK]


def asked_share(content: RecordDict) -> float | None:
    """Return the share that a message asks for; None where it asks for none.

    Raises:
        ProtocolError: it is no share.
    """
    share = next(_said(content), None)
    if share is None:
        return None
    if not _is_share(share):
        raise ProtocolError(f"{WORK} = {share!r:.40}: expected {_ACCEPTED}")
    return float(cast(float, share))


def steps_of(share: float, whole: int) -> int:
    """Return how many of the local steps of a whole job a share of it is.

    It is rounded down, so that a job takes no longer than its share; it is one step at least, if a
    whole job has any.

    Example:
        >>> steps_of(0.5, 15), steps_of(0.125, 3), steps_of(1, 15), steps_of(0.5, 0)
        (7, 1, 15, 0)
    """
    return min(max(int(share * whole), 1), whole)


class Done(NamedTuple):
    """What a device says of a training."""

    steps: int
    """Local steps that it took, >= 1."""
    whole: int
    """Local steps of a whole job, >= `steps`."""

    @property
    def share(self) -> float:
        """Share of a whole job."""
        return self.steps / self.whole

    def record(self) -> ConfigRecord:
        """Return it as it stands in a reply."""
        return ConfigRecord(self._asdict())

    @classmethod
    def of(cls, content: RecordDict) -> Self | None:
        """Return what a reply says; None where it says nothing that can be."""
        record = content.get(WORK)
        if not isinstance(record, ConfigRecord):
            return None
        steps, whole = record.get("steps"), record.get("whole")
        # A bool is an int.
        if type(steps) is not int or type(whole) is not int:
            return None
        return cls(steps, whole) if 1 <= steps <= whole <= _MOST_STEPS else None
