"""What the mod measures of the device that it runs on, real or replayed, and its history.

A simulation implements the same protocol on a replayed trace (`fedstale.simulation.clients`):
there clocks are virtual, and the history is the trace up to now.

The history of a real device has one row a message, for the newest few hundred. Rows live in the
node's Context, which stays on the device and survives a restart of the ClientApp. A state that
cannot be read is forgotten, since a device that has lost its history still has to work.

The mod only runs when a message comes, so an observation is made of samples: the pace of the
device's trainings, how long models took to come, and what was left of the processor. A step without
a sample is unknown. The uplink is unknown too: no device knows when its reply has arrived. Sessions
are unknown without the journal of a recorder, see `fedstale.client.journal_history`.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from fedstale.errors import ConfigError
from fedstale.traces import DAY_S, Array, Mask
from fedstale.traces.forecast import EDGES_S, RATES, STEPS, Observation, OwnSessions
from fedstale.traces.recording import ProcessorTimes, PsutilMonitor, Reading, ResourceMonitor

if TYPE_CHECKING:
    from fedstale.client.journal_history import JournalHistory

logger = logging.getLogger(__name__)

HISTORY_RECORD = "fedstale.history"
"""Name of the record of the history in the Context's state."""
HISTORY_VERSION = 2
MESSAGES_KEPT = 256
"""Messages that are remembered: 27 KB."""
COLUMNS = (
    "arrived",
    "ready",
    "training_s",
    "travel_s",
    "download_bytes",
    "upload_bytes",
    "work",
    "deadline_s",
    "processor_left",
    "battery",
    "charging",
    "online",
    "share",
)
"""What a row holds: instants in s, durations in s, bytes, work units that were done, the reading at
arrival, and which share of a whole job was done, if it was asked for; NaN where unknown or, from
training_s on, where the message was no training."""
# A device that got no message for longer than this may have been offline in between.
_LONGEST_SILENCE_S = 1800.0
# What a training wins of a processor that others keep busy; chosen, not measured. Without it, a
# device that is busy but trains would forecast that it never does.
_FAIR_SHARE = 0.5
# 1 January 1970 was a Thursday.
_MONDAY_S = 3 * DAY_S
_POSITION = {name: i for i, name in enumerate(COLUMNS)}

COUNTERS_RECORD = "fedstale.counters"
"""Name of the record of the kernel's counters in the Context's state."""

Cost = tuple[float, float]
"""Work units and bytes down of a message."""


@dataclass(eq=False, slots=True)
class MessageHistory:
    """The rows of one device, in the order of its messages."""

    rows: Array = field(default_factory=lambda: np.empty((0, len(COLUMNS))))
    """Shape (messages, columns)."""

    def __getitem__(self, column: str) -> Array:
        """Return a column; shape (messages,)."""
        return self.rows[:, _POSITION[column]]

    def add(self, **values: float) -> None:
        """Append a row, and drop the oldest if there are too many."""
        row = [values.get(name, np.nan) for name in COLUMNS]
        self.rows = np.concatenate([self.rows, [row]])[-MESSAGES_KEPT:]

    @property
    def last_training(self) -> dict[str, float]:
        """The row of the last training, by column; empty before the first."""
        trainings = self.rows[self["training_s"] >= 0]
        return dict(zip(COLUMNS, trainings[-1].tolist(), strict=True)) if len(trainings) else {}

    @property
    def pace(self) -> Array:
        """Work units/s of each training, NaN for other messages and where unknown; (messages,)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self["training_s"] > 0, self["work"] / self["training_s"], np.nan)

    def scaled(self, fleet_rate: float) -> "MessageHistory":
        """Return the history with a work for the jobs whose work was not stated.

        Such jobs are taken to be alike but for their share, and the device to be as fast as the
        fleet: what counts for them is how a job's time differs from those before, and that needs no
        unit.

        Args:
            fleet_rate: median work units/s of the forecaster's fleet.
        """
        made, training_s = MessageHistory(self.rows.copy()), self["training_s"]
        unstated = (training_s >= 0) & np.isnan(self["work"])
        if unstated.any():
            share = np.where(np.isnan(self["share"]), 1.0, self["share"])[unstated]
            full_job_s = float(np.median(training_s[unstated] / share))
            made["work"][unstated] = fleet_rate * full_job_s * share
        return made

    def observation(self, instants: Array, utc_offset_s: float) -> Observation:
        """Compute the device's observations of itself at some instants.

        Rows later than an instant do not count at it, also if they exist because the clock was
        set back.

        Args:
            instants: in s since 1970, UTC; shape (n,).
            utc_offset_s: local time minus UTC, in s.
        """
        arrived, pace = self["arrived"], self.pace
        with np.errstate(divide="ignore", invalid="ignore"):
            carried = 8.0 * self["download_bytes"] / self["travel_s"]
        carried = np.where((self["travel_s"] > 0) & (carried > 0), carried, np.nan)
        when = np.concatenate([self["ready"], arrived])
        left = self["processor_left"]
        compute = np.concatenate([pace, expected_pace(pace, left, left)])
        n = instants.size
        rates = {
            "compute": _means(when, compute, instants),
            "downlink": _means(arrived, carried, instants),
            "uplink": np.full((n, STEPS), np.nan),
        }
        online, since, known_for = _session(self, instants)
        local = instants + utc_offset_s
        return Observation(
            devices=np.zeros(n, dtype=np.int64),
            now=instants,
            history_s=known_for,
            online=online,
            own=OwnSessions.unknown(since),
            time_of_day_s=local % DAY_S,
            time_of_week_s=(local + _MONDAY_S) % (7 * DAY_S),
            rates=np.stack([rates[name] for name in RATES], axis=1),
        )

    @classmethod
    def read(cls, state: RecordDict) -> "MessageHistory":
        """Return the history in a node's state; an empty one if there is none to be read."""
        rows = (-1, len(COLUMNS))
        found = stored(state, HISTORY_RECORD, version=HISTORY_VERSION, rows=rows)
        return cls() if found is None else cls(found["rows"][-MESSAGES_KEPT:])

    def write(self, state: RecordDict) -> None:
        """Put the history into a node's state."""
        store(state, HISTORY_RECORD, version=HISTORY_VERSION, rows=self.rows)


def store(state: RecordDict, name: str, **values: Array | int | float | str) -> None:
    """Put a record into a node's state; arrays become bytes of float64."""
    state[name] = ConfigRecord(
        {
            key: np.ascontiguousarray(v, "<f8").tobytes() if isinstance(v, np.ndarray) else v
            for key, v in values.items()
        }
    )


def array_bytes(content: RecordDict) -> float:
    """Return the bytes of the arrays: what makes a transfer long."""
    records = content.array_records.values()
    return float(sum(len(array.data) for record in records for array in record.values()))


def stored(
    state: RecordDict, name: str, **fields: int | type | tuple[int, ...]
) -> dict[str, Any] | None:
    """Read a record of `store` from a node's state; None if there is none that can be read.

    Args:
        state: of the node.
        name: of the record.
        fields: what the record must hold: a number that is equal, such as a version, a value of
            this type, or an array of this shape.
    """
    record, values = state.config_records.get(name), dict[str, Any]()
    if record is None:
        return None
    try:
        for key, expected in fields.items():
            value: Any = record[key]
            if isinstance(expected, tuple):
                value = np.frombuffer(value, "<f8").reshape(expected).copy()
            elif value != expected and not (
                isinstance(expected, type) and isinstance(value, expected)
            ):
                raise ValueError(f"{key} = {value!r}: expected {expected}")
            values[key] = value
    except (KeyError, TypeError, ValueError) as problem:
        logger.warning("this device's %s cannot be read (%s): it begins anew", name, problem)
        return None
    return values


def expected_pace(pace: Array, left_before: Array, left: Array) -> Array:
    """Return the pace to expect at each reading of the processor, in work units/s.

    It is the median pace, times the share that a training gets over the share that trainings got.

    Args:
        pace: of trainings, NaN for other messages and where unknown; shape (messages,).
        left_before: share of the processor that was idle before each, or NaN; same shape.
        left: share that was idle at each reading, or NaN; shape (readings,).
    """
    got = _share_of_training(left_before)[~np.isnan(pace)]
    return _median(pace) * _share_of_training(left) / _median(got, default=1.0)


def _share_of_training(left: Array) -> Array:
    return _FAIR_SHARE + (1.0 - _FAIR_SHARE) * left


def _median(values: Array, default: float = np.nan) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else default


def _means(when: Array, values: Array, instants: Array) -> Array:
    """Return the mean of the samples in each step before each instant; shape (n, steps)."""
    known = np.isfinite(values) & np.isfinite(when)
    when, values = when[known], values[known]
    result = np.full((instants.size, STEPS), np.nan)
    for row, now in enumerate(instants):
        step = np.searchsorted(EDGES_S, now - when, side="right") - 1
        inside = (step >= 0) & (step < STEPS)
        count = np.bincount(step[inside], minlength=STEPS)
        total = np.bincount(step[inside], weights=values[inside], minlength=STEPS)
        result[row, count > 0] = total[count > 0] / count[count > 0]
    return result


def _session(history: MessageHistory, instants: Array) -> tuple[Mask, Array, Array]:
    """Compute the mask online, and seconds since it came online and since the first message."""
    online = np.ones(instants.size, dtype=bool)
    since, known_for = np.zeros(instants.size), np.zeros(instants.size)
    for i, now in enumerate(instants):
        arrived = np.sort(history["arrived"][history["arrived"] <= now])
        if not arrived.size:
            continue
        # A device that was sent a message was online, whatever it can read of its link.
        silent = np.flatnonzero(np.diff(arrived) > _LONGEST_SILENCE_S)
        since[i] = now - arrived[silent[-1] + 1 if silent.size else 0]
        known_for[i] = now - arrived[0]
    return online, since, known_for


class Device(ResourceMonitor, Protocol):
    """A device while it works on one message. The mod reads it once at each end of the work."""

    def worked_s(self) -> float:
        """Return the time between the first and the last reading in s, by a steady clock."""

    def travel_s(self) -> float:
        """Return how long the message was under way, in s; NaN if unknown."""

    def uploaded_s(self, message_id: str) -> float:
        """Return how long the reply to an earlier message was under way, in s.

        NaN where it is unknown: no real device knows when its reply has arrived.
        """
        del message_id
        return np.nan

    def cost(self, share: float | None) -> Cost | None:
        """Return the cost of the message if it is known before the work is done.

        None on real devices: only the server or the app knows how much work a message is.

        Args:
            share: of a whole training that was done; None where the message asks for no share.
        """
        del share
        return None

    def reply_bytes(self, content: RecordDict) -> float:
        """Return the bytes of a reply's arrays, as far as the device counts them."""
        return array_bytes(content)

    def observed(self, history: MessageHistory, journal: "JournalHistory | None") -> Observation:
        """Return the device's observations of itself before the work and after it.

        Args:
            history: of its messages.
            journal: of its recorder; None if there is none.
        """


class CountingMonitor:
    """Reads the machine it runs on; its first reading covers the time since the last message.

    That is since the reading before by another process: the counters of the kernel, which are older
    than any process, are kept in the node's state.

    Args:
        state: of the node; counters are read from it now, and written at each reading.

    Raises:
        ConfigError: psutil is not installed.
    """

    def __init__(self, state: RecordDict) -> None:
        found = stored(state, COUNTERS_RECORD, **dict.fromkeys(ProcessorTimes._fields, float))
        self._monitor = PsutilMonitor(times=None if found is None else ProcessorTimes(**found))
        self._state = state

    def read(self) -> Reading:
        """Return the machine as it is now."""
        reading = self._monitor.read()
        if self._monitor.times is not None:
            store(self._state, COUNTERS_RECORD, **self._monitor.times._asdict())
        return reading


class Machine(Device):
    """The device that this process runs on.

    Args:
        message: that it works on.
        state: of the node, where counters are kept between processes.
        monitor: reads the device; None takes psutil where it is installed, else nothing is read.
        wall: returns s since 1970, UTC.
        steady: returns s of a clock that is never set.
    """

    def __init__(
        self,
        message: Message,
        state: RecordDict,
        monitor: ResourceMonitor | None = None,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        if monitor is None:
            try:
                monitor = CountingMonitor(state)
            except ConfigError:
                # A phone without psutil still has clocks, and its own trainings.
                monitor = None
        self._monitor = monitor
        self._created_at, self._state = message.metadata.created_at, state
        self._wall, self._steady = wall, steady
        self._instants: list[float] = []
        self._ticks: list[float] = []

    def read(self) -> Reading:
        """Return the device as it is now."""
        self._ticks.append(self._steady())
        now = self._wall()
        reading = Reading(instant=now) if self._monitor is None else self._monitor.read()
        self._instants.append(now)
        return reading

    def worked_s(self) -> float:
        """Return the time between the first and the last reading in s."""
        return max(self._ticks[-1] - self._ticks[0], 0.0)

    def travel_s(self) -> float:
        """Return the time from the message's creation to the first reading.

        It crosses two clocks and includes the waiting of the server and the link. A time that is
        not positive comes of a wrong clock, and is NaN.
        """
        took = self._instants[0] - self._created_at
        return took if took > 0 else np.nan

    def observed(self, history: MessageHistory, journal: "JournalHistory | None") -> Observation:
        """Compute the device's observations of itself at its last answer and now."""
        # The time of a job is compared with the forecast that was sent before it, in that answer.
        answered_at = history["ready"][-2:-1]
        before = np.fmin.reduce(answered_at, initial=self._instants[0])
        instants = np.array([before, self._instants[-1]])
        offset = float(time.localtime(instants[-1]).tm_gmtoff)
        if journal is None:
            return history.observation(instants, offset)
        return journal.observation(history, instants, offset, self._state)
