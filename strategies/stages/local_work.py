"""Local work: the share of its local epochs that a node is asked for, and the steps it reports.

The config of a message says the share, in eighths, under `WORK`; a reply says by a ConfigRecord of
that name how many local steps its device took, and how many a whole job would have been. Shares are
eighths, so that messages of one version have a few contents and not one for each node.
"""

from collections.abc import Iterator, Mapping
from math import ceil, floor, inf
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self, cast

from annotated_types import Ge, Le
from flwr.app import ConfigRecord, ConfigRecordValues, RecordDict

from fedstale.errors import ConfigError, ProtocolError
from fedstale.strategies.stages.base import SharedContent, Stage
from fedstale.strategies.stages.compression import Compression
from fedstale.strategies.types import (
    Forecast,
    Job,
    Positive,
    PositiveShare,
    forecast_share,
    median_of,
    require,
)

if TYPE_CHECKING:
    from fedstale.strategies.server import StaleStrategy

WORK = "fedstale.work"
"""Key of the share in the config of a message, and name of the ConfigRecord in a reply."""
EIGHTHS = 8
LEAST = 1 / EIGHTHS
"""Smallest share of a job."""
_FIRST = 0.5
"""Share of a node's jobs until it forecasts, which a node that never answers does not."""

_ACCEPTED = "a whole number of eighths, from 0.125 to 1"
_MOST_STEPS = 10**12

Least = Annotated[float, Ge(LEAST), Le(1), "a number from 0.125 to 1"]


class LocalWork(Stage):
    """Asks nodes for a share of their local epochs: one for all, or what each can do in some time.

    A ClientApp reads the share by `fedstale.client.local_steps`; one that does not trains in full.
    Without any setting whole jobs are asked for, and only the number of their steps is wanted.

    With `within_s` a node's share is the largest with which its job takes at most that time, by its
    own forecast (`ForecastMod`): download, share x training and upload, by their medians. That
    forecast is of a job like its last one, and says which share of a whole job it has, so training
    is that of a whole job whatever the last one was. It counts what `Compression` before it does
    to the upload.

    Args:
        share: of every job: a whole number of eighths, from 0.125 to 1.
        within_s: longest job in s, > 0; instead of a share.
        least: with `within_s`, no share is smaller, in [1/8, 1], rounded up to eighths: a node that
            takes longer with it is asked for it nevertheless.

    Example:
        >>> seconds = {"levels": [0.1, 0.5, 0.9], "training_s": [50.0, 60.0, 80.0]}
        >>> forecast = seconds | {"reporting_s": [5.0, 9.0, 20.0], "total_s": [70.0, 80.0, 110.0]}
        >>> within = LocalWork(within_s=60.0)
        >>> within.share_of(forecast), within.share_of(forecast | {"share": 0.25})
        (0.625, 0.125)
        >>> within.share_of({}), LocalWork(0.25).share_of({})
        (0.5, 0.25)
        >>> LocalWork(0.1)  # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        fedstale.errors.ConfigError: strategy.LocalWork.share = 0.1: expected a whole number of
        eighths, from 0.125 to 1
    """

    def __init__(
        self,
        share: Annotated[PositiveShare, _ACCEPTED] | None = None,
        *,
        within_s: Annotated[Positive, "a finite number of seconds > 0"] | None = None,
        least: Least = LEAST,
    ) -> None:
        self.share, self.within_s, self.least = share, within_s, least
        self._shared = SharedContent()
        if share is not None:
            require(_is_share(share), "LocalWork.share", share, _ACCEPTED)
            require(within_s is None, "LocalWork.within_s", within_s, "None beside a share")

    def check(self, strategy: "StaleStrategy") -> None:
        """Raise ConfigError if the sizes of messages are settled after it."""
        behind = strategy.stages[strategy.stages.index(self) :]
        if any(isinstance(stage, Compression) for stage in behind):
            raise ConfigError(
                "strategy.stages: LocalWork comes before Compression, and knows no size of its "
                "messages; expected it behind"
            )

    def share_of(self, forecast: Forecast, upload: float = 1.0) -> float:
        """Return the share of a node's next job, a whole number of eighths in [1/8, 1].

        Args:
            forecast: that the node last reported of itself; empty if none.
            upload: bytes of the next reply over those of the reply that the forecast is of.
        """
        if self.within_s is None:
            return 1.0 if self.share is None else float(self.share)
        least = ceil(EIGHTHS * self.least) / EIGHTHS
        names = ("training_s", "reporting_s", "total_s")
        training_s, upload_s, total_s = (median_of(forecast, name) for name in names)
        if not (0.0 <= training_s <= total_s < inf and 0.0 <= upload_s < inf):
            return max(_FIRST, least)
        left_s = self.within_s - (total_s - training_s + (upload - 1.0) * upload_s)
        full_job_s = training_s / forecast_share(forecast)
        fits = EIGHTHS * left_s / full_job_s if full_job_s > 0.0 else EIGHTHS * (left_s >= 0.0)
        # One eighth of a training time that is itself rounded must not be lost to rounding.
        most = floor(min(max(fits * (1.0 + 1e-9), 0.0), EIGHTHS))
        return max(most / EIGHTHS, least)

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Ask a node that trains for its share; messages with one share are one object."""
        if job.purpose != "train":
            return content
        share = self.share_of(self._run.history.forecast_of(job.node_id), job.upload)
        job.notes[self.name] = share

        def ask(made: RecordDict) -> None:
            key = self._run.config_key
            made[key] = asking(content.config_records[key], share)

        return self._shared.of(content, ask, share)

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Note the steps that a reply states, and hint at an app that did not read its share."""
        if job.purpose != "train":
            return
        done = StepsDone.of(content)
        if done is not None:
            job.steps, job.share = float(done.steps), done.share
        elif job.notes[self.name] < 1.0:
            self._run.hint(
                "LocalWork: a ClientApp was asked for a share of its local epochs and trains in "
                "full: call fedstale.client.local_steps there, and add PackMod() to its mods"
            )


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
    return next(_stated(content), None) is not None


def _stated(content: RecordDict) -> Iterator[ConfigRecordValues]:
    """Yield the shares that the records of a message state."""
    for record in content.values():
        if isinstance(record, ConfigRecord) and WORK in record:
            yield record[WORK]


def asked_share(content: RecordDict) -> float | None:
    """Return the share that a message asks for; None where it asks for none.

    Raises:
        ProtocolError: it is no share.
    """
    share = next(_stated(content), None)
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


class StepsDone(NamedTuple):
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
        """Read the steps that a reply states; None if there are none that can be."""
        record = content.get(WORK)
        if not isinstance(record, ConfigRecord):
            return None
        steps, whole = record.get("steps"), record.get("whole")
        # A bool is an int.
        if type(steps) is not int or type(whole) is not int:
            return None
        return cls(steps, whole) if 1 <= steps <= whole <= _MOST_STEPS else None
