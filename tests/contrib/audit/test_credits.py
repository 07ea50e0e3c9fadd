"""No device gains by a report that is not its chance; where credits promise nothing, some do."""

import numpy as np
import pytest

from fedstale.contrib.audit import Credits
from fedstale.errors import ConfigError
from fedstale.strategies.selection import Candidates

RNG = np.random.default_rng
REPORTS = np.linspace(0.0, 1.0, 101)


def fleet(seed, n):
    """Return true chances, reports of others (which may lie), utilities and costs of n devices."""
    rng = RNG(seed)
    p, others = rng.random(n), rng.random(n)
    return p, others, rng.lognormal(0.0, 0.5, n), rng.uniform(0.0, 0.6, n)


def profit(credited, k, me, report, about):
    """Return what a device expects of a selection, by asking the rule with both endings."""
    truth, others, utility, cost = about
    reports = others.copy()
    reports[me] = report
    ids = np.arange(len(reports)) + 5
    rule = Credits(utility=lambda nodes: utility, cost=lambda nodes: cost)
    chosen = rule.select(Candidates.of(ids, forecast_p_finish=reports), k, 0.0, RNG(0))
    if ids[me] not in chosen:
        return 0.0
    return credited(rule, int(ids[me]), truth) - cost[me]


def by_rule(rule, node, p):
    """Return the expected credit of a picked node, from the balances of both endings."""
    state = rule.state_dict()
    ends = []
    for name in ("times_finished", "times_failed"):
        again = Credits(1.0)
        again.load_state_dict(state)
        again.settle(Candidates.of([node], **{name: [1]}))
        ends.append(again.balance[node])
    return p * ends[0] + (1 - p) * ends[1]


def by_flat_fee(rule, node, p):
    """Return what a fee of 1 for each finished job brings."""
    return p


def gainers(credited, fleets, n, k):
    """Return the share of devices that some report serves better than the truth."""
    found = 0
    for seed in range(fleets):
        p, others, utility, cost = fleet(seed, n)
        for me in range(n):
            about = (p[me], others, utility, cost)
            honest = profit(credited, k, me, p[me], about)
            # What is expected of a report changes only between picked and not: both are tried.
            best = max(profit(credited, k, me, report, about) for report in REPORTS)
            found += best > honest + 1e-9
    return found / (fleets * n)


def test_no_device_gains_by_a_misreport():
    assert gainers(by_rule, 4, 12, 3) == 0.0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("credited", "share"), [(by_rule, 0.0), (by_flat_fee, 0.19)])
def test_how_many_of_2400_devices_gain_by_one_of_101_reports(credited, share):
    """The figures of docs/validation.md."""
    assert gainers(credited, 24, 100, 10) == pytest.approx(share, abs=0.005 * (share > 0))


def test_a_report_of_the_truth_never_expects_a_loss():
    for seed in range(20):
        p, others, utility, cost = fleet(seed, 12)
        for me in range(12):
            about = (p[me], others, utility, cost)
            assert profit(by_rule, 3, me, p[me], about) >= -1e-9


def test_who_is_not_picked_for_its_cost_is_owed_nothing():
    rule = Credits(utility=1.0, cost=lambda nodes: [0.0, 0.5])
    nodes = Candidates.of([7, 8], forecast_p_finish=[0.6, 0.9])
    assert rule.select(nodes, 1, 0.0, RNG(0)) == [7]
    rule.settle(Candidates.of([7, 8], times_failed=[1, 0]))
    assert rule.balance == {7: pytest.approx(-0.4)}


def test_over_several_selections_a_device_gains_by_waiting():
    """What the page says credits do not prevent: the second place is cheaper."""

    def two_selections(report):
        total, waiting = 0.0, [5, 6]
        for turn in range(2):
            chances = {5: report if turn == 0 else 0.9, 6: 0.8}
            rule = Credits(1.0)
            stated = [chances[node] for node in waiting]
            nodes = Candidates.of(waiting, forecast_p_finish=stated)
            (chosen,) = rule.select(nodes, 1, 0.0, RNG(0))
            if chosen == 5:
                total += by_rule(rule, 5, 0.9)
            waiting.remove(chosen)
        return total

    assert two_selections(report=0.0) > two_selections(report=0.9) + 0.5


def test_a_job_that_was_cancelled_is_neither_credited_nor_charged():
    rule = Credits(1.0)
    nodes = Candidates.of([5, 6], forecast_p_finish=[0.9, 0.5])
    assert rule.select(nodes, 1, 0.0, RNG(0)) == [5]
    assert rule.select(nodes, 1, 0.0, RNG(0)) == [5]
    assert rule.balance == {}


def test_without_a_report_the_record_stands_in():
    rule = Credits(1.0)
    nodes = Candidates.of([5, 6], forecast_p_finish=[np.nan, 0.5], times_finished=[8, 0])
    assert rule.select(nodes, 1, 0.0, RNG(0)) == [5]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"utility": -1.0}, "Credits.utility = -1.0: expected a finite number >= 0"),
        ({"utility": np.nan}, "Credits.utility = nan"),
        ({"utility": 1.0, "cost": np.inf}, "Credits.cost = inf: expected a finite number"),
        ({"utility": lambda nodes: [1.0]}, "has the shape"),
    ],
)
def test_what_is_no_worth_and_no_cost_is_refused(settings, words):
    nodes = Candidates.of([5, 6], forecast_p_finish=[0.9, 0.5])
    with pytest.raises(ConfigError, match=words):
        Credits(**settings).select(nodes, 1, 0.0, RNG(0))


def test_what_is_owed_outlives_the_process():
    rule = Credits(1.0)
    rule.select(Candidates.of([5, 6], forecast_p_finish=[0.9, 0.5]), 1, 0.0, RNG(0))
    other = Credits(1.0)
    other.load_state_dict(rule.state_dict())
    for one in (rule, other):
        one.settle(Candidates.of([5, 6], times_finished=[1, 0]))
    assert rule.balance == other.balance == {5: 0.5}
