"""Sites take the steps of K-FAC by the factors of all of them, whoever is offline or lies."""

from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from own_optima import record
from torch import nn
from torch.nn.functional import cross_entropy

from fedstale.contrib.kfac import (
    Preconditioner,
    SharedInverses,
    exchange_inverses,
    kronecker_factors,
)
from fedstale.contrib.kfac.merge import ABOUT, INVERSES, damped, inverses, symmetric
from fedstale.contrib.tickets import Tickets
from fedstale.errors import ConfigError
from fedstale.flower import record_of
from fedstale.simulation import Costs, TraceGrid
from fedstale.strategies import Compression, FedAvg, FedBuff, Privacy, robust
from fedstale.traces import TraceSet

RATE, DAMPING, STEPS = 0.1, 0.01, 3
SIZES = {"0.A": 3, "0.G": 4, "2.A": 5, "2.G": 3}
data = np.random.default_rng(0)
X = torch.from_numpy(data.normal(size=(3, 8, 2))).float()
Y = torch.from_numpy(data.integers(0, 3, (3, 8)))
"""Of three sites; they count by 1, 2 and 3 examples."""


def network_of(arrays=None):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    if arrays is not None:
        made.load_state_dict(arrays.to_torch_state_dict())
    return made


def trained(network, i, held):
    """Take preconditioned steps on the data of a site."""
    precondition = Preconditioner(network, held)
    optimizer = torch.optim.SGD(network.parameters(), RATE, 0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(network(X[i]), Y[i]).backward()
        precondition(RATE)
        optimizer.step()


def site_app(change=None, seen=None):
    """Return the app of sites.

    Args:
        change: may change what a site replies, called with its number, the version and the content.
        seen: list of site, version, and names of the inverses in its message and of those it has.
    """
    app = ClientApp()

    @app.train()
    def train(message, context):
        i, version = context.node_config["partition-id"], int(message.metadata.group_id)
        network = network_of(message.content["arrays"])
        factors = partial(kronecker_factors, network, [X[i]], seed=i)
        held, records = exchange_inverses(message, context, factors)
        if seen is not None:
            seen.append((i, version, set(message.content.get(INVERSES, {})), set(held)))
        trained(network, i, held)
        content = RecordDict(
            {
                "arrays": ArrayRecord(network.state_dict()),
                "metrics": MetricRecord({"num-examples": i + 1}),
                **records,
            }
        )
        if change is not None:
            change(i, version, content)
        return Message(content, reply_to=message)

    return app


def ran(app, strategy, n_versions, n=3):
    """Return the versions of a model, the jobs, and what `strategy.start` returned."""
    versions = []
    grid = TraceGrid(
        TraceSet.ideal(n),
        app,
        costs=Costs(),
        work=lambda message: 1.0,
        seed=1,
    )
    with grid.running():
        result = strategy.start(
            grid,
            ArrayRecord(network_of().state_dict()),
            n_versions,
            evaluate_fn=lambda _, model: versions.append(model),
        )
    found = [{name: x.numpy() for name, x in each.items()} for each in versions]
    return found, grid.events().to_pandas(), result


def pair_of(factors, damping=DAMPING):
    found = {}
    for layer in "02":
        pair = {name: factors[name] for name in (f"{layer}.A", f"{layer}.G")}
        found |= inverses(damped(pair, damping))
    return record_of(found)


def measured(network, i):
    found = kronecker_factors(network, [X[i]], seed=i)
    return {name: symmetric(name, found[name], n) for name, n in SIZES.items()}


def by_hand(sites, n_versions, every):
    """Return the versions of K-FAC, worked out in one loop without messages."""
    model, held, versions = network_of(), ArrayRecord(), []
    total = sum(i + 1 for i in sites)
    for version in range(n_versions + 1):
        versions.append({name: x.numpy().copy() for name, x in model.state_dict().items()})
        networks = {i: network_of(ArrayRecord(model.state_dict())) for i in sites}
        own = {i: measured(networks[i], i) for i in sites}
        for i in sites:
            trained(networks[i], i, held)
        if version % every == 0:
            means = {k: sum((i + 1) / total * own[i][k] for i in sites) for k in SIZES}
            held = pair_of(means)
        state = {
            name: sum((i + 1) / total * networks[i].state_dict()[name] for i in sites)
            for name in model.state_dict()
        }
        model.load_state_dict(state)
    return versions


def assert_close(found, wanted):
    assert len(found) == len(wanted)
    for one, two in zip(found, wanted, strict=True):
        for name in two:
            np.testing.assert_allclose(one[name], two[name], rtol=1e-3, atol=1e-5)


def shared(every=2, **options):
    return SharedInverses(DAMPING, every=every, **options)


def test_one_site_takes_the_steps_of_local_k_fac():
    found, _, _ = ran(site_app(), FedAvg(stages=[shared()]), 5, n=1)
    assert_close(found, by_hand([0], 5, 2))


def test_sites_are_preconditioned_by_the_factors_of_all_by_examples():
    found, _, result = ran(site_app(), FedAvg(stages=[shared()]), 5)
    wanted = by_hand([0, 1, 2], 5, 2)
    assert_close(found, wanted)
    assert result.train_metrics_clientapp[1]["kfac_layers"] == 2
    # Without the stage the same app takes plain steps.
    plain, _, _ = ran(site_app(), FedAvg(), 2)
    assert np.array_equal(plain[1]["0.weight"], found[1]["0.weight"])
    assert not np.allclose(plain[2]["0.weight"], wanted[2]["0.weight"], atol=1e-3)


def test_inverses_travel_once_after_each_measurement():
    seen = []
    ran(site_app(seen=seen), FedAvg(stages=[shared(every=3)]), 5)
    names = set(SIZES)
    for _, version, sent, held in seen:
        assert sent == (names if version in (1, 4) else set())
        assert held == (names if version else set())


def test_a_site_that_never_answers_leaves_the_others_with_inverses():
    def slow(i, version, content):
        if i == 2:
            raise RuntimeError("no answer")

    found, jobs, _ = ran(site_app(slow), FedAvg(stages=[shared()]), 4)
    assert_close(found, by_hand([0, 1], 4, 2))
    assert set(jobs.loc[jobs["status"] == "client-error", "node_id"]) == {1002}


def test_a_site_that_measures_nothing_counts_for_its_weights_alone():
    def silent(i, version, content):
        if i == 2:
            content.pop("kfac", None)

    found, _, _ = ran(site_app(silent), FedAvg(stages=[shared(every=100)]), 1)
    everyone, _, _ = ran(site_app(), FedAvg(stages=[shared(every=100)]), 1)
    assert_close(found, everyone)


def test_while_nobody_measures_all_steps_are_plain():
    def silent(i, version, content):
        content.pop("kfac", None)

    found, _, result = ran(site_app(silent), FedAvg(stages=[shared()]), 3)
    plain, _, _ = ran(site_app(), FedAvg(), 3)
    assert_close(found, plain)
    assert result.train_metrics_clientapp[3]["kfac_layers"] == 0


def test_a_buffer_merges_the_factors_of_its_own_replies():
    strategy = FedBuff(3, 2, normalise="examples", stages=[shared()])
    found, jobs, result = ran(site_app(), strategy, 8)
    assert len(found) == 9
    assert jobs["staleness"].max() > 0
    assert result.train_metrics_clientapp[8]["kfac_layers"] == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("0.A", np.full(6, np.nan)),
        ("0.G", np.ones(9)),
        ("0.G", -np.ones(10)),
        ("2.A", np.full(15, 1e7)),
        ("5.A", np.ones(1)),
    ],
)
def test_bad_factors_are_rejected_with_their_reply(name, value):
    def lie(i, version, content):
        if i == 2 and "kfac" in content:
            content["kfac"] = ArrayRecord({**content["kfac"], name: Array(value)})

    found, jobs, _ = ran(site_app(lie), FedAvg(stages=[shared(every=100)]), 1)
    assert_close(found, by_hand([0, 1], 1, 100))
    rejected = jobs[jobs["status"] == "rejected"]
    assert set(rejected["node_id"]) == {1002}
    assert rejected["reason"].str.startswith("kfac").all()


def test_factors_that_nobody_asked_for_are_refused():
    factors = kronecker_factors(network_of(), [X[2]])

    def stranger(i, version, content):
        if i == 2 and version == 1:
            content["kfac"] = factors

    _, jobs, _ = ran(site_app(stranger), FedAvg(stages=[shared()]), 3)
    rejected = jobs[jobs["status"] == "rejected"]
    assert set(rejected["node_id"]) == {1002}
    assert rejected["reason"].str.contains("not asked for").all()


def test_the_factors_of_a_reply_with_bad_weights_are_forgotten():
    def broken(i, version, content):
        if i == 2:
            bad = {k: np.full_like(x.numpy(), np.nan) for k, x in content["arrays"].items()}
            content["arrays"] = record(bad)

    found, _, _ = ran(site_app(broken), FedAvg(stages=[shared()]), 3)
    assert_close(found, by_hand([0, 1], 3, 2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"robust": robust.Median(f=1)}, "None with SharedInverses"),
        ({"stages": [shared(), Compression("int8")]}, "none of .*Compression"),
        ({"stages": [shared(), Tickets(0.5)]}, "SharedInverses|Tickets"),
        (
            {
                "stages": [shared(), Privacy(clip_norm=1.0, noise_multiplier=0.0, delta=1e-5)],
                "normalise": "buffer_size",
            },
            "none of .*Privacy",
        ),
    ],
)
def test_what_sends_other_arrays_or_trusts_no_site_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        FedAvg(**({"stages": [shared()]} | options))


def test_a_run_repeats_to_the_byte():
    one, two = (ran(site_app(), FedAvg(stages=[shared()]), 4)[0] for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)


def test_evaluation_carries_no_inverses():
    app, contents = site_app(), []

    @app.evaluate()
    def evaluate(message, context):
        contents.append(set(message.content))
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    strategy = FedAvg(stages=[shared()], fraction_evaluate=1.0)
    ran(app, strategy, 2)
    assert contents
    assert not any({ABOUT, INVERSES} & each for each in contents)
