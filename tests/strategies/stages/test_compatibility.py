"""A server and devices of other releases: next to each other they train, else both are named."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from virtual_grid import Notes, VirtualGrid, identity

import fedstale
from fedstale.client import ForecastMod, mods
from fedstale.errors import FedstaleError
from fedstale.strategies import StaleStrategy, schedule
from fedstale.strategies.server.superlink import SuperLinkGrid
from fedstale.strategies.stages import ForecastRequest, compatibility
from fedstale.strategies.types import Job

RUN_CONFIG = {"forecasts": False}


def arrays(value):
    return ArrayRecord({"w": Array(np.full(3, value, dtype=np.float32))})


def trained(message):
    content = {"arrays": arrays(1.0), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


class Nodes:
    """ClientApps with the mod, of one release, behind the grid of real devices."""

    def __init__(self, *, release=None, monkeypatch=None, n=1):
        self.n_trained, self.received = 0, []
        self.app = ForecastMod(enabled_by="forecasts").client_app()
        self.app.train()(self._train)
        self.release, self.monkeypatch = release, monkeypatch
        grid = VirtualGrid(dict.fromkeys(range(10, 10 + n), self))
        self.grid = SuperLinkGrid(grid, clock=grid)
        self.rejected = grid.refused

    def _train(self, message, context):
        self.n_trained += 1
        return trained(message)

    def __call__(self, message, grid):
        self.received.append(message.content)
        context = Context(
            run_id=1, node_id=10, node_config={}, state=RecordDict(), run_config=RUN_CONFIG
        )
        # As on a device with this release installed; the server's process keeps its own.
        with self.monkeypatch.context() as device:
            device.setattr(mods, "__version__", self.release)
            reply = self.app(message, context)
        return 10.0, reply.error if reply.has_error() else reply.content


def start(nodes, rounds=2):
    notes = Notes()
    nodes.grid.runtime.add(notes)
    with identity():
        result = StaleStrategy(seed=1, schedule=schedule.k_batch_async(1, 1)).start(
            nodes.grid, arrays(0.0), num_rounds=rounds, timeout=60.0
        )
    return result, notes


def server(monkeypatch, release):
    """Let the server be of a release."""
    monkeypatch.setattr(compatibility, "__version__", release)


@pytest.mark.parametrize("device", ["0.4.0", "0.5.0", "0.5.7", "0.6.1"])
def test_releases_next_to_each_other_train_together(monkeypatch, device):
    server(monkeypatch, "0.5.0")
    nodes = Nodes(release=device, monkeypatch=monkeypatch)
    result, notes = start(nodes)
    assert len(result.train_metrics_clientapp) == 2
    assert notes.refused == []


@pytest.mark.parametrize("device", ["0.3.9", "0.7.0", "1.5.0"])
def test_a_device_too_far_from_its_server_does_not_train_and_names_both(monkeypatch, device):
    server(monkeypatch, "0.5.0")
    nodes = Nodes(release=device, monkeypatch=monkeypatch)
    with pytest.raises(FedstaleError) as told:
        start(nodes)
    assert f"the server has fedstale 0.5.0 and the device {device}" in str(told.value)
    assert nodes.n_trained == 0


def reply_of(release):
    """Return a node that answers as a release would that does not look at the server's."""

    def node(message, grid):
        reply = trained(message)
        reply.content["any"] = ConfigRecord({compatibility.RELEASE: release})
        return 10.0, reply.content

    return node


def run_beside_a_good_one(node, rounds=3):
    def plain(message, grid):
        return 10.0, trained(message).content

    grid, notes = VirtualGrid({10: node, 11: plain}), Notes()
    own = SuperLinkGrid(grid, clock=grid)
    own.runtime.add(notes)
    strategy = StaleStrategy(seed=1, schedule=schedule.k_batch_async(2, 1))
    with identity():
        strategy.start(own, arrays(0.0), num_rounds=rounds, timeout=60.0)
    return notes, strategy


def test_the_server_rejects_the_first_reply_of_an_older_release_and_goes_on(monkeypatch):
    server(monkeypatch, "0.5.0")
    notes, strategy = run_beside_a_good_one(reply_of("0.3.0"))
    (first, *_) = notes.refused
    assert "the server has fedstale 0.5.0 and the device 0.3.0" in first[1]
    assert strategy.rejections["rejected: release"] == len(notes.refused) >= 1
    assert len(notes.merged) == 3


@pytest.mark.parametrize("stated", ["", "newest", "0", "9" * 5000 + ".1", 3, b"0.5.0", ["0.5"]])
def test_what_is_no_release_is_rejected_in_a_short_sentence(monkeypatch, stated):
    server(monkeypatch, "0.5.0")
    notes, strategy = run_beside_a_good_one(reply_of(stated))
    assert strategy.rejections["rejected: release"] >= 1
    assert all("expected such as 0.5.0" in reason for _, reason in notes.refused)
    assert max(len(reason) for _, reason in notes.refused) < 200


def test_a_client_app_without_fedstale_is_taken_as_it_is():
    def plain(message, grid):
        return 10.0, trained(message).content

    notes, strategy = run_beside_a_good_one(plain)
    assert len(notes.merged) == 3
    assert strategy.rejections == {}


def test_messages_state_the_servers_release_on_real_devices_and_nowhere_else():
    seen = {}

    def node(message, grid):
        kind = message.metadata.message_type
        # Stock ClientApps find the records that they know, and no others.
        assert kind == "query.forecast" or set(message.content) == {"arrays", "config"}
        seen.setdefault(kind, []).append(compatibility.stated_release(message.content))
        return 10.0, trained(message).content

    for on_devices in (True, False):
        grid = VirtualGrid({10: node})
        strategy = StaleStrategy(
            seed=1, stages=[ForecastRequest()], min_evaluate_nodes=1, fraction_evaluate=1.0
        )
        with identity():
            strategy.start(
                SuperLinkGrid(grid, clock=grid) if on_devices else grid,
                arrays(0.0),
                num_rounds=1,
                timeout=60.0,
            )
        expected = fedstale.__version__ if on_devices else None
        assert set(seen) == {"train", "evaluate", "query.forecast"}
        assert {release for found in seen.values() for release in found} == {expected}
        seen.clear()


def test_this_release_is_one():
    content = RecordDict()
    compatibility.state_release(content, fedstale.__version__)
    assert compatibility.stated_release(content) == fedstale.__version__
    compatibility.Compatibility().incoming(Job(1, "train", 0), content)
