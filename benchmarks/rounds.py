"""What a deployed round takes: as Flower starts ClientApps and asks for work, and as fedstale does.

Two deployments run side by side on this machine, each a SuperLink and two SuperNodes with TLS and
node keys, and take turns. On one, nodes are `flower-supernode` and questions for work are answered
at once; on the other, nodes are `fedstale node` and questions are held. On both, Flower's FedAvg
sends a small model there and back. One app imports what `digits` does, torch and scikit-learn, the
other one numpy alone; neither trains, so a round is all overhead. The first three rounds of a run,
in which an app is unpacked and its libraries are learnt, do not count.

The table is written into docs/small-devices.md. Run it with: python benchmarks/rounds.py [--quick]
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
from results_file import write_result

from fedstale.deployment.local import LocalDeployment, run_app

NODES = 2
LEFT_OUT = 3
PAGE = Path(__file__).parent.parent / "docs" / "small-devices.md"
START, END = "<!-- rounds: begin -->\n", "<!-- rounds: end -->"
APPS = {"numpy": "numpy", "torch and scikit-learn": "torch, torch.nn, sklearn.datasets"}
Row = dict[str, object]

PYPROJECT = f"""
[project]
name = "NAME"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["fedstale", "flwr>=1.41", "numpy>=2.0"]

[tool.flwr.app]
publisher = "benchmarks"

[tool.flwr.app.components]
serverapp = "NAME.server_app:app"
clientapp = "NAME.client_app:app"

[tool.flwr.app.config]
rounds = 8
nodes = {NODES}
"""

SERVER = """
import json
import time

import numpy as np
from fedstale.strategies.server.superlink import without_stalls
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    config, was = context.run_config, []

    def evaluate(version, arrays):
        was.append(time.monotonic())
        if version > 0:
            row = {"version": version, "round s": was[-1] - was[-2]}
            print("ROW " + json.dumps(row), flush=True)

    n = config["nodes"]
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=n, min_available_nodes=n)
    with without_stalls(grid) as grid:
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord({"w": Array(np.zeros(10_000, dtype=np.float32))}),
            num_rounds=config["rounds"],
            timeout=300.0,
            evaluate_fn=evaluate,
        )
"""

CLIENT = """
import IMPORTS
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    arrays = ArrayRecord(message.content["arrays"])
    content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
"""


class AsFlower(LocalDeployment):
    """Nodes as Flower starts them, and questions for work answered at once."""

    def _start(self, name: str, command: list[str]) -> None:
        if name.startswith("node-"):
            command = ["flower-supernode", *command[2:]]
        if name == "superlink":
            command = [*command, "--hold", "0"]
        super()._start(name, command)


class Memory:
    """The largest sum of the nodes' memory while something goes on, in MB (Pss)."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.most_mb = 0.0
        self._pids, self._done = pids, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Memory":
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        """Stop."""
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.5):
            self.most_mb = max(self.most_mb, memory_mb(self._pids))


def nodes_of(deployment: LocalDeployment) -> list[int]:
    """Return the processes that run the nodes of a deployment, one each."""
    return [deployment.processes.pid(f"node-{number}") for number in range(NODES)]


def tree(pid: int) -> list[psutil.Process]:
    """Return what a node consists of, without what only supervises it."""
    return psutil.Process(pid).children(recursive=True)


def memory_mb(pids: Sequence[int]) -> float:
    """Return the mean memory of some nodes in MB, shared pages by their share."""
    found = 0.0
    for pid in pids:
        for process in tree(pid):
            try:
                found += process.memory_full_info().pss / 1e6
            except psutil.Error:
                continue
    return found / len(pids)


def cpu_s(pids: Sequence[int]) -> float:
    """Return the processor time of some nodes, with that of all that has ended below them, in s."""
    return sum(sum(process.cpu_times()[:4]) for pid in pids for process in tree(pid))


def write_app(folder: Path, imports: str) -> Path:
    """Write an app whose ClientApp imports something, and return its folder."""
    name = f"importing{imports.partition(',')[0]}"
    package = folder / name
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT.replace("NAME", name))
    (package / "__init__.py").touch()
    (package / "server_app.py").write_text(SERVER)
    (package / "client_app.py").write_text(CLIENT.replace("IMPORTS", imports))
    return folder


def measured(deployment: LocalDeployment, app: Path, rounds: int) -> tuple[list[float], Row]:
    """Run an app; return how long its rounds took in s, and what it took of the nodes."""
    pids, took, used = nodes_of(deployment), list[float](), list[float]()

    def read(line: str) -> None:
        if "ROW " in line:
            took.append(json.loads(line.split("ROW ", 1)[1])["round s"])
            used.append(cpu_s(pids))

    with Memory(pids) as memory:
        run_app(deployment, app, run_config=f"rounds={rounds}", show=read)
    return took[LEFT_OUT:], {
        "CPU s a message": (used[-1] - used[LEFT_OUT - 1]) / (NODES * (rounds - LEFT_OUT)),
        "MB of a node at work": memory.most_mb,
        "MB of a node at rest": memory_mb(pids),
    }


def page(text: str, rows: Sequence[Row]) -> str:
    """Return a page with the table of rows between its markers."""
    lines = [
        "| the ClientApp imports | as | s a round | CPU s a message | MB at rest | MB at work |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['imports']} | {row['as']} | {row['round s']:.1f} | {row['CPU s a message']:.2f} "
        f"| {row['MB of a node at rest']:.0f} | {row['MB of a node at work']:.0f} |"
        for row in rows
    ]
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return before + START + "\n".join(["", *lines, "", ""]) + END + after


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn of few rounds")
    quick = parser.parse_args().quick
    turns, rounds = (1, LEFT_OUT + 2) if quick else (5, LEFT_OUT + 5)
    print("load before:", os.getloadavg())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = Path(folder)
        sides = {
            name: stack.enter_context(kind(root / name, nodes=NODES))
            for name, kind in (("Flower", AsFlower), ("fedstale", LocalDeployment))
        }
        for what, imports in APPS.items():
            app = write_app(root / imports.partition(",")[0], imports)
            found: dict[str, list[tuple[list[float], Row]]] = {name: [] for name in sides}
            for _ in range(turns):
                for name, side in sides.items():
                    found[name].append(measured(side, app, rounds))
            for name, runs in found.items():
                times = [seconds for took, _ in runs for seconds in took]
                row: Row = {"imports": what, "as": name, "n": len(times)}
                row |= {"round s": statistics.median(times), "range s": [min(times), max(times)]}
                row |= {
                    key: statistics.median(float(r[key]) for _, r in runs) for key in runs[0][1]
                }  # type: ignore[arg-type]
                rows.append(row)
                print(row, flush=True)
    name = "rounds-quick" if quick else "rounds"
    write_result(name, rows, command="python benchmarks/rounds.py" + " --quick" * quick)
    if not quick:
        text = page(PAGE.read_text(encoding="utf-8"), rows)
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
