"""Updates calibrated by the cached one of every client: CA2FL, FedVARP, FedStale."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_updates import packed

from fedstale.strategies.server.checkpoint import unpacked
from fedstale.strategies.weighting import (
    ByAge,
    CachedUpdates,
    ClientUpdate,
    Gap,
    RelevanceAware,
    constant,
    polynomial,
)

ZERO = {"w": np.zeros(2, np.float32), "b": np.zeros(1)}


def model(rng):
    return {"w": rng.normal(size=2).astype(np.float32), "b": rng.normal(size=1)}


def weigh(cache, node_id, delta, staleness=0):
    """Return the calibrated update."""
    delta = {name: array.copy() for name, array in delta.items()}
    update = ClientUpdate(
        delta=delta, base=ZERO, current=ZERO, staleness=staleness, node_id=node_id
    )
    cache.weigh(update)
    return delta


def step(cache, updates):
    """Return the mean of a buffer of updates, and close it with a step."""
    calibrated = [weigh(cache, node_id, delta) for node_id, delta in updates]
    cache.observe(ZERO, ZERO, 1.0)
    return mean(calibrated)


def mean(models):
    return {name: np.mean([m[name] for m in models], axis=0) for name in models[0]}


def assert_close(found, expected, rtol=1e-5):
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=rtol)


def test_without_the_number_of_clients_those_unheard_are_not_calibrated():
    cache = CachedUpdates(beta=1.0)
    first = step(cache, [(1, {"w": ZERO["w"] + 2, "b": ZERO["b"]}), (2, ZERO)])
    assert_close(first, {"w": np.ones(2)})
    # H = 1 over the two cached.
    assert_close(weigh(cache, 3, ZERO), {"w": np.zeros(2)})
    assert_close(weigh(cache, 1, ZERO), {"w": np.full(2, 1.0 - 2.0)})
    assert_close(weigh(cache, 2, ZERO), {"w": np.full(2, 1.0 - 0.0)})


@pytest.mark.parametrize("n_clients", [None, 10])
@pytest.mark.parametrize("then", [ByAge(constant()), ByAge(polynomial(1.0)), Gap()])
def test_the_first_step_is_that_of_the_other_weighting_to_the_last_bit(n_clients, then):
    rng, cache = np.random.default_rng(0), CachedUpdates(n_clients=n_clients, then=then)
    for node_id in range(4):
        delta = model(rng)
        plain = {name: array.copy() for name, array in delta.items()}
        one = ClientUpdate(delta=plain, base=ZERO, current=ZERO, staleness=node_id)
        weight = then.weigh(one)
        found = ClientUpdate(
            delta=delta, base=ZERO, current=ZERO, staleness=node_id, node_id=node_id
        )
        assert cache.weigh(found) == weight
        for name, array in plain.items():
            np.testing.assert_array_equal(delta[name], array)
            assert delta[name].dtype == array.dtype


def n_cached(cache):
    return len(cache.state_dict()["_cached"])


def test_an_empty_cache_is_never_taken_for_none():
    assert CachedUpdates()


def test_beta_zero_changes_nothing_ever_and_caches_nothing():
    rng, cache = np.random.default_rng(0), CachedUpdates(beta=0.0)
    for _ in range(3):
        for node_id in range(3):
            delta = model(rng)
            found = weigh(cache, node_id, delta)
            for name in delta:
                np.testing.assert_array_equal(found[name], delta[name])
        cache.observe(ZERO, ZERO, 1.0)
    assert n_cached(cache) == 0


@pytest.mark.parametrize("n_clients", [None, 5])
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_a_step_of_all_clients_is_the_plain_mean(n_clients, beta):
    rng, cache = np.random.default_rng(0), CachedUpdates(beta, n_clients=n_clients)
    for _ in range(4):
        updates = [(node_id, model(rng)) for node_id in range(5)]
        assert_close(step(cache, updates), mean([delta for _, delta in updates]))


@given(
    buffers=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=6),
    beta=st.sampled_from([0.25, 1.0]),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_every_step_is_that_of_the_formula(buffers, beta, seed):
    rng, cache = np.random.default_rng(seed), CachedUpdates(beta, n_clients=6)
    h = {
        node_id: {name: np.zeros(array.shape) for name, array in ZERO.items()}
        for node_id in range(6)
    }
    for nodes in buffers:
        updates = [(node_id, model(rng)) for node_id in nodes]
        deltas, own = mean([d for _, d in updates]), mean([h[node_id] for node_id in nodes])
        all_clients = mean(list(h.values()))
        found = step(cache, updates)
        assert_close(
            found, {k: deltas[k] + beta * (all_clients[k] - own[k]) for k in deltas}, rtol=1e-4
        )
        h |= dict(updates)


def test_updates_of_one_buffer_do_not_see_each_other():
    cache = CachedUpdates(n_clients=2)
    delta = {"w": np.ones(2, np.float32), "b": np.ones(1)}
    for _ in range(3):
        assert_close(weigh(cache, 1, delta), delta)
    cache.observe(ZERO, ZERO, 1.0)
    assert n_cached(cache) == 1


def test_the_client_unheard_for_longest_is_forgotten_and_its_part_of_the_mean_with_it():
    cache = CachedUpdates(most_clients=2)
    for node_id, value in ((1, 1.0), (2, 2.0), (1, 3.0), (3, 5.0)):
        weigh(cache, node_id, {"w": np.full(2, value, np.float32), "b": np.zeros(1)})
        cache.observe(ZERO, ZERO, 1.0)
    assert n_cached(cache) == 2
    # 2 is gone; H = (3 + 5) / 2.
    assert_close(weigh(cache, 1, ZERO), {"w": np.full(2, 4.0 - 3.0)})
    assert_close(weigh(cache, 2, ZERO), {"w": np.zeros(2)})


def test_forgetting_leaves_no_trace_in_the_sum():
    rng, cache = np.random.default_rng(0), CachedUpdates(most_clients=1, n_clients=1)
    for node_id in range(200):
        weigh(
            cache, node_id, {"w": 10 ** rng.uniform(-3, 3, 2).astype(np.float32), "b": np.ones(1)}
        )
        cache.observe(ZERO, ZERO, 1.0)
    assert_close(weigh(cache, 199, ZERO), ZERO, rtol=1e-10)


def test_stale_updates_are_calibrated_and_then_weighed():
    cache = CachedUpdates(n_clients=1, then=ByAge(polynomial(1.0)))
    step(cache, [(1, {"w": ZERO["w"] + 4, "b": ZERO["b"]})])
    found = weigh(cache, 1, {"w": ZERO["w"] + 6, "b": ZERO["b"]}, staleness=2)
    assert_close(found, {"w": np.full(2, (6 + 4 - 4) / 3)})


def test_it_composes_with_weightings_that_weigh_stale_updates_together():
    cache = CachedUpdates(n_clients=2, then=RelevanceAware(0.5))
    assert cache.needs_whole_buffer
    step(cache, [(1, {"w": ZERO["w"] + 4, "b": ZERO["b"]})])
    stale = ClientUpdate(
        delta={"w": np.full(2, 6.0), "b": np.zeros(1)},
        base=ZERO,
        current=ZERO,
        staleness=1,
        node_id=2,
    )
    (weight,) = cache.weigh_stale([stale], {"w": np.ones(2), "b": np.zeros(1)})
    assert weight == pytest.approx(0.25 + 0.5 * (1 - np.exp(-1.0)))
    assert_close(stale.delta, {"w": np.full(2, weight * (6.0 + 4.0 / 2))})
    cache.observe(ZERO, ZERO, 1.0)
    assert n_cached(cache) == 2


@pytest.mark.parametrize("midway", [False, True])
def test_state_survives_a_checkpoint_to_the_last_bit(midway):
    def make():
        return CachedUpdates(0.7, most_clients=3, then=Gap())

    rng, one, two = np.random.default_rng(0), make(), make()
    for nodes in ((1, 2), (3, 1), (2**63 + 5, 3)):
        step(one, [(node_id, model(rng)) for node_id in nodes])
    if midway:
        weigh(one, 9, model(rng))
    two.load_state_dict(unpacked(packed(one.state_dict())))
    for _ in range(3):
        for node_id in (1, 9, 3):
            delta = model(rng)
            found = [weigh(cache, node_id, delta, staleness=1) for cache in (one, two)]
            for name in delta:
                np.testing.assert_array_equal(found[0][name], found[1][name])
        for cache in (one, two):
            cache.observe(ZERO, ZERO, 1.0)
    assert n_cached(one) == n_cached(two) == 3


def test_a_loaded_state_is_not_shared():
    rng, one, two = np.random.default_rng(0), CachedUpdates(n_clients=3), CachedUpdates(n_clients=3)
    step(one, [(1, model(rng))])
    two.load_state_dict(one.state_dict())
    before = weigh(one, 1, ZERO)
    one.discard()
    step(two, [(1, model(rng)), (2, model(rng))])
    assert_close(weigh(one, 1, ZERO), before, rtol=1e-12)
