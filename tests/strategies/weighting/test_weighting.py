"""Contract tests of every weighting, and the values of ages and gaps."""

from itertools import pairwise

import numpy as np
import pytest

from fedstale.errors import ConfigError
from fedstale.strategies.weighting import (
    ByAge,
    CachedUpdates,
    ClientUpdate,
    DirectionalGap,
    EuclideanStaleness,
    Gap,
    RelevanceAware,
    constant,
    hinge,
    inverse_root,
    polynomial,
    staleness_aware,
)

CURVES = [
    constant(),
    polynomial(0.5),
    polynomial(2.0),
    hinge(10.0, 0),
    hinge(2.0, 4),
    staleness_aware(),
    polynomial(1.0),
    inverse_root(),
]
WEIGHTINGS = [
    *(lambda c=c: ByAge(c) for c in CURVES),
    *(lambda of=of: Gap(of=of) for of in ("parameter", "layer", "model")),
    *(lambda of=of: DirectionalGap(of=of) for of in ("layer", "model")),
    lambda: Gap(decay=0.999),
    EuclideanStaleness,
    RelevanceAware,
]


def model(rng, scale=1.0):
    return {
        "a": (scale * rng.normal(size=(3, 4))).astype(np.float32),
        "b": scale * rng.normal(size=5),
    }


def trained(weighting, seed=0, n=4):
    rng = np.random.default_rng(seed)
    path = [model(rng)]
    for _ in range(n):
        step = model(rng, 0.1)
        path.append({k: (path[-1][k] + step[k]).astype(path[-1][k].dtype) for k in step})
        weighting.observe(path[-2], path[-1], 1.0)
    return path


@pytest.mark.parametrize("make", WEIGHTINGS)
def test_an_update_without_staleness_has_weight_exactly_one(make):
    weighting = make()
    path = trained(weighting)
    delta = model(np.random.default_rng(1))
    before = {k: v.copy() for k, v in delta.items()}
    weight = weighting.weigh(
        ClientUpdate(delta=delta, base=path[-1], current=path[-1], staleness=0)
    )
    assert weight == 1.0
    for name in delta:
        np.testing.assert_array_equal(delta[name], before[name])


@pytest.mark.parametrize("make", WEIGHTINGS)
def test_a_stale_update_alone_is_written_to_and_never_grows_or_turns_round(make):
    weighting = make()
    path = trained(weighting)
    delta = model(np.random.default_rng(1))
    before, *kept = ({k: v.copy() for k, v in m.items()} for m in (delta, *path))
    weight = weighting.weigh(ClientUpdate(delta=delta, base=path[0], current=path[-1], staleness=4))
    assert 0.0 < weight <= 1.0
    for name in delta:
        assert delta[name].dtype == before[name].dtype
    ratio = np.concatenate([(delta[name] / before[name]).ravel() for name in delta])
    assert (ratio > 0).all()
    assert (ratio <= 1).all()
    assert ratio.mean() == pytest.approx(weight, rel=1e-5)
    for found, as_it_was in zip(path, kept, strict=True):
        for name in as_it_was:
            np.testing.assert_array_equal(found[name], as_it_was[name])


@pytest.mark.parametrize("make", WEIGHTINGS)
def test_state_survives_a_checkpoint(make):
    one, two = make(), make()
    path = trained(one)
    two.load_state_dict(one.state_dict())
    deltas = [model(np.random.default_rng(1)) for _ in range(2)]
    weights = [
        w.weigh(ClientUpdate(delta=d, base=path[1], current=path[-1], staleness=3))
        for w, d in zip((one, two), deltas, strict=True)
    ]
    assert weights[0] == weights[1]
    for name in deltas[0]:
        np.testing.assert_array_equal(deltas[0][name], deltas[1][name])


@pytest.mark.parametrize(
    ("curve", "values"),
    [
        (constant(), [1, 1, 1, 1]),
        (polynomial(0.5), [1, 2**-0.5, 3**-0.5, 0.5]),
        (hinge(10.0, 1), [1, 1, 1 / 11, 1 / 21]),
        (staleness_aware(), [1, 1, 1 / 2, 1 / 3]),
        (polynomial(1.0), [1, 1 / 2, 1 / 3, 1 / 4]),
        (inverse_root(), [1, 1 / 2, 1 / (1 + 2**0.5), 1 / (1 + 3**0.5)]),
    ],
)
def test_curves_of_age_have_their_published_values(curve, values):
    np.testing.assert_allclose([curve(tau) for tau in range(4)], values, rtol=1e-12)


def test_the_gap_of_two_parameters_after_three_steps_is_what_hand_computes():
    # Steps (1, 2), (3, 0), (2, 2) with g = 1/2:
    #   r1 = 1/2, 5.0 and 4.5 for the first parameter: (1/2)1; (1/2)(1/2)+(1/2)9 = 19/4; 35/8.
    #   n = 3: C1 = sqrt((35/8) / (7/8)) = sqrt(5).
    #   Second: 2; 1; 1/2 + 2 = 5/2: C2 = sqrt((5/2) / (7/8)) = sqrt(20/7).
    path = [np.array(p, float) for p in ((0, 0), (1, 2), (4, 2), (6, 4))]
    gap = Gap(decay=0.5)
    for before, after in pairwise(path):
        gap.observe({"w": before}, {"w": after}, 1.0)
    delta = {"w": np.array([1.0, -1.0])}
    # From the version after the first step: moved (5, 2), staleness 2, so G <= 3.
    update = ClientUpdate(delta=delta, base={"w": path[1]}, current={"w": path[3]}, staleness=2)
    g1 = min(1 + 5 / 5**0.5, 3)
    g2 = min(1 + 2 / (20 / 7) ** 0.5, 3)
    weight = gap.weigh(update)
    np.testing.assert_allclose(delta["w"], [1 / g1, -1 / g2], rtol=1e-12)
    assert weight == pytest.approx((1 / g1 + 1 / g2) / 2, rel=1e-12)


def test_the_gap_of_norms_is_what_hand_computes():
    path = [np.array(p, float) for p in ((0, 0), (3, 4), (3, 4))]
    for of in ("layer", "model"):
        gap = Gap(of=of, decay=0.5)
        gap.observe({"w": path[0]}, {"w": path[1]}, 1.0)
        gap.observe({"w": path[1]}, {"w": path[2]}, 1.0)
        # r = 25/2, then 25/4; C = sqrt((25/4) / (3/4)) = 5 / sqrt(3); moved 5.
        delta = {"w": np.array([1.0, 1.0])}
        stale = ClientUpdate(delta=delta, base={"w": path[0]}, current={"w": path[2]}, staleness=2)
        assert gap.weigh(stale) == pytest.approx(1 / (1 + 3**0.5), rel=1e-12)


@pytest.mark.parametrize("of", ["parameter", "layer", "model"])
@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
def test_a_model_that_has_moved_by_the_only_step_seen_is_a_gap_of_two_at_any_rate(of, rate):
    gap = Gap(of=of, decay=0.5)
    base, current = {"w": np.zeros(2)}, {"w": np.array([3.0, 4.0])}
    gap.observe(base, current, rate)
    stale = ClientUpdate(delta={"w": np.ones(2)}, base=base, current=current, staleness=4)
    assert gap.weigh(stale) == pytest.approx(1 / 2, rel=1e-12)


def test_c_is_scaled_to_the_largest_rate_so_that_the_penalty_fades_with_it():
    gap = Gap(decay=0.9)
    theta = [{"w": np.array([x])} for x in (0.0, 1.0, 1.1, 1.2)]
    for k, rate in enumerate((1.0, 0.1, 0.1)):
        gap.observe(theta[k], theta[k + 1], rate)
    stale = ClientUpdate(delta={"w": np.ones(1)}, base=theta[1], current=theta[3], staleness=2)
    # At the largest rate each step would have gone 1: two steps of 0.1 are a gap of 0.2.
    assert gap.weigh(stale) == pytest.approx(1 / 1.2, rel=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_frozen_parameter_keeps_its_update_and_a_jump_from_rest_gets_the_largest_gap(dtype):
    gap = Gap()
    still = np.zeros(2, dtype)
    gap.observe({"w": still}, {"w": still}, 1.0)
    delta = {"w": np.ones(2, dtype)}
    now = {"w": np.array([0.0, 1e-3], dtype)}
    gap.weigh(ClientUpdate(delta=delta, base={"w": still}, current=now, staleness=3))
    np.testing.assert_array_equal(delta["w"], np.array([1.0, 0.25], dtype))


@pytest.mark.parametrize("make", [Gap, lambda: Gap(of="layer"), DirectionalGap])
def test_before_any_step_was_seen_every_distance_has_the_largest_gap(make):
    delta = {"w": np.ones(1)}
    stale = ClientUpdate(
        delta=delta, base={"w": np.zeros(1)}, current={"w": np.ones(1)}, staleness=1
    )
    assert make().weigh(stale) == 0.5


def test_a_step_at_rate_zero_teaches_nothing():
    gap = Gap()
    gap.observe({"w": np.zeros(1)}, {"w": np.zeros(1)}, 0.0)
    assert gap.travel.n == 0


@pytest.mark.parametrize("of", ["layer", "model"])
def test_only_movement_in_the_updates_own_direction_is_held_against_it(of):
    weighting = DirectionalGap(of=of, share=0.0, decay=0.0)
    theta = [{"w": np.array([x, 0.0])} for x in (0.0, 1.0, 2.0, 3.0)]
    for before, after in pairwise(theta):
        weighting.observe(before, after, 1.0)

    def weight(*delta):
        delta = {"w": np.array(delta)}
        return weighting.weigh(
            ClientUpdate(delta=delta, base=theta[1], current=theta[3], staleness=9)
        )

    assert weight(7.0, 0.0) == pytest.approx(1 / 3)
    assert weight(-7.0, 0.0) == 1.0
    assert weight(0.0, 7.0) == 1.0
    assert weight(1.0, 1.0) == pytest.approx(1 / (1 + 2 / 2**0.5))
    assert weight(0.0, 0.0) == 1.0


def test_the_whole_share_in_any_direction_bounds_the_directional_gap():
    weighting = DirectionalGap(share=1.0, decay=0.0)
    theta = [{"w": np.array([x, 0.0])} for x in (0.0, 1.0)]
    weighting.observe(theta[0], theta[1], 1.0)
    stale = ClientUpdate(
        delta={"w": np.array([0.0, 1.0])}, base=theta[0], current=theta[1], staleness=9
    )
    assert weighting.weigh(stale) == 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: polynomial(-1.0),
        lambda: hinge(0.0, 1),
        lambda: hinge(1.0, -1),
        lambda: Gap(decay=1.0),
        lambda: Gap(of="tensor"),
        lambda: DirectionalGap(of="parameter"),
        lambda: DirectionalGap(share=1.5),
        lambda: ByAge(lambda tau: 0.5),
        lambda: EuclideanStaleness(0.0),
        lambda: RelevanceAware(1.5),
        lambda: RelevanceAware(scale=0.5),
        lambda: CachedUpdates(-0.1),
        lambda: CachedUpdates(1.1),
        lambda: CachedUpdates(n_clients=0),
        lambda: CachedUpdates(most_clients=0),
    ],
)
def test_settings_out_of_range_are_rejected(make):
    with pytest.raises(ConfigError, match="expected"):
        make()


def test_chunks_cover_large_arrays_as_one_formula_does():
    rng = np.random.default_rng(3)
    n = 100_003
    theta = [rng.normal(size=n).astype(np.float32) for _ in range(3)]
    gap = Gap(decay=0.5)
    gap.observe({"w": theta[0]}, {"w": theta[1]}, 1.0)
    gap.observe({"w": theta[1]}, {"w": theta[2]}, 1.0)
    r = 0.5 * (0.5 * (theta[1] - theta[0]) ** 2) + 0.5 * (theta[2] - theta[1]) ** 2
    c = np.sqrt(r / 0.75)
    g = np.minimum(1 + np.abs(theta[2] - theta[0]) / c, 3)
    delta = rng.normal(size=n).astype(np.float32)
    expected = delta / g
    stale = ClientUpdate(
        delta={"w": delta}, base={"w": theta[0]}, current={"w": theta[2]}, staleness=2
    )
    weight = gap.weigh(stale)
    np.testing.assert_allclose(delta, expected, rtol=1e-5)
    assert weight == pytest.approx(float((1 / g).mean()), rel=1e-5)


GAPS = [
    *(lambda of=of: Gap(of=of) for of in ("parameter", "layer", "model")),
    *(lambda of=of: DirectionalGap(of=of) for of in ("layer", "model")),
    *(lambda of=of: DirectionalGap(of=of, share=0.0) for of in ("layer", "model")),
]


def gap_of_two_steps(weighting, dtype):
    """G - 1 of an update that is two steps of 1/16 behind."""
    weight = weighting.weigh(
        ClientUpdate(
            delta={"w": np.ones(6, dtype)},
            base={"w": np.zeros(6, dtype)},
            current={"w": np.full(6, 1 / 8, dtype)},
            staleness=100,
        )
    )
    return 1.0 / weight - 1.0


def ordinary(weighting, dtype, n):
    for _ in range(n):
        weighting.observe({"w": np.zeros(6, dtype)}, {"w": np.full(6, 1 / 16, dtype)}, 0.5)


@pytest.mark.parametrize("make", GAPS, ids=lambda make: repr(make()))
@pytest.mark.parametrize(
    ("dtype", "huge"),
    [
        *((np.float16, huge) for huge in (300.0, 6e4)),
        *((np.float32, huge) for huge in (1e6, 1e18, 1e30)),
        *((np.float64, huge) for huge in (1e6, 1e100, 1e200)),
    ],
)
def test_one_huge_step_neither_spoils_the_gap_nor_ends_it(make, dtype, huge):
    weighting = make()
    ordinary(weighting, dtype, 50)
    before = gap_of_two_steps(weighting, dtype)
    assert before > 0.9
    weighting.observe({"w": np.zeros(6, dtype)}, {"w": np.full(6, huge, dtype)}, 0.5)
    # It counts for at most 100 steps, so C is at most sqrt(1 + 0.03 / (1 - 0.97^51) 100^2) steps.
    ordinary(weighting, dtype, 1)
    assert before / 20.0 < gap_of_two_steps(weighting, dtype) < before
    ordinary(weighting, dtype, 600)
    assert gap_of_two_steps(weighting, dtype) == pytest.approx(before, rel=1e-2)


@pytest.mark.parametrize("make", GAPS, ids=lambda make: repr(make()))
def test_a_first_step_that_overflows_counts_whole_and_is_forgotten_in_time(make):
    weighting = make()
    weighting.observe({"w": np.zeros(6, np.float32)}, {"w": np.full(6, 1e30, np.float32)}, 0.5)
    assert 0.0 <= gap_of_two_steps(weighting, np.float32) < 1e-6
    # C halves in 2 log(2) / 0.03 steps, and it is 2^58 times too large.
    ordinary(weighting, np.float32, 3000)
    assert gap_of_two_steps(weighting, np.float32) > 0.9


@pytest.mark.parametrize("of", ["parameter", "layer", "model"])
@pytest.mark.parametrize("size", [2.0**-10, 1.0, 2.0**7])
def test_the_gap_of_a_model_in_half_precision_is_that_of_the_same_model_in_single(of, size):
    found = []
    for dtype in (np.float16, np.float32):
        weighting, rng = Gap(of=of), np.random.default_rng(0)
        steps = (size * rng.choice([0.5, 1.0, 2.0], size=(30, 6))).astype(np.float16)
        for step in steps.astype(dtype):
            weighting.observe({"w": np.zeros(6, dtype)}, {"w": step}, 1.0)
        stale = ClientUpdate(
            delta={"w": np.ones(6, dtype)},
            base={"w": np.zeros(6, dtype)},
            current={"w": (3 * steps[0]).astype(dtype)},
            staleness=9,
        )
        found.append((weighting.weigh(stale), stale.delta["w"].astype(np.float32)))
    (half, delta), (single, expected) = found
    assert half == pytest.approx(single, rel=1e-6)
    np.testing.assert_allclose(delta, expected, rtol=2.0**-10)
    assert single < 0.9


def test_products_beyond_the_range_of_a_models_dtype_are_taken_in_a_wider_one():
    huge = {"w": np.array([1e30, 1e30], np.float32)}
    one = ClientUpdate(delta=dict(huge), base={"w": -huge["w"]}, current=huge, staleness=3)
    # |moved| = 2 |delta|, so gamma = 2.
    assert EuclideanStaleness(epsilon=1.0).weigh(one) == pytest.approx(1.0 / 3.0)
    np.testing.assert_allclose(one.delta["w"], 1e30 / 3.0, rtol=1e-6)
