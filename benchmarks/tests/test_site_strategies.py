"""The benchmark of strategies on sites reads losses by time and by jobs, and pairs them."""

import numpy as np
import pytest
from places import PLAY

from fedstale.strategies.server_optimizer import Momentum


@pytest.fixture
def bench():
    from sites import strategies

    return strategies


@pytest.mark.skipif(not PLAY.is_file(), reason=f"{PLAY} is not here")
def test_rounds_merge_fewer_jobs_in_the_same_time(bench):
    names = ("FedBuff(12, 4)", "FedAvg(12)")
    buffered, rounds = (bench.run((name, 0.5, 1), text=str(PLAY), until_s=150.0) for name in names)
    assert buffered[-1][1] > 1.3 * rounds[-1][1] > 0
    for found in (buffered, rounds):
        assert found[0][:2] == [0.0, 0]
        assert found[-1][2] < found[0][2]


def test_the_buffer_is_ahead_by_time_and_rounds_by_jobs_as_the_page_says():
    from lab.results import read_result

    _, *others = read_result("site_strategies")["rows"]
    assert all(row["difference_at_same_time"][1] > 0 for row in others)
    by_jobs = {row["method"]: row["difference_at_same_jobs"] for row in others}
    assert by_jobs.pop("FedAvg(12)")[2] < 0
    assert all(low > 0 for _, low, _ in by_jobs.values())


def test_losses_are_read_between_readings(bench):
    found = [[0.0, 0, 4.0], [10.0, 8, 3.0], [20.0, 12, 2.0]]
    assert bench.loss_at(found, 0, 15.0) == 2.5
    assert bench.loss_at(found, 1, 4) == 3.5
    assert bench.loss_at(found, 0, 99.0) == 2.0


def test_delayed_momentum_of_equal_updates_is_that_of_nesterov_spread_over_steps():
    from sites.outer import DelayedNesterov

    delayed, whole = {"w": np.zeros(1)}, {"w": np.zeros(1)}
    many, one = DelayedNesterov(0.5, beta=0.9, every=4), Momentum(0.5, beta=0.9, nesterov=True)
    for _ in range(400):
        for _ in range(4):
            many.step(delayed, {"w": np.ones(1)})
        one.step(whole, {"w": np.ones(1)})
    # Momentum is seen a round later, and is the same in the end.
    assert delayed["w"][0] == pytest.approx(whole["w"][0], rel=0.03)


def test_aligned_momentum_takes_from_a_stale_update_what_points_against_it():
    from sites.outer import AlignedMomentum

    for staleness, moved in ((0, [0.5, 1.0]), (1, [1.5, 1.0])):
        step, model = AlignedMomentum(1.0, beta=0.5), {"w": np.zeros(2)}
        step.step(model, {"w": np.array([3.0, 0.0])})
        model["w"][:] = 0.0
        step.step(model, {"w": np.array([-1.0, 1.0])}, staleness=staleness)
        np.testing.assert_allclose(model["w"], moved)
