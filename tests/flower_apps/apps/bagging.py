"""Bagging of trees that travel as text in one array of bytes, under Flower's FedXgbBagging."""

import json

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedXgbBagging

client, server = ClientApp(), ServerApp()


def as_arrays(text):
    return ArrayRecord([np.frombuffer(text, dtype=np.uint8)])


def forest(trees):
    count = {"num_trees": str(len(trees)), "num_parallel_tree": "1"}
    indptr = list(range(len(trees) + 1))
    model = {
        "gbtree_model_param": count,
        "iteration_indptr": indptr,
        "trees": trees,
        "tree_info": [0] * len(trees),
    }
    return json.dumps({"learner": {"gradient_booster": {"model": model}}}).encode()


def trees_of(arrays):
    text = arrays.to_numpy_ndarrays()[0].tobytes()
    return json.loads(text)["learner"]["gradient_booster"]["model"]["trees"] if text else []


@client.train()
def train(message, context):
    known = trees_of(message.content["arrays"])
    tree = {"id": 0, "leaf": context.node_config["partition-id"], "after": len(known)}
    content = {
        "arrays": as_arrays(forest([tree])),
        "metrics": MetricRecord({"num-examples": 4, "trees": len(known)}),
    }
    return Message(RecordDict(content), reply_to=message)


@client.evaluate()
def evaluate(message, context):
    n = len(trees_of(message.content["arrays"]))
    metrics = MetricRecord({"auc": 1 - 1 / (1 + n), "num-examples": 4})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@server.main()
def main(grid, context):
    strategy = FedXgbBagging(min_train_nodes=4, min_evaluate_nodes=4, min_available_nodes=4)
    strategy.start(grid=grid, initial_arrays=as_arrays(b""), num_rounds=3)
