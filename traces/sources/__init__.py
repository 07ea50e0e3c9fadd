"""Readers of published trace files, each in the format of its authors; see `TraceSet.read`."""

from fedstale.traces.sources.archives import read_file
from fedstale.traces.sources.catalogue import (
    SOURCES,
    RemoteFile,
    TraceSource,
    cards,
    fetch,
    is_foreign,
    read,
)

__all__ = [
    "SOURCES",
    "RemoteFile",
    "TraceSource",
    "cards",
    "fetch",
    "is_foreign",
    "read",
    "read_file",
]
