"""Runs over Flower's own grid and objects, with nodes that pack and nodes that do not."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig
from flwr.server.compat import LegacyContext
from flwr.server.strategy import FedAvg as OlderFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    FedAvg,
)
from loop_link import LoopLink, grid_of, n_objects, quick_grid_of

from fedstale.client import ForecastMod, PackMod
from fedstale.strategies import FedBuff
from fedstale.strategies.server import packing
from fedstale.strategies.server.packing import (
    PACKED_RECORD,
    PACKING_RECORD,
    can_unpack,
    pack,
    unpack,
)
from fedstale.strategies.server.superlink import without_stalls

N_ARRAYS, N_NODES = 8, 4
NODES = range(101, 101 + N_NODES)

pytestmark = pytest.mark.usefixtures("_identity")


def client(mods=(), around=None):
    """Return a ClientApp that moves each array by the number of its node."""
    app = ClientApp(mods=list(mods)) if around is None else around.client_app(list(mods))

    @app.train()
    def train(message, context):
        assert set(message.content) == {"arrays", "config"}
        # Means of such numbers are exact, so the order of replies does not matter.
        step = np.float32(0.25 * (context.node_config["partition-id"] + 1))
        arrays = {
            k: Array(np.asarray(a.numpy() + step)) for k, a in message.content["arrays"].items()
        }
        metrics = MetricRecord({"num-examples": 3, "loss": 0.5})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def initial():
    rng = np.random.default_rng(0)
    shapes = [(1,), (0,), *((i, 3) for i in range(1, N_ARRAYS - 1))]
    made = {f"w{i}": rng.integers(-9, 9, shape) / 4 for i, shape in enumerate(shapes)}
    return ArrayRecord({k: Array(np.asarray(a, np.float32)) for k, a in made.items()})


def fedavg(n=N_NODES):
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=n, min_available_nodes=n)


def run(apps, strategy=None, rounds=3, nodes=NODES):
    """Return the SuperLink after a run, and the result."""
    link = LoopLink(apps if isinstance(apps, dict) else dict.fromkeys(nodes, apps))
    with without_stalls(quick_grid_of(link)) as grid:
        result = (strategy or fedavg()).start(grid, initial(), num_rounds=rounds, timeout=60.0)
    return link, result


def bits(result):
    return {name: array.data for name, array in result.arrays.items()}


def by_round(trees):
    """Return the numbers of objects of messages, by round."""
    counts = [n_objects(tree) for _, tree in trees]
    return [set(counts[i : i + N_NODES]) for i in range(0, len(counts), N_NODES)]


@pytest.mark.parametrize(
    "packing", [client([PackMod()]), client(around=ForecastMod()), client([ForecastMod()])]
)
def test_a_packed_run_has_the_same_model_bit_for_bit_in_fewer_objects(packing):
    plain, expected = run(client())
    link, result = run(packing)
    assert bits(result) == bits(expected)
    assert any(array.numpy().any() for array in result.arrays.values())
    # The first message goes as it is, since no node has said that it unpacks; so does its reply.
    first, *others = by_round(link.sent)
    assert first == by_round(plain.sent)[0]
    assert len(others) == 2
    assert max(map(max, others)) < min(first) - N_ARRAYS
    first, *others = by_round(link.answered)
    assert max(map(max, others)) < min(first) - N_ARRAYS


def test_nodes_with_the_mod_and_without_work_in_one_run():
    apps = {node: client([PackMod()]) if node % 2 else client() for node in NODES}
    _, expected = run(client())
    link, result = run(apps)
    assert bits(result) == bits(expected)
    last = link.sent[-N_NODES:]
    packed = {node: n_objects(tree) for node, tree in last}
    assert packed[101] == packed[103] < packed[102] == packed[104]


def test_asynchronous_strategies_see_what_they_saw():
    def buffered():
        return FedBuff(concurrency=1, buffer_size=1, seed=1)

    _, expected = run(client(), buffered(), rounds=8)
    _, result = run(client([PackMod()]), buffered(), rounds=8)
    assert bits(result) == bits(expected)


def test_another_server_sees_plain_arrays_and_one_record_more():
    link = LoopLink(dict.fromkeys(NODES, client([PackMod()])))
    result = fedavg().start(grid_of(link), initial(), num_rounds=2, timeout=60.0)
    assert bits(result) == bits(run(client(), rounds=2)[1])
    assert len(set.union(*by_round(link.answered))) == 1


def test_a_simulated_node_states_nothing_and_packs_nothing():
    message = Message(RecordDict({"arrays": initial(), "config": MetricRecord()}), 1, "train")
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    assert can_unpack(client([PackMod()])(message, context).content)
    context.device = object()
    assert PACKING_RECORD not in client([PackMod()])(message, context).content


def test_a_message_that_cannot_be_unpacked_is_answered_with_an_error():
    content = pack(RecordDict({"arrays": initial()}))
    content[PACKING_RECORD]["checksum"] = 1
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    reply = client([PackMod()])(Message(content, 1, "train"), context)
    assert "checksum" in reply.error.reason


def test_a_reply_that_cannot_be_unpacked_costs_its_job_and_not_the_run(caplog):
    def forging(message, context, call_next):
        reply = call_next(message, context)
        if PACKED_RECORD in reply.content:
            reply.content[PACKING_RECORD]["sizes"] = [2**62] * N_ARRAYS
        return reply

    apps = {node: client([PackMod()]) for node in NODES}
    apps[102] = client([forging, PackMod()])
    link, result = run(apps, FedAvg(fraction_evaluate=0.0, min_train_nodes=2))
    assert len(link.sent) == 3 * N_NODES
    assert len(result.train_metrics_clientapp) == 3
    assert "node 102: the reply cannot be unpacked" in caplog.text


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_packed_reply_is_rejected_by_its_size_as_one_that_is_not(is_packed, monkeypatch):
    def bloated(message, context, call_next):
        reply = call_next(message, context)
        reply.content["more"] = ArrayRecord([np.zeros(1_500_000, np.uint8)])
        return reply

    def unpacked(content):
        whole = unpack(content)
        seen.append(PACKED_RECORD in content and "more" in whole)
        return whole

    seen = []
    monkeypatch.setattr(packing, "unpack", unpacked)
    apps = dict.fromkeys(NODES, client([PackMod()]))
    apps[102] = client([PackMod(), bloated] if is_packed else [bloated])
    strategy = FedBuff(4, 3, seed=1)
    _, result = run(apps, strategy, rounds=4)
    assert len(result.train_metrics_clientapp) == 4
    assert strategy.rejections["rejected: size"] >= 2
    assert not any(seen)


# Privacy.


def private(kind):
    """Return mods, and the strategy for one node that they need."""
    if kind == "fixed":
        wrapper = DifferentialPrivacyClientSideFixedClipping
        return [fixedclipping_mod], wrapper(fedavg(1), 0.0, 0.5, 1)
    if kind == "adaptive":
        wrapper = DifferentialPrivacyClientSideAdaptiveClipping
        return [adaptiveclipping_mod], wrapper(fedavg(1), 0.0, 1, 0.5)
    np.random.seed(0)
    return [LocalDpMod(clipping_norm=0.5, sensitivity=0.01, epsilon=1.0, delta=1e-5)], fedavg(1)


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "local"])
@pytest.mark.parametrize("first", ["pack", "forecast"])
def test_mods_for_privacy_inside_packing_see_plain_arrays(kind, first):
    mods, strategy = private(kind)
    _, expected = run(client(mods), strategy, nodes=[101])
    mods, strategy = private(kind)
    app = client([PackMod(), *mods]) if first == "pack" else client(mods, around=ForecastMod())
    link, result = run(app, strategy, nodes=[101])
    assert bits(result) == bits(expected)
    assert len(result.train_metrics_clientapp) == 3
    first, *_, last = (n_objects(tree) for _, tree in link.sent)
    assert last < first - N_ARRAYS


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "local"])
def test_packing_inside_of_a_mod_for_privacy_is_refused_and_never_merged(kind):
    mods, strategy = private(kind)
    link, result = run(client([*mods, PackMod()]), strategy, nodes=[101])
    assert len(link.answered) == 3
    # The first round is not packed yet.
    assert list(result.train_metrics_clientapp) == [1]


def test_a_mod_that_changes_what_is_packed_is_told_where_it_belongs(caplog):
    def adding(message, context, call_next):
        reply = call_next(message, context)
        for name, record in reply.content.array_records.items():
            arrays = {key: Array(array.numpy() + 1) for key, array in record.items()}
            reply.content[name] = ArrayRecord(arrays)
        return reply

    _, result = run(client([adding, PackMod()]), fedavg(1), nodes=[101])
    assert list(result.train_metrics_clientapp) == [1]
    assert "PackMod or ForecastMod must come before it" in caplog.text


class Follower(NumPyClient):
    def __init__(self, target):
        self.target = target

    def fit(self, parameters, config):
        return [p + 0.5 * (self.target - p) for p in parameters], 4, {}


def secure(mods):
    """Return the model that SecAgg+ makes of two rounds, and the SuperLink."""

    def client_fn(context):
        return Follower(context.node_config["partition-id"]).to_client()

    models = []

    def evaluate(server_round, parameters, config):
        models.append([p.copy() for p in parameters])

    strategy = OlderFedAvg(
        min_fit_clients=N_NODES,
        min_available_clients=N_NODES,
        fraction_evaluate=0.0,
        initial_parameters=ndarrays_to_parameters([np.zeros(3), np.ones((2, 2))]),
        evaluate_fn=evaluate,
    )
    app = ClientApp(client_fn=client_fn, mods=mods)
    link = LoopLink(dict.fromkeys(NODES, app))
    context = Context(1, 1, {}, RecordDict(), {})
    legacy = LegacyContext(context, config=ServerConfig(num_rounds=2), strategy=strategy)
    np.random.seed(0)
    with without_stalls(quick_grid_of(link)) as grid:
        DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(3, 2, timeout=60.0))(grid, legacy)
    return models, link


def test_secure_aggregation_inside_packing_comes_to_the_same_model():
    expected, _ = secure([secaggplus_mod])
    found, _ = secure([PackMod(), secaggplus_mod])
    assert len(found) == len(expected) == 3
    for one, other in zip(found[-1], expected[-1], strict=True):
        # Flower rounds at random.
        np.testing.assert_allclose(one, other, atol=1e-3)
        assert one.any()
