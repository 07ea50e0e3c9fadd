"""A loop of its own around named actions, and no strategy: what a strategy would do, by hand."""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client, server = ClientApp(), ServerApp()
STATES_ROUND, ROUNDS = True, 3


@client.train("embed")
def embed(message, context):
    metrics = MetricRecord({"size": context.node_config["partition-id"], "num-examples": 4})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@client.train("step")
def step(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    w = w + 0.5 * (context.node_config["partition-id"] - w)
    metrics = MetricRecord({"train_loss": float(np.abs(w).sum()), "num-examples": 4})
    return Message(RecordDict({"arrays": ArrayRecord([w]), "metrics": metrics}), reply_to=message)


@client.evaluate("global")
def evaluate(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    metrics = MetricRecord({"accuracy": float(w.max() / 1.5), "num-examples": 4})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def asked(grid, kind, number, arrays=None):
    content = RecordDict({"config": ConfigRecord({"lr": 0.5})})
    if arrays is not None:
        content["arrays"] = arrays
    group = str(number) if STATES_ROUND else None
    nodes = sorted(grid.get_node_ids())
    replies = grid.send_and_receive([Message(content, n, kind, group_id=group) for n in nodes])
    return [reply.content for reply in replies if reply.has_content()]


@server.main()
def main(grid, context):
    w = np.zeros(3)
    for number in range(ROUNDS):
        asked(grid, "train.embed", number)
        found = asked(grid, "train.step", number, ArrayRecord([w]))
        w = sum(content["arrays"].to_numpy_ndarrays()[0] for content in found) / len(found)
        asked(grid, "evaluate.global", number, ArrayRecord([w]))
