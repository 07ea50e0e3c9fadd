"""FLASH-RL against rewards, targets and steps worked out by hand, and on clients that differ."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits

from agent import flash_rl
from agent.flash_rl import FlashRL, utilities
from fedstale.strategies.selection import Candidates, SelectionContext

N = 10


def nodes(version, n_in_flight=0, **known):
    context = replace(SelectionContext(), version=version, n_in_flight=n_in_flight)
    n = len(next(iter(known.values())))
    return Candidates.of(np.arange(n), context, **known)


def after_two_rounds():
    """Return a selector of which 0 replied at once, 1 late, and 2 not at all; and then 0 worse."""
    selector, rng = FlashRL(), np.random.default_rng(0)
    assert sorted(selector.select(nodes(0, times_finished=[0, 0, 0]), 3, 0.0, rng)) == [0, 1, 2]
    known = {
        "duration_s": [10.0, 30.0, np.nan],
        "examples": [5.0, 5.0, np.nan],
        "times_finished": [1, 1, 0],
        "times_failed": [0, 0, 1],
    }
    selector.select(nodes(1, loss=[1.0, 3.0, np.nan], **known), 3, 0.0, rng)
    return selector, known, rng


def test_a_reply_near_the_mean_is_useful_in_a_round_that_is_better_and_else_a_far_one():
    losses, examples = np.array([1.0, 4.0]), np.array([3.0, 1.0])
    # The mean is (3 + 4) / 4 = 1.75, from which they are 3 / 7 and 9 / 7 of it away.
    better, mean = utilities(losses, examples, 2.0)
    assert mean == 1.75
    assert better == pytest.approx([np.exp(-3 / 7), np.exp(-9 / 7)])
    worse, _ = utilities(losses, examples, 1.75)
    assert worse == pytest.approx(1.0 - better)


def test_reputations_are_those_worked_out_by_hand():
    selector, known, rng = after_two_rounds()
    # Both are half of the mean loss away from it, and the first round is better than none.
    useful = 0.4 * 0.01 + 0.6 * np.exp(-0.5)
    assert selector.reputation == pytest.approx({0: useful, 1: useful - 0.6, 2: 0.4 * 0.01 - 0.6})
    known |= {"times_finished": [2, 1, 0]}
    selector.select(nodes(2, loss=[4.0, 3.0, np.nan], **known), 1, 0.0, rng)
    # Alone it is the mean, which rose: its utility is 0. The two that were late got none, either.
    failed = [0.4 * (useful - 0.6) - 0.6, 0.4 * (0.4 * 0.01 - 0.6) - 0.6]
    assert selector.reputation == pytest.approx(dict(enumerate([0.4 * useful, *failed])))


def test_jobs_are_rewarded_when_a_round_begins():
    selector, known, rng = after_two_rounds()
    before, known["times_finished"] = dict(selector.reputation), [2, 1, 0]
    # The version is that of the round, and a job is out: the round goes on.
    selector.select(nodes(1, 1, loss=[4.0, 3.0, np.nan], **known), 1, 0.0, rng)
    assert (selector.reputation, len(selector.memory)) == (before, 3)
    selector.select(nodes(2, 1, loss=[4.0, 3.0, np.nan], **known), 1, 0.0, rng)
    # Those three, and the one that was picked meanwhile.
    assert len(selector.memory) == 3 + 4


def test_features_are_in_proportion_to_the_means_and_end_in_the_reputation():
    selector, _, _ = after_two_rounds()
    x, r = selector.memory[0][2], selector.reputation
    # Of the third nothing is known but how long the median job takes, sqrt(10 x 30) s.
    s = np.sqrt(300.0)
    expected = [[1, 10, 0.5, r[0]], [1, 30, 1.5, r[1]], [1, s, 1, r[2]]]
    expected = np.array(expected) / [1, (40 + s) / 3, 1, 1]
    np.testing.assert_allclose(x, expected, rtol=1e-5)


def test_the_copy_rates_what_the_network_takes_for_best():
    selector, _, _ = after_two_rounds()
    # By hand: the network likes a large loss, and its copy values examples alone.
    selector._main = lambda x: x[..., 2]
    selector._target = lambda x: 10.0 * x[..., 0]
    then = torch.tensor([[7.0, 0, 1, 0], [2, 0, 5, 0], [9, 0, 4, 0]])
    batch = [(then[0], 0.25, then), (then[0], -1.0, then[:1])]
    assert selector._targets(batch).tolist() == pytest.approx([0.25 + 0.9 * 20, -1.0 + 0.9 * 70])


def test_first_steps_of_adam_go_by_0_01_against_the_slope():
    fresh = flash_rl.network(np.random.default_rng(0))
    drawn = [w.detach().numpy().astype(float) for w in fresh.parameters()]
    w, b, v, c = drawn[0], drawn[1], drawn[2][0], drawn[3]
    one = FlashRL()
    one.select(nodes(0, times_finished=[0]), 1, 0.0, np.random.default_rng(0))
    known = {"loss": [2.0], "examples": [5.0], "duration_s": [10.0], "times_finished": [1]}
    one.select(nodes(1, **known), 1, 0.0, np.random.default_rng(0))
    (x, reward, then), *_ = one.memory
    x, then = x.numpy().astype(float), then.numpy().astype(float)

    def value(x, w, b, v, c):
        return sum(v[j] * max(float(x @ w[j]) + b[j], 0.0) for j in range(512)) + c[0]

    # One candidate: the best of the next ones, and the copy is of the first network.
    target = reward + 0.9 * value(then[0], w, b, v, c)
    error, active = value(x, w, b, v, c) - target, (w @ x + b) > 0
    slopes = [np.outer(v * active, x), v * active, np.maximum(w @ x + b, 0.0), np.ones(1)]
    now = [p.detach().numpy().squeeze() for p in one._main.parameters()]
    for before, slope, after in zip((w, b, v, c), slopes, now, strict=True):
        is_clear = (slope == 0.0) | (np.abs(slope * error) > 1e-4)
        assert is_clear.mean() > 0.9
        step = -0.01 * np.sign(slope[is_clear] * error)
        np.testing.assert_allclose((after - before)[is_clear], step, atol=2e-6)


class FixedDraw:
    """Draws one number each time, and the last of integers."""

    def __init__(self, number):
        self.number = number

    def random(self, n):
        return np.full(n, self.number)

    def integers(self, n):
        return n - 1


@pytest.mark.parametrize(
    ("rounds", "chance"), [(1, 1.0), (2, 0.9), (3, 0.8986), (252, 0.55), (502, 0.2), (2000, 0.2)]
)
def test_chance_falls_with_the_rounds(rounds, chance):
    def picked(number):
        selector = FlashRL()
        selector._main, selector._round, selector._version = (lambda x: x[:, 0]), rounds, 0
        four = nodes(0, 1, examples=[1.0, 4.0, 2.0, 3.0], times_finished=np.zeros(4, dtype=int))
        return selector.select(four, 2, 0.0, FixedDraw(number))

    # By chance the worst of those that are left, and else the best.
    assert picked(chance - 1e-6) == [0, 2]
    assert picked(chance + 1e-6) == [1, 3]


def play(keeps, rounds, seed):
    rng, selector = np.random.default_rng(seed), FlashRL()
    finished, failed = np.zeros((2, N), dtype=int)
    picks = []
    for version in range(rounds):
        known = {"loss": np.where(finished > 0, 1.0 / (version + 1), np.nan)}
        known |= {"examples": np.full(N, 50.0), "duration_s": np.full(N, 30.0)}
        known |= {"times_finished": finished, "times_failed": failed}
        chosen = selector.select(nodes(version, **known), 2, 0.0, rng)
        finished[chosen] += keeps[chosen]
        failed[chosen] += ~keeps[chosen]
        picks.append(chosen)
    return np.array(picks)


def test_it_learns_whose_jobs_finish_and_does_the_same_by_the_same_seed(monkeypatch):
    monkeypatch.setattr(flash_rl, "ROUNDS", 40)
    keeps = np.arange(N) % 2 == 0
    # As runs are played: the small products of the network are slower on several threads.
    with threadpool_limits(1):
        picks = play(keeps, 100, seed=0)
        np.testing.assert_array_equal(picks, play(keeps, 100, seed=0))
    assert keeps[picks[50:]].mean() > 0.75
