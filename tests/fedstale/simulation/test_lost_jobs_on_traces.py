"""Jobs that fail and updates that are too stale, on devices replayed from traces."""

import numpy as np
import pandas as pd
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from tiny import counting_app, fleet

import fedstale
from fedstale.strategies import REFL, FedAvg, FedBuff, Validation
from fedstale.strategies.schedule import k_sync
from fedstale.strategies.server.runtime import Callback

COSTS = {
    "work_per_example": 1.0,
    "evaluate_work_per_example": 0.5,
    "epochs": 1,
    "examples": 10,
    "model_bytes": 10**6,
}


class Versions(Callback):
    """Notes when each version was made."""

    def __init__(self):
        self.at = []

    def new_version(self, run, version, arrays, updates):
        self.at.append(run.now())


def model():
    return ArrayRecord({"0": Array(np.zeros(3, np.float32))})


@pytest.mark.parametrize("make", [lambda: REFL(3, 2), lambda: FedAvg(schedule=k_sync(3, 2))])
def test_a_round_does_not_wait_for_a_straggler_while_six_free_nodes_are_online(make_grid, make):
    # The first leaves with its job, the second takes 12 s, the third 1,000 s; six more come at 1 s.
    windows = [[(0.0, 5.0)], [(0.0, 2000.0)], [(0.0, 2000.0)], *([[(1.0, 2000.0)]] * 6)]
    grid = make_grid(windows, length=2000.0, compute=[1.0, 1.0, 0.01, *([1.0] * 6)])
    versions = Versions()
    grid.runtime.add(versions)
    make().start(grid, model(), num_rounds=1)
    # The server learns by heartbeat at 65 s that the first is gone; its replacement takes 12 s.
    assert versions.at == [pytest.approx(77.0, abs=0.1)]
    jobs = pd.DataFrame(grid.events().to_pylist())
    assert len(jobs) == 4
    assert jobs["started_at"].iloc[-1] == pytest.approx(65.0, abs=0.1)


def test_too_stale_updates_are_rejected_with_their_reason_in_events_and_summary(tmp_path):
    traces = fleet([[(0.0, 4000.0)]] * 6, length=4000.0, compute=[1.0] * 5 + [0.05])
    run = fedstale.simulate(
        counting_app(),
        strategy=FedBuff(6, 2, validation=Validation(max_staleness=4), seed=1),
        initial_arrays=model(),
        traces=traces,
        until="200 rounds",
        out=tmp_path / "run",
        **COSTS,
    )
    rejected = run.jobs[run.jobs["status"] == "rejected"]
    slow = traces.device_ids[-1]
    assert set(rejected["device_id"]) == {slow}
    reason = "too stale: more than max_staleness = 4 versions behind"
    assert set(rejected["reason"]) == {reason}
    assert run.summary["rejected"] == {reason: len(rejected)}
    assert run.summary["jobs"]["rejected"] == len(rejected) >= 2
    assert run.jobs["staleness"].max() <= 4
    # The slow device starts again at once: its next job begins where its last one ended.
    mine = run.jobs[run.jobs["device_id"] == slow]
    again = mine["started_at"].to_numpy()[1:] - mine["ended_at"].to_numpy()[:-1]
    assert again == pytest.approx(0.0, abs=1.0)


def test_a_node_that_leaves_does_not_hold_the_last_evaluation(make_grid):
    # Training takes 12 s; evaluation 6 s and more. The last device comes back for the training of
    # others only after an hour.
    windows = [[(0.0, 9000.0)], [(0.0, 9000.0)], [(0.0, 14.0), (8000.0, 9000.0)]]
    ends = {}
    for name, strategy in {
        "here": FedAvg(fraction_evaluate=1.0),
        "flower": FlowersFedAvg(fraction_evaluate=1.0, min_available_nodes=2),
    }.items():
        grid = make_grid(windows, length=9000.0, on_interrupt="pause")
        result = strategy.start(grid, model(), num_rounds=1)
        ends[name] = grid.now()
        assert result.evaluate_metrics_clientapp[1]["accuracy"] == 0.5
    assert ends["here"] == pytest.approx(12.0 + 24.0, abs=1.0)
    assert ends["flower"] > 3600.0
