"""Let devices train on while a reply is on its way, and see what that is worth.

Delayed averaging: a device goes on from the model that it received last and its own newest change,
and answers the next message with the model of that message and the change since. That message finds
its training done, or begun, and asks only for the rest of it. The change is that of a version which
is a job older.
"""

from contextlib import suppress

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from sklearn.datasets import load_digits

from fedstale.simulation import Costs, RunEnded, TraceGrid
from fedstale.strategies import FedBuff
from fedstale.traces import Job, TraceSet

N, MODEL_BYTES, WORK, TARGET, UNTIL_S = 60, 56_000_000, 120.0, 0.8, 4 * 3600.0
pixels, labels = load_digits(return_X_y=True)
pixels, wanted = pixels / 16, np.eye(10)[labels]
uneven = np.random.default_rng(0).normal(labels, 2).argsort()  # a device has some of the digits


def train(message: Message, context: Context) -> Message:
    """Take steps of a softmax regression on this device's digits."""
    own = np.array_split(uneven, N)[int(context.node_config["partition-id"])]
    weights = message.content.array_records["arrays"]["weights"].numpy()
    for _ in range(10):
        scores = np.exp(pixels[own] @ weights)
        error = scores / scores.sum(1, keepdims=True) - wanted[own]
        weights = weights - 0.5 * pixels[own].T @ error / len(own)
    reply = {
        "arrays": ArrayRecord({"weights": Array(weights)}),
        "metrics": MetricRecord({"num-examples": len(own)}),
    }
    return Message(RecordDict(reply), reply_to=message)


def overlapping(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer with the training that began when the last one ended, before this message came."""
    received = message.content.array_records["arrays"]
    begun = context.state.array_records.get("begun", received)
    message.content["arrays"] = begun
    reply = call_next(message, context)
    ended = reply.content.array_records["arrays"]
    moved = {
        name: Array(received[name].numpy() + (ended[name].numpy() - begun[name].numpy()))
        for name in received
    }
    context.state["begun"] = reply.content["arrays"] = ArrayRecord(moved)
    return reply


class Ahead:
    """What is left of each job's work when its message comes; a device trains on until then."""

    grid: TraceGrid

    def __init__(self, traces: TraceSet, work: float, model_bytes: int) -> None:
        self.traces, self.work, self.model_bytes = traces, work, model_bytes
        self.ready = np.full(traces.n_devices, np.inf)

    def __call__(self, message: Message) -> float:
        """Return the work units of a message that is sent now."""
        device, done = [message.metadata.dst_node_id - 1000], 0.0
        since, arrives = self.ready[device], self.trip(device, 0.0)
        if since[0] <= arrives < np.inf:
            start, end = self.traces.channel("availability").window_at_or_after(device, since)
            if start[0] <= since[0] and arrives <= end[0]:  # else it was lost
                done = float(self.traces.channel("compute").integral(device, since, arrives)[0])
        self.ready[device] = self.trip(device, left := max(self.work - done, 0.0))
        return left

    def trip(self, device: list[int], work: float) -> float:
        """Return when a device would have done some work; inf if it went offline before."""
        job = Job(work=work, download_bytes=self.model_bytes, upload_bytes=0)
        return float(self.traces.trips(device, [self.grid.now()], job).trained[0])


def run(seed: int, *, overlaps: bool) -> tuple[float, int, float]:
    """Return the hours to the target, the replies, and how stale updates are in the mean."""
    traces = TraceSet.synthetic(N, days=1, seed=seed)
    app, ahead = ClientApp(mods=[overlapping] if overlaps else []), Ahead(traces, WORK, MODEL_BYTES)
    app.train()(train)
    grid = ahead.grid = TraceGrid(
        traces,
        app,
        costs=Costs(model_bytes=MODEL_BYTES, constant_replies=True),
        seed=seed,
        until_s=UNTIL_S,
        work=ahead if overlaps else lambda message: WORK,
    )
    found, reached = [], []

    def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord:
        told = (pixels @ arrays["weights"].numpy()).argmax(1)
        found.append(float((told == labels).mean()))
        if np.mean(found[-5:]) >= TARGET:
            reached.append(grid.now() / 3600)
        return MetricRecord({"accuracy": found[-1]})

    initial = ArrayRecord({"weights": Array(np.zeros((64, 10)))})
    with grid.running(), suppress(RunEnded):
        FedBuff(20, 5, seed=seed).start(grid, initial, 10**6, 3600.0, evaluate_fn=evaluate)
    jobs = grid.events().to_pandas().query("aggregated_version > 0").sort_values("started_at")
    base = jobs["base_version"]
    if overlaps:  # of the message before
        base = jobs.groupby("node_id")["base_version"].shift(1, fill_value=0)
    stale = jobs["aggregated_version"] - 1 - base
    return reached[0] if reached else UNTIL_S / 3600, len(jobs), float(stale.mean())


if __name__ == "__main__":
    ratios = []
    for seed in range(1, 4):
        plain, overlap = (run(seed, overlaps=each) for each in (False, True))
        ratios.append(plain[0] / overlap[0])
        print(
            f"seed {seed}: {plain[1]} and {overlap[1]} replies, {plain[2]:.1f} and "
            f"{overlap[2]:.1f} versions stale, {plain[0]:.2f} h and {overlap[0]:.2f} h"
        )
    print(
        f"time to {TARGET} without overlap, divided by that with it: median {np.median(ratios):.2f}"
    )
