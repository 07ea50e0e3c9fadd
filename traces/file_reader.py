"""How the row groups of a native file become a `TraceSet`; `files` opens and closes it.

Files are an edge: whatever one says is checked before it is believed.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array, Index, offsets_of
from fedstale.traces.availability import Availability
from fedstale.traces.file_schema import FORMAT, KEY, SCHEMA, VERSION
from fedstale.traces.rows import pack
from fedstale.traces.series import Series
from fedstale.traces.trace_set import TraceSet


def metadata(schema: pa.Schema, path: Path) -> dict[str, Any]:
    """Return what a file says of itself.

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
            f"{path}: a Parquet file, but not of traces: expected one written by fedstale traces"
        )
    if version != VERSION:
        raise TraceError(
            f"{path}: version {version!r} of the format: expected {VERSION}; "
            "update fedstale, or convert the original recording again"
        )
    if not schema.equals(SCHEMA):
        kinds = {f.name: f.type for f in schema}
        wrong = [f.name for f in SCHEMA if kinds.get(f.name) != f.type] or ["nullability"]
        found = kinds.get(wrong[0], "missing")
        raise TraceError(
            f"{path}: column {wrong[0]} is {found}: expected the columns of docs/formats.md"
        )
    return about


def read_groups(file: pq.ParquetFile, about: dict[str, Any], path: Path) -> TraceSet:
    """Return the devices of an open file.

    Raises:
        TraceError: rows are missing, or a number cannot be.
    """
    groups: dict[str, list[pa.Table]] = {"device": [], **{name: [] for name in about["channels"]}}
    for number in range(file.num_row_groups):
        record = file.read_row_group(number, columns=["record"])["record"]
        kind = record[0].as_py()
        if kind not in groups:
            raise TraceError(
                f"{path}: record {kind!r} in row group {number}: expected {', '.join(groups)}"
            )
        wanted = [n for n in _columns_of(kind, about) if n != "record"]
        groups[kind].append(file.read_row_group(number, columns=wanted))
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
        repairs=MappingProxyType({str(k): int(v) for k, v in about["repairs"].items()}),
        **channels,
    )


def _columns_of(kind: str, about: dict[str, Any]) -> list[str]:
    if kind == "device":
        ours = tuple(f"{name}_" for name in about["channels"])
        return ["device_id", *(n for n in SCHEMA.names if n.startswith(ours))]
    if kind == "availability":
        return ["length_s", "starts_s", "ends_s"]
    regular = about["channels"][kind]["step_s"] is not None
    return ["length_s", "values", *([] if regular else ["starts_s"])]


def _channel(
    name: str, whole: dict[str, pa.Table], about: dict[str, Any], path: Path
) -> Availability | Series:
    stored, devices, said = whole[name], whole["device"], about["channels"][name]
    lengths = _floats(stored, "length_s", path)
    channel: Availability | Series
    if name == "availability":
        starts, counts = _flat(stored, "starts_s", path)
        ends, _ = _flat(stored, "ends_s", path)
        channel = Availability.packed(starts, ends, counts, lengths, repeat=said["repeat"])
    else:
        channel = _series(stored, lengths, said, path)
    rows = _floats(devices, f"{name}_row", path)
    if not np.all((rows >= 0) & (rows < lengths.size)):
        raise TraceError(f"{path}: {name}_row: expected 0 to {lengths.size - 1}")
    placed: dict[str, Any] = {
        "rows": rows.astype(np.int32),
        "shifts": _floats(devices, f"{name}_shift_s", path),
        "until": np.inf if said["until_s"] is None else float(said["until_s"]),
    }
    if name != "availability":
        placed["scales"] = _floats(devices, f"{name}_scale", path)
    return replace(channel, **placed)


def _series(stored: pa.Table, lengths: Array, said: dict[str, Any], path: Path) -> Series:
    values, counts = _flat(stored, "values", path)
    if np.any(counts == 0) or not np.all(np.isfinite(lengths) & (lengths > 0)):
        raise TraceError(f"{path}: a row of rates is empty or has no length > 0 s")
    step_s = said["step_s"]
    if step_s is not None:
        if not np.array_equal(lengths, counts * float(step_s)):
            raise TraceError(f"{path}: length_s: expected the number of values times {step_s} s")
        return Series.of_rows(
            pack(values, None, float(step_s), counts, lengths), repeat=said["repeat"]
        )
    starts, start_counts = _flat(stored, "starts_s", path)
    first = offsets_of(counts)
    steps = np.diff(starts, prepend=0.0)
    steps[first[:-1]] = 1.0
    if (
        not np.array_equal(start_counts, counts)
        or np.any(starts[first[:-1]] != 0)
        or not np.all(steps > 0)
        or np.any(lengths <= starts[first[1:] - 1])
    ):
        raise TraceError(
            f"{path}: starts_s: expected, for each value, starts that begin at 0, increase, and "
            "end before length_s"
        )
    return Series.of_rows(pack(values, starts, None, counts, lengths), repeat=said["repeat"])


def _floats(table: pa.Table, name: str, path: Path) -> Array:
    column = table[name]
    if column.null_count:
        raise TraceError(f"{path}: column {name} has {column.null_count} nulls: expected none")
    numbers = column.to_numpy().astype(np.float64)
    if not np.all(np.isfinite(numbers) & (numbers >= 0)):
        raise TraceError(f"{path}: column {name}: expected finite numbers >= 0")
    return numbers


def _flat(table: pa.Table, name: str, path: Path) -> tuple[Array, Index]:
    """Return the elements of a column of lists, one list after the other, and their counts."""
    column = table[name]
    flat, counts = [], []
    for chunk in column.chunks:
        if chunk.null_count or chunk.flatten().null_count:
            raise TraceError(f"{path}: column {name} has nulls: expected none")
        flat.append(chunk.flatten().to_numpy())
        counts.append(chunk.value_lengths().to_numpy())
    return np.concatenate(flat), np.concatenate(counts).astype(np.int64)
