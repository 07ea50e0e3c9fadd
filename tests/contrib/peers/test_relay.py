"""A relay: what it sends to whom, what it keeps, which sites and topologies it refuses."""

import re

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.app.error import Error
from keeping_grid import KeepingGrid, KilledError
from peer_sites import SIZE, Site, descending_app, problem, stating, step
from tiny import COSTS, fleet
from virtual_grid import VirtualGrid, content, record

from fedstale.contrib.peers import Relay, ScreenMod
from fedstale.contrib.peers.relay import SEALED, bytes_in
from fedstale.contrib.sites import Adapters
from fedstale.errors import ConfigError
from fedstale.simulation import TraceGrid
from fedstale.strategies import (
    Checkpoints,
    Compression,
    FedAdam,
    FedAvg,
    FedBuff,
    Privacy,
    StaleStrategy,
    Validation,
    parse,
)
from fedstale.strategies.robust import Bulyan, Median, TrimmedMean
from fedstale.strategies.types import RejectionError
from fedstale.strategies.weighting import polynomial

pytestmark = pytest.mark.usefixtures("_identity")

FIRST = np.linspace(-1.0, 1.0, SIZE)
MEAN = TrimmedMean(f=0)


def sites(n, **options):
    return {10 + number: Site(number, **options) for number in range(n)}


def start(strategy, nodes, rounds, grid=VirtualGrid, **settings):
    grid = grid(nodes) if isinstance(grid, type) else grid
    result = strategy.start(grid, record(x=FIRST), num_rounds=rounds, **settings)
    return grid, result.arrays["x"].numpy()


def own(site):
    """Return the last model that a site keeps."""
    return site.context.state["fedstale.own"]["x"].numpy()


def sent_to(grid, node):
    return [m.content for _, m in grid.sent if m.metadata.dst_node_id == node]


# What is learnt.


def descended(n, rounds):
    """Decentralised gradient descent on a ring: mean of three, then a step."""
    x = np.tile(FIRST, (n, 1))
    for _ in range(rounds):
        mixed = (np.roll(x, 1, axis=0) + x + np.roll(x, -1, axis=0)) / 3.0
        x = np.stack([step(mixed[site], site) for site in range(n)])
    return x


def test_the_mean_on_a_ring_is_decentralised_gradient_descent():
    grid = TraceGrid(fleet([[(0, 1000)]] * 6), descending_app(ScreenMod(MEAN)), costs=COSTS)
    strategy = FedAvg(stages=[Relay("ring", 6)])
    with grid.running():
        strategy.start(grid, record(x=FIRST), num_rounds=15)
    relay = next(stage for stage in grid.runtime.stages if isinstance(stage, Relay))
    found = np.stack([relay.models[site]["x"] for site in range(6)])
    expected = descended(6, 15)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # Had nothing been exchanged it would be far away.
    assert np.abs(expected - np.stack([alone(site, 15) for site in range(6)])).max() > 0.1


def alone(site, rounds):
    x = FIRST
    for _ in range(rounds):
        x = step(x, site)
    return x


@pytest.mark.parametrize("rule", [Median(f=1), TrimmedMean(f=1)])
def test_honest_sites_stay_together_although_one_lies(rule):
    def far(body):
        return RecordDict({**body, "arrays": record(x=50.0 + body["arrays"]["x"].numpy())})

    def spread(rule, lie):
        nodes = sites(7, app=descending_app(ScreenMod(rule)))
        nodes[13].lie = lie
        validation = Validation(norm_bound=None)
        start(FedAvg(stages=[Relay("complete", 7)], validation=validation), nodes, 30)
        honest = [own(node) for key, node in nodes.items() if key != 13]
        return np.abs(honest - descended(7, 30).mean(axis=0)).max()

    assert spread(rule, far) < 1.0
    assert spread(MEAN, far) > 5.0


# What is sent to whom.


def test_a_site_is_sent_its_neighbours_last_models_and_no_other():
    nodes = sites(5)
    grid, _ = start(FedAvg(stages=[Relay("ring", 5)]), nodes, 3)
    first, *later = sent_to(grid, 12)
    assert set(first.array_records) == {"arrays"}
    np.testing.assert_array_equal(first["arrays"]["x"].numpy(), FIRST)
    for i, body in enumerate(later, start=1):
        assert set(body.array_records) == {"peer.1", "peer.3"}
        assert body["fedstale.relay"]["peers"] == [1, 3]
        for peer in (1, 3):
            sent = body[f"peer.{peer}"]["x"].numpy()
            np.testing.assert_allclose(sent, descended(5, i)[peer], atol=1e-12)


def test_sites_evaluate_what_they_have_screened_and_are_sent_nothing():
    nodes = sites(3)
    strategy = FedAvg(stages=[Relay("ring", 3)], fraction_evaluate=1.0)
    grid, _ = start(strategy, nodes, 2)
    bodies = [m.content for _, m in grid.sent if m.metadata.message_type == "evaluate"]
    assert len(bodies) == 2 * 3
    assert not any(body.array_records for body in bodies)
    measured = strategy.result.evaluate_metrics_clientapp[2]["first"]
    mixed = descended(3, 1).mean(axis=0)
    assert measured == pytest.approx(mixed[0])


def test_the_servers_model_is_what_the_rule_makes_of_all_last_models_and_is_sent_to_nobody():
    nodes = sites(3)
    grid, after = start(FedAvg(stages=[Relay("complete", 3, Median(f=1))]), nodes, 4)
    np.testing.assert_allclose(after, np.median([own(n) for n in nodes.values()], axis=0))
    models = [arrays["x"].data for _, arrays in grid.models]
    sent = [r["x"].data for _, m in grid.sent for r in m.content.array_records.values()]
    assert not set(models) & set(sent)


def test_without_a_rule_the_servers_model_stays_as_it_was_given():
    for strategy in (FedAvg, lambda **o: FedBuff(5, 2, **o)):
        _, after = start(strategy(stages=[Relay("ring", 5)]), sites(5), 4)
        np.testing.assert_array_equal(after, FIRST)


def test_a_node_that_comes_late_is_sent_the_first_model_and_not_the_servers():
    nodes = sites(5)
    grid = VirtualGrid(nodes, online=lambda now: sorted(nodes)[: 5 if now > 2.5 else 4])
    relay = Relay("complete", 5, Median(f=1))
    start(FedAvg(stages=[relay]), nodes, 5, grid)
    first = sent_to(grid, 14)[0]
    np.testing.assert_array_equal(first["arrays"]["x"].numpy(), FIRST)
    # What stands for it until then is the model that all have.
    waiting = sent_to(grid, 10)[2]
    assert waiting["fedstale.relay"]["peers"] == [1, 2, 3, 4]
    assert set(waiting.array_records) == {"peer.1", "peer.2", "peer.3"}


def test_of_several_records_in_a_reply_the_model_is_the_one_of_its_name():
    nodes = sites(3)
    for node in nodes.values():
        node.lie = lambda body: RecordDict({"more": record(x=FIRST + 50.0), **body})
    grid, _ = start(FedAvg(stages=[Relay("ring", 3)]), nodes, 2)
    sent = sent_to(grid, 10)[1]["peer.1"]["x"].numpy()
    np.testing.assert_allclose(sent, descended(3, 1)[1], atol=1e-12)


# Replies that go to nobody.


def bad(**arrays):
    return lambda body: RecordDict({**body, "arrays": record(**arrays)})


def without_site(body):
    return RecordDict({k: r for k, r in body.items() if k != "fedstale.relay"})


HOSTILE = {
    "NaN": (bad(x=np.full(SIZE, np.nan)), "finite", "holds NaN"),
    "another shape": (bad(x=np.zeros(SIZE + 1)), "shape", r"shape \(5,\): expected \(4,\)"),
    "another name": (bad(y=np.zeros(SIZE)), "names", r"missing \['x'\]"),
    "no arrays": (lambda body: RecordDict({"metrics": body["metrics"]}), "site", "states None"),
    "no number": (without_site, "site", "node 11 states None as its site: expected 0 to 4"),
    "a number beyond": (stating(5), "site", "states 5 as its site: expected 0 to 4"),
    "a number below": (stating(-1), "site", "states -1 as its site"),
    "no whole number": (stating(1.5), "site", r"states 1\.5 as its site"),
    "another site's": (stating(2), "site", "states site 2, which node 12 is: give each node"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reply_is_rejected_and_goes_to_no_neighbour(name):
    lie, kind, words = HOSTILE[name]
    nodes = sites(5)
    nodes[11].lie, nodes[11].delay = lie, 2.0
    strategy = FedBuff(5, 1, stages=[Relay("ring", 5)])
    grid, _ = start(strategy, nodes, 12)
    assert set(strategy.rejections) == {f"rejected: {kind}"}
    reasons = [reason for _, reason in grid.refused if "run ended" not in reason]
    assert reasons
    words = words.replace("of node 11", "")
    assert all(re.search(words, reason) for reason in reasons), reasons
    assert not any("peer.1" in body for _, m in grid.sent for body in [m.content])


@pytest.mark.parametrize("n", [2**63, 2**62, SIZE + 200, -1, 0])
def test_a_sealed_model_of_another_size_than_it_states_is_refused(n):
    sealed = record(sealed=np.zeros(SIZE, np.uint8))
    sealed[SEALED].shape = (n,)
    with pytest.raises(RejectionError, match="shape"):
        bytes_in(sealed)


def test_a_node_keeps_its_number():
    nodes, numbers = sites(4), [1, 3, 1, 1]
    del nodes[13]

    def moving(body):
        return stating(numbers.pop(0))(body)

    nodes[11].lie = moving
    grid, _ = start(FedAvg(stages=[Relay("ring", 4)]), nodes, 4)
    assert [r for _, r in grid.refused] == ["node 11 states site 3, and was site 1 before"]


def test_a_model_that_is_rejected_when_the_running_medians_hold_is_forgotten():
    nodes = sites(6)
    # It comes first, before there is a median.
    nodes[10].lie, nodes[10].delay = bad(x=1e9 + np.zeros(SIZE)), 0.5
    grid, _ = start(FedAvg(stages=[Relay("ring", 6)]), nodes, 2)
    assert any("norm of the update" in reason for _, reason in grid.refused)
    assert [set(body.array_records) for body in sent_to(grid, 11)] == [{"arrays"}, {"peer.2"}]


# Nodes that come back.


def test_a_site_that_has_lost_what_it_kept_is_sent_its_own_model_again():
    nodes = sites(5)
    grid, _ = start(FedAvg(stages=[Relay("ring", 5)]), nodes, 3)
    nodes = sites(5)
    before = []

    class Restarting(VirtualGrid):
        def push_messages(self, messages):
            if len(self.sent) == 15:
                before.append(own(nodes[12]))
                nodes[12].restart()
            return super().push_messages(messages)

    grid, _ = start(FedAvg(stages=[Relay("ring", 5)]), nodes, 6, Restarting)
    assert any("site 2 keeps no model" in reason for _, reason in grid.refused)
    again = next(body for body in sent_to(grid, 12) if "peer.2" in body)
    assert set(again.array_records) == {"arrays", "peer.1", "peer.2", "peer.3"}
    np.testing.assert_array_equal(again["peer.2"]["x"].numpy(), before[0])
    np.testing.assert_array_equal(again["arrays"]["x"].numpy(), FIRST)
    assert set(sent_to(grid, 12)[-1].array_records) == {"peer.1", "peer.3"}


def test_another_node_may_be_a_site_once_its_last_job_has_timed_out():
    nodes = sites(3) | {20: Site(1, delay=3.0)}

    def online(now):
        return [10, 12, 11 if now < 2.5 else 20]

    silent = nodes[11]
    nodes[11] = lambda message, grid: silent(message, grid) if grid.time < 1.5 else (0.0, None)
    grid = VirtualGrid(nodes, online=online)
    strategy = FedBuff(3, 1, stages=[Relay("ring", 3)])
    start(strategy, nodes, 40, grid, timeout=8.0)
    assert strategy.rejections["rejected: site"] > 0
    assert "arrays" in sent_to(grid, 20)[0].array_records
    joined = next(body for body in sent_to(grid, 20) if body["fedstale.relay"]["peers"])
    assert joined["fedstale.relay"]["peers"] == [0, 2]


def test_what_a_new_node_learnt_from_the_first_model_takes_no_sites_last_one():
    stage = Relay("ring", 3)
    nodes = sites(3) | {20: Site(1)}
    calls = []

    def fails(message, grid):
        calls.append(grid.time)
        return (1.0, Error(0, "gone")) if len(calls) > 2 else old(message, grid)

    old, nodes[11] = nodes[11], fails
    grid = VirtualGrid(nodes, online=lambda now: [10, 12, 11 if now < 3.5 else 20])
    start(FedAvg(stages=[stage]), nodes, 8, grid)
    models = [body["peer.1"]["x"].data for body in sent_to(grid, 12) if "peer.1" in body]
    assert sent_to(grid, 20)
    assert len(models) == 7
    # The old node's last goes on until the new one has heard its neighbours.
    assert len(set(models[1:5])) == 1
    assert len(set(models)) == 4


# Runs.


DROPPING = [[(0, 300)], [(0, 40), (45, 90), (92, 300)], [(0, 33), (60, 300)], [(0, 300)]]


def on_traces(folder=None, rounds=200):
    app = descending_app(ScreenMod(MEAN, staleness=polynomial(0.5)))
    grid = TraceGrid(fleet(DROPPING, compute=[1.0, 2.0, 0.5, 3.0], length=300.0), app, costs=COSTS)
    strategy = FedBuff(4, 1, stages=[Relay("complete", 4, Median(f=1))])
    with grid.running():
        result = strategy.start(grid, record(x=FIRST), num_rounds=rounds, timeout=60.0)
    return grid.events().to_pandas(), strategy, result.arrays["x"].numpy()


def test_sites_that_drop_out_and_come_back_learn_on_by_asynchronous_gossip():
    events, strategy, after = on_traces()
    assert not strategy.rejections
    assert not (events["status"] == "reported").all()
    matrices, targets = zip(*map(problem, range(4)), strict=True)
    best = np.linalg.lstsq(np.concatenate(matrices), np.concatenate(targets))[0]
    assert np.abs(after - best).max() < 0.3 * np.abs(FIRST - best).max()


def kept_run(grid):
    strategy = FedBuff(4, 1, stages=[Relay("ring", 4, MEAN)], min_evaluate_nodes=1)
    result = strategy.start(grid, record(x=FIRST), num_rounds=11, timeout=50.0)
    sent = [[r["x"].data for r in m.content.array_records.values()] for _, m in grid.sent]
    return result.arrays["x"].data, sent


def slow_sites():
    return {10 + k: Site(k, delay=0.3 * (k + 1) ** 2) for k in range(4)}


@pytest.mark.parametrize("die_at", [1, 5, 8])
def test_a_run_that_was_cut_off_with_jobs_in_flight_goes_on_to_the_same_bytes(die_at):
    expected = kept_run(KeepingGrid(slow_sites()))
    grid = KeepingGrid(slow_sites(), die_at=die_at)
    with pytest.raises(KilledError):
        kept_run(grid)
    grid.die_at = None
    assert kept_run(grid) == expected


def test_on_real_devices_a_new_run_sends_sites_their_own_models_again(tmp_path):
    strategy = FedAvg(stages=[Relay("ring", 3)], checkpoints=Checkpoints(tmp_path))
    before = sites(3)
    start(strategy, before, 3)
    # A run has Contexts of its own, and SuperNodes may have other ids.
    nodes = {10: Site(0), 11: Site(1), 30: Site(2)}
    grid, _ = start(FedAvg(stages=[Relay("ring", 3)], resume=tmp_path), nodes, 6)
    assert not grid.refused
    again = sent_to(grid, 10)[0]
    assert set(again.array_records) == {"arrays", "peer.0", "peer.1", "peer.2"}
    np.testing.assert_array_equal(again["peer.0"]["x"].numpy(), own(before[10]))


# Topologies.


def degrees(topology, n, seed=0):
    return [len(own) for own in Relay(topology, n).neighbours(seed)]


def test_a_torus_has_four_neighbours_each_and_a_ring_two():
    assert degrees("ring", 2) == [1, 1]
    assert degrees("ring", 7) == [2] * 7
    for n in (9, 12, 15, 16):
        assert degrees("torus", n) == [4] * n
    assert Relay("torus", 12).neighbours(0)[0] == [1, 3, 4, 8]
    assert degrees("complete", 5) == [4] * 5
    assert degrees("random:1", 5) == [4] * 5


def test_random_neighbours_are_the_seeds():
    relay = Relay("random:0.3", 20)
    assert relay.neighbours(1) == relay.neighbours(1) != relay.neighbours(2)
    n_edges = sum(map(len, relay.neighbours(1))) / 2
    assert 35 < n_edges < 80
    for site, own in enumerate(relay.neighbours(1)):
        assert site not in own
        assert all(site in relay.neighbours(1)[peer] for peer in own)


def test_edges_are_read_from_a_file(tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text("# partners\n0 1\n\n1 2  # the lab\n2 1\n")
    assert Relay(path, 3).neighbours(0) == [[1], [0, 2], [1]]
    assert parse(f"FedAvg(stages=[Relay('{path}', 3)])").stages[0].neighbours(0)[0] == [1]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("0 1\n1 1\n", "line 2 makes site 1 its own neighbour; expected two sites"),
        ("0 1\n1 2\n2 7\n", "line 3 has site 7; expected 0 to 2"),
        ("0 1 2\n", "line 1 is '0 1 2'; expected two numbers"),
        ("0 -1\n", "line 1 is '0 -1'; expected two numbers"),
        ("0 1\n", "site 2 is cut off from site 0; expected"),
    ],
)
def test_a_file_of_edges_that_fits_no_sites_is_refused_by_its_line(tmp_path, lines, words):
    path = tmp_path / "edges.txt"
    path.write_text(lines)
    with pytest.raises(ConfigError, match=words):
        FedAvg(stages=[Relay(path, 3)])


@pytest.mark.parametrize(
    ("topology", "n", "words"),
    [
        ("rign", 5, r"topology = 'rign': no such file.*expected ring\|torus\|complete\|random:P"),
        ("torus", 10, "of 10 sites; expected rows x columns of 3 or more"),
        ("torus", 7, "of 7 sites"),
        ("random:0", 5, r"expected ring\|torus"),
        ("random:x", 5, r"expected ring\|torus"),
        ("random:0.02", 20, "site 1 is cut off from site 0 with seed 0"),
        ("ring", 1, r"n_sites = 1: expected an integer >= 2"),
        ("ring", True, r"n_sites = True"),
    ],
)
def test_a_topology_that_is_none_is_refused_before_the_run(topology, n, words):
    with pytest.raises(ConfigError, match=words):
        FedAvg(stages=[Relay(topology, n)])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (TrimmedMean(f=2), r"site 0 has 2 neighbours, and TrimmedMean\(f=2\) needs 5 models"),
        (Bulyan(f=1), r"site 0 has 2 neighbours, and Bulyan\(f=1\) needs 7 models"),
        ("median", "Relay.rule = 'median': expected a robust rule"),
    ],
)
def test_a_site_with_too_few_neighbours_for_the_rule_is_named_before_the_run(rule, words):
    with pytest.raises(ConfigError, match=words):
        FedAvg(stages=[Relay("ring", 5, rule)])


# What goes together.


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda s: StaleStrategy(stages=s, robust=Median(f=1)), "robust = .*averages nothing"),
        (lambda s: FedAdam(stages=s), "server_optimizer = Adam.*sites step"),
        (lambda s: FedBuff(5, 2, eta=0.5, stages=s), "server_optimizer = SGD"),
        (lambda s: FedAvg(stages=[*s, Compression("int8")]), "stages = Compression"),
        (lambda s: FedAvg(stages=[Adapters(2), *s]), "stages = Adapters"),
        (
            lambda s: FedBuff(
                5, 2, stages=[*s, Privacy(clip_norm=1.0, noise_multiplier=0.0, delta=1e-5)]
            ),
            "stages = Privacy",
        ),
    ],
)
def test_what_would_average_or_read_models_is_refused_beside_a_relay(make, words):
    with pytest.raises(ConfigError, match=words):
        make([Relay("ring", 5)])


def test_the_stage_is_a_part_of_a_strategy_in_text():
    made = parse("FedBuff(5, 1, stages=[Relay('ring', 5, TrimmedMean(f=1))])")
    assert repr(made.stages) == "(Relay('ring', 5, rule=TrimmedMean(f=1)),)"


def test_integer_arrays_of_the_servers_model_stay():
    def counting(message, grid):
        number = message.metadata.dst_node_id - 10
        arrays = record(x=FIRST + number, n=np.array(7))
        body = content(arrays)
        body["fedstale.relay"] = ConfigRecord({"site": number})
        return 1.0, body

    strategy = FedAvg(stages=[Relay("ring", 3, MEAN)])
    grid = VirtualGrid(dict.fromkeys((10, 11, 12), counting))
    result = strategy.start(grid, record(x=FIRST, n=np.array(3)), num_rounds=2)
    assert result.arrays["n"].numpy() == 3
    np.testing.assert_allclose(result.arrays["x"].numpy(), FIRST + 1.0)
