"""Flower's wrappers around strategies of ours: its own loop, its differential privacy."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from virtual_grid import VirtualGrid, content, record

from fedstale.compat import stock_strategies_reporting
from fedstale.errors import ConfigError, FedstaleError
from fedstale.simulation import Costs, TraceGrid
from fedstale.strategies import (
    Compression,
    FedAdagrad,
    FedAdam,
    FedAsync,
    FedAvg,
    FedAvgM,
    FedAvgOverSelected,
    FedBuff,
    FedProx,
    FedYogi,
)
from fedstale.strategies.pace import Pace, Ramp
from fedstale.strategies.selection import Random
from fedstale.strategies.server.runtime import Callback
from fedstale.traces import TraceSet

pytestmark = pytest.mark.usefixtures("_identity")

PAIRS = {
    "FedAvg": (FedAvg, flower.FedAvg, {}),
    "FedProx": (FedProx, flower.FedProx, {"proximal_mu": 0.1}),
    "FedAvgM": (FedAvgM, flower.FedAvgM, {"server_learning_rate": 0.5, "server_momentum": 0.8}),
    "FedAdam": (FedAdam, flower.FedAdam, {"eta": 0.05}),
    "FedYogi": (FedYogi, flower.FedYogi, {"eta": 0.05}),
    "FedAdagrad": (FedAdagrad, flower.FedAdagrad, {"eta": 0.05}),
}


def fixed(strategy, noise=0.0):
    return flower.DifferentialPrivacyServerSideFixedClipping(strategy, noise, 0.7, 4)


def adaptive(strategy):
    return flower.DifferentialPrivacyServerSideAdaptiveClipping(strategy, 0.0, 4, 0.7)


def learner(k):
    """A node that goes a step towards a target of its own, and measures its distance from it."""
    target = np.random.default_rng(k).normal(size=5)

    def node(message, grid):
        w = message.content["arrays"]["w"].numpy()
        if message.metadata.message_type == "evaluate":
            metrics = {"num-examples": 1 + k, "distance": float(np.abs(w - target).sum())}
            return 1.0, RecordDict({"metrics": MetricRecord(metrics)})
        return 1.0 + k, content(record(w=w + 0.3 * (target - w)), 3 + 9 * k, train_loss=0.5 * k)

    return node


def run(strategy, nodes=None, **how):
    grid = VirtualGrid(nodes or {k: learner(k) for k in range(4)})
    return strategy.start(grid, record(w=np.zeros(5)), **{"num_rounds": 6, **how}), grid


@pytest.mark.parametrize("wrap", [fixed, adaptive])
@pytest.mark.parametrize("name", PAIRS)
def test_wrapped_strategies_agree_with_flowers_own_in_the_same_wrapper(name, wrap):
    ours, theirs, options = PAIRS[name]
    found, _ = run(wrap(ours(**options)))
    expected, _ = run(wrap(theirs(fraction_evaluate=0.0, **options)))
    bare, _ = run(ours(**options))
    w = found.arrays["w"].numpy()
    np.testing.assert_allclose(w, expected.arrays["w"].numpy(), rtol=1e-9, atol=1e-12)
    assert np.abs(w - bare.arrays["w"].numpy()).max() > 1e-3, "the wrapper has clipped something"
    for version in range(1, 7):
        assert dict(found.train_metrics_clientapp[version]) == pytest.approx(
            dict(expected.train_metrics_clientapp[version])
        )


def test_noise_of_a_wrapper_is_in_the_next_rounds_model():
    seen = []

    def node(message, grid):
        seen.append(message.content["arrays"]["w"].numpy())
        return 1.0, content(record(w=seen[-1] + 0.1), 5)

    result, _ = run(fixed(FedAvg(), noise=2.0), {0: node}, num_rounds=2)
    assert not seen[0].any()
    assert np.abs(seen[1]).min() > 0
    assert np.abs(result.arrays["w"].numpy() - seen[1]).min() > 0


def test_nodes_evaluate_the_model_that_the_wrapper_made():
    ours, _ = run(fixed(FedAvg(fraction_evaluate=1.0)))
    theirs, _ = run(fixed(flower.FedAvg(fraction_evaluate=1.0)))
    assert set(ours.evaluate_metrics_clientapp) == set(range(1, 7))
    for version, metrics in ours.evaluate_metrics_clientapp.items():
        expected = theirs.evaluate_metrics_clientapp[version]["distance"]
        assert metrics["distance"] == pytest.approx(expected)


def test_settings_of_a_round_reach_the_nodes():
    sent = []

    def node(message, grid):
        sent.append(dict(message.content["config"]))
        return 1.0, content(record(w=message.content["arrays"]["w"].numpy() + 0.1), 5)

    strategy = FedProx(proximal_mu=0.2, fraction_train=0.5)
    config = ConfigRecord({"lr": 0.1})
    run(fixed(strategy), dict.fromkeys(range(4), node), num_rounds=2, train_config=config)
    expected = {"lr": 0.1, "proximal-mu": 0.2}
    assert sent == [expected | {"server-round": i} for i in (1, 1, 2, 2)]


def test_bad_and_missing_replies_cost_a_wrapped_run_only_themselves():
    def silent(message, grid):
        return 1.0, None

    def wrong(message, grid):
        return 1.0, content(record(w=np.zeros(9)), 5)

    def infinite(message, grid):
        return 1.0, content(record(w=np.full(5, np.inf)), 5)

    one, _ = run(PlainWrapper(FedAvg()), {0: learner(0), 1: silent, 2: wrong, 3: infinite})
    two, _ = run(PlainWrapper(FedAvg()), {0: learner(0)})
    assert one.arrays["w"].numpy().tobytes() == two.arrays["w"].numpy().tobytes()


def test_rounds_without_any_good_reply_leave_the_model_alone():
    nodes = {0: lambda message, grid: (1.0, content(record(w=np.zeros(9)), 5))}
    result, _ = run(PlainWrapper(FedAvg()), nodes, num_rounds=3)
    assert not result.train_metrics_clientapp


def test_second_start_begins_anew():
    strategy = fixed(FedAdam(eta=0.05))
    one, two = run(strategy)[0], run(strategy)[0]
    assert one.arrays["w"].numpy().tobytes() == two.arrays["w"].numpy().tobytes()


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (FedBuff(4, 2), "FedBuff cannot be wrapped: with send='after_reply'"),
        (FedAsync(4), "FedAsync cannot be wrapped: with send='after_reply'"),
        (FedAvgOverSelected(3), "FedAvgOverSelected cannot be wrapped: with buffer_size=3"),
        (FedAvg(3, pace=Ramp(5)), r"FedAvg cannot be wrapped: with pace=Ramp"),
        (FedAvg(until="60s"), "FedAvg cannot be wrapped: with until="),
        (
            FedAvg(resume="somewhere"),
            "FedAvg cannot be wrapped: with resume=",
        ),
        (
            FedAvg(stages=[Compression("int4")]),
            "FedAvg cannot be wrapped with the stage Compression",
        ),
    ],
)
def test_strategies_without_rounds_refuse_a_wrapper_before_anything_is_sent(strategy, says):
    grid = VirtualGrid({k: learner(k) for k in range(4)})
    with pytest.raises(ConfigError, match=says):
        fixed(strategy).start(grid, record(w=np.zeros(5)))
    assert not grid.sent


class OneMore(Random, Pace):
    """A selector that is a pace: one job at first, one more in each round."""

    def numbers(self, at):
        return min(at.version + 1, at.concurrency), 1


@pytest.mark.parametrize(("selector", "sent"), [(None, [3, 3, 3]), (OneMore(), [1, 2, 3])])
def test_a_wrapped_strategy_sends_to_as_many_nodes_as_it_says(selector, sent):
    result, grid = run(fixed(FedAvg(3, selector=selector)), num_rounds=3)
    rounds = [message.metadata.group_id for _, message in grid.sent]
    assert [rounds.count(round_) for round_ in dict.fromkeys(rounds)] == sent
    # All replies of a round are waited for.
    assert len(result.train_metrics_clientapp) == 3


def test_asynchronous_strategies_refuse_a_wrapper_with_a_loop_of_its_own():
    with pytest.raises(ConfigError, match="cannot be wrapped"):
        run(OwnLoop(FedBuff(4, 2)))


def test_steps_out_of_order_are_refused():
    with pytest.raises(FedstaleError, match="configure_train begins a round"):
        FedAvg().aggregate_train(1, [])


def test_wrapped_run_on_simulated_devices_has_one_job_a_device_and_round():
    app = ClientApp()

    @app.train()
    def train(message, context):
        moved = record(w=message.content["arrays"]["w"].numpy() + 0.1)
        return Message(content(moved, 5), reply_to=message)

    grid = TraceGrid(TraceSet.ideal(4), app, costs=Costs(work_per_example=1, epochs=1, examples=5))
    versions = []
    grid.runtime.add(Versions(versions))
    with stock_strategies_reporting(grid.runtime), grid.running():
        fixed(FedAvg(), noise=1.0).start(grid, record(w=np.zeros(5)), num_rounds=3)
    events = grid.events().to_pandas()
    assert events.status.tolist() == ["reported"] * 12
    assert [version for version, _ in versions] == [1, 2, 3]
    assert all(arrays["w"].numpy().any() for _, arrays in versions), "they have the noise in them"


class Versions(Callback):
    def __init__(self, seen):
        self.seen = seen

    def new_version(self, run, version, arrays, updates):
        self.seen.append((version, arrays))


class PlainWrapper(flower.Strategy):
    """Passes everything on."""

    def __init__(self, strategy):
        self.strategy = strategy
        for verb in ("train", "evaluate"):
            for step in ("configure", "aggregate"):
                name = f"{step}_{verb}"
                setattr(self, name, getattr(strategy, name))

    def configure_train(self, *args):
        raise NotImplementedError

    aggregate_train = configure_evaluate = aggregate_evaluate = configure_train

    def summary(self):
        self.strategy.summary()


class OwnLoop(PlainWrapper):
    """Runs a loop of its own, and asks for no summary."""

    def start(self, grid, initial_arrays, num_rounds, **_):
        for number in range(1, num_rounds + 1):
            messages = self.configure_train(number, initial_arrays, ConfigRecord(), grid)
            self.aggregate_train(number, grid.send_and_receive(messages))
