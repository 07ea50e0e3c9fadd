"""Does a long simulation grow? Memory and open files over a million jobs of an empty app.

A batch of messages goes out, all replies are pulled, and so on. Jobs that are over leave memory, so
after the first tenth of the run, memory should stay as it is. At the end the events are read from
where they went, to see that none is missing.

Run it with: python benchmarks/robustness/soak.py [--jobs 1000000]
"""

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstale.simulation import Costs, TraceGrid
from fedstale.traces import TraceSet

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import write_result

IN_FLIGHT = 1000
SAMPLES = 20
# Of the machine: while the grid runs, `time.perf_counter` tells its virtual instant.
clock = time.perf_counter
WARM_UP = 0.1


def empty_app() -> ClientApp:
    """Return an app that answers with what it was sent."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    return app


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    """Return how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def soaked(grid: TraceGrid, n_jobs: int) -> Iterator[int]:
    """Send jobs in batches and pull their replies; yield how many are done after each batch."""
    arrays = ArrayRecord([np.zeros(1000, np.float32)])
    with grid.running():
        nodes = list(grid.get_node_ids())
        for done in range(0, n_jobs, len(nodes)):
            config = ConfigRecord({"server-round": done // len(nodes)})
            content = RecordDict({"arrays": arrays, "config": config})
            batch = nodes[: n_jobs - done]
            replies = grid.send_and_receive([Message(content, node, "train") for node in batch])
            assert len(list(replies)) == len(batch)
            yield done + len(batch)


def measure(n_jobs: int) -> list[dict[str, object]]:
    """Return memory and open files as a run goes on, and how much they grew after warm-up."""
    traces = TraceSet.constant(IN_FLIGHT, compute=1.0, downlink_bit_per_s=1e7, uplink_bit_per_s=1e7)
    grid = TraceGrid(traces, empty_app(), costs=Costs(work_per_example=1.0, epochs=1, examples=10))
    due = [round(n_jobs * (i + 1) / SAMPLES) for i in range(SAMPLES)]
    rows: list[dict[str, object]] = []
    started = before = clock()
    cpu_before = time.process_time()
    last = 0
    for done in soaked(grid, n_jobs):
        if done < due[len(rows)]:
            continue
        gc.collect()
        now, cpu = clock(), time.process_time()
        rows.append(
            {
                "jobs": done,
                "resident_mib": round(resident_bytes() / 2**20, 1),
                "open_files": open_files(),
                "messages_per_s": round((done - last) / (now - before)),
                "cpu_us_per_message": round(1e6 * (cpu - cpu_before) / (done - last)),
            }
        )
        print(rows[-1], flush=True)
        before, cpu_before, last = now, cpu, done
    wall_s = before - started
    n_events = sum(len(table) for table in grid.event_tables())
    assert n_events == n_jobs, f"{n_events} events of {n_jobs} jobs"
    warm = [row for row in rows if row["jobs"] >= WARM_UP * n_jobs]  # type: ignore[operator]
    memory = [float(row["resident_mib"]) for row in warm]  # type: ignore[arg-type]
    files = [row["open_files"] for row in warm]
    summary = {
        "what": "after the first tenth",
        "growth_percent": round(100 * (max(memory) / memory[0] - 1), 1),
        "open_files_constant": len(set(files)) == 1,
        "messages_per_s": round(n_jobs / wall_s),
        "wall_s": round(wall_s, 1),
        "events": n_events,
        "resident_mib_with_events_read": round(resident_bytes() / 2**20, 1),
    }
    return [*rows, summary]


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000, help="jobs to run")
    parser.add_argument("--quick", action="store_true", help="50,000 jobs")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    n_jobs = 50_000 if options.quick else options.jobs
    rows = measure(n_jobs)
    print(rows[-1])
    name = "soak" if n_jobs == 1_000_000 or options.quick else f"soak-{n_jobs}"
    command = f"python benchmarks/robustness/soak.py --jobs {n_jobs}"
    write_result(name, rows, command=command, quick=options.quick)


if __name__ == "__main__":
    main()
