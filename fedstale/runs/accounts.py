"""Where the device-seconds and bytes of a run went: used, wasted, or in flight at its end.

Work is used if the app got its reply and did not reject it. The sums are over the rows of
events.parquet, in which whatever a device spent appears exactly once.
"""

import re
from contextlib import suppress
from math import isfinite
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from fedstale.errors import first_line
from fedstale.runs.folder import IN_FLIGHT
from fedstale.strategies.server import REPORTED

PHASES = ("download_s", "compute_s", "upload_s")
WAYS = ("downloaded_bytes", "uploaded_bytes")
COST_COLUMNS = ("status", *PHASES, *WAYS)
"""What the costs of a run are computed from."""
ERROR_COLUMNS = ("device_id", "reason")
"""What the errors of clients and rejected replies are counted from."""
REJECTED_DEVICES = 5
"""Devices with rejected replies that a summary lists at most, those with most of them first."""
CLIENT_ERRORS = 5
"""Client errors that a summary lists at most, the commonest first."""
_ERROR = re.compile(r"(?P<kind>\w+): (?P<text>.*) \((?P<where>[^()]+:\d+)\)", re.DOTALL)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
OUTCOMES = ("used", "wasted", "in-flight")
REASONS = 15
"""Reasons that the table of failures lists at most."""


def ledger(events: pa.Table) -> dict[str, dict[str, Any]]:
    """Return the closed accounts of a run.

    Args:
        events: one row a job, as `TraceGrid.events` returns it, with at least `COST_COLUMNS`.

    Returns:
        `jobs` by status; and `device_s` (download, training and upload together), `compute_s` and
        `bytes` (both ways), each with its `total` and its parts `used`, `wasted` and `in-flight`;
        None for a sum of which some parts are unknown.
    """
    status = events["status"]
    counts = {row["values"]: row["counts"] for row in pc.value_counts(status).to_pylist()}
    is_used, is_in_flight = pc.equal(status, REPORTED), pc.equal(status, IN_FLIGHT)
    masks = is_used, pc.invert(pc.or_(is_used, is_in_flight)), is_in_flight

    def account(values: pa.ChunkedArray) -> dict[str, float | None]:
        parts = [values, *(values.filter(mask) for mask in masks)]
        sums = [float(pc.sum(part).as_py() or 0.0) for part in parts]
        known = [each if isfinite(each) else None for each in sums]
        return dict(zip(("total", *OUTCOMES), known, strict=True))

    download, compute, upload = (events[name] for name in PHASES)
    return {
        "jobs": {"sent": len(events), **dict(sorted(counts.items()))},
        "device_s": account(pc.add(pc.add(download, compute), upload)),
        "compute_s": account(compute),
        "bytes": account(pc.add(*(events[name] for name in WAYS))),
    }


def rejections(events: pa.Table) -> dict[str, int]:
    """Return how many replies the server rejected by reason, the most frequent reasons first.

    Args:
        events: the jobs whose reply was rejected, with at least `reason`.

    Returns:
        `REASONS` reasons at most, and the number of replies rejected for each.
    """
    counts = {row["values"]: row["counts"] for row in pc.value_counts(events["reason"]).to_pylist()}
    order = sorted(counts, key=lambda reason: (-counts[reason], reason))
    return {reason: counts[reason] for reason in order[:REASONS]}


def rejected_devices(events: pa.Table) -> list[dict[str, Any]]:
    """Return the devices whose replies the server rejected most often.

    Args:
        events: the jobs whose reply was rejected in the order of sending, with at least
            `ERROR_COLUMNS`.

    Returns:
        `REJECTED_DEVICES` devices at most, each with the number of its `replies` that were rejected
        and the `reason` of the last one.
    """
    by_device = events.select(ERROR_COLUMNS).to_pandas().groupby("device_id", sort=False)["reason"]
    found = by_device.agg(replies="size", reason="last").reset_index(names="device")
    most = found.sort_values("replies", ascending=False, kind="stable")[:REJECTED_DEVICES]
    return [{str(name): value for name, value in row.items()} for row in most.to_dict("records")]


def by_kind(events: pa.Table) -> dict[str, dict[str, Any]]:
    """Count messages, replies and bytes by type and action.

    Args:
        events: one row a job, with at least kind, status and the bytes of both ways.

    Returns:
        By type, in the order of their first message: `sent`, `reported` (the app got the reply
        and used it) and `bytes` both ways; None where some are unknown.
    """
    moved = pc.add(*(events[name] for name in WAYS))
    jobs = pa.table({"kind": events["kind"], "bytes": moved}).append_column(
        "reported", pc.cast(pc.equal(events["status"], REPORTED), pa.int64())
    )
    sums = jobs.group_by("kind", use_threads=False).aggregate(
        [("kind", "count"), ("reported", "sum"), ("bytes", "sum")]
    )
    return {
        row["kind"]: {
            "sent": row["kind_count"],
            "reported": row["reported_sum"],
            "bytes": row["bytes_sum"] if isfinite(row["bytes_sum"]) else None,
        }
        for row in sums.to_pylist()
    }


def client_errors(events: pa.Table) -> list[dict[str, Any]]:
    """Return the commonest errors of clients, at most `CLIENT_ERRORS`.

    Errors of one type from one line are one error, whatever their texts say besides.

    Args:
        events: the jobs that ended in an error of the client, with at least `ERROR_COLUMNS`.

    Returns:
        The commonest first: `error`, the type and the first text of it; `where`, the file and the
        line of the app that raised it, empty where that is not known; `jobs` and `devices`.
    """
    jobs = events.select(ERROR_COLUMNS).to_pandas()
    keys = {
        reason: (found["kind"], found["where"]) if found else (reason, "")
        for reason, found in ((one, _ERROR.fullmatch(one)) for one in jobs["reason"].unique())
    }
    groups = jobs.groupby(jobs["reason"].map(keys), sort=False)
    rows = [
        {
            "error": first_line(str(group["reason"].iloc[0]).removesuffix(f" ({where})")),
            "where": where,
            "jobs": len(group),
            "devices": int(group["device_id"].nunique()),
        }
        for (_, where), group in groups
    ]
    return sorted(rows, key=lambda row: -row["jobs"])[:CLIENT_ERRORS]


def in_words(part: object) -> str | None:
    """Describe a strategy or a selector in its own words, or else by its class; None of none.

    Addresses of objects are left out: they are others in each process.
    """
    if part is None:
        return None
    # Somebody's own may not be able to.
    with suppress(Exception):
        if type(part).__repr__ is not object.__repr__:
            return _ADDRESS.sub("", " ".join(repr(part).split()))
    return type(part).__name__


def with_costs(jobs: pd.DataFrame) -> pd.DataFrame:
    """Return jobs with what each of them took, as far as it is known.

    Args:
        jobs: one row a job, with at least `COST_COLUMNS`.

    Returns:
        The same with the columns `busy_s`, seconds that the device spent; `moved_bytes`, both ways;
        and `outcome`, what the job counts as: used, wasted or in-flight.
    """
    is_used, is_in_flight = jobs["status"] == REPORTED, jobs["status"] == IN_FLIGHT
    return jobs.assign(
        busy_s=jobs[list(PHASES)].sum(axis=1),
        moved_bytes=jobs[list(WAYS)].sum(axis=1),
        outcome=np.select([is_used, is_in_flight], ["used", "in-flight"], "wasted"),
    )
