"""Recording what a device does, on the device, and with pandas the traces made of it."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of
from fedstale.traces.recording.journal import Journal, RecordingRun, check, record
from fedstale.traces.recording.monitor import (
    ProcessorTimes,
    PsutilMonitor,
    Reading,
    ResourceMonitor,
    steady_clock,
)

if TYPE_CHECKING:
    from fedstale.traces.recording.to_traces import (
        AvailableWhen,
        RecordingRules,
        check_readable,
        working_at,
    )
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "AvailableWhen",
    "Journal",
    "ProcessorTimes",
    "PsutilMonitor",
    "Reading",
    "RecordingRules",
    "RecordingRun",
    "ResourceMonitor",
    "check",
    "check_readable",
    "record",
    "steady_clock",
    "working_at",
]
