"""LinUCB against ridge regression, and on clients that differ in what they keep."""

import numpy as np

from agent.lin_ucb import LinUCB
from fedstale.agents.policy.selector import inputs_of as inputs
from fedstale.strategies.selection import Candidates

N = 12


def nodes(finished, failed, *, chance=None, loss=None):
    sent = finished + failed
    return Candidates.of(
        np.arange(N),
        forecast_p_finish=np.linspace(0.05, 0.95, N) if chance is None else chance,
        forecast_at=np.zeros(N),
        examples=np.full(N, 50.0),
        loss=np.where(finished > 0, np.ones(N) if loss is None else loss, np.nan),
        times_picked=sent.astype(int),
        times_finished=finished.astype(int),
        times_failed=failed.astype(int),
    )


def play(bandit, keeps, rounds, *, seed=0, **known):
    """Pick three a round; jobs end before the next one. Return picks, and what was learnt from."""
    rng = np.random.default_rng(seed)
    finished, failed = np.zeros((2, N))
    picks, rows = [], []
    for _ in range(rounds):
        now = nodes(finished, failed, **known)
        x = inputs(now, 3, 0.0).features[0].astype(float)
        chosen = np.array(bandit.select(now, 3, 0.0, rng))
        ends = rng.random(3) < keeps[chosen]
        finished[chosen] += ends
        failed[chosen] += ~ends
        picks.append(chosen)
        rows.append((np.column_stack([x[chosen], np.ones(3)]), ends, chosen))
    return np.array(picks), rows, nodes(finished, failed, **known)


def test_it_is_ridge_regression_on_the_jobs_that_ended():
    bandit, loss = LinUCB(alpha=0.3, ridge=2.0), np.linspace(1.0, 2.0, N)
    _, rows, last = play(bandit, np.linspace(0, 1, N), 15, loss=loss)
    bandit.select(last, 1, 0.0, np.random.default_rng(0))
    x = np.concatenate([x for x, _, _ in rows])
    np.testing.assert_allclose(bandit.covariance, x.T @ x + 2.0 * np.eye(x.shape[1]), atol=1e-9)
    # A node's utility is its loss here; the largest known one grows as nodes finish.
    best, response = 0.0, np.zeros(x.shape[1])
    for features, ends, chosen in rows:
        best = max(best, loss[chosen[ends]].max(initial=0.0))
        response += features.T @ np.where(ends, loss[chosen] / max(best, 1e-9), 0.0)
    np.testing.assert_allclose(bandit.response, response, atol=1e-9)


def test_it_learns_which_reports_are_kept():
    # All that is reported is the wrong way round: the least promising clients finish.
    keeps = np.linspace(1.0, 0.0, N)
    picks, _, _ = play(LinUCB(), keeps, 60)
    assert keeps[picks[-20:]].mean() > 0.75
    assert keeps[picks[:3]].mean() < 0.75


def test_without_uncertainty_it_picks_what_it_expects_most_of():
    bandit = LinUCB(alpha=0.0)
    _, _, last = play(bandit, np.linspace(0, 1, N), 30)
    x = np.column_stack([inputs(last, 3, 0.0).features[0], np.ones(N)])
    chosen = bandit.select(last, 3, 0.0, np.random.default_rng(0))
    expected = x @ np.linalg.solve(bandit.covariance, bandit.response)
    assert sorted(chosen) == sorted(np.argsort(-expected)[:3].tolist())
