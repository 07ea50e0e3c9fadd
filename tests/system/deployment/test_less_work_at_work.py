"""Less work on real nodes: shares are read, steps are stated, and the run folder names both."""

from pathlib import Path

import pandas as pd
import pytest
from small_deployment import PYPROJECT, write_app

from fedstale.deployment.local import run_app

ROUNDS, WHOLE = 2, 12

SERVER = f"""
import numpy as np
from fedstale.deployment.run_folder import recorded
from fedstale.strategies import FedAvg, LocalWork
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    # No real job is as short, so the first share is followed by the least one.
    work = LocalWork(within_s=1e-3, least=0.25, first=0.75)
    strategy = FedAvg(min_available_nodes=3, stages=[work], normalise="steps")
    with recorded(grid, "FOLDER", context, app="adder") as grid:
        initial = ArrayRecord({{"w": Array(np.zeros(4, np.float32))}})
        result = strategy.start(grid, initial, num_rounds={ROUNDS}, timeout=200.0)
    print("MODEL", result.arrays["w"].numpy()[0], flush=True)
"""

CLIENT = f"""
import numpy as np
from fedstale.client import ForecastMod, local_steps
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp(mods=[ForecastMod()])


@app.train()
def train(message, context):
    steps = local_steps(message, 3, {WHOLE // 3} * (1 + context.node_config["partition-id"]))
    w = message.content["arrays"]["w"].numpy() + np.float32(steps)
    metrics = MetricRecord({{"num-examples": 1}})
    content = RecordDict({{"arrays": ArrayRecord({{"w": Array(w)}}), "metrics": metrics}})
    return Message(content, reply_to=message)
"""


@pytest.mark.deployment
@pytest.mark.slow
def test_real_nodes_take_the_steps_that_they_are_asked_for(deployment, tmp_path: Path):
    lines: list[str] = []
    folder = tmp_path / "run"
    app = write_app(tmp_path / "app", PYPROJECT, SERVER.replace("FOLDER", str(folder)), CLIENT)
    run_app(deployment, app, show=lines.append)
    (model,) = (float(line.split()[1]) for line in lines if line.startswith("MODEL"))
    # Each step moves by 1, so an update over its steps is 1, and a version by the mean of steps.
    assert model == pytest.approx(sum(share * WHOLE * (1 + 2 + 3) / 3 for share in (0.75, 0.25)))
    events = pd.read_parquet(folder / "events.parquet")
    assert events.groupby("round")["work_share"].unique().map(list).tolist() == [[0.75], [0.25]]
    assert (events["status"] == "reported").all()
    assert "Share of the work" in (folder / "report.html").read_text()
