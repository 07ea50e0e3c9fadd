"""What a deployed round takes: as Flower starts ClientApps and asks for work, and as fedstale does.

Two deployments run side by side on this machine, each a SuperLink and two SuperNodes with TLS and
node keys, and take turns. On one, nodes are `flower-supernode` and questions for work are answered
at once; on the other, nodes are `fedstale node` and questions are held. On both, Flower's FedAvg
sends a small model there and back. One app imports what `digits` does, torch and scikit-learn, the
other one numpy alone; neither trains, so a round is all overhead. The first three rounds of a run,
in which an app is unpacked and its libraries are learnt, do not count. With --resident both apps
take a step of AdamW; the one has its state in the Context, and the other a trainer that stays.

Run it with: python benchmarks/deployment/run.py [--quick | --resident]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from fedstale.deployment.local import LocalDeployment, run_app

sys.path.append(str(Path(__file__).parents[1]))
from lab.deployed import ADDS_ONE, AsFlower, Memory, cpu_s, memory_mb, nodes_of, write_app
from lab.results import write_result

NODES = 2
LEFT_OUT = 3
APPS = {"numpy": "numpy", "torch and scikit-learn": "torch, torch.nn, sklearn.datasets"}
ADAMW = """
import sys
import torch
from flwr.app import ArrayRecord

model = torch.nn.Linear(2000, 2000, bias=False)  # 16 MB
optimizer = torch.optim.AdamW(model.parameters())


def with_step(message, context, call_next):
    parameter, stays = model.weight, sys.argv[0] == "-c"
    if not stays and "adamw" in context.state:
        kept = context.state["adamw"].to_torch_state_dict()
        optimizer.state[parameter] = dict(kept)
    model(torch.ones(1, 2000)).sum().backward()
    optimizer.step()
    if not stays:
        context.state["adamw"] = ArrayRecord.from_torch_state_dict(optimizer.state[parameter])
    return call_next(message, context)
""" + ADDS_ONE.replace("ClientApp()", "ClientApp(mods=[with_step])")
RESIDENT = "from fedstale.contrib.sites import resident\n\napp = resident('resident.trainer:app')\n"
Row = dict[str, object]

CONFIG = f"""
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
        # Each round adds 1: all clients have answered.
        assert arrays["w"].numpy()[0] == version
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


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn of few rounds")
    parser.add_argument("--resident", action="store_true", help="a trainer that stays, two turns")
    options = parser.parse_args()
    quick, stays = options.quick, options.resident
    turns, rounds = (1, LEFT_OUT + 2) if quick else (2 if stays else 5, LEFT_OUT + 5)
    clients = {what: f"import {imports}\n{ADDS_ONE}" for what, imports in APPS.items()}
    if stays:
        clients = {"torch and AdamW": ADAMW, "the same, resident": RESIDENT}
    print("load before:", os.getloadavg())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = Path(folder)
        sides = {
            name: stack.enter_context(kind(root / name, nodes=NODES))
            for name, kind in (("Flower", AsFlower), ("fedstale", LocalDeployment))
        }
        for what, client in clients.items():
            name = "resident" if client == RESIDENT else f"importing_{what.split()[0]}"
            app = write_app(root / name, name, server=SERVER, client=client, config=CONFIG)
            (app / name / "trainer.py").write_text(ADAMW, encoding="utf-8")
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
    command = "python benchmarks/deployment/run.py" + " --resident" * stays
    write_result("resident" if stays else "rounds", rows, command=command, quick=quick)


if __name__ == "__main__":
    main()
