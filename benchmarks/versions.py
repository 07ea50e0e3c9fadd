"""What does a server need in memory for model versions in flight, and what does the disk cost?

The first part makes versions of a 100 MB model that jobs hold on to, with and without a limit of
1 GB, each in a process of its own. The second merges a late update with the gap of each parameter,
whose base version is in memory, on disk and in the system's cache, or on disk only.

Run it with: python benchmarks/versions.py [--quick]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from flwr.app import Array, ArrayRecord
from results_file import write_result

from fedstale.strategies.server.versions import Snapshot, Versions, stored
from fedstale.strategies.types import Model, add_scaled
from fedstale.strategies.weighting import ClientUpdate, Gap

LIMIT_BYTES = 1_000_000_000
LEAST_FREE_BYTES = 4_000_000_000


def memory_mib(field: str) -> float:
    """Return a field of /proc/self/status, as RssAnon or VmHWM, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(line for line in lines if line.startswith(f"{field}:"))
    return round(int(found.split()[1]) / 1024, 1)


def free_bytes() -> int:
    """Return the memory of the machine that is free, or can be had at once."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("MemAvail")).split()[1])


def hold(n_versions: int, n: int, limit_bytes: int | None, folder: Path) -> dict[str, object]:
    """Return what it takes to keep some versions of a model of n float32 parameters."""
    before = memory_mib("RssAnon")
    initial = Snapshot.of(ArrayRecord({"w": Array(np.zeros(n, np.float32))}))
    versions = Versions(initial, memory_bytes=limit_bytes, folder=folder)
    spent = []
    for number in range(1, n_versions):
        snapshot = Snapshot({"w": np.full(n, number, np.float32)}, {}, ("w",))
        versions.hold(versions.version)
        started = time.perf_counter()
        versions.advance(snapshot)
        spent.append(time.perf_counter() - started)
        del snapshot
    assert all(versions[v].floats["w"][-1] == v for v in range(n_versions))
    assert len(versions) == n_versions
    return {
        "versions": n_versions,
        "model_mb": 4 * n // 10**6,
        "limit_mb": None if limit_bytes is None else limit_bytes // 10**6,
        "on_disk": versions.n_on_disk,
        "anonymous_mib": memory_mib("RssAnon"),
        "anonymous_mib_before": before,
        "s_to_advance_median": round(statistics.median(spent), 4) if spent else 0.0,
        "s_to_advance_max": round(max(spent), 4) if spent else 0.0,
    }


def forget_cached() -> None:
    """Let the system forget what it has cached of the unnamed files of this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").endswith("(deleted)"):
                os.fsync(int(name))
                os.posix_fadvise(int(name), 0, 0, os.POSIX_FADV_DONTNEED)


def merge_s(gap: Gap, base: Model, now: Model, delta: Model, total: Model) -> float:
    """Return the time to weigh one late update and add it."""
    update = {"w": delta["w"].copy()}
    started = time.perf_counter()
    gap.weigh(ClientUpdate(delta=update, base=base, current=now, staleness=5))
    add_scaled(total, update, 1.0)
    return time.perf_counter() - started


def merges(n: int, repeats: int, folder: Path) -> list[dict[str, object]]:
    """Return the time of a merge by where the base version is."""
    rng = np.random.default_rng(0)
    base = {"w": rng.standard_normal(n, np.float32)}
    now = {"w": base["w"] + np.float32(0.01) * rng.standard_normal(n, np.float32)}
    delta, gap = {"w": rng.standard_normal(n, np.float32)}, Gap()
    gap.observe(base, now, 1.0)
    totals = {place: {"w": np.zeros(n, np.float32)} for place in ("memory", "cache", "disk")}
    times: dict[str, list[float]] = {place: [] for place in totals}
    merge_s(gap, base, now, delta, {"w": np.zeros(n, np.float32)})
    for _ in range(repeats):
        # Mapped anew each time: pages that were used once are there already.
        times["memory"].append(merge_s(gap, base, now, delta, totals["memory"]))
        mapped = stored(base, folder)
        times["cache"].append(merge_s(gap, mapped, now, delta, totals["cache"]))
        mapped = stored(base, folder)
        forget_cached()
        times["disk"].append(merge_s(gap, mapped, now, delta, totals["disk"]))
        del mapped
    for total in totals.values():
        np.testing.assert_array_equal(total["w"], totals["memory"]["w"])
    return [
        {
            "base_version_in": place,
            "model_mb": 4 * n // 10**6,
            "s_median": round(statistics.median(values), 4),
            "s_min": round(min(values), 4),
            "s_max": round(max(values), 4),
            "repeats": repeats,
        }
        for place, values in times.items()
    ]


def in_a_process(n_versions: int, n: int, limit_bytes: int | None) -> dict[str, object]:
    """Return what `hold` measures, in a fresh process."""
    words = [str(n_versions), str(n), str(limit_bytes or 0)]
    command = [sys.executable, str(Path(__file__)), "--hold", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row: dict[str, object] = {}
    for line in done.stdout.splitlines():
        name, value = line.split("=")
        row[name] = json.loads(value)
    return row


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a model of 10 MB, limit 0.1 GB")
    parser.add_argument("--hold", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        if options.hold:
            n_versions, n, limit = options.hold
            for key, value in hold(n_versions, n, limit or None, folder).items():
                print(f"{key}={json.dumps(value)}")
            return
        n, limit_bytes = (2_500_000, 10**8) if options.quick else (25_000_000, LIMIT_BYTES)
        rows = []
        for n_versions, limit in (
            *((1, None), (10, None), (100, None)),
            *((1, limit_bytes), (10, limit_bytes), (100, limit_bytes)),
        ):
            if limit is None and free_bytes() < 4 * n * n_versions + LEAST_FREE_BYTES:
                rows.append({"versions": n_versions, "limit_mb": None, "left_out": "memory"})
            else:
                rows.append(in_a_process(n_versions, n, limit))
            print(rows[-1], flush=True)
        rows += merges(n, 3 if options.quick else 7, folder)
        for row in rows[-3:]:
            print(row)
    name = "versions" + "-quick" * options.quick
    write_result(name, rows, command="python benchmarks/versions.py" + " --quick" * options.quick)


if __name__ == "__main__":
    main()
