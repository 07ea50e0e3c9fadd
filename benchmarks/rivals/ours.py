"""Run fedstale through a scenario that others are given, too."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from scenario import Answer, Model, Scenario, answer, clock

from fedstale.simulation import Costs, TraceGrid
from fedstale.simulation.devices import FIRST_NODE_ID
from fedstale.strategies import FedAsync, FedAvg, FedBuff
from fedstale.strategies.schedule import k_batch_async
from fedstale.strategies.selection import Selector
from fedstale.strategies.types import Candidates
from fedstale.traces import Availability, Series, TraceSet
from fedstale.version import __version__

Train = Callable[[int, Model, int], Model]
"""From a client's number, its model and the round to the model that it returns."""


class AsVsim(Selector):
    """Draws as APPFL's `AsyncSimDriver` does: by Python's generator, from the free clients."""

    def __init__(self, seed: int = 0) -> None:
        """Seed the generator."""
        self.seed, self._rng = seed, random.Random(seed)

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Draw without replacement."""
        free = sorted(candidates.node_ids.tolist())
        return self._rng.sample(free, min(k, len(free)))


def client(train_one: Train) -> ClientApp:
    """Return clients that train as a function says."""
    app, metrics = ClientApp(), MetricRecord({"num-examples": 1})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        config, arrays = message.content["config"], message.content["arrays"]
        model = train_one(number, arrays.to_numpy_ndarrays(), config["server-round"])
        content = {"arrays": ArrayRecord(model), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    return app


def traces(scenario: Scenario) -> TraceSet:
    """Return devices that are always online, with the scenario's rates."""
    link = Series.constant(np.array(scenario.mbit_per_s) * 1e6)
    return TraceSet(
        device_ids=pd.Index([f"device{i}" for i in range(scenario.n)]),
        availability=Availability.always(scenario.n),
        compute=Series.constant(1 / np.array(scenario.slowdown)),
        downlink=link,
        uplink=link,
        compute_unit="a second of a client that is not slowed down",
    )


def strategy(scenario: Scenario) -> FedAvg | FedAsync | FedBuff:
    """Return the rule of a scenario, with its options: `distinct` is the schedule's."""
    common = {**scenario.options, "selector": AsVsim(scenario.seed), "seed": scenario.seed}
    is_distinct = common.pop("distinct", False)
    if scenario.rule == "FedAvg":
        return FedAvg(scenario.n, **common)
    if scenario.rule == "FedAsync":
        return FedAsync(scenario.in_flight, mix=scenario.mix, **common)
    jobs, size = scenario.in_flight, scenario.buffer_size
    schedule = replace(k_batch_async(jobs, size), distinct=is_distinct)
    return FedBuff(jobs, size, schedule=schedule, **common)


def grid_of(scenario: Scenario, train: Train, model_bytes: int | None = None) -> TraceGrid:
    """Return the devices of a scenario; the work of a message is its steps."""
    work = {"train": scenario.step_s * scenario.steps}
    costs = Costs(work=work, model_bytes=model_bytes)
    return TraceGrid(traces(scenario), client(train), costs=costs, seed=scenario.seed)


def envelope_bytes(scenario: Scenario) -> int:
    """Return what a message holds besides the model, in bytes; a reply holds as much."""
    grid = grid_of(scenario, lambda number, model, server_round: model)
    with grid.running():
        FedAvg(1).start(grid, ArrayRecord(scenario.first()), num_rounds=1, timeout=1e9)
    job = grid.events().to_pylist()[0]
    assert job["downloaded_bytes"] == job["uploaded_bytes"]
    return int(job["downloaded_bytes"]) - scenario.model_bytes


def run(scenario: Scenario) -> Answer:
    """Return what fedstale makes of a scenario.

    Others charge a client the bytes of the parameters alone. Here the model counts for as many
    fewer as a message holds besides it.
    """

    def train(number: int, model: Model, server_round: int) -> Model:
        return scenario.train(number, model)

    began = clock()
    model_bytes = scenario.model_bytes - envelope_bytes(scenario) if scenario.data else None
    grid, chosen = grid_of(scenario, train, model_bytes), strategy(scenario)
    each = {"FedAvg": scenario.n, "FedBuff": scenario.buffer_size, "FedAsync": 1}[scenario.rule]
    ready = clock()
    with grid.running():
        first = ArrayRecord(scenario.first())
        result = chosen.start(grid, first, num_rounds=scenario.updates // each, timeout=1e9)
    done = clock()
    jobs = grid.events().to_pandas()
    merged = jobs[jobs.aggregated_version >= 0].sort_values("reported_at", kind="stable")
    events = [
        (row.reported_at, row.node_id - FIRST_NODE_ID, row.base_version, row.sent_at)
        for row in merged.itertuples()
    ]
    model = result.arrays.to_numpy_ndarrays()
    return Answer(__version__, events, model, done - ready, ready - began)


if __name__ == "__main__":
    answer(run)
