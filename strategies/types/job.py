"""One job of a node: its message, the update and metrics of its reply, what its device foretells.

Nothing that a device states of its next job is trusted to be more than a statement: what cannot be
meant is ignored, and never ends a run.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan
from numbers import Real
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, RecordDict

from fedstale.errors import ProtocolError, quoted
from fedstale.strategies.types.arrays import Model
from fedstale.traces import outline

logger = logging.getLogger(__name__)

# Outcomes that a reported forecast weighs as much as: few, so that an over-reporting device is
# found out after a handful of jobs, and enough for one bad day to be forgiven.
_TRUST = 4.0

FormatName = Literal["float16", "int8", "int4", "int2"]
"""Of quantised arrays, from fine to coarse; see `fedstale.strategies.messages`."""
Purpose = Literal["train", "evaluate", "query"]
PURPOSES: tuple[Purpose, ...] = ("train", "evaluate", "query")
Ending = Literal["accepted", "rejected", "failed", "timed out", "cancelled", "not sent", "left out"]


class RejectionError(ProtocolError):
    """A reply that may not touch the model."""

    def __init__(self, kind: str, text: str) -> None:
        """Set the kind, to count by, and the sentence."""
        super().__init__(text)
        self.kind = kind


@dataclass(slots=True, eq=False)
class Job:
    """One message to a node, on its way out until `message_id` is set, and then until its end."""

    node_id: int
    purpose: Purpose
    base_version: int
    """Version of the model that it carries."""
    job_id: int = -1
    """Counts up from 0 in the order of sending; sums run in this order."""
    message_id: str = ""
    """Empty until it is sent, or if it could not be."""
    sent_at: float = nan
    """Instant in s."""
    up: FormatName | None = None
    """Format that its reply is asked in; None for in full."""
    down: FormatName | None = None
    """Format of the model that it carries; None for in full."""
    upload: float = 1.0
    """Bytes of its reply over those of the node's reply before."""
    steps: float = nan
    """Local steps that its reply states; NaN where it states none, or was not asked to."""
    share: float = 1.0
    """Share of a whole job's steps that they are."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What stages keep with it, by the name of the stage, in plain values."""


class End(NamedTuple):
    """How a job ended."""

    how: Ending
    """An accepted job may end once more, "left out": its update goes into no step after all."""
    reason: str = ""
    """In words, where something went wrong."""
    facts: Mapping[str, float] = {}
    """What the server has learnt of the node by a good reply to a training, as in `Candidates`."""


@dataclass(slots=True, kw_only=True, eq=False)
class ClientUpdate:
    """One client's update on its way from validation to the server step.

    `Checks` make and limit it, a `Weighting` scales it, and the `Buffer` reduces it, which empties
    its arrays. A weighting reads the first five fields; the others have defaults, so that a
    weighting can be tried by hand.
    """

    delta: Model
    """What the client changed, weights after minus weights received; a weighting scales it."""
    base: Model
    """The model version that the client received; never written to."""
    current: Model
    """The model version that the update is applied to; never written to."""
    staleness: int
    """Versions between the two, >= 0."""
    node_id: int = 0
    """The node that sent it."""
    message_id: str = ""
    """The message that it answers, which is the identity of its job."""
    job_id: int = 0
    """Order in which its job was sent; sums run in this order."""
    base_version: int = 0
    """Number of the version that the client received."""
    counts: Model = field(default_factory=dict)
    """Change of the integer arrays, in float64; never scaled."""
    examples: float = 1.0
    """Number of examples behind the update, > 0, as far as the cap allows."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the client measured; without the number of examples."""
    steps: float = nan
    """Local steps behind the update, as its reply states them; NaN where it does not."""
    share: float = 1.0
    """Share of a whole job's steps that they are."""
    norm: float = nan
    """Euclidean norm of the change of the float arrays, as it was received."""
    limited: bool = False
    """Whether examples and norm are within the caps; see `Checks`."""
    weight: float = nan
    """What the weighting returned; NaN until then."""

    __repr__ = outline

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; the current version is in it already."""
        state = {name: getattr(self, name) for name in self.__slots__ if name != "current"}
        return state | {"base": self.base if self.staleness else {}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], current: Model) -> Self:
        """Return an update from what `state_dict` returned, on the same current version."""
        base = state["base"] if state["staleness"] else current
        return cls(**{**state, "base": base, "current": current})


Forecast = Mapping[str, float | list[float]]

FORECAST_RECORD = "fedstale.forecast"
"""Name of the ConfigRecord in a reply that holds a forecast."""
MOST_METRICS, MOST_NAME, MOST_LIST = 256, 200, 1024
"""Values of a reply, and characters of a name; numbers of a list in a forecast, which is ignored if
it has more of any."""


def forecast_in(content: RecordDict) -> Forecast:
    """Return the numbers of a client's forecast of itself in a reply; empty if it sent none.

    Values that are not finite, too long or no number are left out.
    """
    record = content.get(FORECAST_RECORD)
    if not isinstance(record, ConfigRecord) or len(record) > MOST_METRICS:
        return {}
    kept: dict[str, float | list[float]] = {}
    for key, value in record.items():
        if len(key) > MOST_NAME:
            continue
        if isinstance(value, list):
            numbers = [x for x in value[:MOST_LIST] if isinstance(x, int | float)]
            if numbers and len(numbers) == len(value):
                kept[key] = [x if isinstance(x, float) else as_float(x) for x in numbers]
        elif isinstance(value, int | float) and isfinite(number := as_float(value)):
            kept[key] = number
    return kept


PROPERTIES_RECORD = "fedstale.properties"
"""Name of the ConfigRecord in a reply that holds what its device says it is."""
MOST_PROPERTIES, MOST_TEXT = 32, 100
"""Properties of a device, and characters of a text or a name; others are left out."""
Properties = Mapping[str, str | float]


def properties_in(content: RecordDict) -> Properties:
    """Return what a device says it is in a reply, such as its region; empty if it says nothing."""
    record = content.get(PROPERTIES_RECORD)
    if not isinstance(record, ConfigRecord) or len(record) > MOST_PROPERTIES:
        return {}
    kept: dict[str, str | float] = {}
    for name, value in record.items():
        if not isinstance(value, str | int | float) or len(name) > MOST_TEXT:
            continue
        if len(value) <= MOST_TEXT if isinstance(value, str) else isfinite(as_float(value)):
            kept[name] = value
    return kept


def median_of(forecast: Forecast, name: str) -> float:
    """Return the median of a time in a forecast, in s; NaN where it has none."""
    levels, times = forecast.get("levels"), forecast.get(name)
    if not isinstance(levels, list) or not isinstance(times, list) or 0.5 not in levels:
        return nan
    place = levels.index(0.5)
    return times[place] if place < len(times) else nan


def forecast_share(forecast: Forecast) -> float:
    """Return the share of a whole job's work that the job of a forecast has, in (0, inf)."""
    share = _number(forecast.get("share", 1.0))
    return share if share > 0.0 else 1.0


def full_job_s(duration_s: float, share: float, forecast: Forecast) -> float:
    """Return the duration of a job in full, in s.

    Args:
        duration_s: that it took with a share of the work.
        share: in (0, 1].
        forecast: of its device; where it has no time of training, nothing is added.
    """
    left_s = (1.0 - share) * median_of(forecast, "training_s") / forecast_share(forecast)
    return duration_s + left_s if 0.0 < left_s < inf else duration_s


def whole_duration_s(forecast: Forecast) -> float:
    """Return the duration that a forecast states, for a whole job, in s; NaN for none."""
    duration_s, share = _number(forecast.get("duration_s")), forecast_share(forecast)
    return full_job_s(duration_s, share, forecast) if share < 1.0 else duration_s


def _number(value: object) -> float:
    known = isinstance(value, int | float) and isfinite(value)
    return float(value) if known else nan  # type: ignore[arg-type]


def chance_of(value: object) -> float:
    """Return a stated chance within [0, 1]; NaN for what is no number."""
    number = _number(value)
    return number if isnan(number) else min(max(number, 0.0), 1.0)


def forecast_bias(
    finished: npt.ArrayLike, failed: npt.ArrayLike, expected: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """Estimate the bias of stated chances: positive of nodes that finish more often, in [-1, 1].

    It is (f - e) / (n + 4), with f jobs finished of n that have ended, and e finishes to be
    expected: the posterior mean of a bias that is normal around 0 with a fourth of the variance of
    one job's outcome.

    Args:
        finished: jobs that nodes have finished; shape (m,).
        failed: their other jobs that have ended; same shape.
        expected: sum of the chances that they had stated before all of these; same shape.

    Example:
        >>> forecast_bias([8, 0, 6], [2, 6, 0], [8.0, 6.0, 0.0])
        array([ 0. , -0.6,  0.6])
    """
    jobs = np.asarray(finished) + np.asarray(failed)
    return (np.asarray(finished) - np.asarray(expected)) / (jobs + _TRUST)


class OutcomeLine:
    """Line of outcomes over what devices of a fleet stated before, by least squares.

    Where statements differ more than what comes of them, the slope of the latter over the former
    falls. It begins with 1, as for devices that are right.
    """

    def __init__(self, jobs: float, spread: float) -> None:
        """Set as how many jobs it is believed that devices are right, and how far apart those."""
        self._jobs, self._square = jobs, jobs * spread**2
        self.slope, self.error = 1.0, 0.0
        """In [0, 1]; 0 if they speak of others. And the standard deviation around the line."""
        self.more = self.shift = 0.0
        """By how much more comes in the mean; and where 0 is stated, by the line."""
        self._sums = np.zeros(6)

    def add(self, stated: float, came: float, n_before: float) -> None:
        """Learn from a job; it counts the less the more of its node have ended or follow."""
        missed = self.more + min(max(came - stated - self.more, -_MOST_MISSED), _MOST_MISSED)
        stated, weight = came - missed, 1.0 / (1.0 + n_before)
        each = 1.0, stated, missed, stated * stated, missed * missed, stated * missed
        self._sums = (1.0 - weight * _FORGOTTEN) * self._sums + weight * np.array(each)
        n, stated, missed, square, error, product = self._sums.tolist()
        square, error = square - stated * stated / n, error - missed * missed / n
        product -= stated * missed / n
        less = min(max(-product / (square + self._square), 0.0), 1.0)
        error += 2.0 * less * product + less * less * square
        n_both = n + self._jobs
        self.slope, self.error = 1.0 - less, max(error / n_both, 0.0) ** 0.5
        self.more = missed / n_both
        self.shift = self.slope * self.more + less * (stated + missed) / n


_MOST_MISSED = 3.0
"""A duration further off than the mean by e^3 counts as that: one device is not all of a fleet."""
_FORGOTTEN = 1.0 / 256.0


def as_float(value: float) -> float:
    """Return a number as a float; infinity for an integer beyond all floats."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")


MOST_EXAMPLES = 1e9
"""Of one reply: more are a mistake, or an attempt to own what is averaged or expected of others."""
MOST_ELEMENTS, _MOST_LONG = 100, 5
"""Elements of one list that are metrics of their own."""
_LONG = set[str]()
"""Longer lists that the log has named; it names a few, since devices choose the names."""


def numbers(metrics: object) -> dict[str, float]:
    """Return the numbers among metrics by name, those in tables and lists under dotted names.

    Args:
        metrics: by name: numbers, arrays of them, tables and lists, also within one another. Of a
            list count the first `MOST_ELEMENTS`, and of a name as many characters as `MOST_NAME`.
            What is no mapping has no metrics, and a text or bytes are none.

    Example:
        >>> numbers({"loss": 0.5, "per_class": {"cat": 1, "dog": 0}, "auc": [0.7, 0.8], "of": "a"})
        {'loss': 0.5, 'per_class.cat': 1.0, 'per_class.dog': 0.0, 'auc.0': 0.7, 'auc.1': 0.8}
    """
    return dict(_flat(metrics.items(), "")) if isinstance(metrics, Mapping) else {}


def _flat(items: Any, prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in items:
        # Each element has a name of its own, with what a device has called its list.
        name = f"{prefix}{key}"[:MOST_NAME]
        if isinstance(value, Real):
            yield name, as_float(value)  # type: ignore[arg-type]
            continue
        # Arrays of NumPy and of torch, whatever their number of axes.
        found = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(found, Real):
            yield name, as_float(found)  # type: ignore[arg-type]
        elif isinstance(found, Mapping):
            yield from _flat(found.items(), f"{name}.")
        elif isinstance(found, list | tuple):
            if len(found) > MOST_ELEMENTS and len(_LONG) < _MOST_LONG and name not in _LONG:
                _LONG.add(name)
                text = "metric %s is a list of more than %d: the rest is left out"
                logger.warning(text, quoted(name), MOST_ELEMENTS)
            yield from _flat(enumerate(found[:MOST_ELEMENTS]), f"{name}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionContext:
    """State of the run at a choice of nodes."""

    n_in_flight: int = 0
    """Training jobs that are out already."""
    buffer_size: int = 0
    """Updates that the next server step is made of; 0 where it is made of what a deadline finds."""
    n_missing: int = 0
    """Those of them that have not arrived yet."""
    keeps_stragglers: bool = False
    """Whether jobs that are late for a step count in a later one; else they are cancelled."""
    version: int = 0
    """Version of the model that is sent now."""
    deadline_s: float = inf
    """Time in s in which a reply to a job sent now counts."""

    def begins_round(self, version: int) -> bool:
        """Decide whether a round begins after one at a version: at another, or with no job out."""
        return self.version != version or not self.n_in_flight
