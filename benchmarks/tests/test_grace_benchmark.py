"""A grace window merges who comes within it, and its benchmark pairs runs as the others do."""

import numpy as np
import pytest
from places import PLAY
from virtual_grid import Error, VirtualGrid, adder, identity, record

from fedstale.strategies import FedAvg, StaleStrategy
from fedstale.strategies.schedule import k_async
from fedstale.strategies.server_optimizer import SGD
from fedstale.strategies.weighting import ByAge, polynomial

pytestmark = pytest.mark.usefixtures("_in_a_run")


@pytest.fixture
def _in_a_run():
    with identity():
        yield


@pytest.fixture(scope="module")
def bench():
    from sites import grace

    return grace


SECONDS = (1.0, 2.0, 3.5, 3.75, 6.0, 10.5)


def played(strategy, n, wrap=None, seconds=SECONDS, **nodes):
    """Return a grid after some versions on six nodes; each version's instant, and its updates."""
    made = {i: adder(float(i), delay) for i, delay in enumerate(seconds, start=1)}
    grid = VirtualGrid(made | {int(k[1:]): node for k, node in nodes.items()})
    if wrap is not None:
        grid.runtime.clock = wrap(grid)
    instants = []
    strategy.start(
        grid,
        record(w=np.zeros(2)),
        n,
        100.0,
        evaluate_fn=lambda version, arrays: instants.append(grid.now()),
    )
    updates = [sum(f["version"] == v for _, f in grid.merged) for v in range(1, n + 1)]
    return grid, instants[1:], updates


def models(grid):
    return [arrays["w"].numpy().tolist() for _, arrays in grid.models]


def test_a_step_merges_the_quorum_and_who_comes_within_the_window(bench):
    wrap = lambda grid: bench.GraceWindow(grid, 2, 1.5)  # noqa: E731
    _, instants, updates = played(bench.merging(1.0), 3, wrap)
    # Two are there at 2 s, and 3.5 is the end of the window. Then nodes 1, 2 and 3 are sent to, and
    # node 4 comes at 3.75 of before: with node 1 at 4.5 that is a quorum, until 6. Node 2 comes at
    # 5.5, and node 5 at 6 of before. At last nodes 1 and 3 come at 7, and node 2 at 8.
    assert instants == [3.5, 6.0, 8.5]
    assert updates == [3, 4, 3]


def test_without_a_window_it_is_k_async(bench):
    schedule, eta = k_async(6, 3), 0.5
    same = StaleStrategy(
        schedule=schedule, weighting=ByAge(polynomial(0.5)), server_optimizer=SGD(eta)
    )
    # No two at an instant, where k_async leaves the second for the next step.
    seconds = tuple(s + 0.01 * 2**i for i, s in enumerate(SECONDS))
    there, instants, _ = played(same, 9, None, seconds)
    wrap = lambda grid: bench.GraceWindow(grid, 3, 0.0)  # noqa: E731
    here, at, _ = played(bench.merging(eta), 9, wrap, seconds)
    assert (models(here), at) == (models(there), instants)


@pytest.mark.parametrize(("quorum", "window_s"), [(6, 0.0), (6, 5.0), (2, 60.0)])
def test_a_quorum_of_all_or_a_window_without_end_makes_rounds(bench, quorum, window_s):
    rounds, instants, _ = played(FedAvg(6), 4)
    wrap = lambda grid: bench.GraceWindow(grid, quorum, window_s)  # noqa: E731
    here, at, _ = played(bench.merging(1.0), 4, wrap)
    # Who waits until all are there waits for no window.
    assert at == instants == [10.5, 21.0, 31.5, 42.0]
    assert models(here) == models(rounds)


def test_errors_make_no_quorum_and_a_job_that_expires_ends_the_wait(bench):
    fails = lambda message, grid: (0.5, Error(0, "no data"))  # noqa: E731
    silent = lambda message, grid: (1.0, None)  # noqa: E731
    wrap = lambda grid: bench.GraceWindow(grid, 2, 0.0)  # noqa: E731
    _, instants, updates = played(bench.merging(1.0), 1, wrap, n1=fails)
    assert (instants, updates) == ([3.5], [2])
    wrap = lambda grid: bench.GraceWindow(grid, 6, 0.0)  # noqa: E731
    _, instants, updates = played(bench.merging(1.0), 1, wrap, n6=silent)
    assert (instants, updates) == ([100.0], [5])


def test_the_window_is_a_share_of_a_job_with_its_transfers(bench):
    quick, slow = (bench.job_s(bench.traces_of(times, 1)) for times in (0.3, 3.0))
    more = (3.0 - 0.3) * bench.WORK / 6.0
    assert slow - quick == pytest.approx(more, rel=0.2)


def test_arms_are_compared_with_their_quorum_alone_after_time_and_characters(bench):
    def arm(rate, losses):
        curves = [[[0.0, 0, 4.0, 0.0], [600.0, 12, loss, rate]] for loss in losses]
        return {"rate": 0.5, "found": [{"curve": curve, "versions": 4} for curve in curves]}

    first, windowed = arm(300.0, (3.0, 3.2, 3.4)), arm(200.0, (2.0, 2.2, 2.4))
    names = (bench.BASE, bench.ROUNDS, "2 of 6, 0", "2 of 6, 0.5")
    runs = dict(zip(names, (arm(100.0, (2.5, 2.7, 2.9)), first, first, windowed), strict=True))
    base, _, none, row = bench.rows_of(runs, 3.0, 600.0)
    assert "to_none" not in base
    assert none["to_none"] == [0.0, 0.0, 0.0]
    assert (row["quorum"], row["window"], row["updates_per_step"]) == (2, 0.5, 3.0)
    assert row["characters_per_hour"] == 1200.0
    assert row["to_none"][0] == pytest.approx(-1.0)
    assert row["to_base"][0] == pytest.approx(-0.5)
    # After 200 characters of 300, two thirds of the way from 4.0 to 3.2.
    assert row["to_none_by_characters"][0] == pytest.approx(2.2 - (4.0 - 2 / 3 * 0.8))


@pytest.mark.slow
@pytest.mark.skipif(not PLAY.is_file(), reason=f"{PLAY} is not here")
def test_with_a_window_a_step_has_more_updates_and_steps_are_fewer(bench):
    found = [bench.run((f"0.3: 2 of 6, {w}", 0.5, 1), str(PLAY), until_s=150.0) for w in (0, 0.5)]
    none, some = ((one["curve"][-1][1], one["versions"]) for one in found)
    assert none[0] == 2 * none[1]
    assert some[0] > 2.5 * some[1]
    assert some[1] < none[1]


def test_what_the_page_says_of_windows_is_what_came_out():
    from lab.results import read_result

    rows = {
        (row["ratio"], row["quorum"], row["window"]): row for row in read_result("grace")["rows"]
    }
    windows = [row for row in rows.values() if row["window"]]
    assert len(windows) == 12
    assert all(row["to_none"][2] > 0 for row in windows)
    assert sum(row["to_none"][1] > 0 for row in windows) == 2
    for ratio in (0.3, 3.0):
        assert rows[ratio, 2, 0.0]["to_base"][2] < 0
        mean, _, high = rows[ratio, 2, 0.5]["to_none_by_characters"]
        assert high < 0
        assert mean == pytest.approx({0.3: -0.02, 3.0: -0.04}[ratio], abs=0.005)
        assert rows[ratio, 2, 0.5]["updates_per_step"] > 5
    assert not any(row["is_end"] for row in rows.values())
    by_characters = [row["to_none_by_characters"] for row in windows if row["quorum"] == 4]
    assert all(low < 0 < high for _, low, high in by_characters)
