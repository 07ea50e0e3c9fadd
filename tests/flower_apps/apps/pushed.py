"""A loop that pushes training to its nodes, never asks for the replies, and queries the state."""

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client, server = ClientApp(), ServerApp()
ROUNDS = 3


@client.train("step")
def step(message, context):
    times = context.state["seen"]["times"] if "seen" in context.state else 0
    context.state["seen"] = ConfigRecord({"times": times + 1})
    return Message(RecordDict(), reply_to=message)


@client.query("count")
def count(message, context):
    times = context.state["seen"]["times"] if "seen" in context.state else 0
    return Message(RecordDict({"metrics": MetricRecord({"times": times})}), reply_to=message)


@server.main()
def main(grid, context):
    nodes = sorted(grid.get_node_ids())
    for _ in range(ROUNDS):
        grid.send_and_receive([Message(RecordDict(), node, "query.count") for node in nodes])
        grid.push_messages([Message(RecordDict(), node, "train.step") for node in nodes])
