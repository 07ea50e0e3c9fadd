"""Clients that keep a layer of their own, and a count, in their Context from round to round."""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client, server = ClientApp(), ServerApp()


@client.train()
def train(message, context):
    (shared,) = message.content["arrays"].to_numpy_ndarrays()
    kept = context.state
    own = kept["own"].to_numpy_ndarrays()[0] if "own" in kept else np.zeros(2)
    times = kept["seen"]["times"] if "seen" in kept else 0
    own = own + context.node_config["partition-id"]
    kept["own"], kept["seen"] = ArrayRecord([own]), ConfigRecord({"times": times + 1})
    metrics = MetricRecord({"times": times + 1, "own": float(own[0]), "num-examples": 4})
    content = {"arrays": ArrayRecord([shared + own]), "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def main(grid, context):
    strategy = FedAvg(min_train_nodes=4, min_available_nodes=4, fraction_evaluate=0.0)
    strategy.start(grid=grid, initial_arrays=ArrayRecord([np.zeros(2)]), num_rounds=3)
