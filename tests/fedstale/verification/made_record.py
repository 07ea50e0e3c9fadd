"""Makes runs with a record, and other records of theirs."""

import json
from hashlib import sha256

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedstale
from fedstale.strategies import FedBuff

OPTIONS = {"work": {"train": 60.0, "evaluate": 1.0}, "model_bytes": 1_000_000}


def client(p_finish=0.75):
    """Return a client that forecasts, reports a loss of its own, and now and then fails."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        device = context.node_config["partition-id"]
        at = int(message.content["config"]["server-round"])
        if (device + at) % 11 == 0:
            raise ValueError("no data today")
        weights = message.content["arrays"]["w"].numpy() + 1.0
        loss = float("nan") if device % 7 == 0 else 1.0 + device % 5 / at
        metrics = {"train_loss": loss, "square_loss": loss**2, "num-examples": 10 + device % 4}
        stated = {
            "p_finish": p_finish - device % 4 / 8,
            "p_available": 0.5,
            "duration_s": 60.0 + device,
            "levels": [0.1, float("inf")],
        }
        content = {
            "arrays": ArrayRecord({"w": Array(weights)}),
            "metrics": MetricRecord(metrics),
            "fedstale.forecast": ConfigRecord(stated if device % 3 else {}),
        }
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"accuracy": 0.5, "num-examples": 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def run(
    out, selector=None, *, strategy=None, until="40 rounds", traces="synthetic:60@desktops", **more
):
    """Simulate a short run with a record; further arguments as of `fedstale.simulate`."""
    made = strategy or FedBuff(8, 2, selector=selector, record=True, fraction_evaluate=0.1, seed=3)
    return fedstale.simulate(
        client(),
        strategy=made,
        initial_arrays={"w": np.zeros(2)},
        traces=traces,
        until=until,
        out=out,
        seed=1,
        **OPTIONS,
        **more,
    )


def lines_of(path):
    """Return the lines of a record without their ends."""
    return path.read_bytes().splitlines()


def written(path, lines):
    """Write lines, as they are, into a file, and return it."""
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def chained(lines):
    """Return lines with their numbers and hashes made right, as whoever rewrites them all does."""
    before, found = "0" * 64, []
    for number, line in enumerate(lines, start=1):
        facts = json.loads(line) | {"n": number, "before": before}
        found.append(json.dumps(facts, separators=(",", ":")).encode())
        before = sha256(found[-1]).hexdigest()
    return found


def changed(line, **facts):
    """Return a line with other facts; None takes one out."""
    found = {**json.loads(line), **facts}
    kept = {name: value for name, value in found.items() if name not in facts or value is not None}
    return json.dumps(kept, separators=(",", ":")).encode()
