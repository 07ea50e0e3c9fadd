"""One's own logs: a table of windows, samples, batteries, rates or nodes, in a frame or a file."""

from fedstale.traces.tables.build import TableTraces, read_table
from fedstale.traces.tables.files import open_table
from fedstale.traces.tables.reading import Kind, TableOptions, UnclearLogError

__all__ = [
    "Kind",
    "TableOptions",
    "TableTraces",
    "UnclearLogError",
    "open_table",
    "read_table",
]
