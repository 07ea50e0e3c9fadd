"""Recording what a device does, on the device, and turning recordings into traces."""

from fedstale.traces.recording.journal import Journal, JournalReader, RecordingRun, check, record
from fedstale.traces.recording.monitor import (
    ProcessorTimes,
    PsutilMonitor,
    Reading,
    ResourceMonitor,
    steady_clock,
)
from fedstale.traces.recording.to_traces import (
    AvailableWhen,
    RecordingRules,
    check_readable,
    working_at,
)

__all__ = [
    "AvailableWhen",
    "Journal",
    "JournalReader",
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
