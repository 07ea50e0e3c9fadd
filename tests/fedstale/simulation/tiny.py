"""A tiny app and tiny fleets: small enough to work out by hand."""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedstale.simulation import Costs
from fedstale.traces import Availability, Series, TraceSet


def counting_app() -> ClientApp:
    """Return a ClientApp that counts its messages in its state and adds 1 to the model."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        seen = context.state.config_records.get("seen", ConfigRecord({"times": 0}))
        context.state["seen"] = ConfigRecord({"times": seen["times"] + 1})
        arrays = [array + 1.0 for array in message.content["arrays"].to_numpy_ndarrays()]
        metrics = MetricRecord(
            {
                "num-examples": 10,
                "times": seen["times"] + 1,
                "partition": context.node_config["partition-id"],
                "draw": float(np.random.random()),
            }
        )
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"num-examples": 4, "accuracy": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    @app.query()
    def query(message, context):
        metrics = MetricRecord({"partition": context.node_config["partition-id"]})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


# 10 examples of 1 unit each; a model that stands for 1 MB.
COSTS = Costs(
    work_per_example=1.0, evaluate_work_per_example=0.5, epochs=1, examples=10, model_bytes=10**6
)


def fleet(windows, *, length=1000.0, compute=1.0, repeat=True) -> TraceSet:
    """Return one device for each list of windows, with links of 8 Mbit/s: 1 MB takes 1 s."""
    n = len(windows)
    return TraceSet(
        device_ids=TraceSet.ideal(n).device_ids,
        availability=Availability.of(windows, length, repeat=repeat),
        compute=Series.constant(np.broadcast_to(compute, (n,))),
        downlink=Series.constant(np.full(n, 8e6)),
        uplink=Series.constant(np.full(n, 8e6)),
    )


def message_to(node_id, *, kind="train", value=0.0, ttl=None, group=None):
    content = RecordDict(
        {
            "arrays": ArrayRecord([np.full(3, value, dtype=np.float32)]),
            "config": ConfigRecord({"server-round": 1}),
        }
    )
    return Message(content, node_id, kind, ttl=ttl, group_id=group)
