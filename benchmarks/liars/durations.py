"""How fast selection is that goes by stated durations, where devices state those of others.

Forty devices whose jobs take from seconds to minutes, eight of them picked for each of 20 versions,
which wait for the last one. A selector that goes by durations is compared with `Random` on the same
devices, by the virtual time that the run took: as selectors read a stated duration, and with all of
the belief in it that they had at first.

    OMP_NUM_THREADS=1 python benchmarks/liars/durations.py
"""

import argparse
import logging
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedstale.agents import AgentSelector
from fedstale.simulation import Costs, TraceGrid
from fedstale.strategies import FedAvg
from fedstale.strategies.selection import BALANCED, ExpectedUtility, Oort, Random, Selector
from fedstale.strategies.stages import ForecastRequest
from fedstale.strategies.types import FORECAST_RECORD, Candidates
from fedstale.traces import TraceSet
from fedstale.traces.arrays import Array

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import write_result

Row = dict[str, Any]
NAME = "stated_durations"
N, PICKED, VERSIONS, SEEDS = 40, 8, 20, 10
MEDIAN_S, SPREAD, NOISE = 50.0, 0.8, 0.3
"""Of a job; the spread between devices and between jobs of one is that of a logarithm."""
SELECTORS: dict[str, Callable[[], Selector]] = {
    "ExpectedUtility(BALANCED)": lambda: ExpectedUtility(BALANCED),
    "Oort": Oort,
    "agent": AgentSelector,
}
WAYS = ("as stated", "weighed")


def lies(true: Array, rng: np.random.Generator) -> dict[str, Array]:
    """Return what devices state whose jobs take so many seconds, by what they lie."""
    by_rank = np.argsort(np.argsort(true))
    return {
        "their own": true,
        "another's": true[rng.permutation(N)],
        "the opposite's": np.sort(true)[::-1][by_rank],
        "a tenth, slowest 30 %": np.where(by_rank >= 0.7 * N, true / 10.0, true),
    }


def client(stated: Array, seed: int) -> ClientApp:
    """Return clients that state a duration, and whose jobs differ by chance."""
    app = ClientApp()

    def forecast(device: int) -> ConfigRecord:
        seconds = float(stated[device])
        return ConfigRecord({"p_finish": 0.9, "duration_s": seconds, "p_available": 0.9})

    @app.train()
    def train(message: Message, context: Any) -> Message:
        device = int(context.node_config["partition-id"])
        version = int(message.content["config"]["server-round"])
        noise = np.exp(NOISE * np.random.default_rng((seed, device, version)).standard_normal())
        metrics = MetricRecord({"num-examples": round(MEDIAN_S * noise), "train_loss": 1.0})
        content = {"arrays": message.content["arrays"], "metrics": metrics}
        content[FORECAST_RECORD] = forecast(device)
        return Message(RecordDict(content), reply_to=message)

    @app.query("forecast")
    def ask(message: Message, context: Any) -> Message:
        device = int(context.node_config["partition-id"])
        return Message(RecordDict({FORECAST_RECORD: forecast(device)}), reply_to=message)

    return app


def seconds(selector: Selector, lie: str, seed: int) -> float:
    """Return how long a run takes."""
    rng = np.random.default_rng((seed, 7))
    true = MEDIAN_S * np.exp(SPREAD * rng.standard_normal(N))
    rates = MEDIAN_S / true
    traces = TraceSet.constant(N, compute=rates, downlink_bit_per_s=1e9, uplink_bit_per_s=1e9)
    costs = Costs(work_per_example=1.0, epochs=1, examples=int(MEDIAN_S), model_bytes=1000)
    grid = TraceGrid(traces, client(lies(true, rng)[lie], seed), costs=costs, seed=seed)
    stages = [ForecastRequest(wait_s=1.0, older_than_s=1e9)]
    with grid.running():
        strategy = FedAvg(PICKED, selector=selector, seed=seed, stages=stages)
        strategy.start(grid, ArrayRecord([np.zeros(8)]), num_rounds=VERSIONS, timeout=1e5)
    return grid.now()


def as_stated(candidates: Candidates) -> Array:
    """Return stated durations without the weight that earlier ones give them."""
    found: Array = candidates._table.columns["forecast_duration_s"][candidates._rows]
    return found


def measured(name: str, lie: str, way: str, seeds: int) -> Row:
    """Return the time of a selector in proportion to Random's, as a mean and its interval."""
    found = []
    for seed in range(seeds):
        random = seconds(Random(), lie, seed)
        if way == "weighed":
            found.append(seconds(SELECTORS[name](), lie, seed) / random)
            continue
        with patch.object(Candidates, "forecast_duration_s", property(as_stated)):
            found.append(seconds(SELECTORS[name](), lie, seed) / random)
    # 95 % by Student's t with as many degrees of freedom as SEEDS less 1.
    half = 2.26 * float(np.std(found, ddof=1)) / len(found) ** 0.5
    mean = float(np.mean(found))
    triple = [round(x, 3) for x in (mean, mean - half, mean + half)]
    return {"selector": name, "stated": lie, "way": way, "time": triple}


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a selector and two seeds")
    quick = parser.parse_args().quick
    logging.disable(logging.WARNING)
    said = list(lies(np.ones(N), np.random.default_rng(0)))
    rows = []
    for name, lie, way in product(list(SELECTORS)[: 1 if quick else None], said, WAYS):
        rows.append(measured(name, lie, way, 2 if quick else SEEDS))
        print(rows[-1], flush=True)
    command = "OMP_NUM_THREADS=1 python benchmarks/liars/durations.py"
    print(write_result(NAME, rows, command=command, quick=quick))


if __name__ == "__main__":
    main()
