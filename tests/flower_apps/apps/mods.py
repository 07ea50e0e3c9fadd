"""Mods around all handlers and around one of them: Flower's that logs sizes, and two own ones."""

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import message_size_mod
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg


def doubling(message, context, call_next):
    reply = call_next(message, context)
    (w,) = reply.content["arrays"].to_numpy_ndarrays()
    reply.content["arrays"] = ArrayRecord([2 * w])
    return reply


def counting(message, context, call_next):
    reply = call_next(message, context)
    reply.content["metrics"]["passed"] = 1
    return reply


client, server = ClientApp(mods=[message_size_mod, counting]), ServerApp()


@client.train(mods=[doubling])
def train(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    content = {"arrays": ArrayRecord([w + 1]), "metrics": MetricRecord({"num-examples": 4})}
    return Message(RecordDict(content), reply_to=message)


@client.evaluate()
def evaluate(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    metrics = MetricRecord({"weight": float(w[0]), "num-examples": 4})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@server.main()
def main(grid, context):
    strategy = FedAvg(min_train_nodes=4, min_evaluate_nodes=4, min_available_nodes=4)
    strategy.start(grid=grid, initial_arrays=ArrayRecord([np.zeros(2)]), num_rounds=3)
