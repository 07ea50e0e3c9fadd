"""What the mod costs a device: import time, memory, and time for each message.

Memory is what the process holds after the import, read from /proc: Linux only.

Run it with: python benchmarks/device/run.py [--quick]
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.message.message import make_message
from flwr.app.metadata import Metadata

from fedstale.client import FORECAST_RECORD, ForecastMod
from fedstale.traces import Job, TraceSet
from fedstale.traces.forecast import TraceObserver, embedded

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import write_result

REPEATS = 5
MESSAGES = 300
_IMPORT = """
import time
wall, cpu = time.perf_counter(), time.process_time()
import {modules}
print(time.perf_counter() - wall, time.process_time() - cpu,
      [int(x.split()[1]) / 1024 for x in open("/proc/self/status") if x.startswith("VmRSS")][0])
"""
STARTS = {
    "a ClientApp of Flower": "flwr.clientapp",
    "with the mod, switched off": "flwr.clientapp, fedstale.client",
    "with the mod, forecasting": "flwr.clientapp, fedstale.client.forecasting",
}


def starts() -> list[dict[str, object]]:
    """Return the time and memory of imports, each the best of some new processes."""
    rows: list[dict[str, object]] = []
    for name, modules in STARTS.items():
        found = []
        for _ in range(REPEATS):
            code = _IMPORT.format(modules=modules)
            run = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            )
            found.append([float(x) for x in run.stdout.split()])
        wall_s, cpu_s, megabytes = np.min(found, axis=0)
        rows.append({"what": name, "wall_s": wall_s, "cpu_s": cpu_s, "megabytes": megabytes})
    return rows


def took(work: Callable[[], object]) -> dict[str, float]:
    """Return the median and the least CPU time of some work, in ms."""
    times = []
    for _ in range(MESSAGES):
        began = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - began))
    return {"median_ms": float(np.median(times)), "least_ms": float(np.min(times))}


def main() -> None:
    """Measure, print, and write the result."""
    rows = starts()
    forecaster = embedded()
    observed = TraceObserver(TraceSet.synthetic(1, days=2, seed=0)).at([0], 100_000.0)
    job = Job(work=300.0, download_bytes=5_000_000, upload_bytes=5_000_000, ttl_s=1800.0)
    forecaster.forecast(observed).of_job(job)
    rows.append({"what": "one forecast", **took(lambda: forecaster.forecast(observed).of_job(job))})
    mod = ForecastMod()
    here = Context(1, 7, {}, RecordDict(), {})
    content = RecordDict({"arrays": ArrayRecord([np.zeros(1000, np.float32)])})

    def message() -> Message:
        return make_message(Metadata(1, "m", 1, 7, "", "", time.time(), 3600.0, "train"), content)

    def train(request: Message, _: Context) -> Message:
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=request)

    assert "error" not in mod(message(), here, train).content[FORECAST_RECORD]
    rows.append({"what": "one message, all in all", **took(lambda: mod(message(), here, train))})
    size = sum(len(record.deflate()) for record in here.state.values())
    rows.append({"what": f"state after {MESSAGES} messages", "bytes": size})
    for row in rows:
        print(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else str(v) for k, v in row.items()))
    command, quick = "python benchmarks/device/run.py", "--quick" in sys.argv
    write_result("client_mod", rows, command=command, quick=quick)


if __name__ == "__main__":
    main()
