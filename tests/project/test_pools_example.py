"""The stage of examples/pools: what it sends and merges, and what it does not take from a site.

Sites of two architectures move towards optima of their own, so what a pool reaches is known.
"""

import logging

import numpy as np
import pytest
from places import ROOT
from virtual_grid import Error, VirtualGrid, content, identity, record

from fedstale.client.device import array_bytes
from fedstale.contrib.sites import Adapters
from fedstale.errors import ConfigError, ResumeError
from fedstale.simulation import FlowerApp
from fedstale.strategies import (
    Compression,
    FedAvg,
    FedBuff,
    Privacy,
    robust,
    server_optimizer,
    weighting,
)

PUBLIC = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
SHAPES = {"flat": {"w": (2, 3)}, "deep": {"v": (2, 4), "u": (4, 3)}}
EXAMPLES = {1: 3, 2: 1, 3: 7, 4: 2, 5: 5}
SITES = {1: "flat", 2: "deep", 3: "flat", 4: "deep", 5: "flat"}


@pytest.fixture(autouse=True, scope="module")
def pools():
    """Return the module of the stage."""
    app = FlowerApp.find(ROOT / "examples" / "pools")
    with app.importable(), identity():
        app.load_client()
        from pools_app import stage

        yield stage


def softmax(x):
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def predict(pool, arrays, public):
    of = {name: array.numpy() for name, array in arrays.items()}
    if pool == "flat":
        return softmax(public @ of["w"])
    return softmax(np.tanh(public @ of["v"]) @ of["u"])


def model(seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"{pool}.{name}": rng.normal(size=shape).astype(np.float32)
        for pool, shapes in SHAPES.items()
        for name, shape in shapes.items()
    }


def about(message):
    """Return the numbers in a message by record, and what predictions are said to be of."""
    held = message.content
    records = {k: numbers(held[k]) for k in ("arrays", "predictions") if k in held}
    return records, dict(held.get("predicted", {}))


def numbers(arrays):
    return {name: array.numpy() for name, array in arrays.items()}


class Site:
    """Moves a third of the way to an optimum of its own, and replies with the change."""

    def __init__(self, node, pool, *, delay=1.0):
        self.node, self.pool, self.delay, self.seen = node, pool, delay, []

    def change(self, arrays):
        optimum = model(self.node)
        own = {k: x for k, x in numbers(arrays).items() if k.startswith(f"{self.pool}.")}
        return {k: ((optimum[k] - x) / 3).astype(x.dtype) for k, x in own.items()}

    def __call__(self, message, grid):
        if message.metadata.message_type == "evaluate":
            return self.delay, content(record(), EXAMPLES[self.node], seen=1.0)
        self.seen.append(message)
        return self.delay, self.reply(self.change(message.content["arrays"]))

    def reply(self, changes, update="delta"):
        from flwr.app import ConfigRecord

        found = content(record(**changes), EXAMPLES[self.node])
        found["about"] = ConfigRecord({"fedstale.update": update})
        return found


def sites(**others):
    return {node: Site(node, pool, **others) for node, pool in SITES.items()}


def run(strategy, nodes, n=3, initial=None, **settings):
    """Return the models by version, and the grid."""
    grid = VirtualGrid(nodes)
    first = model() if initial is None else initial
    strategy.start(grid, record(**first), num_rounds=n, **settings)
    return {0: first} | {version: numbers(arrays) for version, arrays in grid.models}, grid


def mean_of(nodes, before, pool):
    """Return what FedAvg makes of a pool's sites: its naive oracle."""
    of = [node for node in nodes if SITES[node] == pool]
    total = sum(EXAMPLES[node] for node in of)
    return {
        name: sum(EXAMPLES[n] * (x + (model(n)[name] - x) / 3) for n in of) / total
        for name, x in before.items()
        if name.startswith(f"{pool}.")
    }


def assert_close(found, wanted):
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-6)


# What is merged.


@pytest.mark.parametrize("pool", SHAPES)
@pytest.mark.parametrize("normalise", ["examples", "buffer_size"])
def test_a_pool_reaches_what_fedavg_of_it_alone_does(pools, pool, normalise):
    stage = pools.Pools(PUBLIC, predict, every=0)
    together, grid = run(FedAvg(stages=[stage], normalise=normalise), sites())
    assert not grid.refused
    alone = {node: site for node, site in sites().items() if site.pool == pool}
    first = {name: x for name, x in model().items() if name.startswith(f"{pool}.")}
    apart, _ = run(FedAvg(normalise=normalise), alone, initial=first)
    for version in (1, 2, 3):
        assert_close(together[version], apart[version])
    if normalise == "examples":
        assert_close(together[1], mean_of(SITES, model(), pool))


@pytest.mark.parametrize("size", [1, 3])
def test_a_step_moves_each_pool_by_the_mean_of_what_it_sent_and_no_other(pools, size):
    nodes = {node: Site(node, pool, delay=1.0 + node / 7) for node, pool in SITES.items()}
    stage = pools.Pools(PUBLIC, predict, every=2)
    models, grid = run(FedBuff(5, size, stages=[stage]), nodes, n=12)
    moves, stale = {}, 0
    for message_id, facts in grid.merged:
        node = grid.sent[int(message_id[1:])][1].metadata.dst_node_id
        base = models[facts["base_version"]]
        for name in SHAPES[SITES[node]]:
            full = f"{SITES[node]}.{name}"
            moved = facts["weight"] * (model(node)[full] - base[full]) / 3
            moves.setdefault((facts["version"], full), []).append(moved)
        stale += facts["staleness"]
    assert stale > 0
    untouched = 0
    for version in range(1, 13):
        for name, before in models[version - 1].items():
            if (version, name) in moves:
                after = before + np.mean(moves[version, name], axis=0)
                np.testing.assert_allclose(models[version][name], after, atol=1e-6)
            else:
                np.testing.assert_array_equal(models[version][name], before)
                untouched += 1
    assert untouched or size > 1


# What is sent.


def test_a_site_is_sent_all_pools_until_it_has_told_its_own(pools):
    nodes = sites()
    strategy = FedAvg(stages=[pools.Pools(PUBLIC, predict, every=0)], fraction_evaluate=1.0)
    _, grid = run(strategy, nodes)
    kinds = set()
    for _, message in grid.sent:
        pool, held = SITES[message.metadata.dst_node_id], about(message)[0]["arrays"]
        is_first = message.metadata.group_id == "0"
        own = {name for name in model() if name.startswith(f"{pool}.")}
        assert set(held) == (set(model()) if is_first else own)
        assert array_bytes(message.content) < 2000
        kinds.add(message.metadata.message_type)
    assert kinds == {"train", "evaluate"}


@pytest.mark.parametrize("make", [FedAvg, lambda **s: FedBuff(5, 2, **s)])
def test_predictions_are_those_of_the_version_that_they_say_for_as_long_as_they_are_sent(
    pools, make
):
    nodes = {node: Site(node, pool, delay=1.0 + node / 7) for node, pool in SITES.items()}
    every = 3
    stage = pools.Pools(PUBLIC, predict, every=every)
    models, grid = run(make(stages=[stage], min_evaluate_nodes=2), nodes, n=11)
    assert all("late" in reason for _, reason in grid.refused), "the run does not wait for them"
    told = {}
    for _, message in grid.sent:
        version, (held, said) = int(message.metadata.group_id), about(message)
        pool = SITES[message.metadata.dst_node_id]
        trains = message.metadata.message_type == "train"
        assert ("predictions" in held) == (trains and version >= every)
        if "predictions" not in held:
            continue
        assert said.pop(pools.PUBLIC) == pools.digest(PUBLIC)
        (other,) = set(SHAPES) - {pool}
        assert set(held["predictions"]) == set(said) == {other}
        assert 0 <= version - said[other] < every
        told.setdefault(version, said[other])
        of = pools.of_pool(record(**models[said[other]]), other)
        np.testing.assert_array_equal(held["predictions"][other], predict(other, of, PUBLIC))
    assert len({*told.values()}) >= 3
    assert any(version > of for version, of in told.items())


def test_nothing_is_sent_of_what_a_pool_without_sites_would_predict(pools):
    nodes = {node: site for node, site in sites().items() if site.pool == "flat"}
    models, grid = run(FedAvg(stages=[pools.Pools(PUBLIC, predict, every=1)]), nodes)
    assert len(models) == 4
    assert not any("predictions" in message.content for _, message in grid.sent)


# What ends a run before it starts, and what does not end it.


def with_another(pool, make):
    """Return predictions of which those of a pool are changed."""
    return lambda of, *args: make(predict(of, *args)) if of == pool else predict(of, *args)


UNUSABLE = {
    "other classes": (with_another("deep", lambda p: softmax(p[:, :2])), r"\(5, 2\).*same classes"),
    "other rows": (with_another("flat", lambda p: p[:4]), r"\(4, 3\) of 5 public inputs"),
    "NaN": (with_another("flat", lambda p: p * np.nan), "'flat' predicts no probabilities"),
    "logits": (with_another("deep", lambda p: 2 * p), "'deep' predicts no probabilities"),
    "negative": (with_another("deep", lambda p: 2 * p - 1 / 3), "'deep' predicts no probabilities"),
}


@pytest.mark.parametrize("bad", UNUSABLE)
def test_predictions_that_cannot_be_compared_start_no_run(pools, bad):
    predicts, text = UNUSABLE[bad]
    refused_before_the_run(pools.Pools(PUBLIC, predicts, every=2), text)


@pytest.mark.parametrize(
    ("public", "more", "text"),
    [
        (np.zeros((5, 3)), {}, r"'flat' cannot predict public inputs of shape \(5, 3\)"),
        (PUBLIC, {"w": np.zeros(2)}, r"expected floating-point arrays named POOL\.NAME"),
        (PUBLIC, {"flat.n": np.zeros(2, np.int64)}, r"floating-point arrays named POOL\.NAME"),
    ],
)
def test_inputs_and_arrays_that_are_of_no_pool_start_no_run(pools, public, more, text):
    refused_before_the_run(pools.Pools(public, predict, every=2), text, model() | more)


def refused_before_the_run(stage, text, initial=None):
    nodes = sites()
    with pytest.raises(ConfigError, match=text):
        run(FedAvg(stages=[stage]), nodes, initial=initial)
    assert not any(site.seen for site in nodes.values())


def test_the_last_predictions_of_a_pool_that_fails_later_stay(pools, caplog):
    calls = []

    def failing(pool, arrays, public):
        found = predict(pool, arrays, public)
        calls.append(pool)
        return found * np.nan if pool == "deep" and calls.count("deep") > 2 else found

    nodes = sites()
    with caplog.at_level(logging.WARNING):
        models, grid = run(FedAvg(stages=[pools.Pools(PUBLIC, failing, every=2)]), nodes, n=7)
    assert len(models) == 8
    assert not grid.refused
    said = {}
    for _, message in grid.sent:
        held, of = about(message)
        for pool in held.get("predictions", ()):
            said.setdefault(pool, []).append(of[pool])
            assert np.isfinite(held["predictions"][pool]).all()
    assert set(said["flat"]) == {2, 4, 6}
    assert set(said["deep"]) == {2}
    warnings = [each.getMessage() for each in caplog.records if "'deep'" in each.getMessage()]
    assert len(warnings) == 2
    assert all("predictions of version 2 stay" in text for text in warnings)


# Replies that are rejected.


def only(names):
    return lambda site, changes: site.reply({k: x for k, x in changes.items() if k in names})


def elsewhere(site, _):
    """Return a reply with a whole model in a record of another name."""
    found = site.reply({k: np.ones_like(x) for k, x in model().items()})
    found["weights"] = found.pop("arrays")
    return found


def as_pool(pool):
    def reply(site, changes):
        return site.reply({k: np.ones_like(x) for k, x in model().items() if k.startswith(pool)})

    return reply


BAD = {
    "another pool's": (as_pool("deep."), "pool 'flat'"),
    "of all pools": (as_pool(""), "pool 'flat'"),
    "of no such pool": (lambda s, _: s.reply({"none.w": np.ones(2)}), "pool 'flat'"),
    "another record": (elsewhere, "'arrays'"),
    "nothing": (only(()), "pool 'flat'"),
    "whole arrays": (lambda s, changes: s.reply(changes, "weights"), "expected changes"),
    "another shape": (lambda s, _: s.reply({"flat.w": np.ones((3, 2), np.float32)}), "shape"),
    "NaN": (lambda s, c: s.reply({k: x * np.nan for k, x in c.items()}), "NaN"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_reply_is_rejected_alone_and_the_others_are_merged(pools, bad):
    reply, text = BAD[bad]
    nodes = sites()

    class Turning(Site):
        def __call__(self, message, grid):
            delay, good = super().__call__(message, grid)
            if message.metadata.group_id != "1":
                return delay, good
            return delay, reply(self, self.change(message.content["arrays"]))

    nodes[3] = Turning(3, "flat")
    models, grid = run(FedAvg(stages=[pools.Pools(PUBLIC, predict, every=0)]), nodes)
    ((message_id, reason),) = grid.refused
    assert grid.sent[int(message_id[1:])][1].metadata.dst_node_id == 3
    assert text in reason
    others = SITES.keys() - {3}
    for pool in SHAPES:
        assert_close(models[2], mean_of(others, models[1], pool))
        assert_close(models[3], mean_of(SITES, models[2], pool))


FIRST = {
    "NaN": lambda s: s.reply({k: x * np.nan for k, x in model().items() if k.startswith("deep.")}),
    "nothing": lambda site: site.reply({}),
    "another record": lambda site: elsewhere(site, None),
    "an error": lambda site: Error(0, "crashed"),
}


@pytest.mark.parametrize("bad", FIRST)
def test_a_bad_first_reply_settles_no_pool_and_costs_itself_alone(pools, bad):
    nodes = sites()

    class Undecided(Site):
        def __call__(self, message, grid):
            later = super().__call__(message, grid)
            return (1.0, FIRST[bad](self)) if message.metadata.group_id == "0" else later

    nodes[3] = Undecided(3, "flat")
    models, grid = run(FedAvg(stages=[pools.Pools(PUBLIC, predict, every=0)]), nodes)
    assert len(grid.refused) == 1
    assert_close(models[1], mean_of(SITES.keys() - {3}, model(), "flat"))
    assert_close(models[2], mean_of(SITES, models[1], "flat"))
    assert set(about(nodes[3].seen[1])[0]["arrays"]) == set(model())
    assert set(about(nodes[3].seen[2])[0]["arrays"]) == {"flat.w"}


# Going on.


def test_a_run_goes_on_with_the_same_exchanges_alone(pools, tmp_path):
    run(FedAvg(stages=[pools.Pools(PUBLIC, predict, every=3)], checkpoints=tmp_path), sites())
    with pytest.raises(ResumeError, match=r"every=3.*every=2"):
        run(FedAvg(stages=[pools.Pools(PUBLIC, predict, every=2)], resume=tmp_path), sites())


# What it does not go together with.


@pytest.mark.parametrize(
    "options",
    [
        {"normalise": "weights"},
        {"robust": robust.Median(f=1)},
        {"weighting": weighting.CachedUpdates(1.0)},
        {"update": "model"},
        {"server_optimizer": server_optimizer.Momentum(1.0)},
        *({"beside": stage} for stage in (Compression("int8"), Adapters(2))),
        {"beside": Privacy(clip_norm=1.0, noise_multiplier=2.0, delta=1e-5)},
    ],
    ids=str,
)
def test_what_would_move_other_pools_is_refused(pools, options):
    beside = [options["beside"]] if "beside" in options else []
    rest = {name: value for name, value in options.items() if name != "beside"}
    with pytest.raises(ConfigError, match=r"with Pools|beside Pools"):
        FedAvg(stages=[pools.Pools(PUBLIC, predict, every=2), *beside], **rest)


@pytest.mark.parametrize("every", [-1, 1.5, True])
def test_an_interval_that_is_none_is_refused(pools, every):
    with pytest.raises(ConfigError, match=r"Pools\.every"):
        pools.Pools(PUBLIC, predict, every=every)
