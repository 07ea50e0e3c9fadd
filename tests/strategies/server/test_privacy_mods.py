"""Flower's differential-privacy mods on the devices, under a strategy for stale updates."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from virtual_grid import VirtualGrid, content, record

from fedstale.strategies import FedAvg, FedBuff
from fedstale.strategies.weighting import Gap

CONTEXT = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


pytestmark = pytest.mark.usefixtures("_identity")


def private(mod, step, delay=1.0):
    """A node that moves every weight by a step, behind a mod."""

    def train(message, context):
        arrays = {k: a.numpy() for k, a in message.content["arrays"].items()}
        moved = {k: (x + np.float32(step)).astype(x.dtype) for k, x in arrays.items()}
        body = content(record(**moved), 5, train_loss=0.5)
        body["fedstale.forecast"] = ConfigRecord({"p_finish": 0.9})
        return Message(body, reply_to=message)

    def node(message, grid):
        reply = mod(message, CONTEXT, train)
        return delay, reply.error if reply.has_error() else reply.content

    return node


def run(strategy, nodes, rounds=1, **config):
    grid = VirtualGrid(nodes)
    initial = record(w=np.zeros((3, 4), np.float32), b=np.zeros(4, np.float32))
    result = strategy.start(
        grid, initial, num_rounds=rounds, train_config=ConfigRecord(config) if config else None
    )
    assert not grid.refused
    return result, grid


def norm(result):
    return np.sqrt(sum((a.numpy().astype(float) ** 2).sum() for a in result.arrays.values()))


@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod])
def test_updates_clipped_on_the_device_pass_and_average(mod):
    nodes = {k: private(mod, 1.0 + k) for k in range(4)}
    result, _ = run(FedAvg(), nodes, clipping_norm=0.5)
    # All point the same way, so the mean has the norm they were clipped to.
    assert norm(result) == pytest.approx(0.5, rel=1e-5)


def test_the_bit_of_adaptive_clipping_is_a_metric():
    nodes = {0: private(adaptiveclipping_mod, 1.0), 1: private(adaptiveclipping_mod, 0.01)}
    result, _ = run(FedAvg(), nodes, clipping_norm=0.5)
    assert result.train_metrics_clientapp[1]["norm_bit"] == 0.5


def test_stale_updates_with_local_noise_pass_and_are_weighed():
    np.random.seed(0)
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=0.01, epsilon=1.0, delta=1e-5)
    nodes = {k: private(mod, 1.0, 1.0 + 3.0 * k) for k in range(4)}
    result, grid = run(FedBuff(4, 2, weighting=Gap()), nodes, 6)
    assert any(facts["staleness"] > 0 for _, facts in grid.merged)
    assert 2.0 < norm(result) < 7.0
    assert len(np.unique(result.arrays["w"].numpy())) == 12


def test_a_mod_without_the_key_it_needs_is_an_error_reply_and_not_the_end():
    grid = VirtualGrid(
        {0: private(fixedclipping_mod, 1.0), 1: private(lambda m, c, f: f(m, c), 1.0)}
    )
    result = FedAvg().start(grid, record(w=np.zeros(2, np.float32)), num_rounds=1)
    np.testing.assert_array_equal(result.arrays["w"].numpy(), 1.0)
    assert "clipping_norm" in grid.refused[0][1]


@pytest.mark.parametrize(
    "mod", [fixedclipping_mod, LocalDpMod(clipping_norm=1.0, sensitivity=0.1, epsilon=1, delta=0.1)]
)
def test_flowers_mods_fail_on_integer_arrays_as_docs_say(mod):
    node = private(mod, 1.0)
    grid = VirtualGrid({0: node})
    counted = record(w=np.zeros(2, np.float32), n=np.array([3]))
    with pytest.raises(TypeError):
        FedAvg().start(
            grid, counted, num_rounds=1, train_config=ConfigRecord({"clipping_norm": 0.5})
        )
