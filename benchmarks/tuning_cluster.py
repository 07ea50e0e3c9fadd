"""How much faster a search is on two nodes of one core than on one, and what a cluster costs.

The nodes are Ray's own on this machine; the head, where the search runs, has no core for
configurations. A grid of configurations that none stops, so that all ways do the same work: by
this machine alone, by one node, and by two. Each way is run in turn; there are medians, and ratios
within a turn, since the machine is shared with others.

The table is written into docs/clusters.md. Run it with:
python benchmarks/tuning_cluster.py [--quick]
"""

import argparse
import os
import statistics
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pages import filled
from ray.cluster_utils import Cluster
from results_file import write_result

import fedstale
from fedstale.tuning.trials import Trial

PAGE = Path(__file__).parent.parent / "docs" / "clusters.md"
WAYS = ("this machine, one worker", "one node", "two nodes")
Row = dict[str, object]


def space(n: int, until: str) -> dict[str, object]:
    """Return a grid of so many configurations."""
    return {
        "app": "digits",
        "traces": "synthetic:100",
        "until": until,
        "seeds": [1],
        "objective": "accuracy",
        "rungs": [],
        "held-out": {"seeds": [11, 12]},
        "run-config": {"num-server-rounds": 100_000, "strategy": "fedbuff"},
        "search": {"concurrency": [10 + i for i in range(n)]},
    }


def search(way: str, table: Mapping[str, object], folder: Path) -> tuple[float, float, list[float]]:
    """Search, and return the seconds of the configurations alone, of all, and what they came to."""
    n = WAYS.index(way)
    instants: list[float] = []

    def watch(trial: Trial) -> None:
        instants.append(time.perf_counter())

    cluster = None
    if n:
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        for _ in range(n):
            cluster.add_node(num_cpus=1)
    try:
        started = time.perf_counter()
        found = fedstale.tune(
            table,
            out=folder,
            workers=n or 1,
            search="grid",
            stop="none",
            watch=watch,
            address=cluster.address if cluster else None,
        )
        whole = time.perf_counter() - started
    finally:
        if cluster:
            cluster.shutdown()
    values = [report.values[0] for trial in found.tried for report in trial.reports]
    return instants[-1] - instants[0], whole, values


def measured(n: int, until: str, repeats: int) -> list[Row]:
    """Return a row a way."""
    table = space(n, until)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    expected: list[float] = []
    for _ in range(repeats):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                alone, whole, values = search(way, table, Path(folder) / "out")
            expected = expected or values
            if values != expected:
                raise RuntimeError(f"{way} came to other values than {WAYS[0]}")
            times[way].append((alone, whole))
            print(way, f"{alone:.1f} s, whole {whole:.1f} s", flush=True)
    rows = []
    for way, found in times.items():
        ratios = [one[0] / own[0] for one, own in zip(times["one node"], found, strict=True)]
        rows.append(
            {
                "way": way,
                "configurations": n,
                "s": statistics.median(alone for alone, _ in found),
                "s, range": [min(found)[0], max(found)[0]],
                "whole s": statistics.median(whole for _, whole in found),
                "times as fast as one node": statistics.median(ratios),
                "ratio, range": [min(ratios), max(ratios)],
                "n": repeats,
            }
        )
    return rows


def page(text: str, rows: Sequence[Row]) -> str:
    """Return a page with the table of rows between its markers."""
    lines = ["| where | configurations, s | whole command, s | times as fast as one node |"]
    lines += ["|---|---:|---:|---:|"]
    for row in rows:
        low, high = row["ratio, range"]  # type: ignore[misc]
        lines.append(
            f"| {row['way']} | {row['s']:.0f} | {row['whole s']:.0f} | "
            f"{row['times as fast as one node']:.2f} ({low:.2f} to {high:.2f}) |"
        )
    first = rows[0]
    title = (
        f"A grid of {first['configurations']} configurations of `digits` that none stops. Nodes "
        f"have one core each, on one machine of {os.cpu_count()} cores that others use too: "
        f"medians of {first['n']} turns, and ratios within a turn "
        "(`python benchmarks/tuning_cluster.py`). The whole command also starts workers, and "
        "judges the best."
    )
    words = textwrap.wrap(title, 120, break_long_words=False)
    return filled(text, "tuning-cluster", "\n".join(["", *words, "", *lines, ""]))


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two short configurations, once")
    quick = parser.parse_args().quick
    print("load before:", os.getloadavg())
    rows = measured(2, "10m", 1) if quick else measured(8, "2h", 3)
    name = "tuning_cluster-quick" if quick else "tuning_cluster"
    write_result(name, rows, command="python benchmarks/tuning_cluster.py" + " --quick" * quick)
    if not quick:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
