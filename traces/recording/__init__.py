"""Recording what a device does, on the device; `to_traces` makes traces of it, with pandas."""

from fedstale.traces.recording.journal import Journal, JournalReader, RecordingRun, check, record
from fedstale.traces.recording.monitor import (
    ProcessorTimes,
    PsutilMonitor,
    Reading,
    ResourceMonitor,
    steady_clock,
)

__all__ = [
    "Journal",
    "JournalReader",
    "ProcessorTimes",
    "PsutilMonitor",
    "Reading",
    "RecordingRun",
    "ResourceMonitor",
    "check",
    "record",
    "steady_clock",
]
