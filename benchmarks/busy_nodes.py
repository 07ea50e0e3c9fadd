"""How many versions a minute many nodes on this machine make: as Flower, and as fedstale.

Deployments, one after the other, each a SuperLink and SuperNodes with TLS and node keys: twelve
`flower-supernode`, whose questions for work are answered at once, then twelve `fedstale node`,
whose questions are held, then fifty of these. Fifty of Flower's start fifty interpreters at once:
on two cores no version was made in ten minutes, and 23 GB of memory were full (--nodes 50 tries
it). The server merges ten replies at a time (FedBuff), and nodes send a model of 40 kB back at
once, moved by 1, so all that is measured is overhead, on a machine that is always busy.

The table is written into docs/small-devices.md. Run it with:
python benchmarks/busy_nodes.py [--quick | --nodes N]
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx
from benchmark_app import ADDS_ONE, write_app
from deployed import AsFlower, cpu_s, memory_mb, nodes_of, superlink_of
from pages import filled
from results_file import write_result

from fedstale.deployment import commands
from fedstale.deployment.local import LINK, LocalDeployment

FEW, MANY, MINUTES, MINUTE_S = 12, 50, 5, 60.0
FIRST_S = 600.0
"""Longest time until each node has answered twice."""
PAGE = Path(__file__).parent.parent / "docs" / "small-devices.md"
START_S, POLL_S = 2.5, 5.0
"""Time for a node to start, before the next one does, and between two looks at the versions."""
Row = dict[str, object]

CONFIG = f"""
nodes = {FEW}
notes = ""
"""

SERVER = """
import time

import numpy as np
from fedstale.strategies import FedBuff
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config

    def evaluate(version, arrays):
        with open(config["notes"], "a") as notes:
            notes.write(f"{time.time()}\\n")

    FedBuff(concurrency=config["nodes"], buffer_size=10).start(
        grid=grid,
        initial_arrays=ArrayRecord({"w": Array(np.zeros(10_000, dtype=np.float32))}),
        num_rounds=1_000_000,
        timeout=3600.0,
        evaluate_fn=evaluate,
    )
"""


class OneByOne(LocalDeployment):
    """Nodes as fedstale starts them, one after the other."""

    def add_node(self, number: int) -> None:
        """Let a node start, which takes a core for seconds."""
        super().add_node(number)
        time.sleep(START_S)


class OneByOneAsFlower(AsFlower, OneByOne):
    """Nodes as Flower starts them, one after the other."""


FLOWER, OURS = "`flower-supernode`, asking every 3 s", "`fedstale node`, questions held"
SIDES = {FLOWER: OneByOneAsFlower, OURS: OneByOne}


def measured(kind: type[LocalDeployment], folder: Path, n_nodes: int, minutes: int) -> Row:
    """Run a deployment for some minutes after its first versions; return medians over minutes."""
    app = write_app(folder / "busy", "busy", server=SERVER, client=ADDS_ONE, config=CONFIG)
    with kind(folder / "deployment", nodes=n_nodes, limit_s=900.0, say=print) as deployment:
        environment, notes = deployment.operator_environment(), folder / "notes"
        command = commands.run(app, LINK, f"nodes={n_nodes} notes='{notes}'")
        subprocess.run(
            commands.found([word for word in command if word != "--stream"], environment),
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        # Each node has answered, so its libraries are known.
        deadline = time.monotonic() + FIRST_S
        while n_versions(notes) < 2 * n_nodes // 10:
            time.sleep(POLL_S)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{n_versions(notes)} versions in {FIRST_S:g} s")
            # A machine that is so busy may not answer.
            with suppress(httpx.TransportError):
                (run,) = deployment.control.runs().values()
                if run[0].startswith("finished"):
                    raise RuntimeError(f"the run has ended: {run}")
        superlink, pids = superlink_of(deployment), nodes_of(deployment)
        rows, began = list[dict[str, float]](), time.monotonic()
        was = n_versions(notes), sum(superlink.cpu_times()[:2]), cpu_s(pids)
        for minute in range(1, minutes + 1):
            time.sleep(max(began + minute * MINUTE_S - time.monotonic(), 0.0))
            now = n_versions(notes), sum(superlink.cpu_times()[:2]), cpu_s(pids)
            versions = now[0] - was[0]
            replies = max(10 * versions, 1)
            rows.append(
                {
                    "versions a minute": versions,
                    "SuperLink CPU s a reply": (now[1] - was[1]) / replies,
                    "node CPU s a reply": (now[2] - was[2]) / replies,
                }
            )
            print(rows[-1], flush=True)
            was = now
        row: Row = {"nodes": n_nodes, "minutes": minutes, "MB a node": memory_mb(pids)}
    for key in rows[0]:
        values = [each[key] for each in rows]
        row |= {key: statistics.median(values), f"{key}, range": [min(values), max(values)]}
    return row


def n_versions(notes: Path) -> int:
    """Return how many versions there are; the first is what the run begins with."""
    return max(notes.read_text().count("\n") - 1, 0) if notes.exists() else 0


def page(text: str, rows: Sequence[Row]) -> str:
    """Return a page with the table of rows between its markers."""
    lines = [
        "| nodes are | how many | versions a minute | CPU s a reply, SuperLink | node | MB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cpu = f"{row['SuperLink CPU s a reply']:.3f} | {row['node CPU s a reply']:.2f}"
        made = f"{row['nodes']} | {row['versions a minute']:.0f}"
        lines.append(f"| {row['as']} | {made} | {cpu} | {row['MB a node']:.0f} |")
    return filled(text, "busy-nodes", "\n".join(["", *lines, ""]))


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="six nodes and one minute")
    how.add_argument("--nodes", type=int, help="so many, both ways")
    options = parser.parse_args()
    few = options.nodes or (6 if options.quick else FEW)
    parts = [(name, few) for name in SIDES]
    is_whole = options.nodes is None and not options.quick
    if is_whole:
        parts.append((OURS, MANY))
    rows: list[Row] = []
    for number, (name, n_nodes) in enumerate(parts):
        with tempfile.TemporaryDirectory() as folder:
            minutes = 1 if options.quick else MINUTES
            row = measured(SIDES[name], Path(folder) / str(number), n_nodes, minutes)
        rows.append({"as": name} | row)
        print(json.dumps(rows[-1]), flush=True)
    if is_whole:
        write_result("busy_nodes", rows, command="python benchmarks/busy_nodes.py")
        text = page(PAGE.read_text(encoding="utf-8"), rows)
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
