"""Smaller messages over Flower's own grid and objects: packed, and with mods for privacy."""

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from loop_link import LoopLink, grid_of, n_objects, quick_grid_of
from test_packed_runs import secure

from fedstale.client import CompressionMod, ForecastMod, PackMod
from fedstale.strategies import Compression, FedAvg
from fedstale.strategies.messages.records import Requested
from fedstale.strategies.server.superlink import without_stalls

# The order in which replies arrive would change the last bits of a mean.
NODES = [101]
N_ARRAYS = 6
SHAPE = (20, 20)

pytestmark = pytest.mark.usefixtures("_identity")


def client(mods=(), around=None):
    app = ClientApp(mods=list(mods)) if around is None else around

    @app.train()
    def train(message, context):
        assert set(message.content) == {"arrays", "config"}
        rng = np.random.default_rng(context.node_config["partition-id"])
        arrays = {
            k: Array((a.numpy() + rng.standard_normal(a.shape)).astype(np.float32))
            for k, a in message.content["arrays"].items()
        }
        metrics = MetricRecord({"num-examples": 3, "train_loss": 0.5})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def initial():
    rng = np.random.default_rng(0)
    made = {f"w{i}": rng.standard_normal(SHAPE) for i in range(N_ARRAYS)} | {"b": np.zeros(3)}
    return ArrayRecord({k: Array(np.asarray(a, np.float32)) for k, a in made.items()})


def run(app, strategy=None, rounds=4, **settings):
    link = LoopLink(dict.fromkeys(NODES, app))
    strategy = strategy or FedAvg(stages=[Compression("int4", down="int8")])
    with without_stalls(quick_grid_of(link)) as grid:
        result = strategy.start(grid, initial(), num_rounds=rounds, timeout=60.0, **settings)
    return link, result, strategy


def bits(result):
    return {name: array.data for name, array in result.arrays.items()}


def last_objects(link):
    (_, sent), (_, answered) = link.sent[-1], link.answered[-1]
    return n_objects(sent), n_objects(answered)


ORDERS = {
    "alone": lambda: client([CompressionMod()]),
    "outside of the forecast": lambda: client([CompressionMod(), ForecastMod()]),
    "inside of the forecast": lambda: client([ForecastMod(), CompressionMod()]),
    "outside of packing": lambda: client([CompressionMod(), PackMod()]),
    "inside of packing": lambda: client([PackMod(), CompressionMod()]),
    "around the app": lambda: client(around=ForecastMod().client_app(around=[CompressionMod()])),
}


@pytest.mark.parametrize("order", ORDERS)
def test_packed_and_quantised_arrays_arrive_in_every_order_of_the_mods(order):
    _, expected, _ = run(ORDERS["alone"]())
    link, result, strategy = run(ORDERS[order]())
    assert bits(result) == bits(expected)
    assert not strategy.rejections
    assert len(result.train_metrics_clientapp) == 4
    # All arrays of a message are one object, of fewer bytes than before.
    plain, _, _ = run(client(), FedAvg())
    assert max(last_objects(link)) < min(last_objects(plain)) - N_ARRAYS
    moved = result.arrays["w0"].numpy() - initial()["w0"].numpy()
    assert np.abs(moved).max() > 0.5


def test_a_server_that_asks_for_nothing_gets_the_bits_that_it_always_got():
    _, expected, _ = run(client(), FedAvg())
    for name in ("outside of the forecast", "inside of packing"):
        assert bits(run(ORDERS[name](), FedAvg())[1]) == bits(expected)
    flowers = FlowersFedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    link = LoopLink(dict.fromkeys(NODES, ORDERS["alone"]()))
    result = flowers.start(grid_of(link), initial(), num_rounds=4, timeout=60.0)
    for name, array in result.arrays.items():
        np.testing.assert_allclose(array.numpy(), expected.arrays[name].numpy(), atol=1e-6)


def private(kind):
    if kind == "local":
        np.random.seed(0)
        return LocalDpMod(clipping_norm=0.5, sensitivity=0.01, epsilon=1.0, delta=1e-5), {}
    mod = {"fixed": fixedclipping_mod, "adaptive": adaptiveclipping_mod}[kind]
    return mod, {"train_config": ConfigRecord({"clipping_norm": 0.5})}


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "local"])
def test_mods_for_privacy_inside_change_arrays_before_they_are_quantised(kind):
    mod, settings = private(kind)
    fine = FedAvg(stages=[Compression("int8")])
    _, result, strategy = run(client([CompressionMod(), mod]), fine, 1, **settings)
    assert not strategy.rejections
    mod, settings = private(kind)
    _, expected, _ = run(client([mod]), FedAvg(), 1, **settings)
    for name, array in expected.arrays.items():
        np.testing.assert_allclose(result.arrays[name].numpy(), array.numpy(), atol=0.01)
    moved = [result.arrays[n].numpy() - a.numpy() for n, a in initial().items()]
    assert 0.1 < np.sqrt(sum((x**2).sum() for x in moved)) < 6.0


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "local"])
def test_devices_with_mods_for_privacy_and_without_this_one_answer_in_full(kind):
    mod, settings = private(kind)
    _, expected, _ = run(client([mod]), FedAvg(), 1, **settings)
    mod, settings = private(kind)
    asking = FedAvg(stages=[Compression("int8", down="int8")])
    _, result, strategy = run(client([mod]), asking, 1, **settings)
    assert not strategy.rejections
    assert bits(result) == bits(expected)


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "local"])
def test_mods_for_privacy_outside_cannot_take_codes_for_numbers(kind):
    mod, _ = private(kind)
    config = Requested("int8").within(ConfigRecord({"clipping_norm": 0.5}))
    content = RecordDict({"arrays": initial(), "config": config})
    context = Context(1, 101, {"partition-id": 0}, RecordDict(), {})
    # Flower makes an error reply of it, which no server merges.
    with pytest.raises(TypeError, match=r"fedstale\.int8"):
        client([mod, CompressionMod()])(Message(content, 101, "train"), context)


def test_secure_aggregation_with_the_mod_comes_to_the_same_model():
    from flwr.client.mod import secaggplus_mod

    expected, _ = secure([secaggplus_mod])
    found, _ = secure([CompressionMod(), secaggplus_mod])
    for one, other in zip(found[-1], expected[-1], strict=True):
        # Flower rounds at random.
        np.testing.assert_allclose(one, other, atol=1e-3)
        assert one.any()
