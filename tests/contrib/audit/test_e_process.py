from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstale.contrib.audit.e_process import ALARM, SURE, log_e_values, log_wealth

FLEETS = {
    "any": lambda rng, n, jobs: rng.random((n, jobs)),
    "one chance each": lambda rng, n, jobs: np.repeat(rng.beta(4, 1, (n, 1)), jobs, axis=1),
    "nearly sure": lambda rng, n, jobs: rng.beta(80, 1, (n, jobs)),
    "coins": lambda rng, n, jobs: np.full((n, jobs), 0.5),
}
JOBS = 100


def alarms(p, kept, in_time):
    """Return how many devices reach the e-value of an alarm at any job."""
    owner = np.repeat(np.arange(len(p)), p.shape[1])
    columns = (np.asarray(column, np.float64).ravel() for column in (p, kept, in_time))
    _, total = log_e_values(*columns, owner)
    return int((total.reshape(p.shape) >= np.log(ALARM)).any(axis=1).sum())


def check_alarms(fleet, n):
    """Compare the alarms of n honest devices, and of a thousand others, with what is promised."""
    rng = np.random.default_rng(1)
    p = FLEETS[fleet](rng, n, JOBS)
    honest, in_time = rng.random(p.shape) < p, rng.random(p.shape) < 0.5
    assert alarms(p, honest, np.where(honest, in_time, np.nan)) <= n / 1000
    # The same count would see devices that are not honest, by 1 in the logit or by durations.
    few = slice(0, 1000)
    lower = p[few] / (p[few] + (1 - p[few]) * np.e)
    none = np.full(lower.shape, np.nan)
    enough = 1 if fleet == "nearly sure" else 10
    assert alarms(p[few], rng.random(lower.shape) < lower, none) > enough
    assert alarms(p[few], honest[few], rng.random(lower.shape) < 0.3) > enough


RNG = np.random.default_rng
chances = st.lists(st.floats(0.0, 1.0, allow_subnormal=False), min_size=1, max_size=6)


def wealth_by_hand(p, kept):
    """Return the wealth after each outcome of one owner, bettor by bettor, in plain Python."""
    worths, found = [1.0] * 5, []
    n = successes = 0
    for stated, y in zip(p, kept, strict=True):
        odds_at = min(stated, 1.0 - SURE)
        held = [odds_at / (odds_at + (1 - odds_at) * np.exp(d)) for d in (0.5, 1.0, 2.0, 4.0)]
        held.append(min((successes + 0.5) / (n + 1), odds_at))
        for i, q in enumerate(held):
            if_kept = q / odds_at if odds_at > 0 else np.exp(-(0.5, 1, 2, 4, 0)[i])
            if_not = (1 - q) / (1 - odds_at)
            worths[i] *= {1: if_kept, 0: if_not}.get(y, min(if_kept, if_not))
        if y in (0, 1):
            n, successes = n + 1, successes + y
        found.append(np.mean(worths))
    return found


@given(st.data(), chances)
def test_wealth_is_that_of_five_bettors_by_hand(data, p):
    kept = data.draw(st.lists(st.sampled_from([0, 1, None]), min_size=len(p), max_size=len(p)))
    outcomes = np.array([np.nan if y is None else y for y in kept], np.float64)
    got = np.exp(log_wealth(np.array(p), outcomes, np.zeros(len(p), np.int64)))
    assert got == pytest.approx(wealth_by_hand(p, kept), rel=1e-9)


@given(chances, st.floats(0.0, 1.0))
def test_no_wealth_grows_in_the_mean_while_chances_are_kept(p, better):
    """Over all 2^n outcomes, of devices that keep their chances, or do better by some share."""
    p = np.array(p)
    true = p + better * (1 - p)
    owner = np.zeros(len(p), np.int64)
    mean = 0.0
    for outcome in product((0.0, 1.0), repeat=len(p)):
        kept = np.array(outcome)
        share = np.prod(np.where(kept == 1, true, 1 - true))
        mean += share * np.exp(log_wealth(p, kept, owner)[-1])
    assert mean <= 1 + 1e-9
    if better == 0 and p.max() <= 1 - SURE:
        assert mean == pytest.approx(1)


@given(st.data(), chances)
def test_an_unknown_outcome_leaves_the_less_of_both(data, p):
    owner = np.zeros(len(p), np.int64)
    kept = np.array(data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=6))[: len(p)])
    kept = np.resize(kept, len(p))
    ends = [log_wealth(np.array(p), np.append(kept[:-1], y), owner)[-1] for y in (0.0, 1.0, np.nan)]
    assert ends[2] <= min(ends[:2]) + 1e-9


def test_owners_have_wealth_of_their_own():
    rng = RNG(0)
    p, owner = rng.random(30), np.repeat([0, 1, 5], 10)
    kept = (rng.random(30) < 0.5).astype(np.float64)
    alone = [log_wealth(p[owner == i], kept[owner == i], owner[owner == i]) for i in (0, 1, 5)]
    assert log_wealth(p, kept, owner) == pytest.approx(np.concatenate(alone), abs=1e-9)
    assert log_wealth(p[:0], kept[:0], owner[:0]).size == 0


@pytest.mark.parametrize("fleet", FLEETS)
def test_of_a_thousand_honest_devices_at_most_one_alarms_whenever_one_looks(fleet):
    check_alarms(fleet, 1000)


def test_who_states_nothing_has_bets_of_one():
    nothing, owner = np.full(4, np.nan), np.zeros(4, np.int64)
    each, mean = log_e_values(nothing, np.ones(4), nothing, owner)
    assert not each.any()
    assert mean == pytest.approx(np.zeros(4), abs=1e-12)
    p, kept = np.array([0.5, np.nan, 0.5, 0.5]), np.array([1.0, 0.0, 0.0, 1.0])
    said = ~np.isnan(p)
    both = log_wealth(p, kept, owner), log_wealth(p[said], kept[said], owner[said])
    assert both[0][said] == pytest.approx(both[1])
