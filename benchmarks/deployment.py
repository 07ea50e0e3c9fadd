"""What a deployment costs: at rest, for each message, and from a reply to its merge.

A SuperLink and two SuperNodes run on this machine, with TLS and node keys. On the same SuperLink,
Flower's FedAvg and fedstale's strategies train a small model whose training takes a second; what a
round takes beyond that second is overhead, most of it the start of a process for each message.
With --doors two deployments run side by side, one behind nginx and one without, and take turns.

Run it with: python benchmarks/deployment.py [--quick] [--doors]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
from benchmark_app import write_app
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from results_file import write_result

from fedstale.deployment.local import LocalDeployment, run_app

NODES = 2
TRAIN_S = 1.0
Row = dict[str, object]

CONFIG = f"""
mode = "idle"
rounds = 5
train-s = {TRAIN_S}
nodes = {NODES}
"""

SERVER = """
import json
import time

import numpy as np
from fedstale.strategies import FedBuff, StaleStrategy
from fedstale.strategies.schedule import k_sync
from fedstale.strategies.server.superlink import without_stalls
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    if config["mode"] == "idle":
        return idle(grid, config)
    n = config["nodes"]
    strategies = {
        "fedavg": lambda: FedAvg(
            fraction_evaluate=0.0, min_train_nodes=n, min_available_nodes=n
        ),
        "rounds": lambda: StaleStrategy(schedule=k_sync(concurrency=n, buffer_size=n)),
        "one": lambda: FedBuff(concurrency=1, buffer_size=1),
    }
    at = []
    result = strategies[config["mode"]]().start(
        grid=grid,
        initial_arrays=model(),
        num_rounds=config["rounds"],
        timeout=300.0,
        evaluate_fn=lambda version, arrays: at.append(time.time()),
    )
    for version, metrics in result.train_metrics_clientapp.items():
        say({"version": version, "round_s": at[version] - at[version - 1],
             "merged_at": at[version], "trained_at": metrics["trained-at"]})


def idle(grid, config):
    with without_stalls(grid) as grid:
        node, *_ = grid.get_node_ids()
        message = Message(RecordDict({"arrays": model()}), node, MessageType.TRAIN)
        (job,) = grid.push_messages([message])
        wall, cpu, polls = time.monotonic(), time.process_time(), 0
        while not list(grid.pull_messages([job])):
            grid.wait(float("inf"))
            polls += 1
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
        say({"what": "ServerApp that waits for one reply", "seconds": wall, "n": polls,
             "percent of a core": 100 * cpu / wall})


def model():
    return ArrayRecord({"w": Array(np.zeros(1000, dtype=np.float32))})


def say(row):
    print("ROW " + json.dumps(row), flush=True)
"""

CLIENT = """
import time

from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    time.sleep(context.run_config["train-s"])
    metrics = MetricRecord({"num-examples": 1, "trained-at": time.time()})
    content = {"arrays": message.content["arrays"], "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)
"""

# What runs on a device, from the least on.
IMPORTS = (
    "numpy",
    "flwr.clientapp",
    "flwr.clientapp, torch",
    "fedstale.traces.recording.journal",
    "fedstale.strategies",
)


class Uploads:
    """The instants at which nodes log that a reply has been uploaded, in s since 1970."""

    def __init__(self, logs: Sequence[Path]) -> None:
        self.at: list[float] = []
        self._logs, self._done = logs, threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> "Uploads":
        """Begin to follow the logs."""
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        """Stop."""
        self._done.set()
        self._thread.join()

    def nearest(self, instant: float) -> float:
        """Return the instant that is nearest to another."""
        return min(self.at, key=lambda at: abs(at - instant))

    def _follow(self) -> None:
        files = [log.open("rb") for log in self._logs]
        for file in files:
            file.seek(0, os.SEEK_END)
        while not self._done.wait(0.005):
            for file in files:
                self.at += [time.time()] * file.read().count(b"Sent successfully")
        for file in files:
            file.close()


def deployment_rows(folder: Path, *, idle_s: float, rounds: int) -> list[Row]:
    """Measure a deployment."""
    with LocalDeployment(folder / "deployment", nodes=NODES, say=print) as deployment:
        app = write_app(folder / "app", "waiting", server=SERVER, client=CLIENT, config=CONFIG)
        rows = rest_rows(idle_s)
        rows += run(deployment, app, f"mode='idle' train-s={idle_s}")
        for mode, name in (
            ("fedavg", f"FedAvg of Flower, a round of {NODES}"),
            ("rounds", f"fedstale, a round of {NODES}"),
        ):
            found = run(deployment, app, f"mode='{mode}' rounds={rounds}")
            rows.append(spread(f"{name}, beyond its training", beyond_training(found)))
        with Uploads([deployment.log(f"node-{number}") for number in range(NODES)]) as uploads:
            found = run(deployment, app, f"mode='one' rounds={rounds}")
        rows.append(
            spread("fedstale, one job at a time, beyond its training", beyond_training(found))
        )
        trained = [float(r["merged_at"]) - float(r["trained_at"]) for r in found]  # type: ignore[arg-type]
        merged = [float(r["merged_at"]) for r in found]  # type: ignore[arg-type]
    rows.append(spread("from the end of a training to the merge", trained))
    latencies = [at - uploads.nearest(at) for at in merged]
    rows.append(spread("from the end of an upload to the merge", latencies))
    return rows


def doors_rows(folder: Path, *, calls: int, turns: int, rounds: int) -> list[Row]:
    """Measure what the doors cost: the same on two deployments, in turns, so that load is shared.

    Args:
        folder: for both.
        calls: of a device that says that it is there, on each side.
        turns: runs on each side.
        rounds: of a run.
    """
    names = {"without doors": False, "behind doors": True}
    app = write_app(folder / "app", "waiting", server=SERVER, client=CLIENT, config=CONFIG)
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                LocalDeployment(folder / name.replace(" ", "-"), nodes=NODES, has_proxy=doors)
            )
            for name, doors in names.items()
        }
        clients = {name: stack.enter_context(device(side)) for name, side in sides.items()}
        asked: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(calls):
            for name, side in sides.items():
                request = SendNodeHeartbeatRequest(
                    node=Node(node_id=side.node_ids[0]), heartbeat_interval=60.0
                )
                begun = time.perf_counter()
                clients[name].SendNodeHeartbeat(request)
                asked[name].append(time.perf_counter() - begun)
        took: dict[str, list[float]] = {name: [] for name in sides}
        merged: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(turns):
            for name, side in sides.items():
                found = run(side, app, f"mode='rounds' rounds={rounds}")
                took[name] += [float(row["round_s"]) for row in found if row["version"] != 1]  # type: ignore[arg-type]
                merged[name] += [float(r["merged_at"]) - float(r["trained_at"]) for r in found]  # type: ignore[arg-type]
    rows = []
    for what, times in (
        ("a device says that it is there", asked),
        (f"a round of {NODES}", took),
        ("from the end of a training to the merge", merged),
    ):
        rows += [spread(f"{what}, {name}", times[name]) for name in sides]
        bare, behind = (statistics.median(times[name]) for name in names)
        rows.append({"what": f"{what}, doors to none", "ratio": behind / bare})
    return rows


def device(side: LocalDeployment) -> FleetHttpClient:
    """Return a client that asks as node 0 does."""
    key = load_ssh_private_key((side.folder / "node-0.key").read_bytes(), None)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise TypeError(f"node-0.key holds a {type(key).__name__}")
    return FleetHttpClient.from_server_address(
        str(side.at),
        insecure=False,
        root_certificates=side.tls.ca.read_bytes(),
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(key, key.public_key()),
        ],
    )


def run(deployment: LocalDeployment, app: Path, config: str) -> list[Row]:
    """Run the app, and return the rows that it says."""
    lines: list[str] = []
    run_app(deployment, app, run_config=config, show=lines.append)
    return [json.loads(line.split("ROW ", 1)[1]) for line in lines if "ROW " in line]


def beyond_training(found: Sequence[Mapping[str, object]]) -> list[float]:
    """Return what rounds took beyond the training; the first one also unpacks the app."""
    return [float(row["round_s"]) - TRAIN_S for row in found if row["version"] != 1]  # type: ignore[arg-type]


def spread(what: str, seconds: Sequence[float]) -> Row:
    """Return a row with the median and the range of some times."""
    middle = statistics.median(seconds)
    return {
        "what": what,
        "seconds": middle,
        "min s": min(seconds),
        "max s": max(seconds),
        "n": len(seconds),
    }


def rest_rows(seconds: float) -> list[Row]:
    """Measure the processes of a deployment that has nothing to do."""
    supervisors = psutil.Process().children()
    processes = [p for one in supervisors for p in one.children(recursive=True)]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(seconds)
    after = [sum(process.cpu_times()[:2]) for process in processes]
    found: dict[str, list[tuple[float, float]]] = {}
    for process, then, now in zip(processes, before, after, strict=True):
        use = 100.0 * (now - then) / seconds, process.memory_full_info().uss / 1e6
        found.setdefault(_name(process), []).append(use)
    return [
        {
            "what": f"{name} at rest",
            "percent of a core": statistics.mean(cpu for cpu, _ in uses),
            "MB": statistics.mean(size for _, size in uses),
            "n": len(uses),
        }
        for name, uses in sorted(found.items())
    ]


def import_rows(repeats: int) -> list[Row]:
    """Measure imports, each in a fresh process."""
    rows: list[Row] = []
    for module in IMPORTS:
        code = (
            "import time; a = time.process_time()\n"
            f"import {module}\n"
            "cpu = time.process_time() - a\n"
            "import psutil; print(cpu, psutil.Process().memory_full_info().uss / 1e6)"
        )
        runs = [
            [float(x) for x in subprocess.check_output([sys.executable, "-c", code]).split()]
            for _ in range(repeats)
        ]
        seconds, size = (statistics.median(column) for column in zip(*runs, strict=True))
        rows.append({"what": f"import {module}", "CPU s": seconds, "MB": size, "n": repeats})
    return rows


def _name(process: psutil.Process) -> str:
    names = [part.rpartition("/")[2] for part in process.cmdline()]
    return next((n for n in names if n.startswith(("flower-", "fedstale."))), names[0])


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter waits, fewer messages")
    parser.add_argument("--doors", action="store_true", help="only what the doors cost")
    arguments = parser.parse_args()
    quick = arguments.quick
    print("load before:", os.getloadavg())
    if arguments.doors:
        with tempfile.TemporaryDirectory() as folder:
            calls, turns, rounds = (100, 1, 3) if quick else (500, 4, 5)
            rows = doors_rows(Path(folder), calls=calls, turns=turns, rounds=rounds)
        for row in rows:
            print(row)
        command = "python benchmarks/deployment.py --doors" + " --quick" * quick
        write_result("deployment-doors" + "-quick" * quick, rows, command=command)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            *import_rows(3 if quick else 5),
            *deployment_rows(
                Path(folder), idle_s=20.0 if quick else 60.0, rounds=3 if quick else 11
            ),
        ]
    for row in rows:
        print(row)
    name = "deployment-quick" if quick else "deployment"
    write_result(name, rows, command="python benchmarks/deployment.py" + " --quick" * quick)


if __name__ == "__main__":
    main()
