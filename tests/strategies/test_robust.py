"""The rules against naive forms, hand-computed cases, bounds on exhaustive subsets, and attacks."""

import importlib.util
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.errors import ConfigError, ProtocolError
from fedstale.strategies.robust import (
    CTMA,
    Bulyan,
    CentredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
    aggregate,
    heaviest,
    scores,
    weighted_median,
)

RULES = {
    "median": lambda f: Median(f=f),
    "trimmed mean": lambda f: TrimmedMean(f=f),
    "geometric median": lambda f: GeometricMedian(f=f),
    "Krum": lambda f: Krum(f=f),
    "Multi-Krum": lambda f: MultiKrum(f=f),
    "Bulyan": lambda f: Bulyan(f=f),
    "centred clipping": lambda f: CentredClipping(f=f),
    "CTMA": lambda f: CTMA(f=f),
    "CTMA of the median": lambda f: CTMA(f=f, base=Median(f=0)),
}
KAPPA = {
    "median": lambda n, f: 4 * (1 + f / (n - 2 * f)) ** 2,
    "trimmed mean": lambda n, f: 6 * f / (n - 2 * f) * (1 + f / (n - 2 * f)),
    "geometric median": lambda n, f: 4 * (1 + f / (n - 2 * f)) ** 2,
    "Krum": lambda n, f: 6 * (1 + f / (n - 2 * f)),
}


def merged(rule, rows, weights=None):
    """Aggregate the rows of a matrix as models of two arrays."""
    rows = np.asarray(rows)
    cut = rows.shape[1] // 2
    models = [{"a": row[:cut].copy(), "b": row[cut:].reshape(-1, 1).copy()} for row in rows]
    out = aggregate(rule, models, weights)
    return np.concatenate([out["a"], out["b"].ravel()])


def points(n, d=3):
    numbers = st.floats(-100, 100, allow_nan=False)
    return st.lists(st.lists(numbers, min_size=d, max_size=d), min_size=n, max_size=n).map(np.array)


def test_a_median_between_two_values_is_their_mean_with_and_without_weights():
    block = np.array([[1.0], [2.0], [4.0], [9.0]])
    assert weighted_median(block, np.ones(4)) == 3.0
    assert weighted_median(block, np.array([1.0, 1.0, 1.5, 0.5])) == 3.0
    assert weighted_median(block, np.array([1.0, 1.0, 3.0, 1.0])) == 4.0


def test_a_trimmed_mean_counts_values_at_the_border_in_part():
    rows = np.array([[0.0], [10.0], [20.0], [90.0]])
    assert merged(TrimmedMean(f=1), rows) == 15.0
    # The heaviest weighs 2 of 6, so 2 go at each end and the third 20 counts alone in part.
    weights = np.array([1.0, 2.0, 2.0, 1.0])
    expected = (1.0 * 10.0 + 1.0 * 20.0) / 2.0
    assert merged(TrimmedMean(f=1), rows, weights) == pytest.approx(expected)


def test_krum_takes_the_point_in_the_middle_of_its_neighbours():
    rows = np.array([[0.0, 0.0], [1.0, 0.0], [0.9, 0.1], [2.0, 0.0], [50.0, 50.0]])
    np.testing.assert_array_equal(merged(Krum(f=1), rows), [1.0, 0.0])
    # Nearest four of the second: itself, 0.02, 1 and 1.
    squares = ((rows[:, None] - rows[None]) ** 2).sum(2)
    assert scores(squares, np.ones(5), 1)[1] == pytest.approx((0.02 + 1 + 1) / 4)


def test_multi_krum_averages_what_krum_would_choose_first():
    rows = np.array([[0.0], [1.0], [2.0], [100.0]])
    assert merged(MultiKrum(f=1), rows) == 1.0
    assert merged(MultiKrum(f=1), rows, np.array([1.0, 1.0, 1.4, 1.0])) == pytest.approx(3.8 / 3.4)


def test_bulyan_by_hand():
    rows = np.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [99.0]])
    # Repeated Krum chooses five of seven; the three values nearest to their median are averaged.
    chosen, left = [], list(range(7))
    for _ in range(5):
        squares = (rows[left] - rows[left].T) ** 2
        means = np.sort(squares, axis=1)[:, : len(left) - 1].sum(1)
        chosen.append(left.pop(int(np.argmin(means))))
    values = rows[chosen, 0]
    near = values[np.argsort(np.abs(values - np.median(values)), kind="stable")[:3]]
    assert 6 not in chosen
    assert merged(Bulyan(f=1), rows) == pytest.approx(near.mean())


def test_centred_clipping_from_zero_with_a_radius_bounds_each_update():
    rows = np.array([[3.0, 4.0], [0.3, 0.4], [-600.0, -800.0]])
    rule = CentredClipping(f=1, radius=1.0, steps=1, start="zero")
    np.testing.assert_allclose(merged(rule, rows), [0.1, 0.4 / 3], rtol=1e-12)


def test_ctma_averages_exactly_the_share_of_weight_that_is_trusted():
    rows = np.array([[0.0], [1.0], [2.0], [100.0]])
    rule = CTMA(f=1, base=Median(f=0))
    assert merged(rule, rows) == 1.0
    weights = np.array([1.0, 1.0, 1.5, 1.0])
    # The median is 2; trusted are 3 of 4.5: 1.5 of the third, 1 of the second, half of the first.
    assert merged(rule, rows, weights) == pytest.approx((1.5 * 2 + 1.0 * 1 + 0.5 * 0) / 3.0)


def test_what_rounding_leaves_of_the_weight_lets_no_far_update_in():
    found = np.array([1.0, 1.1, 1.1, 1.0768477860018624, 1.0748169046712728])
    for weights in (found, *np.random.default_rng(0).uniform(1.0, 1.1, (200, 5))):
        rows = np.zeros((5, 3))
        rows[np.argsort(-weights)[:2], 2] = 1e30
        np.testing.assert_array_equal(merged(CTMA(f=2), rows, weights), 0.0)


@pytest.mark.parametrize("name", RULES)
@given(data=st.data(), f=st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_a_rule_stays_within_the_honest_values_whatever_the_others_say(name, data, f):
    rule = RULES[name](f)
    n = data.draw(st.integers(max(rule.least, 1), rule.least + 3))
    rows = data.draw(points(n))
    bad = np.array(data.draw(st.lists(st.floats(width=32), min_size=3 * f, max_size=3 * f)))
    rows[:f] = bad.reshape(f, 3)
    weights = np.array(data.draw(st.lists(st.floats(1.0, 1.1), min_size=n, max_size=n)))
    if 2 * heaviest(weights, f) >= weights.sum() * 0.99:
        weights = None
    found = merged(rule, rows, weights)
    honest = rows[f:]
    spread = np.linalg.norm(honest - honest.mean(0), axis=1).max() if n > f else 0.0
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - honest.mean(0)) <= 40.0 * spread + 1e-9 * np.abs(honest).max()


@pytest.mark.parametrize("name", KAPPA)
@pytest.mark.parametrize(("n", "f"), [(3, 1), (4, 1), (5, 1), (5, 2), (7, 2), (7, 3)])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_bound_of_robustness_holds_for_every_subset(name, n, f, data):
    rows = data.draw(points(n, 2))
    found = merged(RULES[name](f), rows)
    kappa = KAPPA[name](n, f)
    for chosen in itertools.combinations(range(n), n - f):
        own = rows[list(chosen)]
        middle = own.mean(0)
        error = ((found - middle) ** 2).sum()
        variance = ((own - middle) ** 2).sum(1).mean()
        assert error <= kappa * variance * (1 + 1e-6) + 1e-9 * (1 + (rows**2).max())


@pytest.mark.parametrize("name", RULES)
def test_equal_weights_of_any_size_change_nothing(name):
    rows = np.random.default_rng(3).normal(size=(11, 6))
    plain = merged(RULES[name](2), rows)
    np.testing.assert_allclose(merged(RULES[name](2), rows, np.full(11, 7.0)), plain, rtol=1e-9)


@pytest.mark.parametrize("name", RULES)
def test_without_adversaries_equal_updates_are_returned_as_they_are(name):
    row = np.array([1.0, -2.0, 1e-30, 3e20])
    np.testing.assert_allclose(merged(RULES[name](1), np.tile(row, (7, 1))), row, rtol=1e-12)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_updates_far_below_the_weights_keep_their_precision_beside_huge_ones(name, dtype):
    rng = np.random.default_rng(0)
    rows = (1e-4 * rng.normal(size=(9, 5)) + 1e-3).astype(dtype)
    calm = merged(RULES[name](1), rows)
    rows[0] = np.finfo(dtype).max
    found = merged(RULES[name](1), rows)
    assert found.dtype == dtype
    honest = rows[1:].astype(np.float64)
    assert (np.abs(found - honest.mean(0)) < 3e-4).all()
    assert (np.abs(calm - honest.mean(0)) < 3e-4).all()


@pytest.mark.parametrize("name", RULES)
def test_an_update_with_nan_is_left_out_and_one_too_many_is_rejected(name):
    rule = RULES[name](1)
    n = rule.least
    rows = np.arange(2.0 * n).reshape(n, 2)
    rows[0, 1] = np.nan
    # The NaN was the adversary, so the others suffice.
    np.testing.assert_array_equal(merged(rule, rows), merged(rule.facing(0), rows[1:]))
    with pytest.raises(ProtocolError, match=f"a buffer of {n - 1} finite updates.*at least {n}"):
        merged(rule, rows[1:])


def test_weights_that_give_adversaries_half_are_rejected():
    rows = np.arange(4.0)[:, None]
    with pytest.raises(ProtocolError, match="half the weight"):
        merged(Median(f=1), rows, np.array([1.0, 1.0, 1.0, 3.0]))
    for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ProtocolError, match="finite numbers > 0"):
            merged(Median(f=1), rows, np.array([1.0, 1.0, 1.0, bad]))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Median(f=-1), r"\w+\.f = "),
        (lambda: Krum(f=0.5), r"\w+\.f = "),
        (lambda: CentredClipping(f=1, radius=0.0), r"\w+\.radius = "),
        (lambda: CentredClipping(f=1, steps=0), r"\w+\.steps = "),
        (lambda: CentredClipping(f=1, start="last"), r"\w+\.start = "),
        (lambda: GeometricMedian(f=1, steps=0), r"\w+\.steps = "),
        (lambda: GeometricMedian(f=1, smoothing=0.0), r"\w+\.smoothing = "),
        (lambda: GeometricMedian(f=1, tolerance=-1.0), r"\w+\.tolerance = "),
        (lambda: CTMA(f=1, base="median"), r"\w+\.base = "),
    ],
)
def test_a_setting_out_of_range_is_named(make, field):
    with pytest.raises(ConfigError, match=field):
        make()


def test_rules_look_at_models_of_any_size_block_by_block(monkeypatch):
    rows = np.random.default_rng(1).normal(size=(7, 23))
    whole = {name: merged(make(1), rows) for name, make in RULES.items()}
    monkeypatch.setattr("fedstale.strategies.robust.BLOCK", 21)
    for name, make in RULES.items():
        np.testing.assert_allclose(merged(make(1), rows), whole[name], rtol=1e-9, atol=1e-12)


# What ByzFL 0.0.11 returned for these rows.
BYZFL_ROWS = np.array(
    [
        [0.5, -1.0, 2.0],
        [1.0, 0.0, 3.0],
        [0.0, 0.5, 2.5],
        [1.5, -0.5, 1.0],
        [0.25, 1.0, 2.25],
        [0.75, 0.25, 3.5],
        [40.0, -30.0, 20.0],
    ]
)
BYZFL = {
    "Median()": (Median(f=2), [0.75, 0.0, 2.5]),
    "TrMean(f=2)": (TrimmedMean(f=2), [0.75, -0.08333333333333333, 2.5833333333333335]),
    "GeometricMedian(nu=1e-9, T=5000)": (
        GeometricMedian(f=2, steps=5000, tolerance=0.0),
        [0.8294002159497653, -0.00011156972197196622, 2.7412941012284957],
    ),
    "Krum(f=2)": (Krum(f=2), [1.0, 0.0, 3.0]),
    "MultiKrum(f=2)": (MultiKrum(f=2), [0.5, 0.15, 2.65]),
    "CenteredClipping(L=3, tau=2.0)": (
        CentredClipping(f=2, radius=2.0, steps=3, start="zero"),
        [0.9109788502510701, -0.14879744238296522, 2.469605230492843],
    ),
}


@pytest.mark.parametrize("theirs", BYZFL)
def test_a_rule_returns_what_byzfl_returns(theirs):
    rule, expected = BYZFL[theirs]
    tolerance = 1e-6 if isinstance(rule, GeometricMedian) else 1e-12
    np.testing.assert_allclose(merged(rule, BYZFL_ROWS), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(
    importlib.util.find_spec("byzfl") is None, reason="needs ByzFL: pip install --no-deps byzfl"
)
def test_the_rules_agree_with_byzfl_on_random_rows():
    from byzfl.aggregators import aggregators as theirs

    rng = np.random.default_rng(11)
    for n, f, d in ((5, 1, 4), (9, 2, 30), (15, 4, 7)):
        rows = rng.normal(size=(n, d))
        rows[:f] += 20.0
        exact = GeometricMedian(f=f, steps=3000, tolerance=0.0)
        pairs = [
            (Median(f=f), theirs.Median(), 1e-12),
            (TrimmedMean(f=f), theirs.TrMean(f=f), 1e-12),
            (exact, theirs.GeometricMedian(nu=1e-9, T=3000), 1e-6),
            (Krum(f=f), theirs.Krum(f=f), 1e-12),
            (MultiKrum(f=f), theirs.MultiKrum(f=f), 1e-12),
            (
                CentredClipping(f=f, radius=2.0, steps=3, start="zero"),
                theirs.CenteredClipping(L=3, tau=2.0),
                1e-12,
            ),
        ]
        for mine, rule, tolerance in pairs:
            np.testing.assert_allclose(
                merged(mine, rows), rule(rows), rtol=tolerance, atol=tolerance, err_msg=repr(mine)
            )
