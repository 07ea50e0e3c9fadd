"""One run of a strategy on recorded devices that hold the roles of a play, at a small scale.

The devices are those of `strategy_runs`; they train the built-in app `shakespeare` (see
`numpy_shakespeare`), each on the first sixteen of its lines of eighty characters. A job costs the
device as much as the app says of all of its lines, so only the arithmetic is small, not the time
that it stands for. The roles are dealt as the app deals them; who speaks what has nothing to do
with the device's speed.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from numpy_digits import read_model
from numpy_shakespeare import NumpyShakespeare, evaluate
from strategy_runs import (
    N_DEVICES,
    TIMEOUT_S,
    Curve,
    read_curve,
    slowest_third,
)

from fedstale.simulation import RunEnded, TraceGrid
from fedstale.simulation.flower_app import FlowerApp
from fedstale.strategies import StaleStrategy
from fedstale.traces import TraceSet

MOST = 16
"""Lines that a device trains on."""
TEST_EVERY, SLOW_EVERY, VERSIONS = 6, 2, 4
"""Every so many held-out lines, and versions, are evaluated."""


class PlaySetting:
    """Devices and roles of one seed."""

    def __init__(
        self, app: FlowerApp, traces: TraceSet, text: Path, seed: int, *, grid_s: float
    ) -> None:
        """Deal the roles to the devices.

        Args:
            app: shakespeare.
            traces: of the devices.
            text: file of the plays.
            seed: of the initial model and of all choices.
            grid_s: time between two readings of the accuracy.
        """
        app.load_client()
        from shakespeare_app import play, task  # only now, while the app is open

        self.app, self.seed, self.task, self.play = app, seed, task, play
        self.grid_s = grid_s
        self.config = app.run_config({"text": str(text.resolve()), "seed": seed})
        costs = app.costs.resolved(self.config)
        assert costs.work_per_example is not None
        assert costs.examples is not None
        work = costs.work_per_example * costs.examples / MOST
        self.costs = replace(costs, work_per_example=work, examples=MOST)
        self.traces = traces
        self.test = task.encode(play.held_out(str(text.resolve()))).numpy()[::TEST_EVERY]
        deal = play.deal(str(text.resolve()), N_DEVICES)
        slow = [
            task.split(task.encode(deal[i]))[1] for i in np.flatnonzero(slowest_third(self.traces))
        ]
        self.slow_test = np.concatenate([codes.numpy() for codes in slow])[::SLOW_EVERY]

    def run(self, strategy: StaleStrategy, until_s: float) -> Curve:
        """Return what a strategy reaches by some instant; "slow" are lines of the slow devices."""
        grid = TraceGrid(
            self.traces,
            NumpyShakespeare(self.task, self.play, MOST),
            costs=self.costs,
            seed=self.seed,
            run_config=self.config,
            until_s=until_s,
        )
        seen: list[tuple[float, float, float]] = []

        def look(version: int, arrays: ArrayRecord) -> MetricRecord | None:
            if version % VERSIONS:
                return None
            model = read_model(arrays)
            right = [evaluate(model, codes)[1] for codes in (self.test, self.slow_test)]
            seen.append((grid.now(), *right))
            return MetricRecord({"accuracy": right[0]})

        initial = ArrayRecord(self.task.Network(self.seed).state_dict())
        with grid.running(*self.app.packages), suppress(RunEnded):
            strategy.start(grid, initial, 10**6, TIMEOUT_S, evaluate_fn=look)
        return read_curve(np.array(seen), grid.events().to_pandas(), until_s, self.grid_s)
