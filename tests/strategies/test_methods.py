"""The published strategies: their signatures and texts, and runs over a grid of functions."""

import re
from copy import deepcopy
from inspect import Parameter, signature
from math import exp
from typing import get_type_hints

import numpy as np
import pytest
from flwr.app import ConfigRecord
from virtual_grid import VirtualGrid, adder, identity, record

from fedstale import strategies
from fedstale.errors import ConfigError
from fedstale.strategies import (
    CA2FL,
    FADAS,
    REFL,
    AsyncFedED,
    FedAdagrad,
    FedAdam,
    FedAsync,
    FedAvg,
    FedAvgM,
    FedBuff,
    FedProx,
    FedStale,
    FedYogi,
    Options,
    StaleStrategy,
)
from fedstale.strategies.schedule import Schedule, k_async, k_batch_async
from fedstale.strategies.selection import Fastest, Random
from fedstale.strategies.server_optimizer import SGD, AMSGrad, DelayAdaptive
from fedstale.strategies.weighting import ByAge, CachedUpdates, RelevanceAware, constant

# One fast node and one that comes at 2.5, with a staleness of 2.
DELAYS = {10: 1.0, 11: 2.5}


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def run(strategy, nodes, rounds, size=2, **options):
    grid = VirtualGrid(nodes)
    result = strategy.start(grid, record(w=np.zeros(size)), num_rounds=rounds, **options)
    return result.arrays["w"].numpy(), grid


def weights(grid):
    return [facts["weight"] for _, facts in grid.merged]


def noisy(n=4):
    """Nodes whose updates differ from job to job, all of them equally fast."""

    def node(seed):
        rng = np.random.default_rng(seed)

        def answer(message, grid):
            return adder(rng.normal(size=2))(message, grid)

        return answer

    return {k: node(k) for k in range(n)}


def test_ca2fl_remembers_each_node_by_itself():
    nodes = {10: adder(1.0, 1.0), 11: adder(5.0, 1.5)}
    w, grid = run(CA2FL(2, 1), nodes, 3)
    # 10 alone: 1. Then 11, of which nothing is known: 5. Then 10: 1 + H - h = 1 + 3 - 1.
    assert [facts["staleness"] for _, facts in grid.merged] == [0, 1, 1]
    np.testing.assert_allclose(w, 1.0 + 5.0 + 3.0)
    assert weights(grid) == [1.0, 1.0, 1.0]


def test_ca2fl_with_the_number_of_clients_takes_the_unheard_for_zeros():
    nodes = {10: adder(1.0, 1.0), 11: adder(5.0, 1.5)}
    w, _ = run(CA2FL(2, 1, n_clients=4), nodes, 3)
    # 1; 5 + 1/4; 1 + 6/4 - 1.
    np.testing.assert_allclose(w, 1.0 + 5.25 + 1.5)


def test_the_first_step_of_ca2fl_is_that_of_fedbuff_to_the_last_bit():
    first = [
        run(make, noisy(), 1)[0] for make in (CA2FL(4, 4), CA2FL(4, 4, n_clients=9), FedBuff(4, 4))
    ]
    np.testing.assert_array_equal(first[0], first[2])
    np.testing.assert_array_equal(first[1], first[2])


def test_fedstale_at_beta_zero_is_fedavg_to_the_last_bit():
    stale, _ = run(FedStale(2, beta=0.0, seed=3), noisy(), 5)
    plain, _ = run(FedAvg(2, normalise="buffer_size", seed=3), noisy(), 5)
    np.testing.assert_array_equal(stale, plain)


def test_fedstale_interpolates_between_fedavg_and_fedvarp():
    ends = [run(FedStale(2, beta=beta, n_clients=4), noisy(), 4)[0] for beta in (0.0, 0.25, 1.0)]
    assert not np.allclose(ends[0], ends[2])
    np.testing.assert_allclose(ends[1], 0.75 * ends[0] + 0.25 * ends[2], rtol=1e-6)


def test_refl_weighs_a_stale_update_when_its_buffer_is_full():
    nodes = {10: adder(1.0, 1.0), 11: adder(3.0, 1.2), 12: adder(6.0, 2.1)}
    strategy = REFL(3, 2, beta=0.35, selector=Random())
    w, grid = run(strategy, nodes, 2)
    # 10 and 11 at 1.2. Then both again; 12 comes at 2.1, one version late, 10 at 2.2.
    assert [facts["staleness"] for _, facts in grid.merged] == [0, 0, 0, 1]
    late = 0.65 / 2 + 0.35 * (1 - exp(-1.0))
    assert weights(grid) == pytest.approx([1.0, 1.0, 1.0, late])
    np.testing.assert_allclose(w, 2.0 + (1.0 + late * 6.0) / (1.0 + late))
    assert grid.time == pytest.approx(2.2)


def test_what_waits_when_a_run_ends_is_rejected_with_a_reason():
    nodes = {10: adder(1.0, 1.0), 11: adder(3.0, 1.0), 12: adder(6.0, 2.0)}
    strategy = StaleStrategy(schedule=k_async(3, 2), weighting=RelevanceAware())
    _, grid = run(strategy, nodes, 2)
    # All three come at 2; the first two end the run, and the last one is late by then.
    assert [facts["staleness"] for _, facts in grid.merged] == [0, 0, 0, 1]
    assert [reason for _, reason in grid.refused] == ["the run ended before its server step"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (REFL(4, 4, selector=Random()), StaleStrategy(schedule=k_async(4, 4), normalise="weights")),
        (
            FADAS(4, 4),
            FedBuff(4, 4, weighting=ByAge(constant()), server_optimizer=AMSGrad(0.1)),
        ),
        (
            StaleStrategy(
                schedule=k_async(4, 4), weighting=CachedUpdates(0.0, then=RelevanceAware())
            ),
            StaleStrategy(schedule=k_async(4, 4)),
        ),
    ],
)
def test_without_stale_updates_a_run_is_the_same_to_the_last_bit(one, other):
    found, grid = run(one, noisy(), 5)
    expected, _ = run(other, noisy(), 5)
    assert {facts["staleness"] for _, facts in grid.merged} == {0}
    np.testing.assert_array_equal(found, expected)


def test_fadas_divides_the_rate_of_a_server_step_by_its_largest_staleness():
    rates = []

    class Watch(SGD):
        def step(self, model, delta, *, staleness=0):
            super().step(model, delta, staleness=staleness)
            rates.append((staleness, self.rate))

    nodes = {n: adder(1.0, delay) for n, delay in DELAYS.items()}
    strategy = StaleStrategy(
        schedule=k_async(2, 1), server_optimizer=DelayAdaptive(Watch(0.5), tau_c=1)
    )
    w, _ = run(strategy, nodes, 3)
    assert rates == [(0, 0.5), (0, 0.5), (2, 0.25)]
    np.testing.assert_allclose(w, 0.5 + 0.5 + 0.25)


def test_asyncfeded_steps_by_lambda_over_gamma_plus_epsilon():
    nodes = {10: adder(np.array([3.0, 4.0]), 1.0), 11: adder(np.array([0.0, 2.0]), 2.5)}
    w, grid = run(AsyncFedED(2, lam=0.5, epsilon=1.0, schedule=k_async(2, 1)), nodes, 3)
    # Two steps of (3, 4) / 2 on time: the model moved 5. Then gamma = 5/2.
    assert [facts["staleness"] for _, facts in grid.merged] == [0, 0, 2]
    np.testing.assert_allclose(w, np.array([3.0, 4.0 + 2.0 * 0.5 / (2.5 + 1.0)]))


def test_updates_of_a_dropped_server_step_are_not_remembered():
    remembered = []

    class Watch(CachedUpdates):
        def discard(self):
            super().discard()
            remembered.append("dropped")

        def observe(self, before, after, rate):
            super().observe(before, after, rate)
            remembered.append(len(self.state_dict()["_cached"]))

    first = iter([100.0])

    def node(message, grid):
        return adder(next(first, 1.0), 1.0)(message, grid)

    strategy = StaleStrategy(
        schedule=k_batch_async(1, 1),
        weighting=Watch(n_clients=2),
        server_optimizer=SGD(lambda step: 1e307 if step == 1 else 10.0),
        normalise="buffer_size",
    )
    w, grid = run(strategy, {10: node}, 2)
    assert remembered == ["dropped", 1, 1]
    assert [reason for _, reason in grid.refused] == ["its server step left the finite range"]
    # 1, then 1 + 1/2 - 1, both times 10.
    np.testing.assert_allclose(w, 15.0)


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        (FedProx(2, proximal_mu=0.5), {}, 0.5),
        (FedProx(2, proximal_mu=0.5), {"train_config": ConfigRecord({"proximal-mu": 0.1})}, 0.1),
        (FedBuff(2, 1), {"train_config": ConfigRecord({"proximal-mu": 0.1})}, 0.1),
    ],
)
def test_the_weight_of_fedprox_reaches_the_clients(strategy, options, expected):
    _, grid = run(strategy, noisy(2), 2, **options)
    assert {m.content["config"]["proximal-mu"] for _, m in grid.sent} == {expected}


ALIASES = [
    value
    for value in vars(strategies).values()
    if isinstance(value, type) and issubclass(value, StaleStrategy) and value is not StaleStrategy
]
USUAL = StaleStrategy()
REQUIRED = {"concurrency": 12, "buffer_size": 4}


def made(kind, **options):
    required = [p for p in signature(kind).parameters.values() if p.default is p.empty]
    return kind(**{p.name: REQUIRED[p.name] for p in required}, **options)


def test_the_options_are_the_settings_of_the_strategy():
    hints = get_type_hints(StaleStrategy.__init__)
    del hints["return"]
    assert get_type_hints(Options) == hints
    assert all(p.default is not p.empty for p in signature(StaleStrategy).parameters.values())


@pytest.mark.parametrize("kind", ALIASES)
def test_every_published_strategy_takes_the_options_and_shows_them(kind):
    shown = signature(kind).parameters
    own = set(kind.__init__.__annotations__) - {"options", "return"}
    assert own < set(shown)
    assert set(Options.__annotations__) < set(shown)
    assert shown["seed"].kind is Parameter.KEYWORD_ONLY
    strategy = made(kind, seed=5, selector=Fastest(9.0))
    assert (strategy.seed, strategy.selector.deadline_s) == (5, 9.0)
    assert type(strategy) is kind
    assert kind.__doc__


@pytest.mark.parametrize("kind", ALIASES)
def test_the_text_of_a_strategy_says_what_runs(kind, caplog):
    strategy = made(kind, seed=5)
    assert repr(strategy).startswith(f"{kind.__name__}(")
    assert repr(strategy).endswith("seed=5)")
    for name in ("weighting", "server_optimizer", "selector"):
        part = repr(getattr(strategy, name))
        assert (f"{name}={part}" in repr(strategy)) == (part != repr(getattr(USUAL, name)))
    with caplog.at_level("INFO"):
        strategy.summary()
    assert caplog.messages == [repr(strategy)]


def test_a_strategy_is_described_by_what_is_not_at_its_default():
    assert repr(StaleStrategy()) == "StaleStrategy()"
    assert repr(FedAvg(10, update="model")) == "FedAvg(concurrency=10, update='model')"
    assert repr(FedBuff(20, 5)) == (
        "FedBuff(concurrency=20, buffer_size=5, send='after_reply', stragglers='keep', "
        "weighting=ByAge(polynomial(a=0.5)), normalise='buffer_size')"
    )
    assert "server_optimizer=SGD(eta=0.6)" in repr(FedAsync(20))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: FedBuff(20, bufer_size=5),
            "FedBuff has no setting 'bufer_size': expected 'buffer_size'",
        ),
        (
            lambda: FedBuff(concurency=5),
            "FedBuff has no setting 'concurency': expected 'concurrency'",
        ),
        (
            lambda: StaleStrategy(weigthing=None),
            "StaleStrategy has no setting 'weigthing': expected 'weighting'",
        ),
        (
            lambda: FedProx(fraction_fit=0.5),
            "FedProx has no setting 'fraction_fit': expected 'fraction_train'",
        ),
        (
            lambda: FedBuff(20, deadline_s=60.0),
            "FedBuff has no setting 'deadline_s': expected schedule=Schedule(deadline_s=...)",
        ),
        (
            lambda: FedAvg(examples_cap=None),
            "FedAvg has no setting 'examples_cap': expected "
            "validation=Validation(examples_cap=...)",
        ),
        (lambda: FedAvg(zzz=1), "FedAvg has no setting 'zzz': expected one of concurrency, "),
    ],
)
def test_a_setting_that_does_not_exist_is_named_with_the_nearest(make, sentence):
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}"):
        make()


class Halved(FedBuff):
    """A user's strategy: FedBuff with half the rate for jobs of a user's own."""

    def __init__(self, concurrency, *, factor=0.5, **options):
        super().__init__(concurrency, 2, eta=factor, **options)
        self.factor = factor


def test_a_strategy_can_be_subclassed_and_copied():
    strategy = Halved(4, factor=0.25, staleness=constant(), seed=3)
    assert isinstance(strategy, FedBuff)
    assert repr(strategy) == (
        "Halved(concurrency=4, buffer_size=2, send='after_reply', stragglers='keep', "
        "server_optimizer=SGD(eta=0.25), normalise='buffer_size', seed=3)"
    )
    assert deepcopy(strategy).factor == 0.25
    assert list(signature(Halved).parameters)[:3] == ["concurrency", "factor", "buffer_size"]
    with pytest.raises(ConfigError, match="Halved has no setting 'facto': expected 'factor'"):
        Halved(4, facto=0.25)


def test_what_flower_calls_fedavg_with_a_rule_is_a_fedavg_here_too():
    for kind in (FedProx, FedAvgM, FedAdam, FedYogi, FedAdagrad, FedStale):
        assert issubclass(kind, FedAvg)
        assert made(kind, fraction_train=0.5, min_available_nodes=3).schedule == Schedule(
            fraction_train=0.5, min_available_nodes=3
        )
