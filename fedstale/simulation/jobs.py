"""All jobs of a run in one table: a row from the sending of a message to its end.

A row is filled when the message is sent, when its device has been followed, when the reply is
handed over and when the strategy says what became of it. Whatever a device spent appears in exactly
one row, so the accounts of a run close by summing rows.

The rows lie in a file without a name, which goes with the process. The file is mapped into memory
anew whenever it grows, and what was mapped before is let go: memory grows with the rows that are
read or written meanwhile, those of jobs in flight, and not with all jobs.
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from flwr.app import ArrayRecord, Message, RecordDict

from fedstale.errors import FedstaleError, ResumeError
from fedstale.flower import (
    Size,
    bytes_of_message,
    bytes_of_records,
    message_of_bytes,
    records_of_bytes,
    with_content,
)
from fedstale.runs import IN_FLIGHT, NEVER, UNKNOWN
from fedstale.simulation.costs import reply_class
from fedstale.strategies.server import REJECTED, REPORTED, Callback, Runtime
from fedstale.strategies.types import FORECAST_RECORD, ClientUpdate, State, Stateful, forecast_in

ANSWERED = -1
"""The `error_code` of a job whose device answers itself."""

BLOCK = 1 << 16
"""Jobs of one table of events, which is one row group of events.parquet."""
_GROWTH = 4096
"""Rows by which the file grows at least."""
_PREFIX = "message-"
_EMPTY = RecordDict()


class RunsAfter(IntEnum):
    """When the client of a job must run, at the latest."""

    DELIVERY = 0
    """When its reply is pulled: all that it costs is known before."""
    DOWNLOAD = 1
    """Before it works: its reply tells how much work it is, and how many bytes."""
    WORK = 2
    """Before it uploads: its reply tells how many bytes."""


Columns = dict[str, npt.NDArray[Any]]
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
        value: Any = job.jobs.columns[self.name].item(job.row)
        if self.is_text:
            value = job.jobs.word(value)
        found: T = value
        return found

    def __set__(self, job: "JobRow", value: T) -> None:
        """Write into a job's row."""
        number: Any = job.jobs.number(value) if isinstance(value, str) else value
        job.jobs.columns[self.name][job.row] = number


_UNKNOWN_SIZE = Size(0, 0)


@dataclass(slots=True)
class ClientRun:
    """A client that has run, and what it takes to run it again."""

    before: RecordDict | None
    """What its node remembered before; None for nothing."""
    latest: int | None
    """The job that the node had worked on before."""
    ready_at: float
    """Instant in s at which the client was told that its reply is ready."""
    size: Size = _UNKNOWN_SIZE
    """Bytes of the reply."""
    reply: Message | None = None
    """What it replied; None where that is not kept, and the client runs again to tell."""


class JobRow:
    """One row of the table, and what is in none as long as the server waits for the job's end.

    The columns of events.parquet come first, in its order, with the device's position in the place
    of its name.
    """

    __slots__ = ("form", "jobs", "message", "row", "run")

    message: Message
    """What was sent."""
    form: str
    """Its `reply_class`."""
    run: ClientRun | None
    """What its client has done, if it has run."""

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
    """How the job ended, in the words of docs/formats.md."""
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
    reported_duration_s = Column(float, UNKNOWN)
    """How long the next job takes, in s, as the device had last reported."""
    work_share = Column(float, UNKNOWN)
    """Share of its local epochs that the message asks for; NaN where it asks for none."""
    format_down = Column(str, "")
    """Format of the model in the message, and the one that the reply is asked in; empty for in
    full, see `fedstale.strategies.messages`."""
    format_up = Column(str, "")

    asked_work = Column(float, UNKNOWN, is_event=False)
    """What the job asks of its device: work units, bytes down and up, and s to report in. Until the
    client has run, work or bytes up are what is expected, as `runs_after` says."""
    asked_download_bytes = Column(float, UNKNOWN, is_event=False)
    asked_upload_bytes = Column(float, UNKNOWN, is_event=False)
    asked_ttl_s = Column(float, UNKNOWN, is_event=False)
    whole_work = Column(float, UNKNOWN, is_event=False)
    """Work units of the job in full, of which `work_share` is asked; else `asked_work`."""
    runs_after = Column(int, 0, is_event=False)
    """When the client must run, because what it makes decides what the job costs; a `RunsAfter`."""
    scale = Column(float, 1.0, is_event=False)
    """For how many bytes a byte of values in the reply stands; see `CostModel.scale`."""
    free_at = Column(float, UNKNOWN, is_event=False)
    """Instant in s from which the device was free for the job."""
    visible_at = Column(float, NEVER, is_event=False)
    """Instant at which the server can see the reply or the failure, in s."""
    error_code = Column(int, ANSWERED, is_event=False)
    """Code of the SuperLink's error reply; `ANSWERED` if the device answers itself."""

    def __init__(
        self, jobs: "JobTable", row: int, message: Message | None = None, form: str = ""
    ) -> None:
        """Look at a row of a table; its place is the job's id.

        Args:
            jobs: the table; a weak reference if it holds this, so that it goes with its last user.
            row: of the job.
            message: what was sent, of a job whose end the server has not seen.
            form: its `reply_class`.
        """
        self.jobs, self.row = jobs, row
        if message is not None:
            self.message, self.form, self.run = message, form, None

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as the values of the row; the table stays behind."""
        return SimpleNamespace, (), {name: getattr(self, name) for name in _ALL}

    @property
    def is_answered(self) -> bool:
        """Whether the device answers itself, and not the SuperLink in its place."""
        return self.error_code == ANSWERED


_ALL: Mapping[str, Column[Any]] = {
    name: column for name, column in vars(JobRow).items() if isinstance(column, Column)
}
COLUMNS: Mapping[str, type] = {name: c.kind for name, c in _ALL.items() if c.is_event}
"""Names and types of what is known of a job when it is over, in the order of events.parquet."""
_REPORTED = ("reported_p_finish", "reported_duration_s")
SENT = [
    *("node_id", "device", "sent_at"),
    *("asked_work", "asked_download_bytes", "asked_upload_bytes", "asked_ttl_s"),
    *("whole_work", "scale", "runs_after", "round", "work_share"),
    *("kind", "format_down", "format_up"),
]
"""Columns that are filled when a message is sent, texts by their numbers."""
_DTYPES: Mapping[object, str] = {float: "f8", int: "i8", str: "i8"}
_LAYOUT = np.dtype([(name, _DTYPES[column.kind]) for name, column in _ALL.items()])
_WORDS = [name for name, column in _ALL.items() if column.is_text]
_ARROW = {str: pa.string(), float: pa.float64(), int: pa.int64()}
_SCHEMA = pa.schema([(name, _ARROW[kind]) for name, kind in COLUMNS.items()])


class _Numbers(dict[str, int]):
    """Counts texts as they are asked for; few of them occur many times."""

    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self._words = words

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self._words)
        self._words.append(word)
        return number


class JobTable(Stateful, Callback):
    """The jobs of a run by number and by message; a callback that notes what becomes of replies."""

    saved: ClassVar[tuple[str, ...]] = ("_words", "reported")

    def __init__(self) -> None:
        """Start with no job.

        Raises:
            FedstaleError: the folder of temporary files is not writable.
        """
        self._n = 0
        self.open: dict[int, JobRow] = {}
        """The jobs whose end the server has not seen, by job id."""
        self.reported: dict[str, dict[int, float]] = {name: {} for name in _REPORTED}
        """What each node has last reported of its next job, by column."""
        self._words: list[str] = []
        self.number: Callable[[str], int] = _Numbers(self._words).__getitem__
        """Returns the number of a text, which gets one when it is first asked for."""
        self._map(np.zeros(0, _LAYOUT))
        try:
            # In the system's folder for them (TMPDIR).
            file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see finalize
        except OSError as problem:
            raise _unwritable(problem) from None
        weakref.finalize(self, file.close)
        self._file = file.fileno()

    def __len__(self) -> int:
        """Number of jobs sent so far."""
        return self._n

    @staticmethod
    def message_id(job_id: int) -> str:
        """Return the id of a job's message."""
        return f"{_PREFIX}{job_id}"

    def add(self, n: int) -> slice:
        """Make rows for the next n jobs, with the defaults in them, and return their places.

        Raises:
            FedstaleError: the disk is full, or the folder of temporary files is not writable.
        """
        first, self._n = self._n, self._n + n
        if self._n > self._rows.size:
            try:
                self._grow()
            except FedstaleError:
                self._n = first
                raise
        return slice(first, self._n)

    def begin(
        self, rows: Sequence[tuple[Any, ...]], messages: Sequence[Message], forms: Sequence[str]
    ) -> slice:
        """Open the jobs of messages that are sent, and return their places.

        Args:
            rows: the columns of `SENT` of each.
            messages: that were sent.
            forms: the `reply_class` of each.

        Raises:
            FedstaleError: as `add`.
        """
        places, own = self.add(len(rows)), cast(Any, weakref.proxy(self))
        self._sent[places] = rows
        for row, message, form in zip(range(self._n)[places], messages, forms, strict=True):
            self.open[row] = JobRow(own, row, message, form)
        return places

    def count_on(self, rows: slice, before: int) -> None:
        """Add the rounds of the loops before this one to the rounds that some jobs state."""
        rounds = self.columns["round"][rows]
        rounds[rounds >= 0] += before

    def __getitem__(self, job_id: int) -> JobRow:
        """Return a job; changes to it are kept."""
        return self.open.get(job_id) or JobRow(self, job_id)

    def form(self, row: int) -> str:
        """Return the `reply_class` of a job."""
        job = JobRow(self, row)
        return reply_class(job.kind.removesuffix(".default"), job.format_up)

    def of_message(self, message_id: str) -> JobRow | None:
        """Return the job of a message, or None if no such message was sent."""
        number = message_id.removeprefix(_PREFIX)
        if number == message_id or not number.isdecimal() or int(number) >= self._n:
            return None
        return self[int(number)]

    def end(self, job: JobRow, now: float) -> None:
        """Note that the server has seen the end of a job, at this instant."""
        self.columns["delivered_at"][job.row] = now
        self.open.pop(job.row, None)

    def learn(self, node_id: int, reply: Message) -> None:
        """Keep the forecast of its next job that a device sends with a reply, if it can be."""
        # Asked of every reply, and a look at what is not there takes ten times as long.
        if reply.has_error() or FORECAST_RECORD not in reply.content:
            return
        forecast = forecast_in(reply.content)
        p_finish, duration_s = forecast.get("p_finish"), forecast.get("duration_s")
        if isinstance(p_finish, float) and 0.0 <= p_finish <= 1.0:
            self.reported["reported_p_finish"][node_id] = p_finish
        if isinstance(duration_s, float) and duration_s > 0.0:
            self.reported["reported_duration_s"][node_id] = duration_s

    def note_reported(self, rows: Iterable[int], messages: Iterable[Message]) -> None:
        """Write into jobs that train what their devices have last reported."""
        for row, message in zip(rows, messages, strict=True):
            if message.metadata.message_type.startswith("train"):
                self.note_reported_by(message.metadata.dst_node_id, row)

    def note_reported_by(self, node_id: int, row: int) -> None:
        """Write into a job that trains what its device has last reported."""
        for name, by_node in self.reported.items():
            self.columns[name][row] = by_node.get(node_id, UNKNOWN)

    def new_version(
        self, run: Runtime, version: int, arrays: ArrayRecord, updates: Sequence[ClientUpdate]
    ) -> None:
        """Note which replies went into a model version."""
        columns, used, plain = self.columns, self.number(REPORTED), self.number("")
        for update in updates:
            # A job of the run that this one goes on from may have its row there.
            job = self.of_message(update.message_id)
            if job is not None:
                row = job.row
                columns["base_version"][row] = update.base_version
                columns["aggregated_version"][row] = version
                columns["staleness"][row], columns["weight"][row] = update.staleness, update.weight
                # A run that ended or went back may have left out what waited for this version.
                columns["status"][row], columns["reason"][row] = used, plain

    def rejected(self, run: Runtime, message_id: str, *, reason: str) -> None:
        """Note that the strategy did not use a reply."""
        job = self.of_message(message_id)
        if job is not None and job.status == REPORTED:
            job.status, job.reason = REJECTED, reason

    def word(self, number: int) -> str:
        """Return a text by its number."""
        return self._words[number]

    def tables(
        self, as_of: Callable[[Columns], Columns], device_ids: pd.Index
    ) -> Iterator[pa.Table]:
        """Yield the events of all jobs in the order of sending, `BLOCK` at a time.

        Args:
            as_of: returns rows, some of whose jobs may be under way, as they stand now.
            device_ids: name of each device of the traces.
        """
        for first in range(0, max(self._n, 1), BLOCK):
            rows = self._rows[first : min(first + BLOCK, self._n)]
            known = as_of({name: np.array(rows[name]) for name in _ALL})
            words = np.array(self._words, dtype=object)
            yield table(
                {name: words[known[name]] if name in _WORDS else known[name] for name in COLUMNS},
                device_ids,
            )

    def state_dict(self) -> State:
        """Return all jobs; messages with the same records share them.

        Replies that were not pulled are left out: they may be as many models, and their clients
        run again when they are.
        """
        contents: dict[int, tuple[int, RecordDict]] = {}
        messages: State = {}
        runs: State = {}
        for job_id, job in sorted(self.open.items()):
            content = job.message.content
            number, _ = contents.setdefault(id(content), (len(contents), content))
            head = bytes_of_message(with_content(job.message, _EMPTY))
            messages[str(job_id)] = [np.frombuffer(head, dtype=np.uint8), number]
            if job.run is not None:
                before = records_out(job.run.before or _EMPTY)
                runs[str(job_id)] = [before, job.run.latest, job.run.ready_at]
        return super().state_dict() | {
            "columns": list(_ALL),
            "rows": self._rows[: self._n].view(np.uint8),
            "messages": messages,
            "runs": runs,
            "contents": [records_out(content) for _, content in contents.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, in place of the jobs that there are.

        Raises:
            ResumeError: another release wrote it.
            FedstaleError: the disk is full, or the folder of temporary files is not writable.
        """
        if state.get("columns") != list(_ALL) or "runs" not in state:
            raise ResumeError(
                "the checkpoint holds jobs in another form: resume with the release of "
                "fedstale that wrote it"
            )
        self.__init__()  # type: ignore[misc]
        super().load_state_dict(state)
        words, self._words = self._words, []
        self.number = _Numbers(self._words).__getitem__
        for word in words:
            self.number(word)
        rows = state["rows"].view(_LAYOUT)
        places = self.add(rows.size)
        self._rows[places] = rows
        contents = [records_in(data) for data in state["contents"]]
        for job_id, (head, number) in state["messages"].items():
            message = with_content(message_of_bytes(head.tobytes()), contents[number])
            row = int(job_id)
            self.open[row] = JobRow(weakref.proxy(self), row, message, self.form(row))
        for job_id, (before, latest, ready_at) in state["runs"].items():
            self.open[int(job_id)].run = ClientRun(records_in(before), latest, ready_at)

    def _map(self, rows: npt.NDArray[np.void]) -> None:
        self._rows, self._sent = rows, rows[SENT]
        self.columns: Columns = {name: rows[name] for name in _ALL}
        """The rows, by job id; texts are numbered (`word`, `number`)."""

    def _grow(self) -> None:
        """Add rows to the file until it has one for each job, and map it into memory."""
        before = self._rows.size
        rows = np.zeros(max(self._n - before, _GROWTH), _LAYOUT)
        for name, column in _ALL.items():
            rows[name] = self.number(column.default) if column.is_text else column.default
        rows["job_id"] = range(before, before + rows.size)
        left, at = rows.view(np.uint8).data, before * _LAYOUT.itemsize
        try:
            while left:
                done = os.pwrite(self._file, left, at)
                left, at = left[done:], at + done
            self._map(np.frombuffer(mmap.mmap(self._file, at), _LAYOUT))
        except OSError as problem:
            raise _unwritable(problem) from None


def _unwritable(problem: OSError) -> FedstaleError:
    return FedstaleError(
        f"the events of the run cannot be written to {tempfile.gettempdir()!r}: "
        f"{problem.strerror}; make room there, or set TMPDIR to another folder"
    )


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
    return np.frombuffer(bytes_of_records(content), dtype=np.uint8)


def records_in(data: npt.NDArray[np.uint8]) -> RecordDict:
    """Read records that `records_out` has written."""
    return records_of_bytes(data.tobytes())
