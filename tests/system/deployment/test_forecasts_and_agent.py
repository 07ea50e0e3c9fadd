"""Devices that forecast themselves and an agent that chooses them, on a real SuperLink."""

import json

import numpy as np
import pytest
from small_deployment import PYPROJECT, write_app

from fedstale.agents import AgentSelector
from fedstale.contrib.audit import audited
from fedstale.contrib.energy import Fleet, accounts
from fedstale.deployment.local import run_app
from fedstale.errors import ConfigError
from fedstale.reports.run import Run
from fedstale.strategies.types import Candidates, SelectionContext

pytestmark = pytest.mark.deployment

# The agent says what it knew and whom it chose.
SERVER = """
import json
from dataclasses import asdict

import numpy as np
from fedstale.agents import AgentSelector
from fedstale.deployment.run_folder import recorded
from fedstale.strategies.stages import ForecastRequest
from fedstale.strategies import GapAware
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

app = ServerApp()


class Telling(AgentSelector):
    def select(self, candidates, k, now, rng):
        chance = rng.bit_generator.state
        chosen = super().select(candidates, k, now, rng)
        table, rows = candidates._table, candidates._rows.tolist()
        known = {"ids": candidates.node_ids.tolist(), "k": k, "now": now}
        known["columns"] = {name: x[rows].tolist() for name, x in table.columns.items()}
        known["held"] = {
            name: {what: np.asarray(x).tolist() for what, x in vars(line).items()}
            for name, line in table.held.items()
        }
        known["forecasts"] = [table.forecasts.get(row, {}) for row in rows]
        known |= {"context": asdict(candidates.context), "falls_back": bool(self.fault)}
        known["chance"] = chance
        print("CHOICE " + json.dumps({**known, "chosen": chosen}), flush=True)
        return chosen


@app.main()
def main(grid, context):
    job = {"work": 60.0, "download_bytes": 40.0, "upload_bytes": 40.0, "deadline_s": 200.0}
    strategy = GapAware(
        concurrency=2,
        buffer_size=1,
        selector=Telling(),
        stages=[ForecastRequest(job=job, wait_s=100.0)],
        seed=1,
    )
    initial = ArrayRecord({"w": Array(np.zeros(10, dtype=np.float32))})
    with recorded(grid, context.run_config["run-folder"], context, app="adder") as grid:
        strategy.start(grid=grid, initial_arrays=initial, num_rounds=3, timeout=200.0)
"""

CLIENT = """
import time

import numpy as np
from fedstale.client import ForecastMod
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

app = ForecastMod().client_app()


@app.train()
def train(message, context):
    time.sleep(1.0 + context.node_config["partition-id"])
    w = message.content["arrays"]["w"].numpy() + np.float32(1)
    metrics = MetricRecord({"num-examples": 10, "train_loss": 1.0})
    return Message(
        RecordDict({"arrays": ArrayRecord({"w": Array(w)}), "metrics": metrics}), reply_to=message
    )
"""


def choices(lines):
    return [json.loads(line.split("CHOICE ", 1)[1]) for line in lines if "CHOICE " in line]


def as_known(choice):
    """Return what the agent knew at a choice, made again of what it has told."""
    context = SelectionContext(**choice["context"])
    known = Candidates.of(choice["ids"], context, **choice["columns"])
    for name, line in choice["held"].items():
        vars(known._table.held[name]).update(line, _sums=np.array(line["_sums"]))
    return known


@pytest.mark.timeout(600)
def test_forecasts_arrive_and_the_agent_chooses_by_them(deployment, tmp_path):
    pyproject = PYPROJECT + 'run-folder = ""\n'
    app = write_app(tmp_path / "adder", pyproject, SERVER, CLIENT)
    lines = []
    run_app(deployment, app, run_config=f"run-folder='{tmp_path / 'run'}'", show=lines.append)
    nodes = set(deployment.node_ids.values())
    told = choices(lines)
    # Nobody is chosen before all have answered the question how the first job would go.
    assert set(told[0]["ids"]) == nodes, lines
    for choice in told:
        assert all(0.0 <= at <= choice["now"] for at in choice["columns"]["forecast_at"])
        for said in choice["forecasts"]:
            assert 0.0 < said["p_finish"] <= 1.0
            assert 0.0 < said["p_available"] <= 1.0
            assert np.all(np.diff(said["total_s"]) >= 0)
        assert not choice["falls_back"]
        # The same agent, here, chooses the same of what it knew there, by the same chance.
        rng = np.random.default_rng()
        rng.bit_generator.state = choice["chance"]
        chosen = AgentSelector().select(as_known(choice), choice["k"], choice["now"], rng)
        assert chosen == choice["chosen"]
        assert len(chosen) == min(choice["k"], len(choice["ids"]))

    record = Run(tmp_path / "run")
    events = record.jobs
    queries = events[events.kind == "query.forecast"]
    assert (queries.status == "reported").sum() >= 3
    # Each training holds the chance that its device had stated before.
    assert (
        events[events.kind == "train"].reported_p_finish.between(0.0, 1.0, inclusive="right").all()
    )
    assert (events[events.kind == "train"].reported_duration_s > 0).all()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Reliability of reported forecasts" in page
    # What a server has logged of real devices can be audited, but for durations.
    audit = audited(record)
    done = events[(events.kind == "train") & events.status.isin(["reported", "rejected", "late"])]
    assert set(audit.devices["device_id"]) == set(events[events.kind == "train"].device_id)
    assert 0 < audit.devices["tested"].sum() <= len(done)
    assert not audit.devices["durations"].any()
    # What its devices took is in no log.
    with pytest.raises(ConfigError, match="the seconds or bytes are not known"):
        accounts(record, Fleet("board"))
    assert any("durations are not tested" in note for note in audit.notes)
    assert "Do stated chances hold?" in page
