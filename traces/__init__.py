"""What devices do: recorded and generated behaviour, and what a job would meet on them."""

from fedstale.traces.arrays import (
    DAY_S,
    Array,
    Index,
    Mask,
    broadcast,
    joined,
    last_at_or_before,
    offsets_of,
    outline,
    ranges,
    rounded,
    row_time,
    running_sums,
    stream,
    taken,
)
from fedstale.traces.availability import Availability, stretches_of
from fedstale.traces.series import BLOCK, Series
from fedstale.traces.trace_set import CHANNELS, OWN_LOG, TraceSet, numbered
from fedstale.traces.trip import Job, OnInterrupt, Phase, Status, TripOutcomes, trips

__all__ = [
    "BLOCK",
    "CHANNELS",
    "DAY_S",
    "OWN_LOG",
    "Array",
    "Availability",
    "Index",
    "Job",
    "Mask",
    "OnInterrupt",
    "Phase",
    "Series",
    "Status",
    "TraceSet",
    "TripOutcomes",
    "broadcast",
    "joined",
    "last_at_or_before",
    "numbered",
    "offsets_of",
    "outline",
    "ranges",
    "rounded",
    "row_time",
    "running_sums",
    "stream",
    "stretches_of",
    "taken",
    "trips",
]
