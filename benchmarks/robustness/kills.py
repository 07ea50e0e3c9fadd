"""What is lost when a part of a deployment is killed, during training and during upload.

A SuperLink behind nginx with TLS, a SuperExec, two SuperNodes, and `fedstale deploy run`, which is
started again when its run fails. One part is killed by `kill -9` again and again, each time
when a device has begun to train, or when its update is about to be uploaded, and started again as a
unit would. The network is cut by stopping nginx for a minute and a half, and disks are full for as
long (which takes root). Each update adds 1 to an entry of its own, so the model says which updates
are in it.

With --keep each part and moment is kept in a file once it is measured, and not measured again.

Run it with: python benchmarks/robustness/kills.py [--kills 10] [--part PART] [--moment MOMENT]
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, Self

import psutil

from fedstale.deployment import commands
from fedstale.deployment.local import LINK, LocalDeployment

sys.path.append(str(Path(__file__).parents[1]))
from lab.deployed import write_app
from lab.kept import Kept
from lab.results import commit, write_result

DISKS = {
    "database-disk": {"database": 256},
    "checkpoint-disk": {"checkpoints": 40},
    "node-disk": {"home-node-0": 64, "home-node-1": 64},
}
"""Which folders are small disks, and their MB."""
PARTS = ("superlink", "proxy", "superexec", "serverapp", "node", "node-superexec", "clientapp")
PARTS += ("network", *DISKS)
"""What is killed. The network is cut for everyone, the disk is that of one node."""
MOMENTS = ("training", "upload")
NODES, TRAIN_S = 2, 1.0
UNITS = ("superlink", "proxy", "superexec", *(f"node-{number}" for number in range(NODES)))
"""What is started again when it ends."""
STUCK_S, CUT_S, PAUSE_S = 600.0, 90.0, 5.0
"""Longest time without a new version; that of a cut or a full disk; that before a new start."""
VERSIONS = {"node-disk": 30, "database-disk": 100}
"""How many versions there are between two kills, where it is not 3: the other node goes on, or
the database does, in the pages that it has."""
Note = dict[str, Any]

CONFIG = """
rounds = 1
checkpoints = ""
resume = ""
server-notes = ""
device-notes = ""
"""

SERVER = """
import json
import os
from dataclasses import replace

import numpy as np
from fedstale.strategies import StaleStrategy
from fedstale.strategies.schedule import k_batch_async
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config

    def evaluate(version, arrays):
        w = arrays["w"].numpy()
        facts = {"version": version, "updates": int(w.sum()), "most": float(w.max())}
        with open(config["server-notes"], "a") as notes:
            notes.write(json.dumps({"pid": os.getpid(), **facts}) + chr(10))

    strategy = StaleStrategy(
        schedule=replace(k_batch_async(concurrency=2, buffer_size=1), recheck_s=1.0),
        checkpoints=config["checkpoints"] or None,
        resume=config["resume"] or None,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({"w": Array(np.zeros(1_000_000, dtype=np.float32))}),
        num_rounds=config["rounds"],
        timeout=100.0,
        evaluate_fn=evaluate,
    )
"""

CLIENT = f"""
import json
import os
import time

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    node = context.node_config["partition-id"]

    def note(moment):
        with open(context.run_config["device-notes"], "a") as notes:
            facts = {{"moment": moment, "pid": os.getpid(), "node": node}}
            notes.write(json.dumps(facts) + chr(10))

    note("training")
    w = message.content["arrays"]["w"].numpy().copy()
    time.sleep({TRAIN_S})
    # A message takes much longer than a fiftieth of a second, and no run lasts 10,000 s.
    w[int(time.monotonic() * 50) % 500_000 * {NODES} + node] += 1
    metrics = MetricRecord({{"num-examples": 1}})
    content = RecordDict({{"arrays": ArrayRecord({{"w": Array(w)}}), "metrics": metrics}})
    reply = Message(content, reply_to=message)
    note("upload")
    return reply
"""


class Breakable(LocalDeployment):
    """A deployment with small disks."""

    def __init__(self, folder: Path, parts: Sequence[str]) -> None:
        """Mount the disks that some parts need."""
        super().__init__(folder / "deployment", nodes=NODES, limit_s=300.0)
        sizes = {name: n_mb for part in parts for name, n_mb in DISKS.get(part, {}).items()}
        self.disks = {name: folder / name for name in sizes}
        for name, n_mb in sizes.items():
            if name.startswith("home"):
                self.disks[name] = self.folder / name
            mounted(self.disks[name], n_mb)
        if "database" in self.disks:
            self.database = self.disks["database"] / self.database.name

    def __exit__(self, *problem: object) -> None:
        """End everything, and take the disks away."""
        super().__exit__(*problem)
        for disk in self.disks.values():
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


def mounted(folder: Path, n_mb: int) -> None:
    """Mount a small disk of this user's own.

    Raises:
        CalledProcessError: that is not allowed here.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = f"size={n_mb}m,mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write until nothing more can be written; return the file."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return path


def obstacle(part: str) -> str:
    """Return why a part cannot be measured on this machine; empty if it can."""
    return "mounting a small disk takes root" if part in DISKS and os.geteuid() else ""


@dataclass(slots=True)
class Watched:
    """A run that `fedstale deploy run` looks after, and what its app has noted."""

    deployment: Breakable
    folder: Path
    rounds: int
    process: "subprocess.Popen[str]" = field(init=False)
    _command: list[str] = field(init=False)
    _moved: tuple[int, float] = (-1, 0.0)
    """The newest version, and when it was seen first."""
    lines: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Start the command."""
        folder = self.folder / "adder"
        app = write_app(folder, "adder", server=SERVER, client=CLIENT, config=CONFIG)
        places = {"server-notes": self.folder / "server", "device-notes": self.folder / "devices"}
        config = " ".join([f"rounds={self.rounds}", *(f"{k}='{v}'" for k, v in places.items())])
        environment = self.deployment.operator_environment()
        command = ["fedstale", "deploy", "run", str(app), LINK]
        command += ["--checkpoints", str(self.folder / "checkpoints"), "--run-config", config]
        self._command = commands.found(command, environment)
        self._moved = -1, time.monotonic()
        self._launch()

    def _launch(self) -> None:
        self.process = subprocess.Popen(
            self._command,
            env=self.deployment.operator_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def status(self) -> int | None:
        """Return how the command has ended; one that failed is started again, as by a unit."""
        status = self.process.poll()
        if status:
            time.sleep(PAUSE_S)
            self._launch()
            return None
        return status

    def __enter__(self) -> Self:
        """Start the command."""
        self.start()
        return self

    def __exit__(self, *problem: object) -> None:
        """Kill the command, unless it has ended."""
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.lines.extend(line.rstrip() for line in lines)

    def notes(self, of: str) -> list[Note]:
        """Return what the server or the devices have noted; "server" or "devices"."""
        path = self.folder / of
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def version(self) -> int:
        """The newest version that was measured; -1 before the first."""
        return max((note["version"] for note in self.notes("server")), default=-1)

    def outcome(self) -> Note:
        """Count the versions, and the updates that are in the model, once or more often."""
        seen, trained = self.notes("server"), self.notes("devices")
        versions = [note["version"] for note in seen]
        return {
            "versions": max(versions),
            "trainings": sum(note["moment"] == "training" for note in trained),
            "updates_in_the_model": seen[-1]["updates"],
            "updates_twice": int(max(note["most"] for note in seen) > 1.0),
            "versions_back": sum(b < a for a, b in pairwise(versions)),
        }

    def next_moment(self, moment: str, limit_s: float = inf) -> Note:
        """Wait until a device notes that it begins to train, or to upload.

        Args:
            moment: one of `MOMENTS`.
            limit_s: after which the note is empty.

        Raises:
            TimeoutError: none does.
        """
        before, until = len(self.notes("devices")), time.monotonic() + limit_s

        def found() -> list[Note]:
            new = self.notes("devices")[before:]
            noted = [note for note in new if note["moment"] == moment]
            return noted or [{}] * (time.monotonic() > until)

        return self.wait(found)[0]

    def wait(self, found: Callable[[], Any]) -> Any:
        """Wait until something is found, and return it.

        Raises:
            TimeoutError: the run ends before, or makes no version for `STUCK_S`.
        """
        while not (result := found()):
            now, version = time.monotonic(), self.version
            if version != self._moved[0]:
                self._moved = version, now
            if now > self._moved[1] + STUCK_S or self.status() is not None:
                at = f"waited in vain at version {version} of {self.rounds}"
                raise TimeoutError("\n".join([at, *self.lines[-20:]]))
            time.sleep(0.05)
        return result


def kill(deployment: Breakable, run: Watched, part: str, at: Note, cut_s: float = CUT_S) -> bool:
    """Kill a part, which `kept_alive` starts again, or break it for a while.

    Args:
        deployment: of the part.
        run: which goes on there.
        part: one of `PARTS`.
        at: what the device has noted.
        cut_s: how long the network is cut, or a disk full, in s.

    Returns:
        Whether there was something to kill.
    """
    if part in DISKS:
        own = f"home-node-{at['node']}"
        filler = fill(deployment.disks[own if own in DISKS[part] else next(iter(DISKS[part]))])
        time.sleep(cut_s)
        filler.unlink()
    elif part in {"serverapp", "clientapp", "node-superexec"}:
        pid = run.notes("server")[-1]["pid"] if part == "serverapp" else at["pid"]
        try:
            found = psutil.Process(pid)
            # A ClientApp is a fork of its node's SuperExec.
            ((part == "node-superexec" and found.parent()) or found).kill()
        except psutil.NoSuchProcess:
            # It had just ended.
            return False
    elif part == "network":
        everyone = psutil.Process().children(recursive=True)
        doors = [process for process in everyone if process.name() == "nginx"]
        for process in doors:
            process.suspend()
        time.sleep(cut_s)
        for process in doors:
            process.resume()
    else:
        name = f"node-{at['node']}" if part == "node" else part
        if not deployment.processes.is_running(name):
            return False
        deployment.processes.kill(name)
    return True


@contextmanager
def kept_alive(deployment: LocalDeployment, names: Sequence[str] = UNITS) -> Iterator[None]:
    """Start again what ends, as a unit does: a node is rejected while it still counts as online."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(3.0):
            for name in names:
                if not deployment.processes.is_running(name):
                    deployment.start(name)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def killed(part: str, moment: str, kills: int, folder: Path) -> Note:
    """Kill a part so often, let the run end, and return what became of its updates.

    Args:
        part: one of `PARTS`.
        moment: one of `MOMENTS`.
        kills: how often; between two of them the run makes a version at least, and while it is
            waited for the next moment one or two more.
        folder: for the deployment and the run.

    Raises:
        TimeoutError: nothing goes on, or the run ends before the last kill.
    """
    rng = random.Random(f"{part} {moment}")
    rounds = VERSIONS.get(part, 3) * kills + 4
    with (
        Breakable(folder, [part]) as deployment,
        Watched(deployment, folder, rounds) as run,
    ):
        done, began = 0, time.monotonic()
        with kept_alive(deployment):
            while done < kills:
                least = run.version + 1
                run.wait(lambda least=least: run.version >= least)
                at = run.next_moment(moment)
                time.sleep(rng.uniform(0.0, 0.5))
                done += kill(deployment, run, part, at)
                print(f"{part}, {moment}: killed {done} times at version {run.version}", flush=True)
            run.wait(lambda: run.version >= rounds)
            run.process.wait(STUCK_S)
            status = run.status()
        found = run.outcome() | {"runs": len(deployment.control.runs())}
    minutes = round((time.monotonic() - began) / 60, 1)
    ended = {"exit": status, "versions_asked": rounds, **found, "minutes": minutes}
    return {"part": part, "moment": moment, "kills": done, **ended, "commit": commit()}


def main() -> None:
    """Kill, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--moment", choices=MOMENTS, action="append")
    parser.add_argument("--keep", type=Path, help="file of rows; what is in it is not repeated")
    parser.add_argument("--quick", action="store_true", help="two kills of a ClientApp")
    options = parser.parse_args()
    if options.quick:
        options.kills, options.part, options.moment = 2, ["clientapp"], MOMENTS[:1]
    kept = Kept(options.keep)
    for part in options.part or PARTS:
        for moment in options.moment or MOMENTS:
            if (part, moment) in kept:
                continue
            if why := obstacle(part):
                print(f"{part}: not measured: {why}")
                continue
            with tempfile.TemporaryDirectory() as folder:
                row = killed(part, moment, options.kills, Path(folder))
            print(row, flush=True)
            kept.add((part, moment), row)
    order = [(part, moment) for part in PARTS for moment in MOMENTS if (part, moment) in kept]
    command = "python benchmarks/robustness/kills.py"
    rows = [kept[each] for each in order]
    print(write_result("kills", rows, command=command, quick=options.quick))


if __name__ == "__main__":
    main()
