"""Every fault of a native trace file, by docs/formats.md as formats.toml has it.

The reader stops at the first fault; nothing of it is used here, so that two readings of one format
are compared. Rows count from 0, as pandas reads the file.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fedstale.errors import first_line
from fedstale.traces import Array

FORMAT = tomllib.loads(Path(__file__).with_name("formats.toml").read_text(encoding="utf-8"))
_RATES = ("compute", "downlink", "uplink")


def faults(path: Path) -> Iterator[str]:
    """Yield a sentence for each fault of a native trace file.

    Rows are judged where metadata and columns have no fault.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            rows, schema = file.read().to_pandas(ignore_metadata=True), file.schema_arrow
            groups = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
        about = json.loads((schema.metadata or {}).get(b"fedstale", b"null"))
    except (pa.ArrowException, OSError, ValueError, RecursionError) as problem:
        yield f"not a readable file of traces: {first_line(problem)}"
        return
    wrong = list(_ruled("metadata", about, FORMAT["metadata"]))
    for name, channel in {} if wrong else about["channels"].items():
        rules = FORMAT["channel"] | (FORMAT["rate"] if name in _RATES else {})
        wrong += _ruled(f"metadata, {name}", channel, rules)
        wrong += [] if name in ("availability", *_RATES) else [f"metadata: unknown channel {name}"]
    found = {f.name: f"{f.type}{' not null' * (not f.nullable)}" for f in schema}
    gaps = {"gap_starts_s", "gap_ends_s"} & found.keys()
    due = {k: kind for k, (kind, _) in FORMAT["columns"].items() if gaps or not k.startswith("gap")}
    for name in [*due, *(name for name in found if name not in due)]:
        if (kind := found.get(name, "missing").replace("element", "item")) != due.get(name):
            wrong.append(f"column {name}: {kind}: expected {due.get(name, 'no such column')}")
    if not wrong and [*found] != [*due]:
        wrong.append(f"columns: expected in the order {', '.join(due)}")
    yield from wrong or _rows(rows, about, np.cumsum([0, *groups]))


def _ruled(where: str, found: Any, rules: dict[str, tuple[str, str]]) -> Iterator[str]:
    for name, (pattern, expected) in rules.items():
        is_there = isinstance(found, dict) and name in found
        if not re.fullmatch(pattern, said := json.dumps(found[name]) if is_there else "missing"):
            yield f"{where}, {name}: {said}: expected {expected}"


def _rows(rows: pd.DataFrame, about: dict[str, Any], groups: Array) -> Iterator[str]:
    kinds, channels = rows["record"], about["channels"]
    counts = {"device": about["n_devices"]} | {k: each["n_rows"] for k, each in channels.items()}
    for row, kind in kinds[~kinds.isin(counts)].items():
        yield f"row {row}, column record: {kind!r}: expected one of {', '.join(counts)}"
    for first, last in pairwise(groups):
        if kinds[first:last].nunique() > 1:
            yield f"row {first}, column record: expected one record in its row group, to row {last}"
    for kind, n in counts.items():
        if (kinds == kind).sum() != n:
            yield f"metadata: {n} rows of {kind}: the file has {(kinds == kind).sum()}"
    yield from _cells(rows, kinds, counts, channels)
    for name, channel in channels.items():
        used = set(rows.loc[kinds == "device", f"{name}_row"])
        stored = rows[kinds == name].map(lambda x: np.empty(0) if x is None else x)
        look = _log if name == "availability" else _segments
        for k, row in enumerate(stored.to_dict("records")):
            if k not in used:
                yield f"row {stored.index[k]}, column record: expected a device of this {name}"
            for said in look(row, channel.get("step_s")):
                yield f"row {stored.index[k]}, column {said}"
        endless = rows.index[np.isinf(rows.get(f"{name}_scale", rows["length_s"] * 0))]
        for row in endless if any((each == 0).any() for each in stored["values"]) else ():
            yield f"row {row}, column {name}_scale: inf: expected no rate of 0 with it"


def _cells(
    rows: pd.DataFrame, kinds: "pd.Series[str]", counts: dict[str, int], channels: dict[str, Any]
) -> Iterator[str]:
    on_grid = kinds.isin([k for k in _RATES if k in channels and channels[k]["step_s"]])
    for name, x in ((str(name), x) for name, x in rows.items()):
        kind, records = FORMAT["columns"][name]
        of = name.partition("_")[0]
        is_due = kinds.isin(records.split()) & ~(on_grid & (name == "starts_s"))
        is_due &= of not in ("availability", *_RATES) or of in channels
        for row in rows.index[x.isna() & is_due]:
            yield f"row {row}, column {name}: null or NaN: expected a value"
        for row in rows.index[x.notna() & ~is_due & kinds.isin(counts)]:
            yield f"row {row}, column {name}: {x[row]!r}: expected null in a row of {kinds[row]}"
        most = np.inf if name.endswith("_scale") or name == "log_s" else np.finfo(float).max
        most = counts[of] - 1 if name.endswith("_row") and of in counts else most
        if kind in ("double", "int32"):
            for row in rows.index[x.notna() & is_due & ~x.between(0, most)]:
                yield f"row {row}, column {name}: {x[row]:g}: expected 0 to {most:g}"
    for row in rows.index[(kinds == "device") & rows["device_id"].duplicated()]:
        yield f"row {row}, column device_id: {rows['device_id'][row]!r}: expected distinct names"


def _log(row: dict[str, Any], _: None) -> Iterator[str]:
    length_s, starts_s, ends_s = row["length_s"], row["starts_s"], row["ends_s"]
    log_start_s = row["log_start_s"]
    if not 0 <= log_start_s < length_s:
        yield f"log_start_s: {log_start_s}: expected it before the record's end, {length_s}"
    begins, stops = row.get("gap_starts_s", np.empty(0)), row.get("gap_ends_s", np.empty(0))
    if starts_s.size != ends_s.size or begins.size != stops.size:
        yield "ends_s, gap_ends_s: expected one end for each start"
        return
    yield from _spans("starts_s", starts_s, ends_s, 0.0, length_s)
    yield from _spans("gap_starts_s", begins, stops, 5e-324, np.nextafter(row["log_s"], 0.0))
    for k, at in enumerate(np.mod(log_start_s + begins, length_s)):
        for lap_s in (0.0, length_s):  # instants of a log are sums, and rounded
            low, high = np.maximum(starts_s + lap_s, at), at + stops[k] - begins[k]
            if np.any(np.minimum(ends_s + lap_s, high) - low > 2e-6):
                yield f"gap_starts_s: {begins[k]}, place {k}: expected no window in the gap"


def _segments(row: dict[str, Any], step_s: float | None) -> Iterator[str]:
    length_s, starts_s, values = row["length_s"], row["starts_s"], row["values"]
    n = values.size
    for k in np.flatnonzero(~((values >= 0) & (values < np.inf))):
        yield f"values: {values[k]}, place {k}: expected a finite rate >= 0"
    if not n:
        yield "values: expected one rate at least"
    elif step_s and length_s != n * step_s:
        yield f"length_s: {length_s}: expected {n} rates times {step_s}"
    elif not step_s and (starts_s.size != n or starts_s[0] != 0):
        yield f"starts_s: expected one for each of {n} rates, the first 0"
    elif not step_s:
        for k in np.flatnonzero(~(np.diff(starts_s, append=length_s) > 0)):
            yield f"starts_s: {starts_s[k]}, place {k}: expected it before the next, or the end"


def _spans(column: str, starts: Array, ends: Array, low: float, high: float) -> Iterator[str]:
    is_apart = np.append(True, starts[1:] > ends[:-1])
    for k in np.flatnonzero(~((starts >= low) & (starts < ends) & (ends <= high) & is_apart)):
        yield (
            f"{column}: [{starts[k]}, {ends[k]}), place {k}: expected spans inside [{low:.0f}, "
            f"{high:g}), apart"
        )
