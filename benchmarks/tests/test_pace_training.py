"""The search for an agent's pace: episodes cost what they need, and the search finds a least."""

import tomllib

import numpy as np
import pytest
from small_episodes import episodes, fleet, simulator_of

from agent import pace, whole_trainings
from fedstale.agents.policy import how_many
from fedstale.agents.policy.how_many import FACTS, decided, weights_in
from fedstale.strategies.selection import Enough, Selector
from fedstale.traces import TraceSet
from lab.results import read_result

ALWAYS = [(0.0, 10_000.0)]
ONE = {"epochs": np.array([1]), "rates": np.array([0.2]), "luck": np.zeros((1, 1, 2))}
"""Epochs, learning rate and luck of an episode."""


def played(jobs, updates, *, target=None, speeds=(1.0, 0.5), end=1000.0):
    """Play an episode of two devices, whose jobs take 100 s and 200 s."""
    made = episodes(np.arange(2), end=end, keeps_stragglers=True, concurrency=2, examples=20.0)
    traces = fleet([ALWAYS] * 2, compute=np.array(speeds))
    simulator = simulator_of(traces, made, place=whole_trainings.Places)

    def numbers(simulator, rows):
        return np.full(rows.size, jobs), np.full(rows.size, updates)

    goal = None if target is None else np.array([target])
    return whole_trainings.play(simulator, made, numbers, **ONE, target=goal), simulator


def test_one_job_at_a_time_costs_as_many_device_hours_as_hours():
    needed, simulator = played(1, 1, speeds=(1.0, 1.0))
    assert not needed.reached.any()
    assert needed.hours * 3600.0 == pytest.approx(1000.0)
    assert needed.device_hours * 3600.0 == pytest.approx(1000.0)
    assert simulator.version[0] == 10


def test_jobs_in_flight_at_the_target_count_for_what_they_have_cost_by_then():
    # The target is met by the first version, at 100 s: the slow device is half through.
    needed, _ = played(2, 1, target=0.0)
    assert needed.reached.all()
    assert needed.hours * 3600.0 == pytest.approx(100.0)
    assert needed.device_hours * 3600.0 == pytest.approx(200.0)
    waited, _ = played(2, 2, target=0.0)
    assert waited.hours * 3600.0 == pytest.approx(200.0)
    assert waited.device_hours * 3600.0 == pytest.approx(300.0)


def test_numbers_are_decided_anew_for_each_step():
    made = episodes(np.arange(2), end=1000.0, keeps_stragglers=True, concurrency=2)
    simulator = simulator_of(fleet([ALWAYS] * 2), made, place=whole_trainings.Places)

    def numbers(simulator, rows):
        jobs = np.where(simulator.version[rows] < 3, 1, 2)
        return jobs, np.ones(rows.size, dtype=np.int64)

    needed = whole_trainings.play(simulator, made, numbers, **ONE)
    # One device for 300 s, then both.
    assert needed.device_hours * 3600.0 == pytest.approx(300.0 + 2 * 700.0)
    assert made.concurrency.tolist() == [2], "what was drawn stays as it was"


def test_the_search_comes_near_a_least_that_it_was_not_told():
    least = np.linspace(-1.0, 1.0, 6).reshape(2, 3)

    def cost(tried):
        return ((tried - least) ** 2).sum(axis=(1, 2))

    found = pace.search(np.zeros((2, 3)), [cost, cost], 60)
    assert np.abs(found - least).max() < 0.1


def test_a_price_makes_hours_of_waiting_dear():
    needed = whole_trainings.Needed(
        hours=np.array([2.0, 1.0]),
        device_hours=np.array([2.0, 8.0]),
        reached=np.array([True, True]),
        final=np.zeros(2),
    )
    most = np.array([4, 4])
    np.testing.assert_allclose(np.exp(needed.costs(0.25, most)), [4.0, 9.0])
    np.testing.assert_allclose(np.exp(needed.costs(4.0, most)), [34.0, 24.0])


@pytest.mark.parametrize(("keeps", "sent"), [(True, [4, 4, 4]), (False, [1, 3, 4])])
def test_no_more_is_sent_than_a_step_that_cancels_late_jobs_needs(keeps, sent):
    made = episodes(np.arange(4), b=3, keeps_stragglers=keeps, concurrency=4, buffer_size=[1, 2, 4])
    simulator = simulator_of(fleet([ALWAYS] * 4), made, place=whole_trainings.Places)
    rows, everyone = np.arange(3), np.ones((3, 4), dtype=bool)
    scores = np.array([0.1, 0.4, 0.3, 0.2]) * np.ones((3, 1))
    kept = whole_trainings.enough(simulator, rows, scores, everyone)
    assert kept.sum(axis=1).tolist() == sent
    for row in rows.tolist():
        own = Enough(InOrder(scores[0])).select(simulator.candidates(row), 4, 0.0, None)
        assert sorted(own) == np.flatnonzero(kept[row]).tolist()


class InOrder(Selector):
    """Picks by scores of its own."""

    def __init__(self, scores):
        self.scores = scores

    def select(self, candidates, k, now, rng):
        return sorted(candidates.node_ids.tolist(), key=lambda node: -self.scores[node])[:k]


def test_what_is_tried_together_costs_what_it_costs_alone():
    drawn = episodes(
        np.arange(3), b=3, end=3000.0, keeps_stragglers=[True, False, True], concurrency=3
    )
    traces = fleet([ALWAYS] * 3, compute=np.array([1.0, 0.5, 0.2]))
    simulator = simulator_of(
        traces, drawn.take(np.tile(np.arange(3), 4)), place=whole_trainings.Places
    )
    own = {"epochs": np.array([1, 2, 5]), "rates": np.array([0.05, 0.2, 0.1])}
    own["luck"] = np.random.default_rng(0).gumbel(size=(3, 5, 3))
    target = np.array([0.11, 0.15, 2.0])
    batch = whole_trainings.Batch(
        simulator=simulator,
        episodes=drawn,
        own=own,
        price=np.ones(3),
        target=target,
        plain=whole_trainings.play(simulator, drawn, whole_trainings.plain, **own, target=target),
    )
    prices = np.array([[0.5, 1.0, 2.0], [4.0, 4.0, 4.0]])
    rules = pace.rules(16)[[0, 5, 9, 12]]
    together = batch.costs(whole_trainings.ramp, rules, prices)
    alone = [batch.costs(whole_trainings.ramp, rules[i : i + 1], prices) for i in range(4)]
    np.testing.assert_array_equal(together, np.concatenate(alone, axis=1))
    assert (together[0, :, :2] != 0.0).any()
    assert (together[:, :, 2] == 0.0).all(), "nobody arrives"
    weights = np.stack([pace.first_weights(), np.ones((2, len(FACTS)))])
    both = pace.mean_costs(weights, [batch])
    each = [pace.mean_costs(weights[i : i + 1], [batch])[0] for i in range(2)]
    assert both.tolist() == each
    assert both[0] != both[1]


def test_the_first_weights_have_more_in_flight_where_an_hour_is_dear():
    facts = np.zeros((2, len(FACTS)))
    facts[:, FACTS.index("one")] = 1.0
    facts[:, FACTS.index("price")] = np.log([0.25, 4.0])
    jobs, updates = decided(pace.first_weights(), facts, 16)
    assert jobs.tolist() == [1, 13]
    assert (updates <= jobs).all()


def test_rules_begin_with_the_plain_ones_and_differ():
    found = pace.rules(30)
    assert found[0][0] == found[0][2] == found[0][3] == 0.0, "one at a time"
    assert len(np.unique(found, axis=0)) == 30


def test_a_pace_is_trained_on_traces_of_ones_own(tmp_path, monkeypatch, capsys):
    traces = tmp_path / "own.parquet"
    TraceSet.synthetic(60, days=2, seed=0).write(traces)
    out = tmp_path / "made"
    monkeypatch.setattr(
        "sys.argv", ["pace.py", "--traces", str(traces), "--out", str(out), "--quick"]
    )
    pace.main()
    told = capsys.readouterr().out
    assert told.count("'about': 'rule'") == len(whole_trainings.PRICES)
    weights = weights_in(out / "pace.toml")
    seeds = [weights_in(out / f"seed-{seed}.toml") for seed in range(2)]
    np.testing.assert_allclose(weights, np.mean(seeds, axis=0), atol=5.1e-5)
    assert 'learnt_on = [\n    "own.parquet",\n]' in (out / "pace.toml").read_text()
    # What is there already is not trained again.
    monkeypatch.setattr(pace, "search", None)
    pace.main()
    assert capsys.readouterr().out.endswith(told[told.index("{") :])


def test_a_rule_is_told_in_words():
    assert pace.in_words([0.2, 25.0, 1.0, 0.5]) == (
        "20% of the jobs beyond one at first, one more each 25 versions up to 100%; "
        "a step waits for 50%"
    )
    assert "more" not in pace.in_words([0.5, 1e9, 0.5, 0.0])


def test_the_shipped_pace_is_the_mean_of_the_trainings_that_are_published():
    found = read_result("agent_pace")["rows"]
    about = tomllib.loads(how_many._PACE.read_text(encoding="utf-8"))["provenance"]
    seeds = {row["seed"] for row in found if row["about"] == "seed"}
    assert (about["seeds"], about["generation"]) == (len(seeds), pace.GENERATIONS)
    assert about["commit"] == read_result("agent_pace")["commit"]
