"""What a replayed device knows of itself while it works on a message: its trace, up to now.

The ClientApp runs when its reply is pulled, which is later than the instants at which the device
worked. So the past ends where the device was then: when the message had come, and when the answer
was ready. Whatever the trace holds after that instant makes no difference to what is read here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Context

from fedstale.simulation.jobs import UNKNOWN, JobRow
from fedstale.strategies.state import Stateful
from fedstale.traces import TraceSet
from fedstale.traces.recording.monitor import Reading

if TYPE_CHECKING:
    from fedstale.traces.forecast.observation import Observation, TraceObserver


class NodeContext(Context):
    """The Context of a simulated node, which also knows the device below it."""

    device: "ReplayedDevice | None" = None
    """The device while it works on the message that the Context comes with."""

    @classmethod
    def of(cls, context: Context, device: "ReplayedDevice") -> "NodeContext":
        """Return a Context with the same contents, for one message."""
        made = cls(
            context.run_id,
            context.node_id,
            context.node_config,
            context.state,
            context.run_config,
            context.series_id,
        )
        made.device = device
        return made


class Replay(Stateful):
    """The traces of a run, as their devices see them.

    Args:
        traces: the devices.
        unix_base: instant 0 of the run, in s since 1970, UTC.
    """

    saved = ("_finished",)

    def __init__(self, traces: TraceSet, unix_base: float) -> None:
        self._traces = traces
        self.unix_base = unix_base
        self._observer: TraceObserver | None = None
        self._finished: dict[int, tuple[str, float, float]] = {}

    def device(self, job: JobRow) -> "ReplayedDevice":
        """Return the device of a job that it has reported, as it was while it worked."""
        before, upload_s, reported_at = self._finished.get(job.node_id, ("", UNKNOWN, UNKNOWN))
        # Replies may be pulled in another order than devices worked in.
        if not reported_at <= job.downloaded_at:
            upload_s = UNKNOWN
        return ReplayedDevice(self, job, (before, upload_s))

    def finished(self, job: JobRow) -> None:
        """Take note of a job whose reply is pulled: it is its node's latest."""
        message_id = job.message.metadata.message_id
        took = job.reported_at - job.trained_at
        self._finished[job.node_id] = (message_id, took, job.reported_at)

    def observe(self, devices: Sequence[int], instants: Sequence[float]) -> "Observation":
        """Return what devices have seen of themselves at instants."""
        # Runs of apps that forecast nothing pay neither for the import nor for the preparation.
        from fedstale.traces.forecast.observation import TraceObserver  # noqa: PLC0415

        if self._observer is None:
            self._observer = TraceObserver(self._traces)
        return self._observer.at(np.array(devices), np.array(instants))

    def is_online(self, devices: Sequence[int], instants: Sequence[float]) -> list[bool]:
        """Return whether devices are available at instants."""
        assert self._traces.availability is not None
        online = self._traces.availability.is_available(np.array(devices), np.array(instants))
        return [bool(there) for there in online]


class ReplayedDevice:
    """One device while it works on one message; a `ResourceMonitor` on its trace.

    Crossing to another process takes the two observations along and leaves the traces behind.
    """

    def __init__(self, replay: Replay, job: JobRow, before: tuple[str, float]) -> None:
        self._replay: Replay | None = replay
        self._device, self._base = job.device, replay.unix_base
        self._instants = (job.downloaded_at, job.trained_at)
        self._travel_s = job.downloaded_at - job.sent_at
        self._before = before
        self._cost = (job.asked_work, job.asked_download_bytes, job.asked_upload_bytes)
        self._reads = 0
        self._kept: dict[str, Any] | None = None
        self._online: tuple[bool, bool] | None = None

    def read(self) -> Reading:
        """Return the device when the message had come, and after that when it was answered."""
        end = min(self._reads, 1)
        self._reads += 1
        return Reading(instant=self._base + self._instants[end], online=self._is_online()[end])

    def worked_s(self) -> float:
        """Return how long the device worked, in s."""
        return self._instants[1] - self._instants[0]

    def travel_s(self) -> float:
        """Return the time from sending to the last byte of the download, in s."""
        return self._travel_s

    def uploaded_s(self, message_id: str) -> float:
        """Return how long the reply before this one was uploaded, in s; NaN for any other."""
        return self._before[1] if message_id == self._before[0] else UNKNOWN

    def cost(self) -> tuple[float, float, float]:
        """Return work units, bytes down and bytes up of the message."""
        return self._cost

    def observed(self, history: object) -> "Observation":
        """Return what the trace shows up to both ends of the work.

        Args:
            history: the device's own notes, which know no more than its trace.
        """
        del history
        from fedstale.traces.forecast.observation import Observation  # noqa: PLC0415 - see observe

        if self._kept is not None:
            return Observation(**self._kept)
        assert self._replay is not None
        return self._replay.observe([self._device] * 2, self._instants)

    def _is_online(self) -> tuple[bool, bool]:
        if self._online is None:
            assert self._replay is not None
            first, last = self._replay.is_online([self._device] * 2, self._instants)
            self._online = first, last
        return self._online

    def __getstate__(self) -> dict[str, Any]:
        _pack([self])
        return {**self.__dict__, "_replay": None}


def pack(contexts: Iterable[Context]) -> None:
    """Let devices take along what they may be asked in another process.

    Nobody knows which apps will ask. For one device it takes a millisecond, for many at once a
    fiftieth of that each.
    """
    found = (getattr(context, "device", None) for context in contexts)
    _pack([device for device in found if isinstance(device, ReplayedDevice)])


def _pack(devices: Sequence[ReplayedDevice]) -> None:
    devices = [device for device in devices if device._kept is None]
    if not devices:
        return
    replay = devices[0]._replay
    assert replay is not None
    positions = [device._device for device in devices for _ in device._instants]
    instants = [instant for device in devices for instant in device._instants]
    seen, online = replay.observe(positions, instants), replay.is_online(positions, instants)
    for i, device in enumerate(devices):
        own = seen.take(slice(2 * i, 2 * i + 2))
        # Arrays in a dict: a worker whose app forecasts nothing imports no forecaster.
        device._kept = {f.name: getattr(own, f.name) for f in fields(own)}
        device._online = online[2 * i], online[2 * i + 1]
