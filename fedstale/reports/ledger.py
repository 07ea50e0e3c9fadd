"""Where the device-seconds and bytes of a run went: used, wasted, or still flying.

Work is used if the app got its reply and did not refuse it. The sums are over the rows of
events.parquet, in which whatever a device spent appears exactly once.
"""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fedstale.simulation.jobs import FLYING
from fedstale.strategies.server.runtime import REPORTED

COLUMNS = (
    *("status", "download_s", "compute_s", "upload_s"),
    *("downloaded_bytes", "uploaded_bytes"),
)
"""What `ledger` reads of the events."""


def ledger(events: pa.Table) -> dict[str, dict[str, Any]]:
    """Return the closed accounts of a run.

    Args:
        events: one row a job, as `TraceGrid.events` returns it, with at least `COLUMNS`.

    Returns:
        `jobs` by status; and `device_s` (download, training and upload together), `compute_s` and
        `bytes` (both ways), each with its `total` and its parts `used`, `wasted` and `flying`.
    """
    status = events["status"]
    counts = {row["values"]: row["counts"] for row in pc.value_counts(status).to_pylist()}
    phases = ("download_s", "compute_s", "upload_s")
    device_s = pc.add(pc.add(events[phases[0]], events[phases[1]]), events[phases[2]])
    moved = pc.add(events["downloaded_bytes"], events["uploaded_bytes"])
    is_used, is_flying = pc.equal(status, REPORTED), pc.equal(status, FLYING)
    return {
        "jobs": {"sent": len(events), **dict(sorted(counts.items()))},
        "device_s": _parts(device_s, is_used, is_flying),
        "compute_s": _parts(events["compute_s"], is_used, is_flying),
        "bytes": _parts(moved, is_used, is_flying),
    }


def _parts(
    values: pa.ChunkedArray, is_used: pa.ChunkedArray, is_flying: pa.ChunkedArray
) -> dict[str, float]:
    is_wasted = pc.invert(pc.or_(is_used, is_flying))
    parts = {
        name: float(pc.sum(values.filter(mask)).as_py() or 0.0)
        for name, mask in (("used", is_used), ("wasted", is_wasted), ("flying", is_flying))
    }
    return {"total": float(pc.sum(values).as_py() or 0.0), **parts}
