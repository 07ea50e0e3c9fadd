"""Stale updates weighed by their age and by how far they deviate from the current ones."""

from math import exp

import numpy as np
import pytest
from replies import open_buffer

from fedstale.strategies.server.versions import Snapshot
from fedstale.strategies.weighting import ClientUpdate, RelevanceAware
from fedstale.strategies.weighting.base import ByAge, constant

ZERO = {"w": np.zeros(2)}


def update(*delta, staleness=1, **about):
    delta = {"w": np.array(delta)}
    return ClientUpdate(delta=delta, base=ZERO, current=ZERO, staleness=staleness, **about)


def buffer(weighting, normalise="weights"):
    like = Snapshot(ZERO, {}, ("w",))
    return open_buffer(like, weighting=weighting, normalise=normalise)


def take(into, number, *delta, staleness=0, examples=1.0):
    into.add(
        update(
            *delta,
            staleness=staleness,
            message_id=f"m{number}",
            examples=examples,
            metrics={"loss": float(number)},
            limited=True,
        )
    )


def refl(updates, current, beta, scale):
    """The formula as it is written, with n_F and |u_F|."""
    n, u_f = len(current), np.mean([u.delta["w"] for u in current], axis=0)
    lambdas = [
        np.sum((u_f - (u.delta["w"] + n * u_f) / (n + 1)) ** 2) / np.sum(u_f**2) for u in updates
    ]
    return [
        (1 - beta) / (u.staleness + 1) + beta * (1 - exp(-x / max(lambdas)) / scale)
        for u, x in zip(updates, lambdas, strict=True)
    ]


def test_two_stale_updates_have_the_weights_that_hand_computes():
    # Current mean (1, 0). Squared distances 1 and 4, so the quotients of the Lambdas are 1/4 and 1.
    stale = [update(1.0, 1.0, staleness=1), update(3.0, 0.0, staleness=3)]
    weights = RelevanceAware(beta=0.35).weigh_stale(stale, {"w": np.array([1.0, 0.0])})
    expected = [
        0.65 / 2 + 0.35 * (1 - exp(-0.25)),
        0.65 / 4 + 0.35 * (1 - exp(-1.0)),
    ]
    assert weights == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(stale[0].delta["w"], expected[0] * np.array([1.0, 1.0]))
    np.testing.assert_allclose(stale[1].delta["w"], expected[1] * np.array([3.0, 0.0]))


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_the_weights_are_those_of_the_formula_as_it_is_published(scale):
    rng = np.random.default_rng(0)
    current = [update(*rng.normal(size=2), staleness=0) for _ in range(3)]
    stale = [update(*rng.normal(size=2), staleness=k) for k in (1, 2, 5)]
    expected = refl(stale, current, 0.35, scale)
    mean = {"w": np.mean([u.delta["w"] for u in current], axis=0)}
    found = RelevanceAware(0.35, scale=scale).weigh_stale(stale, mean)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_buffer_weighs_stale_updates_when_it_closes_and_divides_by_all_weights():
    one = buffer(RelevanceAware(beta=0.35))
    take(one, 0, 1.0, 0.0)
    take(one, 1, 4.0, 0.0, staleness=1)
    take(one, 2, 3.0, 0.0)
    assert [each.message_id for each in one.updates] == ["m0", "m1", "m2"]
    assert np.isnan(one.updates[1].weight)
    # Only the stale one waits whole.
    assert [bool(each.delta) for each in one.updates] == [False, True, False]
    found = one.step()
    # One stale update is the farthest: its quotient is 1 whatever its distance.
    w = 0.65 / 2 + 0.35 * (1 - exp(-1.0))
    np.testing.assert_allclose(found.floats["w"], [(1.0 + 3.0 + w * 4.0) / (2 + w), 0.0])
    assert {each.message_id: each.weight for each in one.updates} == {
        "m0": 1.0,
        "m2": 1.0,
        "m1": pytest.approx(w),
    }
    assert one.metrics() == {"loss": 1.0}


def test_the_current_mean_is_that_of_the_buffer():
    seen = []

    class Spy(RelevanceAware):
        def weigh_stale(self, stale, current_mean):
            seen.append({k: v.copy() for k, v in current_mean.items()})
            return super().weigh_stale(stale, current_mean)

    for normalise, mean in (("examples", 2.5), ("buffer_size", 2.0), ("weights", 2.0)):
        one = buffer(Spy(), normalise)
        take(one, 0, 1.0, 1.0, examples=1.0)
        take(one, 1, 3.0, 3.0, examples=3.0)
        take(one, 2, 9.0, 9.0, staleness=1)
        one.step()
        np.testing.assert_allclose(seen.pop()["w"], [mean, mean])


@pytest.mark.parametrize("normalise", ["examples", "buffer_size", "weights"])
def test_without_stale_updates_a_step_is_the_same_to_the_last_bit(normalise):
    results = []
    for weighting in (RelevanceAware(), ByAge(constant())):
        rng, one = np.random.default_rng(1), buffer(weighting, normalise)
        for k in range(5):
            take(one, k, *rng.normal(size=2), examples=k + 1.0)
        results.append(one.step().floats["w"])
    np.testing.assert_array_equal(*results)


def test_only_age_counts_in_a_buffer_without_current_updates():
    one = buffer(RelevanceAware(), "buffer_size")
    take(one, 0, 2.0, 0.0, staleness=1)
    take(one, 1, 3.0, 0.0, staleness=2)
    np.testing.assert_allclose(one.step().floats["w"], [(2 / 2 + 3 / 3) / 2, 0.0])


def test_stale_updates_that_repeat_the_current_ones_gain_nothing_by_it():
    stale = [update(1.0, 2.0), update(1.0, 2.0)]
    assert RelevanceAware(0.4).weigh_stale(stale, {"w": np.array([1.0, 2.0])}) == [0.3, 0.3]


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_a_deviation_that_overflows_weighs_as_the_largest_one():
    stale = [update(1.0, 0.0), update(1e200, 0.0)]
    weights = RelevanceAware(0.5).weigh_stale(stale, {"w": np.zeros(2)})
    assert weights == pytest.approx([0.25, 0.25 + 0.5 * (1 - exp(-1.0))])


@pytest.mark.parametrize("beta", [0.0, 0.35, 1.0])
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_a_stale_update_never_weighs_more_than_a_current_one(beta, scale):
    rng = np.random.default_rng(2)
    stale = [update(*rng.normal(size=2) * 10**k, staleness=1 + k) for k in range(5)]
    weights = RelevanceAware(beta, scale=scale).weigh_stale(stale, {"w": np.array([1.0, 0.0])})
    assert all(0.0 <= weight <= 1.0 for weight in weights)


def test_a_current_update_weighs_one_and_a_stale_one_alone_by_its_age():
    assert RelevanceAware().weigh(update(1.0, 1.0, staleness=0)) == 1.0
    assert RelevanceAware().weigh(update(1.0, 1.0, staleness=3)) == 0.25
