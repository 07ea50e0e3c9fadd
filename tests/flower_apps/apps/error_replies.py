"""Clients of which some fail: one always, one while it evaluates, one in a library."""

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client, server = ClientApp(), ServerApp()


@client.train()
def train(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    own = context.node_config["partition-id"]
    if own == 0:
        raise FileNotFoundError(f"no data of partition {own}")
    if own == 1:
        np.linalg.inv(np.zeros((2, 2)))
    metrics = MetricRecord({"train_loss": float(own), "num-examples": 4})
    content = {"arrays": ArrayRecord([w + own]), "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)


@client.evaluate()
def evaluate(message, context):
    if context.node_config["partition-id"] < 3:
        raise FileNotFoundError("no data to evaluate")
    metrics = MetricRecord({"distance": 1.0, "num-examples": 4})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@server.main()
def main(grid, context):
    strategy = FedAvg(min_train_nodes=4, min_evaluate_nodes=4, min_available_nodes=4)
    strategy.start(grid=grid, initial_arrays=ArrayRecord([np.zeros(2)]), num_rounds=3)
