"""Merge models by the Fisher information of each parameter, in few merges and in a stream of them.

Beside its weights theta_k a device sends the diagonal F_k of its empirical Fisher: the mean square
of a gradient, over its n_k digits. The server merges by it: sum n_k F_k theta_k / sum n_k F_k.
A reply is twice as large, so a stream has fewer of them.

Matena, Raffel. Merging Models with Fisher-Weighted Averaging. NeurIPS 2022.
Jhunjhunwala, Wang, Joshi. FedFisher: Leveraging Fisher Information for One-Shot Federated Learning.
AISTATS 2024. Here F_k is at the labels of the digits, not at those that the model would draw.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits

from fedstale.simulation import Costs, RunEnded, TraceGrid
from fedstale.strategies import FedAvg, FedBuff, Stage, StaleStrategy
from fedstale.strategies.schedule import Schedule
from fedstale.strategies.types import ClientUpdate, End, Job, Model, RejectionError, require
from fedstale.traces import TraceSet

N, STEPS, WORK, HOUR_S = 60, 40, 300.0, 3600.0
SEEDS, OTHER_SEEDS, DAMPINGS = range(1, 6), range(11, 14), (1e-3, 1e-5, 1e-7)
pixels, labels = load_digits(return_X_y=True)
pixels, wanted = pixels / 16, np.eye(10)[labels]


class FisherMean(Stage):
    """Turns a mean by examples into sum n F delta / sum n F, with F + damping in the place of F.

    A device that sends no Fisher counts by the damping alone; if none does, it is the mean. Who
    overstates it owns the merge: devices are trusted with it. With `update="model"` a stale model
    is merged by the formula; else its change from the version that it started from is.
    """

    saved = ("_fishers",)

    def __init__(self, damping: float) -> None:
        require(damping > 0, "FisherMean.damping", damping, "a number > 0")
        self.damping = damping
        self._fishers: dict[str, Model] = {}
        """Those of replies, by the messages that they answer, until their server step."""

    def check(self, strategy: StaleStrategy) -> None:
        """Raise ConfigError if updates count by anything else."""
        normalise, robust = strategy.normalise, strategy.robust
        require(normalise == "examples", "normalise", normalise, "'examples' with FisherMean")
        require(robust is None, "robust", robust, "None with FisherMean")

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Take the Fisher of a reply, if it has the form of its arrays."""
        if job.purpose != "train" or "fisher" not in content:
            return
        arrays, record = content.get("arrays"), content["fisher"]
        is_like = isinstance(record, ArrayRecord) and isinstance(arrays, ArrayRecord)
        if not is_like or set(record) != set(arrays):
            raise RejectionError("fisher", "fisher is no ArrayRecord with the names of arrays")
        self._fishers[job.message_id] = {
            name: checked(name, stored, tuple(arrays[name].shape))
            for name, stored in record.items()
        }

    def ended(self, job: Job, end: End) -> None:
        """Forget the Fisher of a reply that was rejected for something else, or left out."""
        if end.how != "accepted":
            self._fishers.pop(job.message_id, None)

    def accepted(self, update: ClientUpdate) -> None:
        """Multiply an update by its Fisher, once its staleness has been weighed."""
        for name, delta in update.delta.items() if update.weight >= 0 else ():
            np.multiply(delta, self._factor(update, name), out=delta)

    def step(self, mean: Model, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Divide the mean by that of the Fishers."""
        n = sum(update.examples for update in updates)
        for name, array in mean.items():
            total = sum(each.examples / n * self._factor(each, name) for each in updates)
            np.divide(array, total, out=array)
        for update in updates:
            self._fishers.pop(update.message_id, None)
        return {}

    def _factor(self, update: ClientUpdate, name: str) -> np.ndarray | float:
        return self._fishers.get(update.message_id, {}).get(name, 0.0) + self.damping


def checked(name: str, stored: Array, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of a Fisher, or raise RejectionError; large ones would leave float32."""
    try:
        fisher = stored.numpy()
    except Exception as problem:
        raise RejectionError("fisher", f"fisher[{name!r}] cannot be read") from problem
    if fisher.shape != shape or fisher.dtype.kind != "f":
        raise RejectionError("fisher", f"fisher[{name!r}] is not of floats in the shape {shape}")
    if not ((fisher >= 0) & (fisher <= 1e6)).all():
        raise RejectionError("fisher", f"fisher[{name!r}] is not within 0 and 1e6")
    return fisher


@cache
def dealt(seed: int) -> list[np.ndarray]:
    """Return the digits of each device, which has some of the classes."""
    uneven = np.random.default_rng(seed).normal(labels, 1).argsort()
    return np.array_split(uneven, N)


def train(message: Message, context: Context) -> Message:
    """Take steps of a softmax regression on this device's digits, and measure its Fisher there."""
    place, seed = int(context.node_config["partition-id"]), int(context.run_config["seed"])
    own = dealt(seed)[place]
    x, y = pixels[own], wanted[own]
    weights = message.content.array_records["arrays"]["weights"].numpy()

    def error() -> np.ndarray:
        scores = np.exp(x @ weights)
        return scores / scores.sum(1, keepdims=True) - y

    for _ in range(STEPS):
        weights = weights - x.T @ error() / len(own)
    reply = {
        "arrays": ArrayRecord({"weights": Array(weights)}),
        "metrics": MetricRecord({"num-examples": len(own)}),
    }
    if context.run_config["fisher"]:
        squares = (x**2).T @ error() ** 2  # an element of a gradient is a pixel times an error
        reply["fisher"] = ArrayRecord({"weights": Array(squares / len(own))})
    return Message(RecordDict(reply), reply_to=message)


@cache
def phones(seed: int) -> TraceSet:
    """Return the devices of a seed."""
    return TraceSet.synthetic(N, days=1, seed=seed, time_zones="spread")


def run(seed: int, damping: float | None, days: int) -> list[tuple[float, float]]:
    """Return the hour and the accuracy of each version; without a damping, of the mean.

    Args:
        seed: of devices, their digits, and the strategy.
        damping: of FisherMean; None for the mean.
        days: with one merge each of a reply of each device; 0 for a stream.
    """
    app = ClientApp()
    app.train()(train)
    grid = TraceGrid(
        phones(seed),
        app,
        costs=Costs(model_bytes=14_000_000, constant_replies=True),
        seed=seed,
        run_config={"seed": seed, "fisher": damping is not None},
        until_s=(24 * days + 1 if days else 8) * HOUR_S,
        work=lambda message: WORK,
    )
    found = []

    def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord:
        told = (pixels @ arrays["weights"].numpy()).argmax(1)
        found.append((grid.now() / HOUR_S, float((told == labels).mean())))
        return MetricRecord({"accuracy": found[-1][1]})

    stages = [] if damping is None else [FisherMean(damping)]
    stream = FedBuff(20, 5, normalise="examples", stages=stages, seed=seed)
    once = Schedule(
        buffer_size=N, send="after_reply", distinct=True, deadline_s=24 * HOUR_S, recheck_s=1800.0
    )
    daily = FedAvg(schedule=once, stages=stages, seed=seed)
    strategy, n_versions = (daily, days) if days else (stream, 10**6)
    initial = ArrayRecord({"weights": Array(np.zeros((64, 10)))})
    with grid.running(), suppress(RunEnded):
        strategy.start(grid, initial, n_versions, 24 * HOUR_S, evaluate_fn=evaluate)
    return found


def accuracy(found: list[tuple[float, float]], until: float, n: int) -> float:
    """Return the mean accuracy of the last n versions until an hour."""
    return float(np.mean([value for hour, value in found if hour <= until][-n:]))


if __name__ == "__main__":
    once = [np.median([run(seed, d, 1)[-1][1] for seed in OTHER_SEEDS]) for d in DAMPINGS]
    best = DAMPINGS[int(np.argmax(once))]
    print(f"damping {best:g}: of {DAMPINGS} the best for one merge, on other seeds")
    by_days = {
        days: [[run(seed, damping, days) for seed in SEEDS] for damping in (None, best)]
        for days in (5, 0)
    }
    for what, days, until, n in (
        ("one merge, after a day", 5, 24.5, 1),
        ("five merges, in five days", 5, 120.5, 1),
        ("a stream of 4 hours", 0, 4, 5),
        ("a stream of 8 hours", 0, 8, 5),
    ):
        mean, fisher = (
            np.array([accuracy(found, until, n) for found in runs]) for runs in by_days[days]
        )
        texts = [
            f"{np.median(each):.2f} ({each.min():.2f} to {each.max():.2f})"
            for each in (mean, fisher)
        ]
        better = f"better in {(fisher > mean).sum()} of {len(SEEDS)} seeds"
        print(f"{what}: {texts[0]} by the mean, {texts[1]} by Fisher, {better}")
