"""Readers of published trace files, each in the format of its authors."""

from fedstale.traces.sources.catalogue import SOURCES, RemoteFile, TraceSource
from fedstale.traces.sources.read import read

__all__ = ["SOURCES", "RemoteFile", "TraceSource", "read"]
