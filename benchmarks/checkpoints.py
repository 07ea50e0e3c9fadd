"""What does a checkpoint at every aggregation cost a server on real devices?

A whole `StaleStrategy` runs over a grid that answers at once with what it was sent, with and
without checkpoints in turn; only the time from one version to the next is compared. Each merge has
five replies, weighed by the gap of each parameter, with 20 jobs in flight.

Run it with: python benchmarks/checkpoints.py [--quick]
"""

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from flwr.app import Array, ArrayRecord
from merging import EchoGrid
from results_file import write_result

from fedstale.flower import identity
from fedstale.strategies import GapAware
from fedstale.strategies.server.metrics import Progress

IN_FLIGHT, MERGE_SIZE = 20, 5


def version_s(n: int, n_versions: int, folder: Path | None) -> list[float]:
    """Return the seconds that each version took, for a model of n float32 parameters."""
    ends = [time.perf_counter()]

    def note(progress: Progress) -> bool:
        ends.append(time.perf_counter())
        return False

    strategy = GapAware(IN_FLIGHT, MERGE_SIZE, checkpoints=folder, stop_when=note)
    initial = ArrayRecord({"w": Array(np.ones(n, np.float32))})
    with identity(1):
        strategy.start(EchoGrid(2 * IN_FLIGHT, MERGE_SIZE), initial, num_rounds=n_versions)
    # The first version waits for the first messages.
    return np.diff(ends)[2:].tolist()


def measure(n: int, n_versions: int, repeats: int) -> dict[str, object]:
    """Return the cost of a checkpoint; runs with and without take turns."""
    times: dict[bool, list[float]] = {False: [], True: []}
    size = 0
    for _ in range(repeats):
        for kept in times:
            with TemporaryDirectory() as name:
                folder = Path(name) if kept else None
                times[kept] += version_s(n, n_versions, folder)
                size = max((f.stat().st_size for f in Path(name).iterdir()), default=size)
    without, with_ = (statistics.median(values) for values in times.values())
    return {
        "parameters": n,
        "ms_a_version_without": round(1e3 * without, 2),
        "ms_a_version_with": round(1e3 * with_, 2),
        "ms_a_checkpoint": round(1e3 * (with_ - without), 2),
        "checkpoint_mb": round(size / 1e6, 2),
        "versions": len(times[True]),
    }


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer versions")
    quick = parser.parse_args().quick
    rows = []
    for n, n_versions in (
        ((25_000, 20), (25_000_000, 4)) if quick else ((25_000, 200), (25_000_000, 12))
    ):
        rows.append(measure(n, n_versions, repeats=1 if quick else 3))
        print(rows[-1], flush=True)
    command = "python benchmarks/checkpoints.py" + " --quick" * quick
    write_result("checkpoints" + "-quick" * quick, rows, command=command)


if __name__ == "__main__":
    main()
