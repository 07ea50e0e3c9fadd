"""FedAvg over the message API: training, evaluation on clients and on the server."""

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client, server = ClientApp(), ServerApp()


@client.train()
def train(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    w = w + 0.5 * (context.node_config["partition-id"] - w)
    metrics = MetricRecord({"train_loss": float(np.abs(w).sum()), "num-examples": 4})
    return Message(RecordDict({"arrays": ArrayRecord([w]), "metrics": metrics}), reply_to=message)


@client.evaluate()
def evaluate(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    distance = float(np.abs(context.node_config["partition-id"] - w).max())
    metrics = MetricRecord({"distance": distance, "num-examples": 4})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def measured(server_round, arrays):
    (w,) = arrays.to_numpy_ndarrays()
    return MetricRecord({"accuracy": float(w.max() / 1.5)})


@server.main()
def main(grid, context):
    strategy = FedAvg(min_train_nodes=4, min_evaluate_nodes=4, min_available_nodes=4)
    start = ArrayRecord([np.zeros(3)])
    strategy.start(grid=grid, initial_arrays=start, num_rounds=3, evaluate_fn=measured)
