"""The native trace file: one Parquet file that keeps a `TraceSet` bit for bit.

The table is long: one Parquet row for each device and one for each recorded row of a channel, told
apart by the column `record`. Rows that many devices share are written once. Everything else (the
format's version, the epoch, the repairs) is JSON in the metadata of the schema; docs/formats.md has
each column. Both directions work on row groups of flat arrays, so a million devices make no Python
object each. A file is written under another name and renamed when it is whole.
"""

import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fedstale.errors import TraceError
from fedstale.traces.file_reader import metadata, read_groups
from fedstale.traces.file_writer import write_groups
from fedstale.traces.trace_set import TraceSet


def write(traces: TraceSet, path: str | Path) -> None:
    """Write a trace set, whole or not at all; recorded rows that no device uses are left out.

    Args:
        traces: what to write.
        path: file to make or replace, usually NAME.parquet.

    Raises:
        TraceError: the file cannot be written.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as problem:
        raise TraceError(f"{path}: cannot be written ({problem.strerror})") from None
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            write_groups(traces, out)
            out.flush()
            os.fsync(out.fileno())
        # mkstemp makes private files; a trace is read by whoever may read its folder.
        part.chmod(0o644)
        part.replace(path)
    except OSError as problem:
        raise TraceError(f"{path}: cannot be written ({problem.strerror or problem})") from None
    finally:
        part.unlink(missing_ok=True)


def read(path: str | Path) -> TraceSet:
    """Return the trace set of a file that `write` made.

    Args:
        path: the file.

    Returns:
        A set equal to the one written: the same arrays, so the same answers to the last bit.

    Raises:
        TraceError: the file is missing, damaged, of another kind or of a later version.
    """
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"{path}: no such file")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            about = metadata(file.schema_arrow, path)
            return read_groups(file, about, path)
    except TraceError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        reason = str(problem).strip().splitlines()[0]
        raise TraceError(
            f"{path}: not a readable Parquet file, cut short or damaged ({reason}): "
            "write it again with fedstale traces convert"
        ) from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise TraceError(
            f"{path}: its contents contradict its metadata ({type(problem).__name__}: {problem}): "
            "write it again with fedstale traces convert"
        ) from None
