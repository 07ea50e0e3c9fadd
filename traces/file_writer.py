"""How a `TraceSet` becomes the row groups of a native file; `files` opens and closes it.

A row group holds rows of one kind, taken from flat arrays as they are.
"""

import json
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from fedstale.traces.arrays import Index, offsets_of
from fedstale.traces.availability import Availability
from fedstale.traces.file_schema import FORMAT, KEY, SCHEMA, VERSION
from fedstale.traces.series import Series
from fedstale.traces.trace_set import TraceSet

_DEVICES_A_GROUP = 131_072
_SAMPLES_A_GROUP = 1 << 20


def write_groups(traces: TraceSet, out: IO[bytes]) -> None:
    """Write a whole file; rows that no device uses are left out."""
    used = {
        name: np.unique(getattr(traces, name).rows, return_inverse=True) for name in traces.known
    }
    about = {
        "format": FORMAT,
        "version": VERSION,
        "n_devices": traces.n_devices,
        "epoch": traces.epoch,
        "compute_unit": traces.compute_unit,
        "repairs": dict(traces.repairs),
        "channels": {
            name: _channel_about(getattr(traces, name), int(used[name][0].size))
            for name in traces.known
        },
    }
    schema = SCHEMA.with_metadata({KEY: json.dumps(about).encode()})
    with pq.ParquetWriter(
        out, schema, compression="zstd", write_page_checksum=True, use_dictionary=["record"]
    ) as writer:
        for columns in _device_groups(traces, {k: v[1].ravel() for k, v in used.items()}):
            writer.write_table(_table(schema, columns))
        for name in traces.known:
            channel = getattr(traces, name)
            groups = _window_groups if name == "availability" else _segment_groups
            for columns in groups(channel, used[name][0].astype(np.int64)):
                columns["record"] = pa.repeat(name, len(columns["length_s"]))
                writer.write_table(_table(schema, columns))


def _channel_about(channel: Availability | Series, n_rows: int) -> dict[str, Any]:
    until = None if np.isinf(channel.until) else float(channel.until)
    about = {"n_rows": n_rows, "repeat": channel.repeat, "until_s": until}
    if isinstance(channel, Series):
        about["step_s"] = channel.stored.step_s
    return about


def _table(schema: pa.Schema, columns: dict[str, pa.Array]) -> pa.Table:
    n = len(columns["record"])
    arrays = [columns[f.name] if f.name in columns else pa.nulls(n, f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _device_groups(
    traces: TraceSet, rows: dict[str, npt.NDArray[np.integer]]
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
    for part in _groups(counts):
        windows = _runs(channel.offsets[rows[part]], counts[part])
        yield {
            "length_s": pa.array(channel.lengths[rows[part]]),
            "starts_s": _lists(channel.starts[windows], counts[part]),
            "ends_s": _lists(channel.ends[windows], counts[part]),
        }


def _segment_groups(channel: Series, rows: Index) -> Iterator[dict[str, pa.Array]]:
    stored = channel.stored
    blocks = np.diff(stored.first_block)[rows]
    for part in _groups(blocks * stored.values.shape[1]):
        block = _runs(stored.first_block[rows[part]], blocks[part])
        owner = np.repeat(np.arange(blocks[part].size), blocks[part])
        lengths = channel.lengths[rows[part]]
        if stored.starts is None:
            assert stored.step_s is not None
            slot = np.arange(block.size) - np.repeat(offsets_of(blocks[part])[:-1], blocks[part])
            place = slot[:, None] * stored.values.shape[1] + np.arange(stored.values.shape[1])
            samples = np.rint(lengths / stored.step_s).astype(np.int64)
            inside = place < samples[owner][:, None]
            starts = None
        else:
            inside = np.isfinite(stored.starts[block])
            starts = stored.starts[block][inside]
        counts = np.bincount(owner, weights=inside.sum(axis=1), minlength=lengths.size)
        columns = {
            "length_s": pa.array(lengths),
            "values": _lists(stored.values[block][inside], counts.astype(np.int64)),
        }
        if starts is not None:
            columns["starts_s"] = _lists(starts, counts.astype(np.int64))
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


def _runs(first: Index, counts: Index) -> Index:
    """Return first, first + 1, ... for each run, one after the other."""
    return np.arange(int(counts.sum())) + np.repeat(first - offsets_of(counts)[:-1], counts)


def _lists(flat: npt.NDArray[np.floating], counts: Index) -> pa.Array:
    return pa.ListArray.from_arrays(
        pa.array(offsets_of(counts).astype(np.int32)), pa.array(np.ascontiguousarray(flat))
    )
