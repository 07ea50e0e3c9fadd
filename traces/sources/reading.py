"""One way to read a trace, whatever kind it is of."""

from pathlib import Path

from fedstale.errors import TraceError
from fedstale.traces.sources.catalogue import SOURCES
from fedstale.traces.sources.detect import NATIVE, kind_of
from fedstale.traces.trace_set import TraceSet


def read(path: str | Path, source: str | None = None) -> TraceSet:
    """Return the traces in a file or folder, of whatever kind.

    Args:
        path: file or folder.
        source: name of its kind, one of `SOURCES` or "native"; None finds out by name and content.

    Returns:
        A set that knows what the source knows, with its repairs counted.

    Raises:
        TraceError: the path is missing, damaged or of no known kind.
    """
    path = Path(path)
    if source is None:
        source = kind_of(path)
    if source == NATIVE:
        # Only here, so that reading a published recording does not load pyarrow.
        from fedstale.traces.files import read as read_native  # noqa: PLC0415

        return read_native(path)
    if source not in SOURCES:
        raise TraceError(f"source = {source!r}: expected {NATIVE!r} or one of {', '.join(SOURCES)}")
    return SOURCES[source].reader(path)
