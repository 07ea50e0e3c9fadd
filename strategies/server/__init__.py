"""The event loop of a strategy and what it keeps: jobs, clients, versions, the buffer."""

from fedstale.strategies.server.buffer import Normalise
from fedstale.strategies.server.checkpoint import (
    Checkpoints,
    read_checkpoint,
    take_up,
    write_checkpoint,
)
from fedstale.strategies.server.driven import DrivenLoop
from fedstale.strategies.server.loop import EventLoop
from fedstale.strategies.server.metrics import Progress, StopWhen, Sums, add_metrics, means_of
from fedstale.strategies.server.packing import pack, says_so, stating, unpack
from fedstale.strategies.server.record import FORMAT, NONE_BEFORE, RECORD, plain_state
from fedstale.strategies.server.releases import fault_of_releases, state_release, stated_release
from fedstale.strategies.server.runtime import (
    CLIENT_ERROR,
    HEARTBEAT_S,
    MOST_REASON,
    RECHECK_S,
    REJECTED,
    REPORTED,
    Callback,
    Checkpointer,
    Limit,
    RunEnded,
    RunLogger,
    Runtime,
    RuntimeGrid,
)
from fedstale.strategies.server.superlink import (
    ForwardingGrid,
    SuperLinkGrid,
    connected,
    without_stalls,
)
from fedstale.strategies.server.validation import (
    FORECAST_RECORD,
    UPDATE_KEY,
    NextJob,
    Validation,
    next_job_in,
    records_in,
)
from fedstale.strategies.server.versions import Snapshot

__all__ = [
    "CLIENT_ERROR",
    "FORECAST_RECORD",
    "FORMAT",
    "HEARTBEAT_S",
    "MOST_REASON",
    "NONE_BEFORE",
    "RECHECK_S",
    "RECORD",
    "REJECTED",
    "REPORTED",
    "UPDATE_KEY",
    "Callback",
    "Checkpointer",
    "Checkpoints",
    "DrivenLoop",
    "EventLoop",
    "ForwardingGrid",
    "Limit",
    "NextJob",
    "Normalise",
    "Progress",
    "RunEnded",
    "RunLogger",
    "Runtime",
    "RuntimeGrid",
    "Snapshot",
    "StopWhen",
    "Sums",
    "SuperLinkGrid",
    "Validation",
    "add_metrics",
    "connected",
    "fault_of_releases",
    "means_of",
    "next_job_in",
    "pack",
    "plain_state",
    "read_checkpoint",
    "records_in",
    "says_so",
    "state_release",
    "stated_release",
    "stating",
    "take_up",
    "unpack",
    "without_stalls",
    "write_checkpoint",
]
