"""The devices' side of a simulation: what each job costs, and what its device does with it.

A trace knows its future, so a job is followed to its end in one go, and with it is known what the
server will see and when. That waits until the first instant at which the server could see anything:
many jobs are then followed together, in the time that one alone would take.

Who is online, kept up from change to change instead of looked up for everybody each time.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import ConfigRecord, Message, RecordDict

from fedstale.errors import ConfigError
from fedstale.simulation import flight as fl
from fedstale.simulation.compat import ErrorCode
from fedstale.simulation.costs import CostBook
from fedstale.simulation.flight import Flight
from fedstale.strategies.server.node_set import NodeSet, Places
from fedstale.strategies.server.validation import records_in
from fedstale.traces import Job, Status, TraceSet, TripOutcomes
from fedstale.traces.arrays import Array, Index, Mask
from fedstale.traces.availability import Availability
from fedstale.traces.trip import OnInterrupt

_AHEAD = 1 << 16
"""Devices whose next change is kept in order; of the others it is enough that it comes later."""


class OnlineSet:
    """The devices that are available at an instant that mostly moves ahead.

    Example:
        >>> phones = Availability.of([[(0.0, 10.0)], [(5.0, 20.0)]], 60.0)
        >>> presence = OnlineSet(phones)
        >>> presence.move(7.0)
        >>> presence.is_online, presence.next_change
        (array([ True,  True]), 10.0)
    """

    def __init__(self, availability: Availability) -> None:
        """Start at 0 s."""
        self._availability = availability
        self._everyone = np.arange(availability.n_devices)
        self._mask: Mask = np.zeros(availability.n_devices, dtype=np.bool_)
        self._until: Array = np.zeros(availability.n_devices)
        self._soon: list[tuple[float, int]] = []
        self._n_online, self._now, self._horizon = 0, 0.0, np.inf
        self._begin(0.0)

    @property
    def is_online(self) -> Mask:
        """Who is available, by position; the same array until one changes, then another."""
        return self._mask

    @property
    def n_online(self) -> int:
        """Number of devices that are available."""
        return self._n_online

    @property
    def next_change(self) -> float:
        """The next instant in s at which a device comes or goes; inf if none does."""
        return self._soon[0][0] if self._soon else np.inf

    def move(self, now: float) -> None:
        """Go to an instant in s."""
        if now < self._now or now > self._horizon:
            self._begin(now)
            return
        self._now = now
        due = []
        while self._soon and self._soon[0][0] <= now:
            due.append(heapq.heappop(self._soon)[1])
        if not due:
            return
        self._update(np.array(due))
        for device in due:
            until = float(self._until[device])
            if until <= self._horizon and until < np.inf:
                heapq.heappush(self._soon, (until, device))
        if not self._soon:
            self._order()

    def _begin(self, now: float) -> None:
        """Look everybody up."""
        self._now = now
        self._update(self._everyone)
        self._order()

    def _update(self, devices: Index) -> None:
        """Look up who of some devices is here now, and until when that holds."""
        start, end = self._availability.window_at_or_after(devices, self._now)
        is_online = start <= self._now
        self._n_online += int(is_online.sum()) - int(self._mask[devices].sum())
        self._mask = self._mask.copy()
        self._mask[devices] = is_online
        self._until[devices] = np.where(is_online, end, start)

    def _order(self) -> None:
        """Put the next changes in order, as far ahead as is worth it."""
        is_many = self._until.size > _AHEAD
        self._horizon = float(np.partition(self._until, _AHEAD)[_AHEAD]) if is_many else np.inf
        near = np.flatnonzero((self._until <= self._horizon) & (self._until < np.inf))
        self._soon = sorted(zip(self._until[near].tolist(), near.tolist(), strict=True))


# Node ids are fixed, so that runs repeat, and far from 0 and 1, which Flower uses for itself.
FIRST_NODE_ID = 1_000

# A SuperLink notices a silent node when its heartbeat, every 30 s, has been missed twice.
HEARTBEAT_S = 60.0

_SHORTEST_S = 1e-9

# Of the least time that a job can take: rounding must not make it longer than the job.
_SURELY = 0.99

_INSTANTS = ("started", "downloaded", "trained", "reported", "ended")
_SPENT = (
    "download_s",
    "compute_s",
    "upload_s",
    "work_done",
    "downloaded_bytes",
    "uploaded_bytes",
)


@dataclass(slots=True, kw_only=True)
class Sent:
    """A job that was sent, whose device has not been followed yet."""

    message: Message
    job_id: int
    """Counts up from 0 in the order of sending."""
    device: int
    """Position of the device in the traces."""
    round: int
    """The server's round, or -1."""
    sent_at: float
    """Instant in s."""
    asked: tuple[float, float, float, float]
    """Work, bytes down, bytes up, and the time in s within which the device must have answered."""
    unseen_until: float
    """Instant in s before which the server sees neither a reply nor a failure."""
    reported_p_finish: float = fl.UNKNOWN
    """Chance to finish the next job that the device had last told the server."""


class Fleet:
    """Replayed devices; node i + 1000 is device i of the traces."""

    def __init__(self, traces: TraceSet, book: CostBook, on_interrupt: OnInterrupt) -> None:
        traces.require("availability", "compute", "downlink", "uplink")
        assert traces.availability is not None
        assert traces.downlink is not None
        assert traces.compute is not None
        assert traces.uplink is not None
        self._traces = traces
        self._presence = OnlineSet(traces.availability)
        self._everyone = Places(np.arange(traces.n_devices, dtype=np.uint64) + FIRST_NODE_ID)
        self._online = NodeSet(self._everyone, self._presence.is_online)
        self._book = book
        self._on_interrupt: OnInterrupt = on_interrupt
        self._free_at = np.zeros(traces.n_devices)
        # In the order of what is asked: work, bytes down, bytes up.
        channels = (traces.compute, traces.downlink, traces.uplink)
        self._fastest = np.stack([channel.fastest() for channel in channels], axis=1)

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return self._traces.n_devices

    def device_id(self, device: int) -> str:
        """Return the name of a device by its position."""
        return str(self._traces.device_ids[device])

    def presence(self, now: float) -> OnlineSet:
        """Return who is available at an instant."""
        self._presence.move(now)
        return self._presence

    def online(self, now: float) -> NodeSet:
        """Return the nodes that are available at an instant; the same object until one changes."""
        is_online = self.presence(now).is_online
        if is_online is not self._online.is_in:
            self._online = NodeSet(self._everyone, is_online)
        return self._online

    def send(self, messages: Sequence[Message], now: float, first_job_id: int) -> list[Sent]:
        """Return some messages as jobs that are sent now, at what they cost by now.

        Raises:
            ConfigError: a node does not exist, the cost of a message is unknown, or its ttl is not
                above 0.
        """
        devices = [message.metadata.dst_node_id - FIRST_NODE_ID for message in messages]
        for device in devices:
            if not 0 <= device < self.n_devices:
                raise ConfigError(
                    f"dst_node_id = {FIRST_NODE_ID + device}: expected an id from "
                    f"get_node_ids(), {FIRST_NODE_ID} to {FIRST_NODE_ID + self.n_devices - 1}"
                )
        asked, rounds = self._asked(messages)
        if not (asked[:, 3] > 0).all():
            raise ConfigError(f"ttl = {asked[:, 3].min()}: expected seconds > 0")
        unseen_until = now + self._least_s(np.array(devices, dtype=np.int64), asked)
        back_s = self._book.costs.upload_overhead_s or 0.0
        # A reply must be at the server in time.
        asked[:, 3] = np.maximum(asked[:, 3] - back_s, _SHORTEST_S) if back_s else asked[:, 3]
        columns = (messages, devices, rounds, asked.tolist(), unseen_until.tolist())
        return [
            Sent(
                message=message,
                job_id=first_job_id + i,
                device=device,
                round=round_,
                sent_at=now,
                asked=tuple(row),
                unseen_until=until,
            )
            for i, (message, device, round_, row, until) in enumerate(zip(*columns, strict=True))
        ]

    def follow(self, jobs: Iterable[Sent]) -> list[Flight]:
        """Return what devices do with jobs, which are given in the order of sending."""
        flights: list[Flight] = []
        batch: dict[int, Sent] = {}
        for job in jobs:
            if job.device in batch:
                # A device's second job starts when its first has ended, so that must be known.
                flights += self._follow(list(batch.values()))
                batch = {}
            batch[job.device] = job
        return flights + self._follow(list(batch.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return until when each device is busy."""
        return {"free_at": self._free_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._free_at = state["free_at"]

    @property
    def device_ids(self) -> pd.Index:
        """Names of the devices by their positions."""
        return self._traces.device_ids

    def settled(self, flights: Sequence[Flight], now: float) -> list[Flight]:
        """Return the flights as they stand now; who still works has spent what it has until now.

        The traces are replayed as if they ended now, so that the share of an unfinished job is as
        exact as the whole.
        """
        done = list(flights)
        open_ = [i for i, f in enumerate(flights) if f.ended_at > now or f.visible_at > now]
        if not open_:
            return done
        until_now = self._traces.between(0.0, now) if now > 0 else None
        for i in open_:
            done[i] = self._cut(flights[i], until_now, now)
        return done

    def _least_s(self, devices: Index, asked: Array) -> Array:
        """Return for how many s the server surely sees nothing of each job; shape (n,)."""
        amounts = asked[:, :3] * (1.0, 8.0, 8.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            phases = np.where(amounts > 0, amounts / self._fastest[devices], 0.0)
        # What fails is noticed by its heartbeat, or when the message expires.
        return _SURELY * np.minimum(np.minimum(phases.sum(axis=1), HEARTBEAT_S), asked[:, 3])

    def _follow(self, jobs: Sequence[Sent]) -> list[Flight]:
        """Return what devices do with one job each."""
        if not jobs:
            return []
        devices = np.array([job.device for job in jobs])
        asked = np.array([job.asked for job in jobs])
        sent_at = np.array([job.sent_at for job in jobs])
        there_s = self._book.costs.download_overhead_s or 0.0
        back_s = self._book.costs.upload_overhead_s or 0.0
        free_at = self._free_at[devices]
        if there_s:
            free_at = np.maximum(free_at, sent_at) + there_s
        trips = self._traces.trips(devices, sent_at, _job(asked, self._on_interrupt), free_at)
        self._free_at[devices] = trips.ended
        columns = {name: getattr(trips, name).tolist() for name in (*_INSTANTS, *_SPENT)}
        columns["reported"] = (trips.reported + back_s).tolist()
        return [
            _flight(
                job,
                free_at=float(free_at[i]),
                trips=trips,
                i=i,
                column={name: values[i] for name, values in columns.items()},
            )
            for i, job in enumerate(jobs)
        ]

    def _asked(self, messages: Sequence[Message]) -> tuple[Array, list[int]]:
        """Return work, bytes down and up and ttl of each message, shape (n, 4), and its round."""
        asked, rounds = np.empty((len(messages), 4)), []
        # Strategies put the same records into every message of a round.
        known: dict[int, tuple[int, int]] = {}
        for i, message in enumerate(messages):
            metadata, content = message.metadata, message.content
            kind = metadata.message_type.split(".")[0]
            if id(content) not in known:
                known[id(content)] = self._book.bytes_of(content), _round_in(content)
            size, round_ = known[id(content)]
            rounds.append(_round_said(metadata.group_id, round_))
            work = self._book.work(kind, metadata.dst_node_id)
            reply = self._book.reply_bytes(kind, content, size)
            asked[i] = work, size, reply, metadata.ttl
        return asked, rounds

    def _cut(self, flight: Flight, until_now: TraceSet | None, now: float) -> Flight:
        cut = replace(flight)
        if flight.visible_at > now:
            cut.status = fl.FLYING
        for name in ("started_at", "downloaded_at", "trained_at", "reported_at", "ended_at"):
            if getattr(cut, name) > now:
                setattr(cut, name, fl.NEVER)
        *asked, free_at = flight.asked
        spent = dict.fromkeys(_SPENT, 0.0)
        if until_now is not None and flight.sent_at < now:
            job = _job(np.array([asked]), self._on_interrupt)
            trip = until_now.trips([flight.device], flight.sent_at, job, free_at)
            spent = {name: float(getattr(trip, name)[0]) for name in _SPENT}
        for name, value in spent.items():
            setattr(cut, "work" if name == "work_done" else name, value)
        return cut


def _job(asked: Array, on_interrupt: OnInterrupt) -> Job:
    work, down, up, ttl = asked.T
    return Job(
        work=work, download_bytes=down, upload_bytes=up, ttl_s=ttl, on_interrupt=on_interrupt
    )


def _flight(
    job: Sent, *, free_at: float, trips: TripOutcomes, i: int, column: dict[str, float]
) -> Flight:
    status, metadata = Status(int(trips.status[i])), job.message.metadata
    reason = "" if status == Status.REPORTED else trips.reason(i)
    visible_at, failure = _seen(status, job.sent_at + metadata.ttl, reason, column)
    return Flight(
        message=job.message,
        asked=(*job.asked, free_at),
        outcome=status,
        visible_at=visible_at,
        failure=failure,
        job_id=job.job_id,
        node_id=FIRST_NODE_ID + job.device,
        device=job.device,
        kind=metadata.message_type,
        round=job.round,
        reported_p_finish=job.reported_p_finish,
        status=fl.FAILED.get(status, fl.UNCLAIMED),
        reason=reason,
        sent_at=job.sent_at,
        started_at=column["started"],
        downloaded_at=column["downloaded"],
        trained_at=column["trained"],
        reported_at=column["reported"],
        ended_at=column["ended"],
        download_s=column["download_s"],
        compute_s=column["compute_s"],
        upload_s=column["upload_s"],
        work=column["work_done"],
        downloaded_bytes=column["downloaded_bytes"],
        uploaded_bytes=column["uploaded_bytes"],
    )


def round_of(message: Message) -> int:
    """Return the round that a strategy wrote into the message, or -1."""
    return _round_said(message.metadata.group_id, _round_in(message.content))


def _round_said(group_id: str, otherwise: int) -> int:
    return int(group_id) if group_id.isdecimal() else otherwise


def _round_in(content: RecordDict) -> int:
    for record in records_in(content, ConfigRecord).values():
        number = record.get("server-round")
        if isinstance(number, int):
            return number
    return -1


def _seen(
    status: Status, expires: float, reason: str, column: dict[str, float]
) -> tuple[float, tuple[int, str] | None]:
    """Return when the server sees the end of a job, and the SuperLink's error if it is one."""
    if status == Status.REPORTED:
        return column["reported"], None
    noticed = column["ended"] + HEARTBEAT_S
    if status == Status.INTERRUPTED and noticed < expires:
        return noticed, (ErrorCode.NODE_UNAVAILABLE, reason)
    return expires, (ErrorCode.MESSAGE_UNAVAILABLE, reason)
