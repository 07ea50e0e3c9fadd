"""A strategy of exchangeable parts and its event loop: jobs, clients, versions, the buffer."""

from fedstale.strategies.server.buffer import WEIGHT_CAP, Sums, add_metrics, capped, means_of
from fedstale.strategies.server.checkpoint import Checkpoints, read_checkpoint, write_checkpoint
from fedstale.strategies.server.checks import Validation
from fedstale.strategies.server.packing import advertised, can_unpack, pack, unpack
from fedstale.strategies.server.runtime import (
    CLIENT_ERROR,
    HEARTBEAT_S,
    REJECTED,
    REPORTED,
    Callback,
    Checkpointer,
    Limit,
    ResumedClock,
    RunLogger,
    Runtime,
    RuntimeGrid,
)
from fedstale.strategies.server.strategy import Options, StaleStrategy
from fedstale.strategies.server.superlink import ForwardingGrid, SuperLinkGrid, connected
from fedstale.strategies.server.versions import UPDATE_KEY, Versions, is_delta, read, records_in
from fedstale.strategies.types import numbers

__all__ = [
    "CLIENT_ERROR",
    "HEARTBEAT_S",
    "REJECTED",
    "REPORTED",
    "UPDATE_KEY",
    "WEIGHT_CAP",
    "Callback",
    "Checkpointer",
    "Checkpoints",
    "ForwardingGrid",
    "Limit",
    "Options",
    "ResumedClock",
    "RunLogger",
    "Runtime",
    "RuntimeGrid",
    "StaleStrategy",
    "Sums",
    "SuperLinkGrid",
    "Validation",
    "Versions",
    "add_metrics",
    "advertised",
    "can_unpack",
    "capped",
    "connected",
    "is_delta",
    "means_of",
    "numbers",
    "pack",
    "read",
    "read_checkpoint",
    "records_in",
    "unpack",
    "write_checkpoint",
]
