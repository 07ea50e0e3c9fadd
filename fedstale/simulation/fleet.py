"""The devices' side of a simulation: what each job costs, and what its device does with it.

A job is worked out in full when it is sent, because a trace knows its future. What the server sees
of it, and when, is fixed then too; the server sees nothing earlier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import ConfigRecord, Message, RecordDict

from fedstale.errors import ConfigError
from fedstale.simulation import flight as fl
from fedstale.simulation.compat import ErrorCode
from fedstale.simulation.costs import CostBook
from fedstale.simulation.flight import Flight
from fedstale.simulation.presence import Presence
from fedstale.strategies.gate import records_in
from fedstale.strategies.node_set import NodeSet, Places
from fedstale.traces import Job, Status, TraceSet, TripOutcomes
from fedstale.traces.trip import OnInterrupt

# Node ids are fixed, so that runs repeat, and far from 0 and 1, which Flower uses for itself.
FIRST_NODE_ID = 1_000

# A SuperLink notices a silent node when its heartbeat, every 30 s, has been missed twice.
HEARTBEAT_S = 60.0

_SHORTEST_S = 1e-9

_INSTANTS = ("started", "downloaded", "trained", "reported", "ended")
_SPENT = (
    "download_s",
    "compute_s",
    "upload_s",
    "work_done",
    "downloaded_bytes",
    "uploaded_bytes",
)


class Fleet:
    """Replayed devices; node i + 1000 is device i of the traces."""

    def __init__(self, traces: TraceSet, book: CostBook, on_interrupt: OnInterrupt) -> None:
        traces.require("availability", "compute", "downlink", "uplink")
        assert traces.availability is not None
        self._traces = traces
        self._presence = Presence(traces.availability)
        self._everyone = Places(np.arange(traces.n_devices, dtype=np.uint64) + FIRST_NODE_ID)
        self._online = NodeSet(self._everyone, self._presence.is_here)
        self._book = book
        self._on_interrupt: OnInterrupt = on_interrupt
        self._free_at = np.zeros(traces.n_devices)

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return self._traces.n_devices

    def device_id(self, device: int) -> str:
        """Return the name of a device by its position."""
        return str(self._traces.device_ids[device])

    def presence(self, now: float) -> Presence:
        """Return who is available at an instant."""
        self._presence.move(now)
        return self._presence

    def online(self, now: float) -> NodeSet:
        """Return the nodes that are available at an instant; the same object until one changes."""
        is_here = self.presence(now).is_here
        if is_here is not self._online.is_in:
            self._online = NodeSet(self._everyone, is_here)
        return self._online

    def send(self, messages: Sequence[Message], now: float, first_job_id: int) -> list[Flight]:
        """Return the flights of some messages, sent now.

        Raises:
            ConfigError: a node does not exist, or the cost of a message is unknown.
        """
        flights: list[Flight] = []
        batch: dict[int, Message] = {}
        for message in messages:
            node_id = message.metadata.dst_node_id
            device = node_id - FIRST_NODE_ID
            if not 0 <= device < self.n_devices:
                raise ConfigError(
                    f"dst_node_id = {node_id}: expected an id from "
                    f"get_node_ids(), {FIRST_NODE_ID} to {FIRST_NODE_ID + self.n_devices - 1}"
                )
            if device in batch:
                # A device's second job starts when its first has ended, so that must be known.
                flights += self._send(batch, now, first_job_id + len(flights))
                batch = {}
            batch[device] = message
        return flights + self._send(batch, now, first_job_id + len(flights))

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

    def _send(self, batch: dict[int, Message], now: float, first_job_id: int) -> list[Flight]:
        if not batch:
            return []
        devices = np.fromiter(batch, dtype=np.int64)
        asked, rounds = self._asked(list(batch.values()))
        there_s = self._book.costs.download_overhead_s or 0.0
        back_s = self._book.costs.upload_overhead_s or 0.0
        free_at = self._free_at[devices]
        if there_s:
            free_at = np.maximum(free_at, now) + there_s
        # A reply must be at the server in time.
        asked[:, 3] = np.maximum(asked[:, 3] - back_s, _SHORTEST_S) if back_s else asked[:, 3]
        trips = self._traces.trips(devices, now, _job(asked, self._on_interrupt), free_at)
        self._free_at[devices] = trips.ended
        columns = {name: getattr(trips, name).tolist() for name in (*_INSTANTS, *_SPENT)}
        columns["reported"] = (trips.reported + back_s).tolist()
        return [
            _flight(
                message,
                job_id=first_job_id + i,
                device=int(devices[i]),
                round_=rounds[i],
                now=now,
                asked=(*asked[i].tolist(), float(free_at[i])),
                trips=trips,
                i=i,
                column={name: values[i] for name, values in columns.items()},
            )
            for i, message in enumerate(batch.values())
        ]

    def _asked(
        self, messages: list[Message]
    ) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.float64]], list[int]]:
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


def _job(
    asked: np.ndarray[tuple[int, int], np.dtype[np.float64]], on_interrupt: OnInterrupt
) -> Job:
    work, down, up, ttl = asked.T
    return Job(
        work=work, download_bytes=down, upload_bytes=up, ttl_s=ttl, on_interrupt=on_interrupt
    )


def _flight(
    message: Message,
    *,
    job_id: int,
    device: int,
    round_: int,
    now: float,
    asked: tuple[float, float, float, float, float],
    trips: TripOutcomes,
    i: int,
    column: dict[str, float],
) -> Flight:
    status, metadata = Status(int(trips.status[i])), message.metadata
    reason = "" if status == Status.REPORTED else trips.reason(i)
    visible_at, failure = _seen(status, now + metadata.ttl, reason, column)
    return Flight(
        message=message,
        asked=asked,
        outcome=status,
        visible_at=visible_at,
        failure=failure,
        job_id=job_id,
        node_id=FIRST_NODE_ID + device,
        device=device,
        kind=metadata.message_type,
        round=round_,
        status=fl.FAILED.get(status, fl.UNCLAIMED),
        reason=reason,
        sent_at=now,
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
