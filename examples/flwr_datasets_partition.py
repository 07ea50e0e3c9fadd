"""Read the partition of a device with Flower Datasets, dealt from data on this machine."""

from functools import cache

import numpy as np
from datasets import Dataset
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr_datasets.partitioner import DirichletPartitioner
from sklearn.datasets import load_digits

import fedstale
from fedstale.strategies import FedBuff

pixels, labels = load_digits(return_X_y=True)
digits = Dataset.from_dict({"image": pixels / 16, "label": labels}).with_format("numpy")


@cache
def partitions(n: int) -> DirichletPartitioner:
    """Deal the digits to n devices, few labels to each.

    For data of a hub: `FederatedDataset(dataset="ylecun/mnist", partitioners={"train": dealt})`.
    """
    dealt = DirichletPartitioner(n, partition_by="label", alpha=0.5, min_partition_size=5, seed=1)
    dealt.dataset = digits
    return dealt


app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take steps of a softmax regression on the digits of this device."""
    place = context.node_config
    own = partitions(int(place["num-partitions"])).load_partition(int(place["partition-id"]))
    x, y = own["image"][:], np.eye(10)[own["label"][:]]
    weights = message.content.array_records["arrays"]["weights"].numpy()
    for _ in range(5):
        scores = np.exp(x @ weights)
        weights = weights - x.T @ (scores / scores.sum(1, keepdims=True) - y) / len(x)
    reply = {
        "arrays": ArrayRecord({"weights": Array(weights)}),
        "metrics": MetricRecord({"num-examples": len(x)}),
    }
    return Message(RecordDict(reply), reply_to=message)


for i in range(3):
    own = partitions(60).load_partition(i)
    print(f"device {i} has {len(own)} digits: {sorted(set(own['label'][:].tolist()))}")

run = fedstale.simulate(
    app,
    strategy=FedBuff(concurrency=20, buffer_size=4, seed=1),
    initial_arrays={"weights": np.zeros((64, 10))},
    traces="synthetic:60",
    until="30m",
    seed=1,
    work_per_example=0.9,
    epochs=5,
    examples=30,
)
told = (digits["image"][:] @ run.model["weights"]).argmax(1)
print(f"accuracy {(told == labels).mean():.1f}: {run.reason}")
