"""What devices do: recorded and generated behaviour, and what a job would meet on them."""

from fedstale.traces.availability import Availability
from fedstale.traces.series import Series
from fedstale.traces.trace_set import TraceSet
from fedstale.traces.trip import Job, Phase, Status, TripOutcomes

__all__ = [
    "Availability",
    "Job",
    "Phase",
    "Series",
    "Status",
    "TraceSet",
    "TripOutcomes",
]
