"""Durations that devices state: what honest ones bring a run, and what wrong ones cost it."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedstale.simulation import Costs, TraceGrid
from fedstale.strategies import FedAvg
from fedstale.strategies.selection import BALANCED, Enough, ExpectedUtility, Random
from fedstale.strategies.stages import ForecastRequest
from fedstale.strategies.types import FORECAST_RECORD, History, SelectionContext
from fedstale.traces import TraceSet

N, SEEDS = 20, range(8)


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
    ("lie", "most"),
    [("honest", 0.5), ("permuted", 0.75), ("reversed", 0.62), ("slow ones low", 0.7)],
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
    np.testing.assert_equal(found, restored)
    return found


def test_a_statement_counts_by_how_well_earlier_ones_held():
    # As stated while statements hold, also where they are far from the median of those observed.
    assert shown([100.0, 900.0, 10.0], [100.0, 900.0, 10.0]) == 10.0
    assert 60.0 < shown([10.0], [100.0]) < 100.0
    assert 90.0 < shown([10.0] * 8, [100.0] * 8) < 100.0
    # A record of honest jobs does not buy belief in lies.
    assert 80.0 < shown([100.0] * 50 + [10.0] * 2, [100.0] * 52) < 100.0
    # Lies are forgotten as they came.
    assert shown([10.0] * 8 + [100.0] * 40, [100.0] * 48) == pytest.approx(100.0, rel=0.01)


@pytest.mark.parametrize("stated", [0.0, -5.0, 1e-320, 1e308])
def test_what_is_no_duration_is_not_weighed_into_one(stated):
    found = shown([stated] * 2, [100.0] * 2)
    assert np.isnan(found) if stated in {0.0, -5.0, 1e308} else 30.0 < found < 400.0


def fleet(said, n=100, seed=0):
    """n new devices after a job of each of n others; how long theirs take, and what they state."""
    rng = np.random.default_rng(seed)
    took, chance = 50.0 * np.exp(0.8 * rng.standard_normal(2 * n)), rng.uniform(size=2 * n)
    other = rng.permutation(2 * n) if said == "another's" else np.arange(2 * n)
    seconds = took[other] * {"ten times": 10.0, "in ms": 1000.0}.get(said, 1.0)
    if said == "some nonsense":
        seconds = np.where(rng.random(2 * n) < 0.05, 1e-9, seconds)
    history = History()
    for node in range(2 * n):
        stated = {"p_finish": float(chance[other[node]]), "duration_s": float(seconds[node])}
        history.forecast(node, stated, 0.0)
        if node >= n:
            continue
        history.picked(node, 0.0)
        facts = {"examples": 1.0, "loss": 1.0, "square_loss": 1.0, "staleness": 0, "version": 0}
        if rng.random() < chance[node]:
            history.finished(node, duration_s=float(took[node]), **facts)
        else:
            history.failed(node)
    again = History()
    again.load_state_dict(history.state_dict())
    step = SelectionContext(buffer_size=4, n_missing=4)
    new = again.candidates(np.arange(n, 2 * n), step)
    return new, took[n:], seconds[n:], chance[other][n:]


def slope(y, x):
    """By how much y rises with x."""
    return np.cov(x, y)[0, 1] / np.var(x)


@pytest.mark.parametrize(("said", "least", "most"), [("its own", 0.7, 1.1), ("another's", 0, 0.2)])
def test_what_new_devices_state_counts_as_far_as_statements_held_in_the_fleet(said, least, most):
    new, took, seconds, stated = fleet(said)
    logs = np.log(new.forecast_duration_s)
    assert least <= slope(logs, np.log(seconds)) <= most
    assert least <= slope(new.p_finish, stated) <= most
    if said == "its own":
        np.testing.assert_array_equal(new.forecast_duration_s, took)
    else:
        assert np.ptp(logs) < 0.3 * np.ptp(np.log(seconds))


@pytest.mark.parametrize(("said", "least"), [("ten times", 0.9), ("in ms", 0.5)])
def test_durations_of_a_fleet_that_states_multiples_of_its_own_are_put_right(said, least):
    new, took, *_ = fleet(said)
    found = np.log(new.forecast_duration_s)
    assert abs(np.median(found - np.log(took))) < 0.3
    assert slope(found, np.log(took)) > least


def test_a_few_devices_do_not_take_all_belief_from_the_others():
    found = []
    for seed in range(4):
        new, took, seconds, _ = fleet("some nonsense", seed=seed)
        true = seconds == took
        found.append(slope(np.log(new.forecast_duration_s)[true], np.log(took)[true]))
    assert np.mean(found) > 0.45


def test_more_jobs_are_enough_where_stated_durations_do_not_hold():
    n_sent = {}
    for said in ("its own", "ten times", "another's"):
        new = fleet(said)[0]
        sure = new.take(np.argsort(-new.p_finish)[:10])
        rng = np.random.default_rng(0)
        vars(sure)["p_finish"] = np.full(10, 0.95)
        n_sent[said] = len(Enough(Random()).select(sure, 10, 0.0, rng))
    assert n_sent["its own"] == n_sent["ten times"] == 4 < n_sent["another's"]
