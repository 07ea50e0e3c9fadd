"""One job from its sending to its end, as the simulator accounts for it.

Each field of `Flight` from `job_id` on is a column of events.parquet, in this order, with the
device's name in the place of its position. Whatever a device spent appears in exactly one row, so
the ledger of a run closes by summing rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from flwr.app import Message

from fedstale.traces import Status

# How a job ended, from the server's point of view.
REPORTED = "reported"
REJECTED = "rejected"
CLIENT_ERROR = "client-error"
LATE = "late"
EXPIRED = "expired"
INTERRUPTED = "interrupted"
STALLED = "stalled"
UNCLAIMED = "unclaimed"
FLYING = "flying"

FAILED = {
    Status.LATE: LATE,
    Status.EXPIRED: EXPIRED,
    Status.INTERRUPTED: INTERRUPTED,
    Status.STALLED: STALLED,
}

NEVER = float("inf")
UNKNOWN = float("nan")


@dataclass(slots=True, kw_only=True)
class Flight:
    """A message to a device, what the device did with it, and what became of the reply."""

    message: Message | None
    """The message, until its reply has been delivered."""
    asked: tuple[float, float, float, float, float]
    """Work, bytes down, bytes up, ttl in s, and the instant from which the device was free."""
    outcome: Status
    """How the device's trip ends."""
    visible_at: float
    """Instant at which the server can see the reply or the failure, in s."""
    failure: tuple[int, str] | None
    """Code and reason of the SuperLink's error reply; None if the device answers itself."""

    job_id: int
    """Counts up from 0 in the order of sending."""
    node_id: int
    """Flower's id of the node."""
    device: int
    """Position of the device in the traces."""
    kind: str
    """Message type: train, evaluate or query, with its action if it has one."""
    round: int
    """The server's round, from the message; -1 where the app counts none."""
    status: str = FLYING
    """How the job ended: one of the words above."""
    reason: str = ""
    """Why, in words."""
    sent_at: float
    """Instants in s; inf where it never happened."""
    started_at: float
    downloaded_at: float
    trained_at: float
    reported_at: float
    ended_at: float
    """Instant from which the device is free again."""
    delivered_at: float = NEVER
    """Instant at which the app pulled the reply or the failure."""
    download_s: float
    """Seconds the device spent in each phase, also if the job was lost."""
    compute_s: float
    upload_s: float
    work: float
    """Work units computed, also if the job was lost."""
    downloaded_bytes: float
    """Bytes moved, also if the job was lost; fractions where a transfer was cut."""
    uploaded_bytes: float
    base_version: int = -1
    """Model version that was sent, -1 where the strategy has none."""
    aggregated_version: int = -1
    """Model version that the update went into, -1 where it went into none."""
    staleness: float = UNKNOWN
    """Versions between the two, counted at the merge."""
    weight: float = UNKNOWN
    """Weight of the update in the merge."""
    reported_p_finish: float = UNKNOWN
    """Chance to finish the next job that the device had last told the server, at the sending."""


_HIDDEN = {"message", "asked", "outcome", "visible_at", "failure"}
COLUMNS: Mapping[str, type] = {
    f.name: f.type  # type: ignore[misc]
    for f in fields(Flight)
    if f.name not in _HIDDEN
}
"""Names and types of what is known of a job when it is over."""

_TYPES = {str: pa.string(), float: pa.float64(), int: pa.int64()}
_SCHEMA = pa.schema([(name, _TYPES[kind]) for name, kind in COLUMNS.items()])


def table_of(flights: Sequence[Flight], device_ids: pd.Index) -> pa.Table:
    """Return the events table of some jobs, one row a job.

    Args:
        flights: the jobs, in the order of sending.
        device_ids: name of each device of the traces, for the column device_id.
    """
    return table({name: [getattr(f, name) for f in flights] for name in COLUMNS}, device_ids)


def table(
    columns: Mapping[str, Sequence[Any] | npt.NDArray[Any]], device_ids: pd.Index
) -> pa.Table:
    """Return the events table whose columns are given, with names of devices for positions."""
    names = device_ids[columns["device"]].to_numpy(dtype=object)
    events = pa.table(dict(columns), schema=_SCHEMA)
    after = events.schema.get_field_index("device")
    return events.set_column(after, "device_id", pa.array(names, pa.string()))
