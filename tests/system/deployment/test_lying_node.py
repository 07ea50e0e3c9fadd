"""A node that lies on a real SuperLink: what the audit finds, and what its loss does not get it."""

import json

import numpy as np
import pytest
from small_deployment import PYPROJECT, write_app

import fedstale
from fedstale.deployment.local import run_app

pytestmark = pytest.mark.deployment

# The server goes by the norms of updates, and says what it knows of each node in the end.
SERVER = """
import json

import numpy as np
from fedstale.deployment.run_folder import recorded
from fedstale.strategies import FedAvg
from fedstale.strategies.selection import Random
from fedstale.strategies.server.validation import Validation
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

app = ServerApp()


class Telling(Random):
    def select(self, candidates, k, now, rng):
        known = {str(c.node_id): [c.loss, c.utility] for c in candidates}
        print("KNOWN " + json.dumps(known), flush=True)
        return super().select(candidates, k, now, rng)


@app.main()
def main(grid, context):
    strategy = FedAvg(
        3, selector=Telling(), validation=Validation(loss_from="norm"), recheck_s=1.0, seed=1
    )
    initial = ArrayRecord({"w": Array(np.zeros(16, dtype=np.float32))})
    with recorded(grid, context.run_config["run-folder"], context, app="adder") as grid:
        strategy.start(grid=grid, initial_arrays=initial, num_rounds=12, timeout=200.0)
"""

# Node 0 states a chance of 0, so as to be left alone, and a thousand times its loss.
CLIENT = """
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    lies = context.node_config["partition-id"] == 0
    w = message.content["arrays"]["w"].numpy() + np.float32(0.5)
    content = RecordDict(
        {
            "arrays": ArrayRecord({"w": Array(w)}),
            "metrics": MetricRecord({"num-examples": 10, "train_loss": 1000.0 if lies else 1.0}),
            "fedstale.forecast": ConfigRecord({"p_finish": 0.0 if lies else 0.9}),
        }
    )
    return Message(content, reply_to=message)
"""


@pytest.mark.timeout(600)
def test_the_audit_finds_the_node_and_its_loss_brings_it_nothing(deployment, tmp_path):
    pyproject = PYPROJECT + 'run-folder = ""\n'
    app = write_app(tmp_path / "adder", pyproject, SERVER, CLIENT)
    lines = []
    run_app(deployment, app, run_config=f"run-folder='{tmp_path / 'run'}'", show=lines.append)
    told = [json.loads(line.split("KNOWN ", 1)[1]) for line in lines if "KNOWN " in line]
    assert {node for known in told for node in known} == {
        str(node) for node in deployment.node_ids.values()
    }
    # Sixteen numbers that each moved by a half: a norm of 2, and ten examples.
    seen = np.array([losses for losses in told[-1].values() if np.isfinite(losses).all()])
    assert len(seen) == 3, told
    np.testing.assert_allclose(seen, [[2.0, 20.0]] * 3, rtol=1e-6)

    audit = fedstale.audit(tmp_path / "run")
    (liar,) = audit.alarms.to_dict("records")
    assert liar["device_id"] == str(deployment.node_ids[0])
    assert (liar["direction"], liar["last_p"], liar["kept"]) == ("under", 0.0, 1.0)
    honest = audit.devices[audit.devices["device_id"] != liar["device_id"]]
    assert len(honest) == 2
    assert honest["last_p"].tolist() == [0.9, 0.9]
    assert (honest["tested"] >= 9).all()
