"""Two strategies one after the other, and one strategy twice; each counts its rounds from 1."""

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg

from fedstale.strategies import FedBuff

client, server = ClientApp(), ServerApp()
OURS = False


@client.train()
def train(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    w = w + 0.5 * (context.node_config["partition-id"] - w)
    metrics = MetricRecord({"train_loss": float(np.abs(w).sum()), "num-examples": 4})
    return Message(RecordDict({"arrays": ArrayRecord([w]), "metrics": metrics}), reply_to=message)


def measured(server_round, arrays):
    return MetricRecord({"accuracy": float(arrays.to_numpy_ndarrays()[0].max() / 1.5)})


@server.main()
def main(grid, context):
    nodes = {"min_train_nodes": 4, "min_available_nodes": 4, "fraction_evaluate": 0.0}
    if OURS:
        first = second = FedBuff(concurrency=4, buffer_size=2, seed=1)
    else:
        first, second = FedAvg(**nodes), FedAdam(**nodes, eta=0.01)
    how = {"grid": grid, "evaluate_fn": measured}
    found = first.start(initial_arrays=ArrayRecord([np.zeros(3)]), num_rounds=2, **how)
    found = second.start(initial_arrays=found.arrays, num_rounds=2, **how)
    first.start(initial_arrays=found.arrays, num_rounds=1, **how)
