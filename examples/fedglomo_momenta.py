"""Add the momenta of FedGLOMO by a client mod and a server step, at what they cost a device.

With g(w) what training from w changes, the server moves by u = b g(w_k) + (1 - b)(u + g(w_k) -
g(w_k-1)), means over devices. A device replies with g(w_k) - (1 - b) g(w_k-1), and the server's
momentum does the rest. Training is corrected in the same way, from step to step. So a device
trains twice a job, and each step takes two gradients: work is declared four times as much.

Das, Acharya, Hashemi, Sanghavi, Dhillon, Topcu. Faster Non-Convex Federated Learning via Global
and Local Momentum. UAI 2022. Differences from the paper: w_k-1 is the model that this device
received before, so that nothing more is sent to it; a local training begins with the gradient of a
batch instead of one of all examples.
"""

from contextlib import suppress

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from sklearn.datasets import load_digits

from fedstale.simulation import Costs, RunEnded, TraceGrid
from fedstale.strategies import FedAvgOverSelected
from fedstale.strategies.server_optimizer import SGD, Momentum
from fedstale.traces import TraceSet

N, WORK, TARGET, UNTIL_S = 150, 30.0, 0.8, 6 * 3600.0
B = 0.5
pixels, labels = load_digits(return_X_y=True)
pixels, wanted = pixels / 16, np.eye(10)[labels]
uneven = np.random.default_rng(0).normal(labels, 2).argsort()  # a device has some of the digits


def gradient(weights: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Return the gradient of the cross-entropy on some digits."""
    scores = np.exp(pixels[batch] @ weights)
    error = scores / scores.sum(1, keepdims=True) - wanted[batch]
    return pixels[batch].T @ error / len(batch)


def train(message: Message, context: Context) -> Message:
    """Take steps on batches of four of this device's digits; the order is the message's."""
    place, config = int(context.node_config["partition-id"]), message.content["config"]
    own = np.array_split(uneven, N)[place]
    order = np.random.default_rng([place, config["server-round"]]).permutation(own)
    weights = message.content.array_records["arrays"]["weights"].numpy()
    direction, before = np.zeros_like(weights), weights
    for batch in np.array_split(order, len(order) // 4):
        if context.run_config["momenta"]:
            kept = direction - gradient(before, batch) if direction.any() else 0.0
            direction = gradient(weights, batch) + (1 - B) * kept
        else:
            direction = gradient(weights, batch)
        before, weights = weights, weights - 0.3 * direction
    reply = {
        "arrays": ArrayRecord({"weights": Array(weights)}),
        "metrics": MetricRecord({"num-examples": len(own)}),
    }
    return Message(RecordDict(reply), reply_to=message)


def global_momentum(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer with a change less a part of what the same training changed in the model before."""

    def change(arrays: ArrayRecord) -> tuple[Message, np.ndarray]:
        message.content["arrays"] = arrays
        reply = call_next(message, context)
        after = reply.content.array_records["arrays"]["weights"].numpy()
        return reply, after - arrays["weights"].numpy()

    received = message.content.array_records["arrays"]
    before = context.state.array_records.get("before", received)
    reply, new = change(received)
    sent = new - (1 - B) * change(before)[1]
    context.state["before"] = received
    reply.content["arrays"] = ArrayRecord({"weights": Array(sent)})
    reply.content["about"] = ConfigRecord({"fedstale.update": "delta"})
    return reply


def run(seed: int, *, momenta: bool, work: float = WORK) -> tuple[int, float]:
    """Return server steps and hours to the target."""
    app = ClientApp(mods=[global_momentum] if momenta else [])
    app.train()(train)
    grid = TraceGrid(
        TraceSet.synthetic(N, days=1, seed=seed),
        app,
        costs=Costs(model_bytes=14_000_000, constant_replies=True),
        seed=seed,
        run_config={"momenta": momenta},
        until_s=UNTIL_S,
        work=lambda message: work,
    )
    found, reached = [], []

    def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord:
        told = (pixels @ arrays["weights"].numpy()).argmax(1)
        found.append(float((told == labels).mean()))
        if np.mean(found[-3:]) >= TARGET:
            reached.append((version, grid.now() / 3600))
            raise RunEnded("the target is reached")
        return MetricRecord({"accuracy": found[-1]})

    initial = ArrayRecord({"weights": Array(np.zeros((64, 10)))})
    step = Momentum(1.0, beta=1 - B) if momenta else SGD(1.0)
    strategy = FedAvgOverSelected(10, 1.5, server_optimizer=step, seed=seed)
    with grid.running(), suppress(RunEnded):
        strategy.start(grid, initial, 10**6, 1200.0, evaluate_fn=evaluate)
    return reached[0] if reached else (len(found), UNTIL_S / 3600)


if __name__ == "__main__":
    ratios = []
    for seed in range(1, 4):
        plain, free = (run(seed, momenta=each) for each in (False, True))
        paid = run(seed, momenta=True, work=4 * WORK)
        ratios.append([plain[1] / free[1], plain[1] / paid[1]])
        print(
            f"seed {seed}: {plain[0]} steps and {plain[1]:.2f} h without, {paid[0]} steps and "
            f"{paid[1]:.2f} h with momenta; {free[1]:.2f} h if they cost nothing"
        )
    free, paid = np.exp(np.mean(np.log(ratios), axis=0))
    print(
        f"time to {TARGET} without momenta, divided by that with them: {paid:.2f}, and {free:.2f} "
        "if they cost nothing"
    )
