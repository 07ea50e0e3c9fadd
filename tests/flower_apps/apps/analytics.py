"""Federated analytics: queries with two actions and no strategy; nothing is trained."""

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client, server = ClientApp(), ServerApp()
ROUNDS = 4


def values(context):
    return np.arange(8) + context.node_config["partition-id"]


@client.query("range")
def query_range(message, context):
    own = values(context)
    metrics = MetricRecord({"least": int(own.min()), "most": int(own.max())})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@client.query("histogram")
def query_histogram(message, context):
    edges = message.content["config"]["edges"]
    counts, _ = np.histogram(values(context), edges)
    metrics = MetricRecord({"counts": counts.tolist(), "num-examples": 8})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@server.main()
def main(grid, context):
    for _ in range(ROUNDS):
        nodes = sorted(grid.get_node_ids())
        asked = [Message(RecordDict(), node, "query.range") for node in nodes]
        found = [reply.content["metrics"] for reply in grid.send_and_receive(asked)]
        edges = [float(min(f["least"] for f in found)), 5.0, float(max(f["most"] for f in found))]
        config = RecordDict({"config": ConfigRecord({"edges": edges})})
        asked = [Message(config, node, "query.histogram") for node in nodes]
        replies = grid.send_and_receive(asked)
        total = np.sum([reply.content["metrics"]["counts"] for reply in replies], axis=0)
    print(f"counts: {total.tolist()}")
