"""All jobs of a run in one table: a row from the sending of a message to its end.

A row is filled when the message is sent, when its device has been followed, when the reply is
handed over and when the strategy says what became of it. Whatever a device spent appears in exactly
one row, so the accounts of a run close by summing rows.

A job may change until its reply has been delivered, and the strategy may say later what became of
the reply. So rows that are over stay in memory for a while and then move to a file without a name,
which goes with the process; one that changes after all is read back. Memory grows with the jobs in
flight, not with all jobs.
"""

import os
import tempfile
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import IO, Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from flwr.app import Message, RecordDict
from flwr.common.serde import (
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from fedstale.errors import FedstaleError, ResumeError
from fedstale.simulation.compat import with_content
from fedstale.strategies.server.runtime import CLIENT_ERROR, REJECTED, REPORTED
from fedstale.strategies.state import State, Stateful
from fedstale.traces import Status
from fedstale.traces.arrays import Index

# How a job ended, from the server's point of view, besides the words of the runtime.
LATE = "late"
EXPIRED = "expired"
INTERRUPTED = "interrupted"
STALLED = "stalled"
UNCLAIMED = "unclaimed"
IN_FLIGHT = "in-flight"
STATUSES = (
    *(REPORTED, REJECTED, CLIENT_ERROR, LATE, EXPIRED, INTERRUPTED, STALLED, UNCLAIMED, IN_FLIGHT),
)

FAILED = {
    Status.LATE: LATE,
    Status.EXPIRED: EXPIRED,
    Status.INTERRUPTED: INTERRUPTED,
    Status.STALLED: STALLED,
}

NEVER = float("inf")
UNKNOWN = float("nan")
ANSWERED = -1
"""The `error_code` of a job whose device answers itself."""

BLOCK = 1 << 16
"""Jobs of one table of events, which is one row group of events.parquet."""
_WRITTEN_TOGETHER = 4096
_PREFIX = "message-"
_EMPTY = RecordDict()

Columns = dict[str, npt.NDArray[Any]]
Rows = npt.NDArray[np.void]
T = TypeVar("T", int, float, str)


class Column(Generic[T]):
    """A column of the table, and the attribute of `JobRow` that reads and writes it."""

    def __init__(self, kind: type[T], default: T, *, is_event: bool = True) -> None:
        """Declare a column.

        Args:
            kind: of its values.
            default: of a new row.
            is_event: whether it is a column of events.parquet.
        """
        self.kind: type[T] = kind
        self.default: T = default
        self.is_event, self.is_text, self.name = is_event, isinstance(default, str), ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, job: None, owner: type) -> "Column[T]": ...
    @overload
    def __get__(self, job: "JobRow", owner: type) -> T: ...
    def __get__(self, job: "JobRow | None", owner: type) -> "Column[T] | T":
        """Return the value in a job's row."""
        if job is None:
            return self
        value: Any = job.jobs.columns[self.name].item(job.slot)
        if self.is_text:
            value = job.jobs.word(value)
        found: T = value
        return found

    def __set__(self, job: "JobRow", value: T) -> None:
        """Write into a job's row."""
        number: Any = job.jobs.number(value) if isinstance(value, str) else value
        job.jobs.columns[self.name][job.slot] = number


class JobRow:
    """One row of the table while it is in memory.

    The columns of events.parquet come first, in its order, with the device's position in the place
    of its name.
    """

    __slots__ = ("jobs", "slot")

    job_id = Column(int, 0)
    """Counts up from 0 in the order of sending."""
    node_id = Column(int, 0)
    """Flower's id of the node."""
    device = Column(int, 0)
    """Position of the device in the traces."""
    kind = Column(str, "")
    """Message type: train, evaluate or query, with its action if it has one."""
    round = Column(int, -1)
    """The server's round, from the message; -1 where the app counts none."""
    status = Column(str, IN_FLIGHT)
    """How the job ended: one of `STATUSES`."""
    reason = Column(str, "")
    """Why, in words."""
    sent_at = Column(float, NEVER)
    """Instants in s; inf where it never happened, NaN where no server can know."""
    started_at = Column(float, NEVER)
    downloaded_at = Column(float, NEVER)
    trained_at = Column(float, NEVER)
    reported_at = Column(float, NEVER)
    ended_at = Column(float, NEVER)
    """Instant from which the device is free again."""
    delivered_at = Column(float, NEVER)
    """Instant at which the app pulled the reply or the failure."""
    download_s = Column(float, 0.0)
    """Seconds the device spent in each phase, also if the job was lost."""
    compute_s = Column(float, 0.0)
    upload_s = Column(float, 0.0)
    work = Column(float, 0.0)
    """Work units computed, also if the job was lost."""
    downloaded_bytes = Column(float, 0.0)
    """Bytes moved, also if the job was lost; fractions where a transfer was cut."""
    uploaded_bytes = Column(float, 0.0)
    base_version = Column(int, -1)
    """Model version that was sent, -1 where the strategy has none."""
    aggregated_version = Column(int, -1)
    """Model version that the update went into, -1 where it went into none."""
    staleness = Column(float, UNKNOWN)
    """Versions between the two, counted at the server step."""
    weight = Column(float, UNKNOWN)
    """Weight of the update in the server step."""
    reported_p_finish = Column(float, UNKNOWN)
    """Chance to finish the next job that the device had last reported, at the sending."""

    asked_work = Column(float, UNKNOWN, is_event=False)
    """What the job asks of its device: work units, bytes down and up, and s to report in."""
    asked_download_bytes = Column(float, UNKNOWN, is_event=False)
    asked_upload_bytes = Column(float, UNKNOWN, is_event=False)
    asked_ttl_s = Column(float, UNKNOWN, is_event=False)
    free_at = Column(float, UNKNOWN, is_event=False)
    """Instant in s from which the device was free for the job."""
    visible_at = Column(float, NEVER, is_event=False)
    """Instant at which the server can see the reply or the failure, in s."""
    error_code = Column(int, ANSWERED, is_event=False)
    """Code of the SuperLink's error reply; `ANSWERED` if the device answers itself."""

    def __init__(self, jobs: "JobTable", slot: int) -> None:
        """Look at a slot of a table."""
        self.jobs, self.slot = jobs, slot

    def aggregate(self, base_version: int, version: int, staleness: int, weight: float) -> None:
        """Note that the update went into a model version."""
        self.base_version, self.aggregated_version = base_version, version
        self.staleness, self.weight = float(staleness), float(weight)

    @property
    def message(self) -> Message:
        """The message, until its reply has been delivered.

        Raises:
            KeyError: it has been.
        """
        return self.jobs.messages[self.slot]

    @property
    def is_waiting(self) -> bool:
        """Whether the server has not been given a reply yet."""
        return self.slot in self.jobs.messages

    @property
    def is_answered(self) -> bool:
        """Whether the device answers itself, and not the SuperLink in its place."""
        return self.error_code == ANSWERED


_ALL: Mapping[str, Column[Any]] = {
    name: column for name, column in vars(JobRow).items() if isinstance(column, Column)
}
COLUMNS: Mapping[str, type] = {name: c.kind for name, c in _ALL.items() if c.is_event}
"""Names and types of what is known of a job when it is over, in the order of events.parquet."""
ASKED = ("asked_work", "asked_download_bytes", "asked_upload_bytes", "asked_ttl_s")
_DTYPES: Mapping[object, str] = {float: "f8", int: "i8", str: "i4"}
_LAYOUT = np.dtype([(name, _DTYPES[kind]) for name, kind in COLUMNS.items()])
_WORDS = [name for name, column in _ALL.items() if column.is_text]
_ARROW = {str: pa.string(), float: pa.float64(), int: pa.int64()}
_SCHEMA = pa.schema([(name, _ARROW[kind]) for name, kind in COLUMNS.items()])


class JobTable(Stateful):
    """The jobs of a run by number and by message."""

    saved = ("_n", "_over", "_words")

    def __init__(self) -> None:
        """Start with no job."""
        self._n = 0
        self.columns: Columns = {
            name: np.zeros(0, _DTYPES[column.kind]) for name, column in _ALL.items()
        }
        """The rows in memory, by slot; texts are numbered (`word`, `number`)."""
        self.messages: dict[int, Message] = {}
        """The messages that have not been answered, by slot."""
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._over: dict[int, None] = {}
        self._words: list[str] = []
        self._numbers: dict[str, int] = {}
        self._file = _RowFile()
        self._write_at = 2 * _WRITTEN_TOGETHER

    def __len__(self) -> int:
        """Number of jobs sent so far."""
        return self._n

    @staticmethod
    def message_id(job_id: int) -> str:
        """Return the id of a job's message."""
        return f"{_PREFIX}{job_id}"

    def add(self, n: int) -> Index:
        """Make rows for the next n jobs, and return their slots, shape (n,)."""
        slots = self._taken(n)
        self.columns["job_id"][slots] = range(self._n, self._n + n)
        self._slots.update(zip(range(self._n, self._n + n), slots, strict=True))
        self._n += n
        return np.array(slots, dtype=np.int64)

    def __getitem__(self, job_id: int) -> JobRow:
        """Return a job; changes to it are kept."""
        slot = self._slots.get(job_id)
        if slot is None:
            slot = self._read_back(job_id)
        return JobRow(self, slot)

    def of_message(self, message_id: str) -> JobRow | None:
        """Return the job of a message, or None if no such message was sent."""
        number = message_id.removeprefix(_PREFIX)
        if number == message_id or not number.isdecimal() or int(number) >= self._n:
            return None
        return self[int(number)]

    def end(self, job: JobRow, now: float) -> None:
        """Note that the server has seen the end of a job, at this instant."""
        job.delivered_at = now
        self.messages.pop(job.slot, None)
        self._over[job.job_id] = None
        if len(self._over) >= self._write_at:
            self._write_oldest(now)

    @property
    def n_in_memory(self) -> int:
        """Number of rows in memory."""
        return len(self._slots)

    def word(self, number: int) -> str:
        """Return a text by its number."""
        return self._words[number]

    def number(self, word: str) -> int:
        """Return the number of a text; few texts occur many times."""
        number = self._numbers.get(word)
        if number is None:
            number = self._numbers[word] = len(self._words)
            self._words.append(word)
        return number

    def numbers(self, words: Sequence[str]) -> npt.NDArray[np.int32]:
        """Return the numbers of some texts."""
        return np.array([self.number(word) for word in words], dtype=np.int32)

    def tables(
        self, as_of: Callable[[Columns], Columns], device_ids: pd.Index
    ) -> Iterator[pa.Table]:
        """Yield the events of all jobs in the order of sending, `BLOCK` at a time.

        Args:
            as_of: returns rows in memory, some of whose jobs may be under way, as they stand now.
            device_ids: name of each device of the traces.
        """
        ids = sorted(self._slots)
        known = as_of(self._gathered(ids))
        words = np.array(self._words, dtype=object)
        for first in range(0, max(self._n, 1), BLOCK):
            rows = self._file.read(first, min(first + BLOCK, self._n))
            here = slice(bisect_left(ids, first), bisect_left(ids, first + BLOCK))
            places = np.array(ids[here], dtype=np.int64) - first
            for name in COLUMNS:
                rows[name][places] = known[name][here]
            yield table(
                {
                    name: words[rows[name]] if name in _WORDS else np.ascontiguousarray(rows[name])
                    for name in COLUMNS
                },
                device_ids,
            )

    def state_dict(self) -> State:
        """Return all jobs; messages with the same records share them."""
        ids = sorted(self._slots)
        contents: dict[int, tuple[int, RecordDict]] = {}
        messages: State = {}
        for job_id in ids:
            message = self.messages.get(self._slots[job_id])
            if message is not None:
                number, _ = contents.setdefault(
                    id(message.content), (len(contents), message.content)
                )
                head = message_to_proto(with_content(message, _EMPTY)).SerializeToString()
                messages[str(job_id)] = [np.frombuffer(head, dtype=np.uint8), number]
        return super().state_dict() | {
            "columns": list(COLUMNS),
            "in_memory": self._gathered(ids),
            "on_disk": self._file.bytes(),
            "messages": messages,
            "contents": [records_out(content) for _, content in contents.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, in place of the jobs that there are.

        Raises:
            ResumeError: another release wrote it.
            FedstaleError: the disk is full, or the folder of temporary files is not writable.
        """
        if state.get("columns") != list(COLUMNS):
            raise ResumeError(
                "the checkpoint holds events with other columns: resume with the release of "
                "fedstale that wrote it"
            )
        self.__init__()  # type: ignore[misc]
        super().load_state_dict(state)
        self._numbers = {word: number for number, word in enumerate(self._words)}
        if len(state["on_disk"]):
            self._file.write(state["on_disk"].view(_LAYOUT), 0)
        known: Columns = state["in_memory"]
        slots = self._taken(known["job_id"].size)
        for name, values in known.items():
            self.columns[name][slots] = values
        self._slots = dict(zip(known["job_id"].tolist(), slots, strict=True))
        contents = [records_in(data) for data in state["contents"]]
        for job_id, (head, number) in state["messages"].items():
            message = message_from_proto(ProtoMessage.FromString(head.tobytes()))
            self.messages[self._slots[int(job_id)]] = with_content(message, contents[number])

    def _gathered(self, ids: Sequence[int]) -> Columns:
        slots = np.array([self._slots[job_id] for job_id in ids], dtype=np.int64)
        return {name: column[slots] for name, column in self.columns.items()}

    def _taken(self, n: int) -> list[int]:
        """Return n free slots, whose rows hold the defaults."""
        if len(self._free) < n:
            size = self.columns["job_id"].size
            more = max(size, n, 64)
            for name, column in self.columns.items():
                self.columns[name] = np.concatenate([column, np.zeros(more, column.dtype)])
            self._release(range(size + more - 1, size - 1, -1))
        return [self._free.pop() for _ in range(n)]

    def _release(self, slots: Sequence[int]) -> None:
        """Let rows be used again, with the defaults in them."""
        for name, column in _ALL.items():
            default: Any = self.number(column.default) if column.is_text else column.default
            self.columns[name][slots] = default
        self._free += slots

    def _read_back(self, job_id: int) -> int:
        """Bring a row that was written back into memory."""
        (slot,) = self._taken(1)
        row = self._file.read(job_id, job_id + 1)[0]
        for name, column in _ALL.items():
            if column.is_event:
                self.columns[name][slot] = row[name]
        self.columns["visible_at"][slot] = row["delivered_at"]
        self._slots[job_id], self._over[job_id] = slot, None
        return slot

    def _write_oldest(self, now: float) -> None:
        """Move the rows that were over first to the file, unless the device still works."""
        oldest = list(islice(self._over, len(self._over) - _WRITTEN_TOGETHER))
        slots = np.array([self._slots[job_id] for job_id in oldest], dtype=np.int64)
        is_done = self.columns["ended_at"][slots] <= now
        done = sorted(job for job, ended in zip(oldest, is_done.tolist(), strict=True) if ended)
        if done:
            columns = self._gathered(done)
            rows = np.empty(len(done), _LAYOUT)
            for name in COLUMNS:
                rows[name] = columns[name]
            for part in np.split(rows, np.flatnonzero(np.diff(rows["job_id"]) != 1) + 1):
                self._file.write(part, int(part["job_id"][0]))
        for job_id in done:
            del self._over[job_id]
        self._release([self._slots.pop(job_id) for job_id in done])
        self._write_at = len(self._over) + _WRITTEN_TOGETHER


class _RowFile:
    """Rows of fixed length in a temporary file in the system's folder for them (TMPDIR)."""

    def __init__(self) -> None:
        """Make the file when there is something to write."""
        self._files: list[IO[bytes]] = []
        self._end = 0

    def read(self, start: int, stop: int) -> Rows:
        """Return the rows start to stop; those never written are zeros."""
        rows = np.zeros(stop - start, _LAYOUT)
        for file in self._files:
            size = _LAYOUT.itemsize
            data = os.pread(file.fileno(), len(rows) * size, start * size)
            written = np.frombuffer(data, _LAYOUT)
            rows[: len(written)] = written
        return rows

    def bytes(self) -> npt.NDArray[np.uint8]:
        """Return the whole file; it is not read into memory for it."""
        for file in self._files:
            return np.memmap(file, np.uint8, "r", shape=(self._end * _LAYOUT.itemsize,))
        return np.zeros(0, np.uint8)

    def write(self, rows: Rows, first: int) -> None:
        """Write rows from a place on.

        Raises:
            FedstaleError: the disk is full, or the folder is not writable.
        """
        left, at = rows.view(np.uint8).data, first * _LAYOUT.itemsize
        try:
            if not self._files:
                file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see finalize
                weakref.finalize(self, file.close)
                self._files.append(file)
            while left:
                done = os.pwrite(self._files[0].fileno(), left, at)
                left, at = left[done:], at + done
        except OSError as problem:
            raise FedstaleError(
                f"the events of the run cannot be written to {tempfile.gettempdir()!r}: "
                f"{problem.strerror}; make room there, or set TMPDIR to another folder"
            ) from None
        self._end = max(self._end, first + len(rows))


def table(
    columns: Mapping[str, Sequence[Any] | npt.NDArray[Any]], device_ids: pd.Index
) -> pa.Table:
    """Return the events table whose columns are given, with names of devices for positions.

    Args:
        columns: those of `COLUMNS`, each of shape (n,).
        device_ids: name of each device of the traces, for the column device_id.
    """
    names = device_ids[np.asarray(columns["device"], dtype=np.int64)].to_numpy(dtype=object)
    events = pa.table({name: columns[name] for name in COLUMNS}, schema=_SCHEMA)
    after = events.schema.get_field_index("device")
    return events.set_column(after, "device_id", pa.array(names, pa.string()))


def records_out(content: RecordDict) -> npt.NDArray[np.uint8]:
    """Return Flower's records as bytes."""
    return np.frombuffer(recorddict_to_proto(content).SerializeToString(), dtype=np.uint8)


def records_in(data: npt.NDArray[np.uint8]) -> RecordDict:
    """Return what `records_out` was given."""
    return recorddict_from_proto(ProtoRecordDict.FromString(data.tobytes()))
