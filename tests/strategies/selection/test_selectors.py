"""Which nodes to send to: a contract for all selectors, and each published rule."""

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_nodes import NODES, RNG, listed, picks_as_it_should, pool

from fedstale.errors import ConfigError
from fedstale.strategies.selection import (
    BALANCED,
    RELEASED,
    Candidates,
    Enough,
    ExpectedUtility,
    Exponents,
    Fastest,
    LeastAvailable,
    LeastRecent,
    Likely,
    MostReliable,
    Oort,
    OortSettings,
    PowerOfChoice,
    Random,
    SelectionContext,
)
from fedstale.strategies.selection.expected_utility import scores_of
from fedstale.strategies.types import UNKNOWN, History

SELECTORS = {
    "random": Random,
    "fedcs": Fastest,
    "power": lambda: PowerOfChoice(5),
    "most reliable": MostReliable,
    "expected utility": ExpectedUtility,
    "refl": LeastAvailable,
    "oort": Oort,
    "oort released": lambda: Oort(RELEASED),
    "least recent": LeastRecent,
    "balanced": lambda: ExpectedUtility(BALANCED),
    "likely": lambda: Likely(0.4, Random()),
    "enough": lambda: Enough(Random()),
}


@settings(max_examples=40, deadline=None)
@given(NODES, st.integers(1, 15))
@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_keeps_the_contract(name, pool, k):
    picks_as_it_should(SELECTORS[name], pool, k)


def test_candidates_hold_only_what_a_server_can_honestly_know():
    assert UNKNOWN.keys() == {
        *("forecast_p_finish", "forecast_p_available", "forecast_duration_s", "forecast_error"),
        *("forecast_at", "forecast_before_s", "forecast_before_p", "durations_s", "duration_s"),
        *("loss", "square_loss", "examples", "staleness", "last_version", "picked_at"),
        *("expected_finishes", "times_picked", "times_finished", "times_failed"),
    }


SPEEDS = {"durations_s": [(5.0,), (1.0, 3.0), (20.0,), ()]}


@pytest.mark.parametrize(
    ("rule", "known", "order"),
    [
        # The fastest that make the deadline, and unknown ones last.
        (Fastest(10.0), SPEEDS, [11, 10, 13]),
        (Fastest(), SPEEDS, [11, 10, 12, 13]),
        # The largest loss, and unknown ones first.
        (
            PowerOfChoice(4),
            {"loss": [1.0, 3.0, nan, 2.0], "examples": [1.0, 1.0, nan, 1.0]},
            [12, 11, 13, 10],
        ),
        # Those that will finish, whatever they are worth.
        (
            MostReliable(),
            {
                "times_finished": [0, 8, 3],
                "times_failed": [8, 0, 1],
                "square_loss": [9.0, 1.0, 4.0],
                "examples": [10.0, 1.0, 5.0],
            },
            [11, 12, 10],
        ),
        # The largest product of chance and utility.
        (
            ExpectedUtility(),
            {
                "forecast": [{"p_finish": 0.1}, {"p_finish": 0.9}, {"p_finish": 1.0}],
                "examples": [10.0, 5.0, 1.0],
                "square_loss": [4.0, 1.0, 1.0],
            },
            [11, 10, 12],
        ),
        # Who was never picked, then the least recent.
        (LeastRecent(), {"picked_at": [30.0, nan, 10.0]}, [11, 12, 10]),
        # Those that will rarely be online.
        (
            LeastAvailable(),
            {"forecast": [{"p_available": 0.9}, {}, {"p_available": 0.2}]},
            [12, 10, 11],
        ),
    ],
    ids=lambda value: repr(value) if hasattr(value, "select") else "",
)
def test_a_rule_picks_in_its_published_order(rule, known, order):
    nodes = pool(**known)
    assert rule.select(nodes, len(nodes), 0.0, RNG(0)) == order


def test_power_of_choice_draws_by_the_number_of_examples():
    known = pool(loss=[1.0, 9.0], examples=[1e6, 1.0])
    drawn = [PowerOfChoice(1).select(known, 1, 0.0, RNG(seed))[0] for seed in range(50)]
    assert drawn == [10] * 50


def test_a_balanced_score_is_its_formula():
    known = Candidates.of(
        [1, 2, 3],
        forecast_p_finish=[0.5, 0.9, 1.0],
        examples=[4.0, 9.0, nan],
        loss=[1.0, 1.0, nan],
        forecast_duration_s=[100.0, nan, -5.0],
        duration_s=[7.0, 50.0, nan],
        times_picked=[0, 1, 3],
    )
    found = scores_of(known, BALANCED)
    # Node 3 has the largest utility known, and the median of the durations known.
    expected = [
        0.5**3 * 4**0.7 / 100**2,
        0.9**3 * 9**0.7 / 50**2 / 2**1.5,
        9**0.7 / 5000 / 4**1.5,
    ]
    np.testing.assert_allclose(found, expected)


def test_a_draw_has_the_chances_of_its_scores():
    known = Candidates.of([1, 2], times_picked=[0, 1])
    rule = ExpectedUtility(Exponents(picked=1.0, temperature=0.5))
    drawn = [rule.select(known, 1, 0.0, RNG(seed))[0] for seed in range(2000)]
    assert drawn.count(1) / 2000 == pytest.approx(0.8, abs=0.03)


def test_the_likely_are_chosen_among_and_the_next_likely_fill_up():
    known = pool(
        forecast=[{"p_finish": p} for p in (0.95, 0.2, 0.9, 0.7)], picked_at=[5.0, 1.0, 2.0, 0.0]
    )
    rule = Likely(0.9, LeastRecent())
    assert rule.select(known, 1, 0.0, RNG(0)) == [12]
    assert rule.select(known, 3, 0.0, RNG(0)) == [12, 10, 13]
    assert Likely(1.0, LeastRecent()).select(known, 1, 0.0, RNG(0)) == [10]


@pytest.mark.parametrize(
    ("in_flight", "n_missing", "sure", "n"),
    [
        # 1 - .5^3 = .875, 1 - .5^4 = .9375
        ([], 1, 0.9, 4),
        ([], 1, 0.8, 3),
        ([0.5, 0.5, 0.5], 1, 0.9, 1),
        ([1.0], 1, 0.9, 0),
        # Of six jobs at least two come with 1 - 7 / 64 = .89, of seven with .94.
        ([], 2, 0.89, 6),
        ([], 2, 0.9, 7),
        ([0.0], 2, 0.9, 7),
    ],
)
def test_no_more_are_sent_than_a_step_is_likely_to_need(in_flight, n_missing, sure, n):
    history = History()
    for node, p in enumerate(in_flight, start=100):
        history.forecast(node, {"p_finish": p}, 0.0)
    for node in range(20):
        history.forecast(node, {"p_finish": 0.5}, 0.0)
    out = np.arange(100, 100 + len(in_flight), dtype=np.uint64)
    context = SelectionContext(buffer_size=3, n_missing=n_missing, n_in_flight=len(in_flight))
    candidates = history.candidates(np.arange(20), context, lambda: out)
    assert len(Enough(Random(), sure).select(candidates, 20, 0.0, RNG(0))) == n


def test_where_a_deadline_makes_the_step_all_are_sent():
    assert len(Enough(Random()).select(pool(loss=[1.0] * 9), 9, 0.0, RNG(0))) == 9


def test_of_very_many_updates_as_many_are_sent_as_of_few():
    def sent(n_missing, p, sure):
        step = SelectionContext(buffer_size=n_missing, n_missing=n_missing)
        nodes = Candidates.of(range(20_000), step, forecast_p_finish=[p] * 20_000)
        return len(Enough(Random(), sure).select(nodes, 20_000, 0.0, RNG(0)))

    for p, sure in ((0.9, 0.5), (0.9, 0.99), (0.5, 0.9)):
        # 64 are exact, 65 are not.
        assert sent(64, p, sure) < sent(65, p, sure) <= sent(64, p, sure) + 4
    # 5,000 / .9 = 5,555.6, and 2.33 standard deviations of 24.8, over .9, are 61 more.
    assert abs(sent(5_000, 0.9, 0.99) - 5_617) <= 3


def test_where_late_jobs_count_later_all_are_sent():
    def sent(keeps):
        step = SelectionContext(buffer_size=2, n_missing=2, keeps_stragglers=keeps)
        nodes = Candidates.of(range(9), step, forecast_p_finish=[0.99] * 9)
        return len(Enough(Random()).select(nodes, 9, 0.0, RNG(0)))

    assert (sent(keeps=False), sent(keeps=True)) == (2, 9)


@pytest.mark.parametrize(("out_for_s", "n"), [(199.0, 0), (201.0, 1)])
def test_a_job_is_not_waited_for_when_it_takes_far_longer_than_stated(out_for_s, n):
    history = History()
    for node in (7, 100):
        history.forecast(node, {"p_finish": 1.0, "duration_s": 100.0}, 0.0)
    history.picked(100, 0.0)
    step = SelectionContext(buffer_size=1, n_missing=1, n_in_flight=1)
    candidates = history.candidates(np.array([7]), step, lambda: np.array([100], dtype=np.uint64))
    assert len(Enough(Random()).select(candidates, 1, out_for_s, RNG(0))) == n


def test_a_job_of_unknown_length_is_waited_for():
    history = History()
    for node in (7, 100):
        history.forecast(node, {"p_finish": 1.0}, 0.0)
    history.picked(100, 0.0)
    step = SelectionContext(buffer_size=1, n_missing=1, n_in_flight=1)
    candidates = history.candidates(np.array([7]), step, lambda: np.array([100], dtype=np.uint64))
    assert Enough(Random()).select(candidates, 1, 1e6, RNG(0)) == []


def test_without_a_forecast_the_record_of_a_node_speaks_for_it():
    known = pool(times_finished=[0, 8, 0], times_failed=[0, 0, 8])
    assert known.p_finish.tolist() == [0.5, 0.9, 0.1]


def test_ties_are_broken_by_chance_and_not_by_position():
    known = pool(loss=[1.0] * 20, examples=[1.0] * 20)
    firsts = {ExpectedUtility().select(known, 1, 0.0, RNG(seed))[0] for seed in range(100)}
    assert len(firsts) > 10


def test_oort_explores_less_and_less():
    fresh = [{"node_id": 10 + i} for i in range(50)]
    answered = {"examples": 1.0, "square_loss": 1.0, "durations_s": (1.0,)}
    both = listed([*fresh, *({"node_id": 1000 + i, **answered} for i in range(50))])
    oort, shares = Oort(), []
    for seed in range(120):
        chosen = oort.select(both, 20, 0.0, RNG(seed))
        shares.append(sum(node < 1000 for node in chosen) / 20)
    assert shares[0] == pytest.approx(0.9, abs=0.03)
    assert shares[-1] == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fastest(0.0),
        lambda: Exponents(chance=-1.0),
        lambda: Exponents(temperature=nan),
        lambda: Likely(1.5, Random()),
        lambda: Enough(Random(), 1.0),
        lambda: PowerOfChoice(0),
        lambda: OortSettings(exploration=1.5),
        lambda: OortSettings(penalty=-1.0),
        lambda: OortSettings(pacer_window=0),
        lambda: OortSettings(clip=0.0),
    ],
)
def test_settings_out_of_range_are_rejected(make):
    with pytest.raises(ConfigError, match="expected"):
        make()


def test_a_history_keeps_the_last_durations_only():
    history = History()
    for seconds in range(20):
        history.finished(
            7,
            duration_s=float(seconds),
            examples=1.0,
            loss=nan,
            square_loss=nan,
            staleness=1,
            version=seconds,
        )
    np.testing.assert_equal(history.candidates([7, 8]).duration_s, [15.5, nan])
    assert Fastest(inf).select(history.candidates([7, 8]), 1, 0.0, RNG(0)) == [7]


def test_a_history_knows_each_node_by_its_own_id_however_many_there_are():
    history, rng = History(), RNG(0)
    ids = rng.permutation(np.arange(1, 500, dtype=np.uint64) * np.uint64(2**55)).tolist()
    for turn, node in enumerate(ids):
        for _ in range(turn % 3):
            history.picked(node, float(turn))
        if turn % 50 == 0:
            assert history.candidates([node]).times_picked.tolist() == [turn % 3]
    seen = history.candidates([*ids, 12345])
    assert seen.times_picked.tolist() == [turn % 3 for turn in range(len(ids))] + [0]
    assert seen.node_ids.tolist() == [*ids, 12345]


def test_a_device_that_claims_certainty_and_fails_is_believed_no_more():
    history = History()
    for _ in range(10):
        for liar, p in ((1, 1.0), (2, 0.1), (3, 0.8)):
            history.forecast(liar, {"p_finish": p}, 0.0)
            history.picked(liar, 0.0)
        history.failed(1)
        history.failed(2)
        done = {"duration_s": 1.0, "examples": 1.0, "loss": 1.0, "square_loss": 1.0}
        history.finished(3, **done, staleness=0, version=1)
    liar, modest, better_than_its_word = history.candidates([1, 2, 3]).p_finish
    assert liar < 4 / 14
    assert modest < 0.1
    assert better_than_its_word > 0.8 + 1 / 14


def test_a_stated_zero_is_not_believed_for_ever():
    history = History()
    done = {"duration_s": 1.0, "examples": 1.0, "loss": 1.0, "square_loss": 1.0}
    for _ in range(36):
        history.forecast(1, {"p_finish": 0.0}, 0.0)
        history.picked(1, 0.0)
        history.finished(1, **done, staleness=0, version=1)
    assert history.candidates([1]).p_finish[0] > 36 / 40


def test_a_history_goes_on_from_its_state():
    history = History()
    history.forecast(7, {"p_finish": 0.5, "note": [1.0, 2.0]}, 3.0)
    history.picked(7, 4.0)
    history.failed(9)
    other = History()
    other.load_state_dict(history.state_dict())
    for one in (history, other):
        one.failed(7)
        one.picked(8, 5.0)
    for name in UNKNOWN.keys() - {"durations_s", "forecast_before_s", "forecast_before_p"}:
        ours, theirs = (getattr(one.candidates([7, 8, 9, 10]), name) for one in (history, other))
        np.testing.assert_equal(theirs, ours)
    assert [other.forecast_of(node) for node in (7, 8)] == [{"p_finish": 0.5, "note": [1, 2]}, {}]


def test_any_number_of_nodes_may_be_heard_first_by_a_forecast():
    history = History()
    for node in range(1000, 1200):
        history.forecast(node, {"p_finish": 0.25}, 1.0)
    assert (history.candidates(np.arange(1000, 1200)).forecast_p_finish == 0.25).all()
