"""Weigh stale updates by a rule of your own: a function of staleness, passed to FedBuff."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits

import fedstale
from fedstale.strategies import FedBuff


def linear(tau: int) -> float:
    """Fade out over five versions."""
    return max(0.0, 1 - tau / 5)


pixels, labels = load_digits(return_X_y=True)
pixels, wanted = pixels / 16, np.eye(10)[labels]
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take steps of a softmax regression on this device's digits."""
    place = context.node_config
    own = slice(int(place["partition-id"]), None, int(place["num-partitions"]))
    x, y = pixels[own], wanted[own]
    weights = message.content.array_records["arrays"]["weights"].numpy()
    for _ in range(5):
        scores = np.exp(x @ weights)
        weights = weights - x.T @ (scores / scores.sum(1, keepdims=True) - y) / len(x)
    reply = {
        "arrays": ArrayRecord({"weights": Array(weights)}),
        "metrics": MetricRecord({"num-examples": len(x)}),
    }
    return Message(RecordDict(reply), reply_to=message)


def accuracy(version: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the share of all digits that a version of the model tells."""
    told = (pixels @ arrays["weights"].numpy()).argmax(1)
    return MetricRecord({"accuracy": float((told == labels).mean())})


run = fedstale.simulate(
    app,
    strategy=FedBuff(concurrency=20, buffer_size=4, staleness=linear, seed=1),
    initial_arrays={"weights": np.zeros((64, 10))},
    evaluate=accuracy,
    traces="synthetic:60",
    until="1h",
    seed=1,
    # What training costs a device is said, never guessed.
    work_per_example=0.9,
    epochs=5,
    examples=30,
)
merged = run.jobs.dropna(subset="staleness").astype({"staleness": int})
print(merged.groupby("staleness")["weight"].agg(updates="size", weight="mean"))
print(f"accuracy {run.last('server')['accuracy']:.1f}: {run.reason}")
