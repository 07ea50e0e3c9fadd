"""What the agent sees: finite whatever it is given, and the same for ten or a thousand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.agents.policy.features import (
    CONTEXT,
    FEATURES,
    HEURISTIC_LIMIT,
    LIMIT,
    N_CONTEXT,
    N_FEATURES,
    SCHEMA,
    features,
    heuristic_scores,
)
from fedstale.strategies.types import Candidates

FLOATS = (
    "forecast_p_finish",
    "forecast_p_available",
    "forecast_duration_s",
    "forecast_at",
    "duration_s",
    "loss",
    "square_loss",
    "examples",
    "staleness",
    "last_version",
    "picked_at",
    "expected_finishes",
)


def some(n, seed, unknown=0.3):
    """Candidates with everything known of most."""
    rng = np.random.default_rng(seed)
    columns = {name: rng.lognormal(1.0, 2.0, n) for name in FLOATS}
    columns["forecast_p_finish"] = rng.random(n)
    columns["forecast_p_available"] = rng.random(n)
    for name in FLOATS[:-1]:
        columns[name][rng.random(n) < unknown] = np.nan
    counts = {
        name: rng.integers(0, 9, n) for name in ("times_picked", "times_finished", "times_failed")
    }
    return Candidates.of(np.arange(n), **columns, **counts)


def see(candidates, **changed):
    state = {"now": 1000.0, "k": 3, "n_in_flight": 2, "version": 5, "deadline_s": 600.0}
    state |= {"n_missing": 3, "n_expected": 1.5}
    given = features(candidates, np.ones((1, len(candidates)), dtype=bool), **(state | changed))
    return tuple(values[0] for values in given)


def test_the_schema_names_every_number_once():
    assert len(set(FEATURES)) == N_FEATURES
    assert len(set(CONTEXT)) == N_CONTEXT
    assert SCHEMA["version"] == 3


def test_numbers_of_one_candidate_by_hand():
    nodes = Candidates.of(
        [1, 2, 3],
        forecast_p_finish=[0.5, np.nan, 1.0],
        forecast_duration_s=[100.0, np.nan, 400.0],
        forecast_at=[990.0, np.nan, 1000.0],
        loss=[1.0, 2.0, np.nan],
        examples=[10.0, 10.0, np.nan],
        times_finished=[1, 1, 0],
        times_failed=[0, 1, 0],
        times_picked=[1, 2, 0],
    )
    x, context, heuristic = see(nodes, k=2, n_in_flight=2)
    value = dict(zip(FEATURES, x[0], strict=True))
    assert value["p_finish_logit"] == pytest.approx(np.log(0.7 / 0.3), rel=1e-5)
    assert value["forecast_age"] == pytest.approx(np.log1p(10.0) / 2, rel=1e-5)
    assert value["forecast_duration_ratio"] == pytest.approx(np.log(0.5), rel=1e-5)
    assert value["forecast_duration_to_deadline"] == pytest.approx(np.log(100 / 600), rel=1e-5)
    assert value["utility_ratio"] == pytest.approx(-0.5 * np.log(2.0), rel=1e-5)
    assert value["duration_unknown"] == 1.0
    assert x[1, FEATURES.index("forecast_unknown")] == 1.0
    # Certainty is cut to log-odds of 4.
    assert x[2, FEATURES.index("p_finish_logit")] == 4.0
    about = dict(zip(CONTEXT, context, strict=True))
    assert about["slots_share"] == pytest.approx(np.log(2 / 3), rel=1e-5)
    assert about["in_flight_share"] == 0.5
    assert about["utility_known_share"] == pytest.approx(2 / 3)
    # Of 100 s and 400 s, the middle is 200 s on the scale of logarithms.
    assert about["median_duration_to_deadline"] == pytest.approx(np.log(200 / 600), rel=1e-5)
    assert about["missing_to_slots"] == pytest.approx(np.log(4 / 3), rel=1e-5)
    assert about["expected_to_missing"] == pytest.approx(np.log(2.5 / 4), rel=1e-5)
    # The third is unknown: it gets the largest utility, and its own word; so the second gets 200 s.
    np.testing.assert_allclose(
        np.exp(heuristic - heuristic[0]),
        [
            1.0,
            (0.5 / 0.7) ** 3 * 2**0.7 / 2**2 / 1.5**1.5,
            (1 / 0.7) ** 3 * 2**0.7 / 4**2 * 2**1.5,
        ],
        rtol=1e-5,
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -1.0, 1e-150, 1e150, 0.5, 1.0])),
    st.integers(0, 1000),
)
def test_everything_is_finite_whatever_is_known(n, odd, seed):
    rng = np.random.default_rng(seed)
    values = [*odd, 1.0]
    nodes = Candidates.of(np.arange(n), **{name: rng.choice(values, size=n) for name in FLOATS})
    for deadline in (np.inf, 0.0, 100.0):
        x, context, heuristic = see(nodes, deadline_s=deadline, now=rng.choice([0.0, 1e12]))
        assert x.shape == (n, N_FEATURES)
        assert np.isfinite(x).all()
        assert np.isfinite(context).all()
        assert np.isfinite(heuristic).all()
        assert np.abs(x).max() <= LIMIT + 1e-5
        assert np.abs(context).max() <= LIMIT
        assert np.abs(heuristic).max() <= HEURISTIC_LIMIT


@pytest.mark.parametrize("n", [1, 2, 17, 300])
def test_many_choices_at_once_give_the_same_numbers_as_one_at_a_time(n):
    rng = np.random.default_rng(n)
    each = [some(n, seed) for seed in range(4)]
    mask = rng.random((4, n)) < 0.7
    mask[:, 0] = True
    names = (*FLOATS, "times_picked", "times_finished", "times_failed")
    columns = {name: np.concatenate([getattr(c, name) for c in each]) for name in names}
    together = Candidates.of(np.arange(4 * n), **columns)
    state = {
        "now": np.array([100.0, 200.0, 1e4, 5e5]),
        "k": np.array([1, 2, 3, 40]),
        "n_in_flight": np.array([0, 5, 1, 2]),
        "version": np.array([0, 3, 50, 7]),
        "deadline_s": np.array([np.inf, 100.0, 600.0, 1e6]),
        "n_missing": np.array([0, 1, 2, 30]),
        "n_expected": np.array([0.0, 4.5, 0.7, 1.0]),
    }
    x, context, heuristic = features(together, mask, **state)
    for i, nodes in enumerate(each):
        one = see(nodes.take(mask[i]), **{k: v[i] for k, v in state.items()})
        np.testing.assert_allclose(x[i, mask[i]], one[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(context[i], one[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(heuristic[i, mask[i]], one[2], rtol=1e-5, atol=1e-5)
        assert not x[i, ~mask[i]].any()
        assert not heuristic[i, ~mask[i]].any()
    np.testing.assert_allclose(
        heuristic,
        heuristic_scores(together, mask),
        rtol=1e-5,
        atol=1e-5,
    )


def test_ranks_among_very_many_are_read_off_a_sample():
    x = see(some(50_000, 2))[0][:, FEATURES.index("heuristic_rank")]
    heuristic = see(some(50_000, 2))[2]
    order = np.argsort(np.argsort(heuristic))
    # What is beyond the limits is tied.
    is_within = np.abs(heuristic) < HEURISTIC_LIMIT
    assert np.abs(x - order / 50_000)[is_within].max() < 0.1


def test_no_candidates_is_no_features():
    x, context, heuristic = see(Candidates.of(np.zeros(0)))
    assert x.shape == (0, N_FEATURES)
    assert heuristic.shape == (0,)
    assert np.isfinite(context).all()
