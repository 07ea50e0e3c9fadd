"""What one job does on one device: waits, downloads, trains, uploads, or fails on the way.

This is the one place that knows. The simulator, the selection environment and the labels of the
forecasters all call it, so that they cannot disagree. A device starts a job when it is next
available, unless the message has expired by then, and does one thing at a time. If availability
ends on the way, `abort` loses the work and `pause` goes on in the next window.

The device does not know that a message expires while it works: it finishes, and the late reply is
rejected. That is how a Flower SuperLink behaves, and the device-seconds are spent all the same.

What takes exactly as long as a window, a record or a time to live is done: ends are compared with a
slack of some units in the last place, since sums of decimals round.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces.arrays import DAY_S, ROUNDED, Array, Index, joined, outline
from fedstale.traces.availability import Availability
from fedstale.traces.series import Series

OnInterrupt = Literal["abort", "pause"]

# Trips are worked out this many at a time, so that the intermediate arrays stay in the cache.
_CHUNK = 16_384

# A paused job that has not ended in this time never will, nor will one that has moved nothing in so
# many windows: its windows and its rates never meet.
_GIVE_UP_S = 366 * DAY_S
_GIVE_UP_WINDOWS = 1_000


class Status(IntEnum):
    """How a job ended."""

    REPORTED = 0
    """The last byte of the reply arrived in time."""
    LATE = 1
    """The reply arrived after the message had expired."""
    EXPIRED = 2
    """The device did not come online before the message expired."""
    INTERRUPTED = 3
    """The device went offline and lost the work."""
    STALLED = 4
    """The device stays online but will never finish: a rate is zero for good."""


class Phase(IntEnum):
    """The last phase that a job was in."""

    WAITING = 0
    DOWNLOAD = 1
    TRAINING = 2
    UPLOAD = 3
    DONE = 4


# NumPy takes plain numbers faster.
_REPORTED, _LATE, _EXPIRED, _INTERRUPTED, _STALLED = (int(status) for status in Status)
_DOWNLOAD, _DONE = int(Phase.DOWNLOAD), int(Phase.DONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the server asks of a device. Each field is a scalar or has shape (n,)."""

    work: npt.ArrayLike
    """Work of the training in the trace's compute units, >= 0."""
    download_bytes: npt.ArrayLike
    """Size of the message, >= 0."""
    upload_bytes: npt.ArrayLike
    """Size of the reply, >= 0."""
    ttl_s: npt.ArrayLike = np.inf
    """Time from sending after which a reply is rejected, > 0."""
    on_interrupt: OnInterrupt = "abort"
    """What happens when availability ends on the way."""

    def __post_init__(self) -> None:
        for name in ("work", "download_bytes", "upload_bytes"):
            value = np.asarray(getattr(self, name), dtype=np.float64)
            if not ((value >= 0) & (value < np.inf)).all():
                raise TraceError(
                    f"job.{name} = {getattr(self, name)}: expected finite numbers >= 0"
                )
        if not (np.asarray(self.ttl_s, dtype=np.float64) > 0).all():
            raise TraceError(f"job.ttl_s = {self.ttl_s}: expected seconds > 0 (inf never expires)")
        if self.on_interrupt not in ("abort", "pause"):
            raise TraceError(
                f"job.on_interrupt = {self.on_interrupt!r}: expected 'abort' or 'pause'"
            )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TripOutcomes:
    """What became of each job; arrays of shape (n,). An instant that never came is inf."""

    started: Array
    """Instant at which the device took the message, in s."""
    downloaded: Array
    """Instant at which the last byte of the message arrived, in s."""
    trained: Array
    """Instant at which the training was done, in s."""
    reported: Array
    """Instant at which the last byte of the reply arrived at the server, in s."""
    ended: Array
    """Instant from which the device is free again, in s; inf if it never is."""
    status: npt.NDArray[np.int8]
    """A `Status`."""
    phase: npt.NDArray[np.int8]
    """The `Phase` that the job was in when it ended."""
    download_s: Array
    """Seconds spent downloading while available, also by the failed."""
    compute_s: Array
    """Seconds spent training while available, also by the failed."""
    upload_s: Array
    """Seconds spent uploading while available, also by the failed."""
    downloaded_bytes: Array
    """Bytes received, also by the failed; fractions where a transfer was cut."""
    uploaded_bytes: Array
    """Bytes sent back, also by the failed; fractions where a transfer was cut."""
    work_done: Array
    """Work units computed, also by the failed."""

    __repr__ = outline

    def reason(self, i: int) -> str:
        """Return in words how job i ended."""
        status, phase = Status(int(self.status[i])), int(self.phase[i])
        doing = ("waiting", "downloading", "training", "uploading", "done")[phase]
        match status:
            case Status.REPORTED:
                return "reported"
            case Status.LATE:
                return "reported after the message had expired"
            case Status.EXPIRED:
                return "not online before the message expired"
            case Status.INTERRUPTED:
                return f"went offline while {doing}"
            case Status.STALLED:
                return f"can never finish {doing}: its rate stays zero"


def trips(
    channels: tuple[Availability, Series, Series, Series],
    devices: npt.ArrayLike,
    sent_at: npt.ArrayLike,
    job: Job,
    free_at: npt.ArrayLike = 0.0,
) -> TripOutcomes:
    """Work out the job that is sent to each device.

    Args:
        channels: of the devices, as of `TraceSet.complete`.
        devices: position of each job's device; shape (n,).
        sent_at: instants in s, >= 0; scalar or shape (n,).
        job: what is asked.
        free_at: instant before which the device is busy with something else, inf if it
            never gets free; scalar or shape (n,).

    Returns:
        Outcomes, each array of shape (n,).

    Raises:
        TraceError: a device does not exist, or an instant is negative or not a number.
    """
    devices = np.atleast_1d(np.asarray(devices, dtype=np.int64))
    availability, compute, downlink, uplink = channels
    n_devices = availability.rows.size
    if devices.size and (devices.min() < 0 or devices.max() >= n_devices):
        wrong = devices[(devices < 0) | (devices >= n_devices)][0]
        raise TraceError(f"device {wrong}: expected a position from 0 to {n_devices - 1}")
    # One row a phase: download in bits, training in work units, upload in bits.
    phases = downlink, compute, uplink
    asked, instants = np.empty((3, devices.size)), np.empty((3, devices.size))
    asked[0], asked[1], asked[2] = job.download_bytes, job.work, job.upload_bytes
    asked[::2] *= 8.0
    instants[0], instants[1], instants[2] = sent_at, free_at, job.ttl_s
    if not ((instants[0] >= 0) & (instants[0] < np.inf)).all():
        raise TraceError(f"sent_at = {sent_at!r}: expected finite seconds >= 0 of the trace")
    if np.isnan(instants[1]).any():
        raise TraceError(f"free_at = {free_at!r}: expected seconds of the trace, not NaN")
    parts = []
    for i in range(0, max(devices.size, 1), _CHUNK):
        part = slice(i, i + _CHUNK)
        some = _Trips(availability, phases, devices[part], asked[:, part], instants[:, part])
        parts.append(some.resolve(job.on_interrupt))
    return parts[0] if len(parts) == 1 else joined(parts)


class _Trips:
    """Jobs under way, with the phase and the spending of each; arrays of shape (n,).

    Which jobs are meant is an array of their places, or a slice for all of them: that is what most
    calls are about, and it copies nothing.
    """

    def __init__(
        self,
        availability: Availability,
        channels: tuple[Series, Series, Series],
        devices: Index,
        asked: Array,
        instants: Array,
    ) -> None:
        sent_at, free_at, ttl_s = instants
        self.availability, self.channels, self.devices = availability, channels, devices
        self.asked, self.places = asked, np.arange(devices.size)
        self.done_at = np.full(asked.shape, np.inf)
        self.spent_s, self.moved = np.zeros(asked.shape), np.zeros(asked.shape)
        # How many windows in a row a paused job has moved nothing.
        self.idle_windows = np.zeros(devices.size, dtype=np.int64)
        self.moved_before = np.zeros(devices.size)
        self.expires = sent_at + ttl_s

        ready = np.maximum(sent_at, free_at)
        never_free = ready == np.inf
        started, self.end = availability.window_at_or_after(
            devices, np.where(never_free, 0.0, ready)
        )
        # Who is asked at the very end of a window is asked after it.
        over = np.flatnonzero((self.end <= started * ROUNDED) & (started < np.inf))
        if over.size:
            started[over], self.end[over] = availability.window_at_or_after(
                devices[over], self.end[over]
            )
        expired = never_free | (started >= self.expires)
        self.started = np.where(expired, np.inf, started)
        self.now = self.started.copy()
        self.phase = (~expired).astype(np.int8) * _DOWNLOAD
        self.status = np.where(expired, _EXPIRED, _STALLED).astype(np.int8)
        self.ended = np.where(expired, ready, np.inf)

    def resolve(self, on_interrupt: OnInterrupt) -> TripOutcomes:
        """Work out every job to its end, one window of its device at a time."""
        under_way: Index | slice = slice(None)
        while True:
            for p in range(len(self.channels)):
                is_there = self.phase[under_way] == p + 1
                if is_there.all():
                    self._work_in_window(p, under_way)
                elif is_there.any():
                    self._work_in_window(p, self.places[under_way][is_there])
            phase = self.phase[under_way]
            # A device that is online for ever and not done waits for a rate that never comes.
            goes_on = (phase > 0) & (phase < _DONE) & (self.end[under_way] < np.inf)
            if not goes_on.any():
                break
            cut = self.places[under_way][goes_on]
            if on_interrupt == "abort":
                self._interrupt(cut)
                break
            under_way = self._wait_for_next_window(cut)
        return self._outcomes()

    def _work_in_window(self, p: int, jobs: Index | slice) -> None:
        """Do what the rest of the window allows of one phase."""
        devices, channel, now = self.devices[jobs], self.channels[p], self.now[jobs]
        finish = now + channel.time_to_accumulate(
            devices, self.asked[p, jobs] - self.moved[p, jobs], now
        )
        # A last byte at the very end of a window has arrived.
        end = self.end[jobs]
        made = (finish <= end * ROUNDED) & (finish < np.inf)
        finish = np.minimum(finish, end)
        is_whole, whole = bool(made.all()), jobs
        if not is_whole:
            whole, finish, now = self.places[jobs][made], finish[made], now[made]
        self.spent_s[p, whole] += finish - now
        self.moved[p, whole] = self.asked[p, whole]
        self.now[whole] = self.done_at[p, whole] = finish
        self.phase[whole] += 1
        if is_whole:
            return
        cut = self.places[jobs][~made]
        # A device that is online for ever and cannot finish still moves what its channel holds.
        end = np.minimum(self.end[cut], channel.ends(self.devices[cut]))
        end = np.where(np.isfinite(self.end[cut]), self.end[cut], np.maximum(end, self.now[cut]))
        some = np.isfinite(end)
        leaves, now, end = cut[some], self.now[cut[some]], end[some]
        gain = channel.integral(self.devices[leaves], now, end)
        # Never more than was asked, whatever the rounding.
        self.moved[p, leaves] = np.minimum(self.moved[p, leaves] + gain, self.asked[p, leaves])
        self.spent_s[p, leaves] += end - now
        self.now[leaves] = end

    def _interrupt(self, jobs: Index) -> None:
        self.status[jobs] = _INTERRUPTED
        self.ended[jobs] = self.end[jobs]

    def _wait_for_next_window(self, jobs: Index) -> Index:
        """Move paused jobs to their device's next window; return those that have one."""
        moved = self.moved[:, jobs].sum(axis=0)
        self.idle_windows[jobs] = np.where(
            moved > self.moved_before[jobs], 0, self.idle_windows[jobs] + 1
        )
        self.moved_before[jobs] = moved
        hopeful = self.now[jobs] - self.started[jobs] < _GIVE_UP_S
        jobs = jobs[hopeful & (self.idle_windows[jobs] < _GIVE_UP_WINDOWS)]
        again, until = self.availability.window_at_or_after(self.devices[jobs], self.end[jobs])
        back = np.isfinite(again)
        self._interrupt(jobs[~back])
        jobs = jobs[back]
        self.now[jobs], self.end[jobs] = again[back], until[back]
        return jobs

    def _outcomes(self) -> TripOutcomes:
        """Compute the outcomes of the jobs, once they are resolved."""
        reported, arrived = self.done_at[2], self.phase == _DONE
        is_in_time = reported <= self.expires * ROUNDED
        reported = np.where(is_in_time, np.minimum(reported, self.expires), reported)
        self.ended = np.where(arrived, reported, self.ended)
        in_time = np.where(is_in_time, _REPORTED, _LATE).astype(np.int8)
        self.status = np.where(arrived, in_time, self.status)
        return TripOutcomes(
            started=self.started,
            downloaded=self.done_at[0],
            trained=self.done_at[1],
            reported=reported,
            ended=self.ended,
            status=self.status,
            phase=self.phase,
            download_s=self.spent_s[0],
            compute_s=self.spent_s[1],
            upload_s=self.spent_s[2],
            downloaded_bytes=self.moved[0] / 8.0,
            uploaded_bytes=self.moved[2] / 8.0,
            work_done=self.moved[1],
        )
