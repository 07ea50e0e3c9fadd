"""A ServerApp that is killed at any moment, and new runs that go on from its checkpoints."""

import json
import re
import subprocess
import threading
from itertools import pairwise

import psutil
import pytest
from small_deployment import PYPROJECT, wait_for, write_app

from fedstale.app_folder import BUILT_IN
from fedstale.deployment import commands
from fedstale.deployment.local import LINK, LocalDeployment, run_app
from fedstale.reports.run import Run

pytestmark = [pytest.mark.deployment, pytest.mark.slow]

KEYS = """
rounds = 1000
checkpoints = ""
resume = ""
server-notes = ""
run-folder = ""
"""
PROJECT = re.sub(r'strategy = "fedavg"\n(.|\n)*', KEYS, PYPROJECT)

# Each update adds 1 to an entry of its own, and a merge of two adds both.
SERVER = """
import json
import os
from dataclasses import replace

import numpy as np
from fedstale.deployment import recorded
from fedstale.strategies.server_optimizer import SGD
from fedstale.strategies import StaleStrategy
from fedstale.strategies.schedule import k_batch_async
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config

    def note(**facts):
        with open(config["server-notes"], "a") as notes:
            notes.write(json.dumps({"run": context.run_id, "pid": os.getpid(), **facts}) + chr(10))

    def evaluate(version, arrays):
        w = arrays["w"].numpy()
        note(version=version, updates=int(w.sum()), most=float(w.max()))

    note()

    strategy = StaleStrategy(
        schedule=replace(k_batch_async(concurrency=2, buffer_size=2), recheck_s=1.0),
        server_optimizer=SGD(2.0),
        normalise="buffer_size",
        checkpoints=config["checkpoints"] or None,
        resume=config["resume"] or None,
    )
    with recorded(grid, config["run-folder"], context, app="adder") as grid:
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord({"w": Array(np.zeros(100_000, dtype=np.float32))}),
            num_rounds=config["rounds"],
            timeout=100.0,
            evaluate_fn=evaluate,
        )
"""

CLIENT = """
import time

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    w = message.content["arrays"]["w"].numpy().copy()
    # A message takes much longer than a tenth of a second.
    w[int(time.time() * 10) % 50_000 * 2 + context.node_config["partition-id"]] += 1
    content = {"arrays": ArrayRecord({"w": Array(w)}), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
"""


def has_ended(process):
    # The SuperExec does not look after a child that has died.
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


class Unit:
    """The command of a run, which is started again when it fails, as a unit does."""

    def __init__(self, deployment, app, checkpoints, run_config, *options, starts=10):
        self.environment = deployment.operator_environment()
        command = ["fedstale", "deploy", "run", str(app), LINK, "--checkpoints", str(checkpoints)]
        self.command = commands.found(
            [*command, "--run-config", run_config, *options], self.environment
        )
        self.lines, self.starts = [], starts
        self.process = self.started()
        self.keeper = threading.Thread(target=self.keep)
        self.keeper.start()

    def started(self):
        self.starts -= 1
        return subprocess.Popen(
            self.command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def keep(self):
        while True:
            with self.process.stdout as output:
                self.lines.extend(line.rstrip() for line in output)
            if self.process.wait() == 0 or not self.starts:
                return
            self.process = self.started()

    def kill(self):
        self.starts = 0
        self.process.kill()
        self.keeper.join()

    def status(self, limit_s):
        self.keeper.join(limit_s)
        return self.process.poll()


def read(notes):
    return [json.loads(line) for line in lines(notes)]


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.timeout(900)
def test_a_built_in_app_goes_on_in_a_new_run_and_leaves_a_run_folder(tmp_path):
    folder = tmp_path / "checkpoints"
    common = f"strategy='FedBuff(2, 1)' checkpoints='{folder}'"
    with LocalDeployment(tmp_path / "deployment", nodes=2, limit_s=300.0) as deployment:
        digits = BUILT_IN / "digits"
        run_app(
            deployment, digits, run_config=f"{common} num-server-rounds=2", show=lambda line: None
        )
        seen = []
        config = f"{common} num-server-rounds=3 resume='{folder}' run-folder='{tmp_path / 'run'}'"
        run_app(deployment, digits, run_config=config, show=seen.append)
    versions = [int(match[1]) for line in seen if (match := re.search(r"version (\d+), s", line))]
    assert versions == [3], seen
    record = Run(tmp_path / "run")
    assert record.summary["status"] == "finished"
    merged = record.jobs[record.jobs.aggregated_version == 3]
    assert len(merged) == 1
    assert (merged.delivered_at > merged.sent_at).all()
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.timeout(1500)
def test_a_run_of_a_unit_ends_with_its_versions_whatever_of_the_server_is_killed(tmp_path):
    folder, server_notes = tmp_path / "checkpoints", tmp_path / "server"
    app = write_app(tmp_path / "adder", PROJECT, SERVER, CLIENT)
    config = f"rounds=6 server-notes='{server_notes}' run-folder='{tmp_path / 'run'}'"

    def versions():
        return [note["version"] for note in read(server_notes) if "version" in note]

    def server_app():
        return psutil.Process(read(server_notes)[-1]["pid"])

    def unit_of_run():
        return Unit(deployment, app, folder, config)

    with LocalDeployment(tmp_path / "deployment", nodes=2, limit_s=300.0) as deployment:
        unit = unit_of_run()
        wait_for(lambda: [*folder.glob("*.checkpoint")], 200.0)
        # The ServerApp.
        server_app().kill()
        wait_for(lambda: max(versions()) >= 2 and not has_ended(server_app()), 300.0)
        # The command; the run goes on, and the next one follows it.
        unit.kill()
        first = unit.lines
        unit = unit_of_run()
        wait_for(lambda: max(versions()) >= 3, 200.0)
        # What starts ServerApps, with all that it has started, as a unit does.
        app_process = server_app()
        deployment.processes.kill("superexec")
        wait_for(lambda: has_ended(app_process))
        deployment.start("superexec")
        assert unit.status(600.0) == 0, unit.lines
        statuses = [status for status, _ in deployment.control.runs().values()]
        again = Unit(deployment, app, folder, config, "--json")
        assert again.status(200.0) == 0, again.lines
        ended = json.loads(again.lines[-1])
        assert ended["status"] == "completed"
        assert ended["run_id"] in deployment.control.runs()
        assert max(versions()) == 6
    # One folder holds what all of these runs did.
    record = Run(tmp_path / "run")
    assert (record.summary["status"], record.summary["rounds"]) == ("finished", 6)
    merged = record.jobs.aggregated_version.value_counts()
    assert {version: n for version, n in merged.items() if version > 0} == dict.fromkeys(
        range(1, 7), 2
    )
    assert sorted(statuses) == ["finished:completed", "finished:failed", "finished:failed"]
    assert sum("the same command goes on from it" in line for line in first) == 1, first
    said = "\n".join(unit.lines)
    assert re.match(r"following run \d+, which goes on", said), said
    assert said.count("the same command goes on from it") == 1
    seen = [note for note in read(server_notes) if "version" in note]
    assert all(note["updates"] == 2 * note["version"] for note in seen), seen
    assert all(after - before in {0, 1} for before, after in pairwise(versions())), versions()


@pytest.mark.timeout(900)
def test_a_run_goes_on_from_its_checkpoints_after_the_database_is_lost(tmp_path):
    folder, server_notes = tmp_path / "checkpoints", tmp_path / "server"
    app = write_app(tmp_path / "adder", PROJECT, SERVER, CLIENT)
    config = f"rounds=3 server-notes='{server_notes}'"
    with LocalDeployment(tmp_path / "deployment", nodes=2, limit_s=300.0) as deployment:
        unit = Unit(deployment, app, folder, config)
        wait_for(lambda: [*folder.glob("*.checkpoint")], 200.0)
        for name in ("superlink", "node-0", "node-1"):
            deployment.processes.kill(name)
        # Until it notices, the ServerApp of the lost run would hold its checkpoints.
        psutil.Process(read(server_notes)[-1]["pid"]).kill()
        for path in deployment.folder.glob("superlink.db*"):
            path.unlink()
        deployment.start_superlink()
        # Its nodes are registered again.
        deployment.node_ids.clear()
        for number in (2, 3):
            deployment.add_node(number)
        deployment.wait_online()
        assert unit.status(600.0) == 0, unit.lines
        assert list(deployment.control.runs().values()) == [("finished:completed", "")]
    said = [line for line in unit.lines if "is not in the database of the SuperLink" in line]
    assert len(said) == 1, unit.lines
    assert said[0].startswith("fedstale: run "), said
    versions = [note["version"] for note in read(server_notes) if "version" in note]
    # None is made again from the start.
    assert versions == sorted(versions), versions
    assert versions[-1] == 3, versions


def test_a_run_that_fails_is_an_error_and_a_stopped_one_is_none(tmp_path):
    broken = write_app(tmp_path / "broken", PROJECT, "raise ValueError('no such thing')", CLIENT)
    app = write_app(tmp_path / "adder", PROJECT, SERVER, CLIENT)
    config = f"server-notes='{tmp_path / 'server'}'"
    with LocalDeployment(tmp_path / "deployment", nodes=1, limit_s=300.0) as deployment:
        unit = Unit(deployment, app, tmp_path / "kept", config)
        wait_for(lambda: [note for note in read(tmp_path / "server") if "version" in note])
        (run_id,) = deployment.control.runs()
        environment = deployment.operator_environment()
        command = commands.found(["fedstale", "flwr", "stop", str(run_id), LINK], environment)
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        assert unit.status(200.0) == 0, unit.lines
        assert unit.lines[-1] == f"run {run_id} stopped"
        unit = Unit(deployment, broken, tmp_path / "other", config, starts=2)
        assert unit.status(400.0) == 2, unit.lines
        assert unit.lines[-1] == "fedstale: flwr run started nothing: see above"
