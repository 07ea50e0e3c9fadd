"""How a SuperLink and a ServerApp hold 200 devices: replies a minute, memory, and what is lost.

The nodes are light: threads of a few processes, each with a key and a connection of its own, that
speak to the SuperLink through Flower's own functions of a SuperNode, behind nginx with TLS. They
train nothing and start no ClientApp; each adds 1 to its own entry of the model, so the model says
whose updates are in it, and how often. The server merges 20 at a time, as FedBuff does.

Run it with: python benchmarks/deployment/many_nodes.py [--nodes 200] [--minutes 10]
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from fedstale.deployment import commands
from fedstale.deployment.local import LINK, LocalDeployment

sys.path.append(str(Path(__file__).parents[1]))
from lab.deployed import superlink_of, write_app
from lab.results import write_result

WORKERS, BUFFER, SIZE = 4, 20, 10_000
EMPTY_POLL_S, MINUTE_S, DRAIN_S = 3.0, 60.0, 240.0
"""A SuperNode asks for work so often."""
WARM_UP = 2
"""Minutes that the growth of memory does not count."""
Row = dict[str, Any]

CONFIG = """
nodes = 1
server-notes = ""
"""

SERVER = f"""
import json
import os
import time

import numpy as np
from fedstale.strategies import StaleStrategy
from fedstale.strategies.schedule import k_batch_async
from fedstale.strategies.server_optimizer import SGD
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config

    def evaluate(version, arrays):
        w = arrays["w"].numpy()
        facts = {{"version": version, "merged": [round(float(x)) for x in w[: config["nodes"]]]}}
        facts |= {{"pid": os.getpid(), "sum": float(w.sum())}}
        with open(config["server-notes"], "a") as notes:
            notes.write(json.dumps(facts) + chr(10))

    strategy = StaleStrategy(
        schedule=k_batch_async(concurrency=config["nodes"], buffer_size={BUFFER}),
        server_optimizer=SGD({float(BUFFER)}),
        normalise="buffer_size",
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({{"w": Array(np.zeros({SIZE}, dtype=np.float32))}}),
        num_rounds=1_000_000,
        timeout=3600.0,
        evaluate_fn=evaluate,
    )
"""

CLIENT = """
from flwr.clientapp import ClientApp

app = ClientApp()
"""


class LightNodes(LocalDeployment):
    """A deployment whose nodes are threads."""

    def __init__(self, folder: Path, nodes: int) -> None:
        """Let as many requests pass from one address as so many addresses may make."""
        super().__init__(folder / "deployment", nodes=nodes, limit_s=600.0, has_proxy=True)
        assert self.doors is not None
        self.doors = replace(self.doors, requests_per_s=50 * nodes, connections=4 * nodes)
        self.notes = folder
        self.over, self.gone = folder / "over", folder / "gone"

    def add_node(self, number: int) -> None:
        """Make a key for a node and register it."""
        key = self.folder / f"node-{number}.key"
        self.node_ids[number] = self.control.register(commands.write_node_key(key))

    def wait_online(self) -> None:
        """Start the nodes, and wait until the SuperLink sees them all."""
        for worker in range(WORKERS):
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(worker)]
            command += ["--nodes", str(self.n_nodes), "--folder", str(self.notes)]
            command += ["--superlink", str(self.at)]
            environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
            log = self.log(f"worker-{worker}")
            self.processes.start(f"worker-{worker}", command, environment=environment, log=log)
        names = [f"worker-{worker}" for worker in range(WORKERS)]
        self._wait(names, lambda: [*self.control.nodes().values()].count("online") == self.n_nodes)

    def unsure(self) -> set[int]:
        """Return the nodes that have not ended as they should."""
        notes = [json.loads(path.read_text()) for path in self.notes.glob("sent-*.json")]
        return set(range(self.n_nodes)) - {number for note in notes for number in note["done"]}

    def failed(self) -> dict[int, str]:
        """Return which nodes could not go on, and why."""
        notes = [json.loads(path.read_text()) for path in self.notes.glob("sent-*.json")]
        return {int(number): why for note in notes for number, why in note["failed"].items()}

    def sent(self) -> tuple[list[int], int]:
        """Return how many replies of each node the SuperLink has taken in, and who is at work."""
        sent, at_work = [0] * self.n_nodes, self.n_nodes
        for path in self.notes.glob("sent-*.json"):
            note = json.loads(path.read_text())
            at_work -= len(note["done"])
            for number, count in note["sent"].items():
                sent[int(number)] = count
        return sent, at_work


class Worker:
    """Some of the nodes, in a process of their own."""

    def __init__(self, folder: Path, superlink: str, numbers: range, path: Path) -> None:
        self._deployment, self._path, self._superlink = folder / "deployment", path, superlink
        self._over, self._gone = folder / "over", folder / "gone"
        self.sent, self.done = dict.fromkeys(numbers, 0), list[int]()
        self.failed: dict[int, str] = {}
        """Nodes that could not go on, and why."""

    def run(self) -> None:
        """Run the nodes until the file `over` is there, and stay online until `gone` is.

        Flower takes the replies of a node that has gone offline for lost.
        """
        nodes = [threading.Thread(target=self._node, args=(number,)) for number in self.sent]
        for node in nodes:
            node.start()
        while any(node.is_alive() for node in nodes):
            time.sleep(1.0)
            self._note()
        self._note()

    def _note(self) -> None:
        part = self._path.with_suffix(".part")
        note = {"sent": self.sent, "done": self.done, "failed": self.failed}
        part.write_text(json.dumps(note))
        part.replace(self._path)

    def _node(self, number: int) -> None:
        try:
            self._answer_all(number)
        except Exception as problem:
            self.failed[number] = repr(problem)
            traceback.print_exc()

    def _answer_all(self, number: int) -> None:
        key = load_ssh_private_key((self._deployment / f"node-{number}.key").read_bytes(), None)
        certificate = (self._deployment / "ca.crt").read_bytes()
        keys = key, key.public_key()
        with http_request_response(self._superlink, False, certificate, keys) as connection:
            _, receive, send, _, _, pull_object, push_object, confirm = connection
            time.sleep(random.uniform(0.0, EMPTY_POLL_S))
            while not self._over.exists():
                received = receive()
                if received is None:
                    time.sleep(EMPTY_POLL_S)
                    continue
                message, tree = received
                run = message.metadata.run_id
                ids = [each.object_id for each in iterate_object_tree(tree)]
                # A SuperNode gives a job up that fails, and asks for the next.
                with suppress(RunNotRunningException):
                    objects = pull_objects(ids, partial(pull_object, run))
                    confirm(run, message.metadata.message_id)
                    whole = inflate_object_from_contents(tree.object_id, objects)
                    reply = answer(make_message(message.metadata, whole.content), number)
                    objects = get_all_nested_objects(reply)
                    missing, session = send(reply, get_object_tree(reply), 0.0)
                    push_object_contents_from_iterable(
                        ((one, made.deflate()) for one, made in objects.items() if one in missing),
                        partial(push_object, run, session),
                    )
                    self.sent[number] += 1
            self.done.append(number)
            while not self._gone.exists():
                time.sleep(1.0)


def answer(message: Message, number: int) -> Message:
    """Return a reply whose model has 1 more at the node's own entry."""
    w = message.content["arrays"]["w"].numpy().copy()
    w[number] += 1
    arrays, metrics = ArrayRecord({"w": Array(w)}), MetricRecord({"num-examples": 1})
    reply = Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    return reply


def started(deployment: LightNodes, folder: Path) -> None:
    """Start the run."""
    app = write_app(folder / "adder", "adder", server=SERVER, client=CLIENT, config=CONFIG)
    environment = deployment.operator_environment()
    config = f"nodes={deployment.n_nodes} server-notes='{folder / 'server'}'"
    command = [w for w in commands.run(app, LINK, config) if w != "--stream"]
    command = commands.found(command, environment)
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def last_note(folder: Path) -> Row:
    """Return what the server has noted last; an empty row before the first."""
    path = folder / "server"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines[-2:] if line.endswith("\n")]
    return json.loads(whole[-1]) if whole else {"version": 0, "sum": 0.0, "merged": [], "pid": None}


def check_running(deployment: LightNodes) -> None:
    """Check that the run goes on.

    Raises:
        RuntimeError: it has ended, as when the machine is so busy that it cannot report.
    """
    (run,) = deployment.control.runs().values()
    if run[0].startswith("finished"):
        raise RuntimeError(f"the run has ended: {run}")


def memory_mib(pid: int | None) -> float | None:
    """Return what a process holds in RAM, shared pages by halves and so on."""
    if pid is None:
        return None
    return round(psutil.Process(pid).memory_full_info().pss / 2**20, 1)


def measured(n_nodes: int, minutes: int, folder: Path) -> list[Row]:
    """Return a row for each minute, and one for the whole.

    Raises:
        FedstaleError: something does not start.
        RuntimeError: the run ends.
    """
    rows: list[Row] = []
    with LightNodes(folder, n_nodes) as deployment:
        started(deployment, folder)
        while not last_note(folder)["version"]:
            check_running(deployment)
            time.sleep(0.5)
        link, began, before = (
            superlink_of(deployment).pid,
            time.monotonic(),
            last_note(folder)["sum"],
        )
        for minute in range(1, minutes + 1):
            time.sleep(max(began + minute * MINUTE_S - time.monotonic(), 0.0))
            note, wal = last_note(folder), Path(f"{deployment.database}-wal")
            files = deployment.database.stat().st_size + (wal.stat().st_size if wal.exists() else 0)
            rows.append(
                {
                    "minute": minute,
                    "replies": round(note["sum"] - before),
                    "version": note["version"],
                    "superlink_mib": memory_mib(link),
                    "serverapp_mib": memory_mib(note["pid"]),
                    "database_mib": round(files / 2**20, 1),
                    "load": round(os.getloadavg()[0], 1),
                }
            )
            before = note["sum"]
            check_running(deployment)
            print(rows[-1], flush=True)
        deployment.over.touch()
        drain(deployment, folder)
        rows.append(outcome(deployment, folder, rows))
        deployment.gone.touch()
    return rows


def drain(deployment: LightNodes, folder: Path) -> None:
    """Wait until the nodes have sent what they had, and the server has merged what it can."""
    deadline = time.monotonic() + DRAIN_S
    while time.monotonic() < deadline:
        sent, at_work = deployment.sent()
        if not at_work and sum(sent) - last_note(folder)["sum"] < BUFFER:
            return
        time.sleep(1.0)


def outcome(deployment: LightNodes, folder: Path, rows: list[Row]) -> Row:
    """Return what became of all replies, and how memory grew."""
    (sent, at_work), note = deployment.sent(), last_note(folder)
    failed = deployment.failed()
    merged, unsure = note["merged"], deployment.unsure()
    log = deployment.log("superexec").read_text(errors="replace")
    steady = rows[min(WARM_UP, len(rows) - 1) :]

    def slope(name: str) -> float | None:
        """Return the growth in MiB a minute, by least squares."""
        known = [(row["minute"], row[name]) for row in steady if row[name] is not None]
        return round(float(np.polyfit(*zip(*known, strict=True), 1)[0]), 2) if known[1:] else None

    return {
        "minute": "all",
        "nodes": deployment.n_nodes,
        "replies_sent": sum(sent),
        "nodes_still_at_work": at_work - len(failed),
        "nodes_failed": failed,
        "replies_merged": round(note["sum"]),
        "versions": note["version"],
        "left_in_the_buffer_at_most": BUFFER - 1,
        "lost": max(sum(sent) - round(note["sum"]) - (BUFFER - 1), 0),
        # A node may fail, or be stopped, after its reply was stored and before it knows.
        "merged_twice": sum(
            max(m - s - (number in unsure), 0)
            for number, (m, s) in enumerate(zip(merged, sent, strict=True))
        ),
        "nodes_heard": sum(m > 0 for m in merged),
        "rejected": log.count("rejected:"),
        "superlink_mib_a_minute": slope("superlink_mib"),
        "serverapp_mib_a_minute": slope("serverapp_mib"),
    }


def main() -> None:
    """Measure, print, and write the result; or be some of the nodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="20 nodes for a minute")
    for name in ("--worker", "--folder", "--superlink"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        folder, worker = Path(options.folder), int(options.worker)
        numbers = range(worker, options.nodes, WORKERS)
        # Flower ends a SuperNode by SIGINT; a benchmark must notice.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        Worker(folder, options.superlink, numbers, folder / f"sent-{worker}.json").run()
        return
    with tempfile.TemporaryDirectory() as folder:
        nodes, minutes = (20, 1) if options.quick else (options.nodes, options.minutes)
        rows = measured(nodes, minutes, Path(folder))
    print(rows[-1])
    command = "python benchmarks/deployment/many_nodes.py"
    command += f" --nodes {options.nodes} --minutes {options.minutes}"
    print(write_result("many_nodes", rows, command=command, quick=options.quick))


if __name__ == "__main__":
    main()
