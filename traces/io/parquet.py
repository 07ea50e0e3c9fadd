"""The native trace file: one Parquet file that keeps a `TraceSet` bit for bit.

The table is long: one Parquet row for each device and one for each recorded row of a channel, told
apart by the column `record`. Rows that many devices share are written once. Everything else (the
format's version, the epoch, the repairs) is JSON in the metadata of the schema; docs/formats.md has
each column. Both directions work on row groups of flat arrays, so a million devices make no Python
object each.

Writing takes row groups of one kind from the flat arrays as they are. Files are an edge: whatever
one says is checked before it is believed.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fedstale.errors import TraceError, first_line
from fedstale.traces import (
    BLOCK,
    CHANNELS,
    OWN_LOG,
    Array,
    Availability,
    Index,
    Series,
    TraceSet,
    offsets_of,
    ranges,
)
from fedstale.traces.io.files import replacing

FORMAT = "fedstale-traces"
VERSION = 2
KEY = b"fedstale"

SCHEMA = pa.schema(
    [
        pa.field("record", pa.string(), nullable=False),
        pa.field("device_id", pa.string()),
        *(
            pa.field(f"{name}_{part}", kind)
            for name in CHANNELS
            for part, kind in (
                ("row", pa.int32()),
                ("shift_s", pa.float64()),
                ("scale", pa.float64()),
            )
            if (name, part) != ("availability", "scale")
        ),
        pa.field("length_s", pa.float64()),
        pa.field("log_start_s", pa.float64()),
        pa.field("log_s", pa.float64()),
        pa.field("starts_s", pa.list_(pa.float64())),
        pa.field("ends_s", pa.list_(pa.float64())),
        pa.field("values", pa.list_(pa.float32())),
    ]
)
"""Columns of the file; all but `record` are null where they do not apply."""
_GAPS = ("gap_starts_s", "gap_ends_s")
WITH_GAPS = pa.schema([*SCHEMA, *(pa.field(name, pa.list_(pa.float64())) for name in _GAPS)])
"""Columns where logs have gaps."""


_DEVICES_A_GROUP = 131_072
_SAMPLES_A_GROUP = 1 << 20
_LARGEST = float(np.finfo(np.float64).max)


def write(traces: TraceSet, path: Path, *, private: bool = False) -> None:
    """Write a trace set; see `TraceSet.write`. Rows that no device uses are left out."""
    used, rows, channels = {}, {}, {}
    for name in traces.known:
        channel: Any = getattr(traces, name)
        used[name], rows[name] = np.unique(channel.rows, return_inverse=True)
        until = None if np.isinf(channel.until) else float(channel.until)
        n_rows = int(used[name].size)
        channels[name] = {"n_rows": n_rows, "repeat": channel.repeat, "until_s": until}
        if isinstance(channel, Series):
            channels[name]["step_s"] = channel.step_s
    about = {
        "format": FORMAT,
        "version": VERSION,
        "n_devices": traces.n_devices,
        "epoch": traces.epoch,
        "compute_unit": traces.compute_unit,
        "repairs": traces.repairs,
        "channels": channels,
    }
    gappy = traces.availability is not None and traces.availability.gap_starts.size > 0
    schema = (WITH_GAPS if gappy else SCHEMA).with_metadata({KEY: json.dumps(about).encode()})
    options = {"compression": "zstd", "write_page_checksum": True, "use_dictionary": ["record"]}
    try:
        with (
            replacing(path, private=private) as out,
            pq.ParquetWriter(out, schema, **options) as writer,
        ):
            for columns in _device_groups(traces, rows):
                writer.write_table(_table(schema, columns))
            for name in traces.known:
                channel = getattr(traces, name)
                groups = _window_groups if name == "availability" else _segment_groups
                for columns in groups(channel, used[name].astype(np.int64)):
                    columns["record"] = pa.repeat(name, len(columns["length_s"]))
                    writer.write_table(_table(schema, columns))
    except OSError as problem:
        raise TraceError(f"{path}: cannot be written ({problem.strerror or problem})") from None


def _table(schema: pa.Schema, columns: dict[str, pa.Array]) -> pa.Table:
    n = len(columns["record"])
    arrays = [columns[f.name] if f.name in columns else pa.nulls(n, f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _device_groups(
    traces: TraceSet, rows: Mapping[str, npt.NDArray[np.integer]]
) -> Iterator[dict[str, pa.Array]]:
    for first in range(0, traces.n_devices, _DEVICES_A_GROUP):
        part = slice(first, first + _DEVICES_A_GROUP)
        ids = pa.array(traces.device_ids[part], type=pa.string())
        columns = {"record": pa.repeat("device", len(ids)), "device_id": ids}
        for name in traces.known:
            channel = getattr(traces, name)
            columns[f"{name}_row"] = pa.array(rows[name][part].astype(np.int32))
            columns[f"{name}_shift_s"] = pa.array(channel.shifts[part])
            if isinstance(channel, Series):
                columns[f"{name}_scale"] = pa.array(channel.scales[part])
        yield columns


def _window_groups(channel: Availability, rows: Index) -> Iterator[dict[str, pa.Array]]:
    counts = np.diff(channel.offsets)[rows]
    gap_starts, gap_ends, n_gaps = channel.gaps()
    gap_offsets, n_gaps = offsets_of(n_gaps), n_gaps[rows]
    for part in _groups(counts):
        windows = ranges(channel.offsets[rows[part]], counts[part])
        gaps = ranges(gap_offsets[rows[part]], n_gaps[part])
        yield {
            "gap_starts_s": _lists(gap_starts[gaps], n_gaps[part]),
            "gap_ends_s": _lists(gap_ends[gaps], n_gaps[part]),
            "length_s": pa.array(channel.lengths[rows[part]]),
            "log_start_s": pa.array(channel.log_starts[rows[part]]),
            "log_s": pa.array(channel.logs_s[rows[part]]),
            "starts_s": _lists(channel.starts[windows], counts[part]),
            "ends_s": _lists(channel.ends[windows], counts[part]),
        }


def _segment_groups(channel: Series, rows: Index) -> Iterator[dict[str, pa.Array]]:
    blocks = np.diff(channel.first_block)[rows]
    for part in _groups(blocks * BLOCK):
        block = ranges(channel.first_block[rows[part]], blocks[part])
        owner = np.repeat(np.arange(blocks[part].size), blocks[part])
        lengths = channel.lengths[rows[part]]
        starts = channel.starts_of(block, rows[part][owner])
        inside = starts < lengths[owner][:, None]
        counts = np.bincount(owner, weights=inside.sum(axis=1), minlength=lengths.size)
        columns = {
            "length_s": pa.array(lengths),
            "values": _lists(channel.values[block][inside], counts.astype(np.int64)),
        }
        if channel.starts is not None:
            columns["starts_s"] = _lists(starts[inside], counts.astype(np.int64))
        yield columns


def _groups(counts: Index) -> Iterator[slice]:
    """Return slices of rows that hold about a million samples each, and at least one row."""
    ends = np.cumsum(counts)
    first = 0
    while first < counts.size:
        before = ends[first - 1] if first else 0
        last = int(np.searchsorted(ends, before + _SAMPLES_A_GROUP, side="right"))
        # Rows may be empty, so their number is bounded too.
        last = min(max(last, first + 1), first + _DEVICES_A_GROUP)
        yield slice(first, last)
        first = last


def _lists(flat: npt.NDArray[np.floating], counts: Index) -> pa.Array:
    return pa.ListArray.from_arrays(
        pa.array(offsets_of(counts).astype(np.int32)), pa.array(np.ascontiguousarray(flat))
    )


def _metadata(schema: pa.Schema, path: Path) -> dict[str, Any]:
    """Read and check the metadata of a file.

    Raises:
        TraceError: it is not a trace file, of another version, or has other columns.
    """
    try:
        about = json.loads((schema.metadata or {})[KEY])
        ours = about["format"] == FORMAT
        version = about["version"]
    except (KeyError, TypeError, ValueError, RecursionError):
        ours, version = False, None
    if not ours:
        raise TraceError(
            f"{path}: a Parquet file, but not of traces: expected one written by fedstale traces; "
            f"{OWN_LOG}"
        )
    if version != VERSION:
        raise TraceError(
            f"{path}: version {version!r} of the format: expected {VERSION}; "
            "update fedstale, or convert the original recording again"
        )
    if not (schema.equals(SCHEMA) or schema.equals(WITH_GAPS)):
        kinds = {f.name: f.type for f in schema}
        wrong = [f.name for f in SCHEMA if kinds.get(f.name) != f.type] or ["nullability"]
        found = kinds.get(wrong[0], "missing")
        raise TraceError(
            f"{path}: column {wrong[0]} is {found}: expected the columns of docs/formats.md"
        )
    return about


def _groups_of(file: pq.ParquetFile, about: dict[str, Any], path: Path) -> TraceSet:
    """Return the devices of an open file.

    Raises:
        TraceError: rows are missing, or a number cannot be.
    """
    kinds = ["device", *about["channels"]]
    groups: dict[str, list[pa.Table]] = {kind: [] for kind in kinds}
    for number in range(file.num_row_groups):
        # A group holds records of one kind, and nulls in the columns of the others.
        table = file.read_row_group(number)
        kind = table["record"][0].as_py()
        if kind not in groups:
            raise TraceError(
                f"{path}: record {kind!r} in row group {number}: expected {', '.join(kinds)}"
            )
        groups[kind].append(table)
    whole = {kind: pa.concat_tables(tables) for kind, tables in groups.items() if tables}
    expected = {"device": about["n_devices"]}
    expected |= {name: channel["n_rows"] for name, channel in about["channels"].items()}
    for kind, n in expected.items():
        found = whole[kind].num_rows if kind in whole else 0
        if found != n:
            raise TraceError(f"{path}: {found} rows of {kind}: expected {n}, as its metadata says")
    devices = whole["device"]
    channels: dict[str, Any] = {
        name: _channel(name, whole, about, path) for name in about["channels"]
    }
    return TraceSet(
        device_ids=pd.Index(devices["device_id"].to_pandas(), dtype="str", name=None),
        compute_unit=about["compute_unit"],
        epoch=about["epoch"],
        repairs={str(k): int(v) for k, v in about["repairs"].items()},
        **channels,
    )


def _channel(
    name: str, whole: dict[str, pa.Table], about: dict[str, Any], path: Path
) -> Availability | Series:
    stored, devices, described = whole[name], whole["device"], about["channels"][name]
    lengths = _floats(stored, "length_s", path)
    try:
        if name == "availability":
            starts, counts = _flat(stored, "starts_s")
            ends, _ = _flat(stored, "ends_s")
            logs = _floats(stored, "log_start_s", path), _floats(stored, "log_s", path, most=np.inf)
            channel: Availability | Series
            channel = online = Availability.packed(
                starts, ends, counts, lengths, logs=logs, repeat=described["repeat"]
            )
            if _GAPS[0] in stored.column_names:
                (begins, n_gaps), (stops, n_stops) = (_flat(stored, name) for name in _GAPS)
                if not np.array_equal(n_gaps, n_stops):
                    raise TraceError("gap_ends_s: expected one for each start of a gap")
                channel = online.with_gaps(begins, stops, n_gaps)
        else:
            values, counts = _flat(stored, "values")
            starts, start_counts = None, counts
            if described["step_s"] is None:
                starts, start_counts = _flat(stored, "starts_s")
            if not np.array_equal(start_counts, counts):
                raise TraceError("starts_s: expected one for each value")
            channel = Series.packed(
                values,
                counts,
                lengths,
                starts=starts,
                step_s=described["step_s"],
                repeat=described["repeat"],
            )
    except TraceError as problem:
        raise TraceError(f"{path}: {name}: {problem}") from None
    rows = _floats(devices, f"{name}_row", path)
    if not np.all((rows >= 0) & (rows < lengths.size)):
        raise TraceError(f"{path}: {name}_row: expected 0 to {lengths.size - 1}")
    placed: dict[str, Any] = {
        "rows": rows.astype(np.int32),
        "shifts": _floats(devices, f"{name}_shift_s", path),
        "until": np.inf if described["until_s"] is None else float(described["until_s"]),
    }
    if name != "availability":
        scales = _floats(devices, f"{name}_scale", path, most=np.inf)
        if np.isinf(scales).any() and not (values > 0).all():
            raise TraceError(f"{path}: column {name}_scale is inf: expected no rate of 0 with it")
        placed["scales"] = scales
    return replace(channel, **placed)


def _floats(table: pa.Table, name: str, path: Path, *, most: float = _LARGEST) -> Array:
    column = table[name]
    if column.null_count:
        raise TraceError(f"{path}: column {name} has {column.null_count} nulls: expected none")
    numbers = column.to_numpy().astype(np.float64)
    if not np.all((numbers >= 0) & (numbers <= most)):
        finite = "" if most == np.inf else "finite "
        raise TraceError(f"{path}: column {name}: expected {finite}numbers >= 0")
    return numbers


def _flat(table: pa.Table, name: str) -> tuple[Array, Index]:
    """Return the elements of a column of lists, one list after the other, and their counts."""
    column = table[name]
    flat, counts = [], []
    for chunk in column.chunks:
        if chunk.null_count or chunk.flatten().null_count:
            raise TraceError(f"column {name} has nulls: expected none")
        flat.append(chunk.flatten().to_numpy())
        counts.append(chunk.value_lengths().to_numpy())
    return np.concatenate(flat), np.concatenate(counts).astype(np.int64)


def is_native(path: Path) -> bool:
    """Return whether a Parquet file is of traces, of whatever version; one that is damaged is."""
    try:
        return KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return True


def read(path: Path) -> TraceSet:
    """Return the trace set of a native file; see `TraceSet.read`."""
    if not path.is_file():
        raise TraceError(f"{path}: no such file")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            about = _metadata(file.schema_arrow, path)
            return _groups_of(file, about, path)
    except TraceError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise TraceError(
            f"{path}: not a readable Parquet file, cut short or damaged ({first_line(problem)}): "
            "write it again with fedstale traces convert"
        ) from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise TraceError(
            f"{path}: its contents contradict its metadata ({type(problem).__name__}: {problem}): "
            "write it again with fedstale traces convert"
        ) from None
