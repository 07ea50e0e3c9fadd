"""How much sooner are eight runs over on two nodes of a Ray cluster than on one?

Each node has one core, as many as this machine can give it, and the command runs on a head without
any. One node and two take turns; files that do not depend on wall time must have the same bytes.

Run it with: python benchmarks/two_nodes.py [--turns N]
"""

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from results_file import write_result

import fedstale

PLAN: dict[str, Any] = {
    "app": "digits",
    "traces": "synthetic:40",
    "until": "8h",
    "seeds": [1, 2, 3, 4],
    "run-config": {"num-server-rounds": 100000, "buffer-size": 2, "concurrency": 6},
    "variants": {
        "FedBuff": {"run-config": {"strategy": "fedbuff"}},
        "Gap-Aware": {"run-config": {"strategy": "gap-aware"}},
    },
}
SAME = ("events.parquet", "metrics.parquet", "model.safetensors", "config.toml")


def digest(folder: Path) -> str:
    """Return the SHA-256 of all files of runs that do not depend on wall time."""
    found = hashlib.sha256()
    for path in sorted(path for name in SAME for path in folder.rglob(name)):
        found.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def played(n_nodes: int) -> tuple[float, str]:
    """Return the wall seconds of the plan on so many nodes, and the digest of its runs."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        for _ in range(n_nodes):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        with tempfile.TemporaryDirectory() as folder:
            out, began = Path(folder) / "plan", time.perf_counter()
            fedstale.compare(PLAN, out=out, address=cluster.address)
            return time.perf_counter() - began, digest(out)
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    # Ray lets its workers wait for everything else, as 15 less important.
    os.environ.setdefault("RAY_worker_niceness", "0")
    rows: list[dict[str, Any]] = []
    for turn in range(turns):
        order = (1, 2) if turn % 2 else (2, 1)
        found = {n_nodes: played(n_nodes) for n_nodes in order}
        (one, first), (two, second) = found[1], found[2]
        is_same = first == second
        assert is_same, "runs on two nodes differ from those on one"
        row = {"turn": turn, "one_node_s": round(one, 1), "two_nodes_s": round(two, 1)}
        rows.append(row | {"speed_up": round(one / two, 3), "same_bytes": is_same})
        print(rows[-1], flush=True)
    speed_up = statistics.median(row["speed_up"] for row in rows)
    n_runs = len(PLAN["variants"]) * len(PLAN["seeds"])
    rows.append({"turn": "median", "speed_up": speed_up, "runs": n_runs})
    print(
        write_result("two_nodes", rows, command=f"python benchmarks/two_nodes.py --turns {turns}")
    )


if __name__ == "__main__":
    main()
