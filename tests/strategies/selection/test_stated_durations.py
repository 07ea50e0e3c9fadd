"""Durations that devices state: what honest ones bring a run, and what wrong ones cost it."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedstale.simulation import Costs, TraceGrid
from fedstale.strategies import FedAvg
from fedstale.strategies.selection import BALANCED, ExpectedUtility, Random
from fedstale.strategies.stages import ForecastRequest
from fedstale.strategies.types import FORECAST_RECORD, History
from fedstale.traces import TraceSet

N, SEEDS = 20, (0, 1, 2)


def client(stated):
    app = ClientApp()

    def forecast(context):
        duration = float(stated[int(context.node_config["partition-id"])])
        return ConfigRecord({"p_finish": 0.9, "duration_s": duration, "p_available": 0.9})

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"num-examples": 50, "train_loss": 1.0})
        content = {"arrays": message.content["arrays"], "metrics": metrics}
        content[FORECAST_RECORD] = forecast(context)
        return Message(RecordDict(content), reply_to=message)

    @app.query("forecast")
    def ask(message, context):
        return Message(RecordDict({FORECAST_RECORD: forecast(context)}), reply_to=message)

    return app


def seconds(selector, lie, seed):
    """How long twelve rounds take on devices whose speeds are far apart."""
    rng = np.random.default_rng(seed)
    true = 50.0 * np.exp(0.8 * rng.standard_normal(N))
    rank = np.argsort(np.argsort(true))
    stated = {
        "honest": true,
        "permuted": true[rng.permutation(N)],
        "reversed": np.sort(true)[::-1][rank],
        "slow ones low": np.where(rank >= 0.7 * N, true / 10.0, true),
    }[lie]
    traces = TraceSet.constant(N, compute=50.0 / true, downlink_bit_per_s=1e9, uplink_bit_per_s=1e9)
    costs = Costs(work_per_example=1.0, epochs=1, examples=50, model_bytes=1000)
    grid = TraceGrid(traces, client(stated), costs=costs, seed=seed)
    stages = [ForecastRequest(wait_s=1.0, older_than_s=1e9)]
    with grid.running():
        strategy = FedAvg(4, selector=selector, seed=seed, stages=stages)
        strategy.start(grid, ArrayRecord([np.zeros(8)]), num_rounds=12, timeout=1e4)
    return grid.now()


@pytest.mark.parametrize(
    ("lie", "most"), [("honest", 0.5), ("permuted", 0.8), ("reversed", 0.8), ("slow ones low", 0.7)]
)
def test_selection_by_stated_durations_is_no_slower_than_random_whatever_they_are(lie, most):
    found = [
        seconds(ExpectedUtility(BALANCED), lie, seed) / seconds(Random(), lie, seed)
        for seed in SEEDS
    ]
    assert np.mean(found) < most, found


def shown(stated, observed):
    """The duration that a selector sees after jobs before which others were stated."""
    history = History()
    for before, took in zip(stated, observed, strict=True):
        history.forecast(7, {"duration_s": before}, 0.0)
        history.picked(7, 0.0)
        history.forecast(7, {"duration_s": stated[-1]}, 0.0)
        facts = {"examples": 1.0, "loss": 1.0, "square_loss": 1.0, "staleness": 0, "version": 0}
        history.finished(7, duration_s=took, **facts)
    again = History()
    again.load_state_dict(history.state_dict())
    found, restored = (each.candidates([7]).forecast_duration_s[0] for each in (history, again))
    assert found == restored
    return found


def test_a_statement_counts_by_how_well_earlier_ones_held():
    # As stated while statements hold, also where they are far from the median of those observed.
    assert shown([100.0, 900.0, 10.0], [100.0, 900.0, 10.0]) == 10.0
    assert 60.0 < shown([10.0], [100.0]) < 100.0
    assert 90.0 < shown([10.0] * 8, [100.0] * 8) < 100.0
    # A record of honest jobs does not buy belief in lies.
    assert 80.0 < shown([100.0] * 50 + [10.0] * 2, [100.0] * 52) < 100.0
    # Lies are forgotten as they came.
    assert shown([10.0] * 8 + [100.0] * 40, [100.0] * 48) == pytest.approx(100.0)


@pytest.mark.parametrize("stated", [0.0, -5.0, 1e-320, 1e308])
def test_what_is_no_duration_is_not_weighed_into_one(stated):
    found = shown([stated] * 2, [100.0] * 2)
    assert found == stated if stated <= 0.0 else 30.0 < found < 400.0
