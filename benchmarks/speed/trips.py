"""How many trips a second, how a query grows with the record, how many bytes a device takes.

Run it with: python benchmarks/speed/trips.py [--quick]
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from fedstale.traces import Availability, Job, Series, TraceSet
from fedstale.traces.trace_set import numbered

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import spread, write_result

WEEK_S = 604_800.0
JOB = Job(work=600, download_bytes=4_000_000, upload_bytes=4_000_000)


def week_of_devices(n: int, rng: np.random.Generator, hours: int = 168) -> TraceSet:
    """Return n devices with 14 windows a week and an hourly link of their own each way."""
    starts = np.arange(14) * 43_200.0 + rng.uniform(0, 10_000, (n, 1))
    ends = np.arange(14) * 43_200.0 + rng.uniform(15_000, 29_000, (n, 1))
    availability = Availability.packed(starts.ravel(), ends.ravel(), np.full(n, 14), WEEK_S)
    step_s = WEEK_S / hours
    down = rng.lognormal(15, 1, (n, hours)).astype(np.float32)
    downlink = Series.regular(down, step_s=step_s)
    uplink = Series.regular(down[:, ::-1] / 3, step_s=step_s)
    compute = Series.constant(rng.uniform(0.5, 2, n))
    return TraceSet(
        device_ids=numbered("d", n),
        availability=availability,
        compute=compute,
        downlink=downlink,
        uplink=uplink,
    )


def measure(n: int, hours: int, queries: int, repeats: int = 5) -> dict[str, object]:
    """Return trips per second for queries in random order, and bytes per device."""
    rng = np.random.default_rng(0)
    traces = week_of_devices(n, rng, hours)
    devices, sent_at = rng.integers(0, n, queries), rng.uniform(0, 2 * WEEK_S, queries)
    traces.trips(devices, sent_at, JOB)
    rates = []
    for _ in range(repeats):
        begin = time.perf_counter()
        traces.trips(devices, sent_at, JOB)
        rates.append(queries / (time.perf_counter() - begin))
    return {
        "what": "trips per second",
        "devices": n,
        "segments per link": hours,
        "bytes per device": round(traces.nbytes / n),
        **spread(rates),
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer devices and queries")
    quick = parser.parse_args().quick
    queries = 50_000 if quick else 200_000
    sizes = [1_000, 10_000] if quick else [1_000, 100_000, 1_000_000]
    lengths = [24, 1_536] if quick else [24, 384, 1_536, 24_576]
    rows = [measure(n, 168, queries) for n in sizes]
    rows += [measure(500, hours, queries) for hours in lengths]
    write_result("trips", rows, command="python benchmarks/speed/trips.py", quick=quick)


if __name__ == "__main__":
    main()
