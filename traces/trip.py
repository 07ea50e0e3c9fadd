"""What one job does on one device: waits, downloads, trains, uploads, or fails on the way.

This is the one place that knows. The simulator, the selection environment and the labels of the
forecasters all call it, so that they cannot disagree. A device starts a job when it is next
available, unless the message has expired by then, and does one thing at a time. If availability
ends on the way, `abort` loses the work and `pause` goes on in the next window.

The device does not know that a message expires while it works: it finishes, and the late reply is
refused. That is how a Flower SuperLink behaves, and the device-seconds are spent all the same.
"""

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array, Index

if TYPE_CHECKING:
    from fedstale.traces.trace_set import TraceSet

OnInterrupt = Literal["abort", "pause"]

# Trips are worked out this many at a time, so that the intermediate arrays stay in the cache.
_CHUNK = 8192

# A paused job that has made no end in this time never will: its windows and its rates never meet.
_GIVE_UP_S = 366 * 86_400.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is asked of a device. Each field is a scalar or has shape (n,)."""

    work: npt.ArrayLike
    """Work of the training in the trace's compute units, >= 0."""
    download_bytes: npt.ArrayLike
    """Size of the message, >= 0."""
    upload_bytes: npt.ArrayLike
    """Size of the reply, >= 0."""
    ttl_s: npt.ArrayLike = np.inf
    """Time from sending after which a reply is refused, > 0."""
    on_interrupt: OnInterrupt = "abort"
    """What happens when availability ends on the way."""

    def __post_init__(self) -> None:
        for name in ("work", "download_bytes", "upload_bytes"):
            value = np.asarray(getattr(self, name), dtype=np.float64)
            if not np.all(np.isfinite(value) & (value >= 0)):
                raise TraceError(
                    f"job.{name} = {getattr(self, name)}: expected finite numbers >= 0"
                )
        if not np.all(np.asarray(self.ttl_s, dtype=np.float64) > 0):
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

    def reason(self, i: int) -> str:
        """Return in words how job i ended."""
        status, phase = Status(int(self.status[i])), Phase(int(self.phase[i]))
        doing = {
            Phase.DOWNLOAD: "downloading",
            Phase.TRAINING: "training",
            Phase.UPLOAD: "uploading",
        }
        match status:
            case Status.REPORTED:
                return "reported"
            case Status.LATE:
                return "reported after the message had expired"
            case Status.EXPIRED:
                return "not online before the message expired"
            case Status.INTERRUPTED:
                return f"went offline while {doing[phase]}"
            case Status.STALLED:
                return f"can never finish {doing[phase]}: its rate stays zero"


def trips(
    traces: "TraceSet",
    devices: npt.ArrayLike,
    sent_at: npt.ArrayLike,
    job: Job,
    free_at: npt.ArrayLike = 0.0,
) -> TripOutcomes:
    """Return what each device would do with a job sent to it.

    Args:
        traces: the devices, with all four channels.
        devices: position of each job's device; shape (n,).
        sent_at: instants in s, >= 0; scalar or shape (n,).
        job: what is asked.
        free_at: instant before which the device is busy with something else; scalar or shape (n,).

    Returns:
        Outcomes, each array of shape (n,).

    Raises:
        TraceError: a channel of the traces is unknown, or a device does not exist.
    """
    devices = np.atleast_1d(np.asarray(devices, dtype=np.int64))
    n = devices.size
    traces.require("availability", "compute", "downlink", "uplink")
    if n and not (0 <= devices.min() and devices.max() < traces.n_devices):
        raise TraceError(f"device {devices.max()}: expected 0 to {traces.n_devices - 1}")
    wide = [
        np.broadcast_to(np.asarray(x, dtype=np.float64), (n,))
        for x in (sent_at, free_at, job.work, job.download_bytes, job.upload_bytes, job.ttl_s)
    ]
    if n and not np.all(wide[0] >= 0):
        raise TraceError(f"sent_at = {wide[0].min()}: expected seconds >= 0 of the trace")
    parts = [
        _trips(
            traces, devices[i : i + _CHUNK], *(w[i : i + _CHUNK] for w in wide), job.on_interrupt
        )
        for i in range(0, max(n, 1), _CHUNK)
    ]
    if len(parts) == 1:
        return parts[0]
    return TripOutcomes(
        **{
            f.name: np.concatenate([getattr(p, f.name) for p in parts])
            for f in fields(TripOutcomes)
        }
    )


def _trips(
    traces: "TraceSet",
    devices: Index,
    sent_at: Array,
    free_at: Array,
    work: Array,
    download_bytes: Array,
    upload_bytes: Array,
    ttl_s: Array,
    on_interrupt: OnInterrupt,
) -> TripOutcomes:
    n = devices.size
    availability, channels = traces.availability, (traces.downlink, traces.compute, traces.uplink)
    assert availability is not None
    # One row a phase: download in bits, training in work units, upload in bits.
    asked = np.stack([download_bytes * 8.0, work, upload_bytes * 8.0])
    done_at = np.full((3, n), np.inf)
    spent_s = np.zeros((3, n))
    moved = np.zeros((3, n))
    expires = sent_at + ttl_s

    started, end = availability.window_at_or_after(devices, np.maximum(sent_at, free_at))
    expired = started >= expires
    started = np.where(expired, np.inf, started)
    now = started.copy()
    phase = np.where(expired, Phase.WAITING, Phase.DOWNLOAD).astype(np.int8)
    status = np.where(expired, Status.EXPIRED, Status.STALLED).astype(np.int8)
    ended = np.where(expired, np.maximum(sent_at, free_at), np.inf)

    open_ = np.flatnonzero(~expired)
    while open_.size:
        for p, channel in enumerate(channels):
            assert channel is not None
            here = open_[phase[open_] == p + 1]
            if here.size == 0:
                continue
            missing = asked[p, here] - moved[p, here]
            finish = now[here] + channel.time_to_accumulate(devices[here], missing, now[here])
            # A last byte at the very end of a window has arrived.
            made = np.isfinite(finish) & (finish <= end[here])
            whole, cut = here[made], here[~made]
            spent_s[p, whole] += finish[made] - now[whole]
            moved[p, whole] = asked[p, whole]
            now[whole] = done_at[p, whole] = finish[made]
            phase[whole] += 1
            leaves = cut[np.isfinite(end[cut])]
            gain = channel.integral(devices[leaves], now[leaves], end[leaves])
            # Never more than was asked, whatever the rounding.
            moved[p, leaves] = np.minimum(moved[p, leaves] + gain, asked[p, leaves])
            spent_s[p, leaves] += end[leaves] - now[leaves]
            now[leaves] = end[leaves]
        open_ = open_[phase[open_] != Phase.DONE]
        # Who is online for ever and not done waits for a rate that never comes.
        open_ = open_[np.isfinite(end[open_])]
        if on_interrupt == "abort":
            status[open_] = Status.INTERRUPTED
            ended[open_] = end[open_]
            break
        open_ = open_[now[open_] - started[open_] < _GIVE_UP_S]
        again, until = availability.window_at_or_after(devices[open_], end[open_])
        back = np.isfinite(again)
        gone = open_[~back]
        status[gone], ended[gone] = Status.INTERRUPTED, end[gone]
        open_ = open_[back]
        now[open_], end[open_] = again[back], until[back]

    reported = done_at[2]
    arrived = phase == Phase.DONE
    ended[arrived] = reported[arrived]
    status[arrived] = np.where(reported[arrived] <= expires[arrived], Status.REPORTED, Status.LATE)
    return TripOutcomes(
        started=started,
        downloaded=done_at[0],
        trained=done_at[1],
        reported=reported,
        ended=ended,
        status=status,
        phase=phase,
        download_s=spent_s[0],
        compute_s=spent_s[1],
        upload_s=spent_s[2],
        downloaded_bytes=moved[0] / 8.0,
        uploaded_bytes=moved[2] / 8.0,
        work_done=moved[1],
    )
