"""Three sites on real SuperNodes take steps by inverses that a server on a SuperLink shares."""

import pytest
from small_deployment import PYPROJECT, write_app

from fedstale.deployment.local import LocalDeployment, run_app

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(600)]

N, ROUNDS = 3, 4

SERVER = f"""
import torch
from fedstale.contrib.kfac import SharedInverses
from fedstale.strategies import FedAvg
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from torch import nn

app = ServerApp()


@app.main()
def main(grid, context):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    strategy = FedAvg({N}, min_available_nodes={N}, stages=[SharedInverses(0.01, every=2)])
    result = strategy.start(grid, ArrayRecord(network.state_dict()), {ROUNDS}, 200.0)
    found = result.train_metrics_clientapp
    seen = [(found[i]["kfac_layers"], found[i]["held"]) for i in sorted(found)]
    print("SEEN", seen, dict(strategy.rejections), flush=True)
"""

CLIENT = """
import torch
from fedstale.contrib.kfac import Preconditioner, exchange_inverses, kronecker_factors
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn.functional import cross_entropy

app = ClientApp()


@app.train()
def train(message, context):
    torch.manual_seed(int(context.node_config["partition-id"]))
    x, y = torch.rand(16, 4), torch.randint(0, 2, (16,))
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    held, records = exchange_inverses(message, context, lambda: kronecker_factors(network, [x]))
    precondition = Preconditioner(network, held)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(network(x), y).backward()
        precondition(0.1)
        optimizer.step()
    metrics = MetricRecord({"num-examples": 16, "held": len(held)})
    content = {"arrays": ArrayRecord(network.state_dict()), "metrics": metrics, **records}
    return Message(RecordDict(content), reply_to=message)
"""


def test_three_sites_keep_the_inverses_that_a_superlink_brings_them(tmp_path):
    app, lines = write_app(tmp_path / "app", PYPROJECT, SERVER, CLIENT), []
    with LocalDeployment(tmp_path / "deployment", nodes=N) as deployment:
        run_app(deployment, app, show=lines.append)
    (text,) = (line for line in lines if line.startswith("SEEN "))
    # The first messages hold none; from the second on sites have A and G of both layers.
    assert text == "SEEN [(2.0, 0.0), (2.0, 4.0), (2.0, 4.0), (2.0, 4.0)] {}"
