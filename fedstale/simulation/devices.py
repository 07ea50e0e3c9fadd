"""The devices' side of a simulation: the cost of each job, and its trip.

A trace knows its future, so a job is followed to its end in one go, and with it is known what the
server will see and when. That waits until the first instant at which the server could see anything:
many jobs are then followed together, in the time that one alone would take. Where a client's reply
decides how long its device is at work, the job is followed with what is expected, and corrected
when the client has run. Who is online is kept up from change to change instead of looked up for all
devices each time.
"""

import heapq
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from flwr.app import Message, RecordDict

from fedstale.errors import ConfigError
from fedstale.flower import ErrorCode, Size, content_size, round_and_share_in, sent_to
from fedstale.runs import FAILED, IN_FLIGHT, NEVER, UNCLAIMED, UNKNOWN
from fedstale.simulation.costs import CostModel, reply_class
from fedstale.simulation.jobs import ANSWERED, Columns, JobRow, JobTable, RunsAfter
from fedstale.strategies.messages import formats_of
from fedstale.strategies.server import HEARTBEAT_S
from fedstale.strategies.stages import asked_share
from fedstale.strategies.types import (
    Bits,
    NodeIndex,
    NodeSet,
    Stateful,
    bits_at,
    clear_bits,
    packed,
    set_bits,
    unpacked,
)
from fedstale.traces import (
    Array,
    Availability,
    Index,
    Job,
    Mask,
    OnInterrupt,
    Status,
    TraceSet,
    trips,
)

_AHEAD = 1 << 16
"""Devices whose next change is kept in order; of the others it is enough that it comes later."""


class OnlineSet:
    """The devices that are available at an instant that mostly moves ahead.

    Example:
        >>> phones = Availability.of([[(0.0, 10.0)], [(5.0, 20.0)]], 60.0)
        >>> online = OnlineSet(phones)
        >>> online.move(7.0)
        >>> online.is_online(), online.next_change
        (array([ True,  True]), 10.0)
    """

    def __init__(self, availability: Availability) -> None:
        """Start at 0 s."""
        self._availability = availability
        self._everyone = np.arange(availability.n_devices)
        self.words: Bits = packed(np.zeros(availability.n_devices, dtype=np.bool_))
        """Which devices are available, as bits; the same array until one changes, then another."""
        self.n_online = 0
        self._until: Array = np.zeros(availability.n_devices)
        self._soon: list[tuple[float, int]] = []
        self._now, self._horizon = 0.0, np.inf
        self._begin(0.0)

    def is_online(self) -> Mask:
        """Return which devices are available, shape (devices,)."""
        return unpacked(self.words, self._everyone.size)

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
        """Look up all devices."""
        self._now = now
        self._update(self._everyone)
        self._order()

    def _update(self, devices: Index) -> None:
        """Look up some devices online now, and the end of each state."""
        start, end = self._availability.window_at_or_after(devices, self._now)
        now_online = start <= self._now
        was_online = bits_at(self.words, devices)
        self.n_online += int(now_online.sum()) - int(was_online.sum())
        self.words = self.words.copy()
        set_bits(self.words, devices[now_online])
        clear_bits(self.words, devices[~now_online])
        self._until[devices] = np.where(now_online, end, start)

    def _order(self) -> None:
        """Put the next changes in order, as far ahead as is worth it."""
        is_many = self._until.size > _AHEAD
        self._horizon = float(np.partition(self._until, _AHEAD)[_AHEAD]) if is_many else np.inf
        near = np.flatnonzero((self._until <= self._horizon) & (self._until < np.inf))
        self._soon = sorted(zip(self._until[near].tolist(), near.tolist(), strict=True))


# Node ids are fixed, so that runs repeat, and far from 0 and 1, which Flower uses for itself.
FIRST_NODE_ID = 1_000

_SHORTEST_S = 1e-9
# In the place of 0, so that what a device can never do takes as good as for ever.
_SLOWEST = 1e-200

# Of the least time that a job can take: rounding must not make it longer than the job.
_SURELY = 0.99

# NumPy and lists take plain numbers faster.
_AFTER_DELIVERY, _AFTER_DOWNLOAD, _AFTER_WORK = (int(after) for after in RunsAfter)

# Fields of TripOutcomes, and the columns of the table that hold them.
_INSTANTS = {
    name: f"{name}_at" for name in ("started", "downloaded", "trained", "reported", "ended")
}
_SPENT = {name: name for name in ("download_s", "compute_s", "upload_s")} | {
    "work_done": "work",
    "downloaded_bytes": "downloaded_bytes",
    "uploaded_bytes": "uploaded_bytes",
}


_FOLLOWED = _INSTANTS | _SPENT

Followed = tuple[list[int], list[tuple[float, int]]]
"""Jobs whose end is known; and others, each behind the instant in s when its client must run."""


class _Content(NamedTuple):
    """What messages of one type with the same records have in common."""

    kind: str
    form: str
    """Its `reply_class`."""
    round: int
    scale: float
    down: int
    """Bytes of the message."""
    promised: Size | None
    share: float | None
    """Share of the work that is asked for."""
    texts: tuple[int, int, int]
    """Its type and its formats down and up, by the table's numbers of texts."""


class Devices(Stateful):
    """Replayed devices; node i + 1000 is device i of the traces."""

    saved = ("_free_at", "_behind")

    def __init__(self, traces: TraceSet, book: CostModel, on_interrupt: OnInterrupt) -> None:
        self.traces, self._channels = traces, traces.complete()
        availability, compute, downlink, uplink = self._channels
        self.available = OnlineSet(availability)
        """The devices that are available, at the instant that was last looked at."""
        self._everyone = NodeIndex(np.arange(traces.n_devices, dtype=np.uint64) + FIRST_NODE_ID)
        self._online = NodeSet(self._everyone, self.available.words)
        self._book = book
        self._on_interrupt: OnInterrupt = on_interrupt
        self._free_at = np.zeros(traces.n_devices)
        self._behind: dict[int, list[int]] = {}
        """Jobs behind one whose client has yet to run, by device; each device that has such one."""
        # In the order of what is asked: work, bytes down, bytes up; each a second.
        channels = (compute, downlink, uplink)
        fastest = np.stack([channel.fastest() for channel in channels], axis=1) / (1.0, 8.0, 8.0)
        self._fastest = np.maximum(fastest, _SLOWEST)

    def device_id(self, device: int) -> str:
        """Return the name of a device by its position."""
        return str(self.traces.device_ids[device])

    def online(self, now: float) -> NodeSet:
        """Return the nodes that are available at an instant; the same object until one changes."""
        self.available.move(now)
        if self.available.words is not self._online.words:
            self._online = NodeSet(self._everyone, self.available.words)
        return self._online

    def send(self, messages: Sequence[Message], now: float, jobs: JobTable) -> tuple[slice, float]:
        """Enter messages into the table as jobs that are sent now, at what they cost by now.

        Returns:
            Their rows in the table, and the instant in s before which the server sees neither a
            reply nor a failure of any.

        Raises:
            ConfigError: a node does not exist, the cost of a message is unknown, or its ttl is not
                above 0.
        """
        book, last_id = self._book, FIRST_NODE_ID + self._free_at.size - 1
        back_s = book.costs.upload_overhead_s or 0.0
        rows: list[tuple[float, ...]] = []
        forms: list[str] = []
        first_s = inf
        # Strategies put the same records into every message of a round.
        known: dict[tuple[int, str], _Content] = {}
        for message in messages:
            node_id, sent_as, group_id, ttl_s, content = sent_to(message)
            if not FIRST_NODE_ID <= node_id <= last_id:
                raise ConfigError(
                    f"dst_node_id = {node_id}: expected an id from "
                    f"get_node_ids(), {FIRST_NODE_ID} to {last_id}"
                )
            if not ttl_s > 0:
                raise ConfigError(f"ttl = {ttl_s}: expected seconds > 0")
            found = known.get((id(content), sent_as))
            if found is None:
                found = known[id(content), sent_as] = self._content_of(sent_as, content, jobs)
            charge = book.work(message, found.kind, node_id, found.share)
            place = node_id - FIRST_NODE_ID
            compute, downlink, uplink = self._fastest[place].tolist()
            # The phases that come before the client must run.
            before_s, after = found.down / downlink, _AFTER_DOWNLOAD
            if not charge.is_expected:
                before_s, after = before_s + charge.work / compute, _AFTER_WORK
            if charge.is_expected or found.promised is None:
                up = book.expected_bytes(found.form, node_id, found.down)
            else:
                up, after = book.message_bytes(found.promised, found.scale), _AFTER_DELIVERY
                before_s += up / uplink
            # What fails is noticed by its heartbeat, or when the message expires.
            first_s = min(first_s, before_s, HEARTBEAT_S, ttl_s)
            # A reply must be at the server in time.
            within_s = max(ttl_s - back_s, _SHORTEST_S) if back_s else ttl_s
            number = int(group_id) if group_id.isdecimal() else found.round
            share = UNKNOWN if found.share is None else found.share
            asked = charge.work, found.down, up, within_s, charge.whole, found.scale, after
            rows.append((node_id, place, now, *asked, number, share, *found.texts))
            forms.append(found.form)
        return jobs.begin(rows, messages, forms), now + _SURELY * first_s

    def follow(self, jobs: JobTable, rows: Sequence[int]) -> Followed:
        """Work out what devices do with jobs, and write it into the table.

        A job behind one whose client has yet to run is followed by `finish` of that one.

        Args:
            jobs: the table.
            rows: of the jobs, in the order of sending.

        Returns:
            The jobs whose end is known, and those whose client must run first, each behind the
            instant in s at which that is: what the table says from then on is expected.
        """
        found: Followed = [], []
        batch: dict[int, int] = {}
        device_of = jobs.columns["device"].item
        for row in rows:
            device = device_of(row)
            if device in batch:
                # A device's second job starts when its first has ended, so that must be known.
                self._follow(jobs, list(batch.values()), found)
                batch = {}
            if device in self._behind:
                self._behind[device].append(row)
            else:
                batch[device] = row
        if batch:
            self._follow(jobs, list(batch.values()), found)
        return found

    def finish(self, jobs: JobTable, rows: Sequence[int], changed: Sequence[int]) -> Followed:
        """Work out the rest of jobs whose clients have run, and follow those behind them.

        Args:
            jobs: the table.
            rows: of the jobs.
            changed: those of which more or less is asked than was expected.

        Returns:
            As `follow`, of the jobs that were behind.
        """
        if changed:
            self._plan(jobs, changed)
        behind: list[int] = []
        device_of, ended_at = jobs.columns["device"].item, jobs.columns["ended_at"].item
        for row in rows:
            device = device_of(row)
            self._free_at[device] = ended_at(row)
            behind += self._behind.pop(device)
        return self.follow(jobs, sorted(behind)) if behind else ([], [])

    def as_of(self, jobs: Columns, words: JobTable, now: float) -> Columns:
        """Return jobs as they stand at an instant: a device at work has spent what it has by then.

        The traces are replayed as if they ended there, so that the share of an unfinished job is as
        exact as the whole.

        Args:
            jobs: rows of a table, which are written to.
            words: the table, for its texts.
            now: the instant in s.
        """
        is_open = (jobs["ended_at"] > now) | (jobs["visible_at"] > now)
        in_flight = jobs["visible_at"] > now
        jobs["status"][in_flight], jobs["reason"][in_flight] = map(words.number, (IN_FLIGHT, ""))
        unclaimed = jobs["status"] == words.number(UNCLAIMED)
        jobs["reason"][unclaimed] = words.number("reported when the server no longer waited for it")
        for name in _INSTANTS.values():
            jobs[name][is_open & (jobs[name] > now)] = NEVER
        for name in _SPENT.values():
            jobs[name][is_open] = 0.0
        # One behind another job of its device, which is not over, has not begun.
        begun = np.flatnonzero(is_open & (jobs["sent_at"] < now) & ~np.isnan(jobs["free_at"]))
        if begun.size:
            found = self.traces.between(0.0, now).trips(
                jobs["device"][begun],
                jobs["sent_at"][begun],
                _job(jobs, begun, self._on_interrupt),
                jobs["free_at"][begun],
            )
            for source, name in _SPENT.items():
                jobs[name][begun] = getattr(found, source)
        return jobs

    def _follow(self, jobs: JobTable, rows: Sequence[int], found: Followed) -> None:
        """Compute the trips of devices with one job each, and add them to those found."""
        self._plan(jobs, rows)
        known, open_ = found
        columns = jobs.columns
        device_of, after_of = columns["device"].item, columns["runs_after"].item
        for row in rows:
            device, after = device_of(row), after_of(row)
            name = "trained_at" if after == _AFTER_WORK else "downloaded_at"
            run_at = columns[name].item(row)
            if after == _AFTER_DELIVERY or run_at == np.inf:
                self._free_at[device] = columns["ended_at"].item(row)
                known.append(row)
            else:
                self._behind[device] = []
                open_.append((run_at, row))

    def _plan(self, jobs: JobTable, rows: Sequence[int]) -> None:
        """Work out one job a device with what it asks by now, and write it into the table."""
        columns, places, costs = jobs.columns, _places(rows), self._book.costs
        devices, sent_at = columns["device"][places], columns["sent_at"][places]
        free_at = self._free_at[devices]
        if costs.download_overhead_s:
            free_at = np.maximum(free_at, sent_at) + costs.download_overhead_s
        job = _job(columns, places, self._on_interrupt)
        found = trips(self._channels, devices, sent_at, job, free_at)
        for source, name in _FOLLOWED.items():
            columns[name][places] = getattr(found, source)
        if costs.upload_overhead_s:
            columns["reported_at"][places] += costs.upload_overhead_s
        columns["free_at"][places] = free_at
        columns["visible_at"][places] = columns["reported_at"][places]
        columns["status"][places] = jobs.number(UNCLAIMED)
        columns["reason"][places] = jobs.number("")
        columns["error_code"][places] = ANSWERED
        if found.status.any():
            for i in np.flatnonzero(found.status).tolist():
                self._fail(jobs.open[rows[i]], Status(int(found.status[i])), found.reason(i))

    def _fail(self, job: JobRow, status: Status, reason: str) -> None:
        """Note that a device does not report, and when and how the server sees it."""
        job.status, job.reason = FAILED[status], reason
        expires = job.sent_at + job.message.metadata.ttl
        noticed = job.ended_at + HEARTBEAT_S
        if status == Status.INTERRUPTED and noticed < expires:
            job.visible_at, job.error_code = noticed, ErrorCode.NODE_UNAVAILABLE
        else:
            job.visible_at, job.error_code = expires, ErrorCode.MESSAGE_UNAVAILABLE

    def _content_of(self, sent_as: str, content: RecordDict, jobs: JobTable) -> _Content:
        """Measure the content that messages of one type share."""
        book, kind, size = self._book, sent_as.removesuffix(".default"), content_size(content)
        number, asks = round_and_share_in(content)
        down, up = formats_of(content) if asks else ("", "")
        scale, form = book.scale(size), reply_class(kind, up)
        return _Content(
            kind=kind,
            form=form,
            round=number,
            scale=scale,
            down=book.message_bytes(size, scale),
            promised=book.promised_size(form) if book.costs.constant_replies else None,
            share=asked_share(content) if asks and kind.startswith("train") else None,
            texts=(jobs.number(sent_as), jobs.number(down), jobs.number(up)),
        )


def _job(columns: Columns, places: Index | slice, on_interrupt: OnInterrupt) -> Job:
    return Job(
        work=columns["asked_work"][places],
        download_bytes=columns["asked_download_bytes"][places],
        upload_bytes=columns["asked_upload_bytes"][places],
        ttl_s=columns["asked_ttl_s"][places],
        on_interrupt=on_interrupt,
    )


def _places(rows: Sequence[int]) -> Index | slice:
    """Return the places of rows; a slice, which is much faster, if they follow each other."""
    if not rows:
        return slice(0, 0)
    first, n = rows[0], len(rows)
    if rows[-1] - first + 1 == n and (n == 1 or list(rows) == list(range(first, first + n))):
        return slice(first, first + n)
    return np.array(rows, dtype=np.int64)
