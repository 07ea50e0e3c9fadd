"""Oort against a plain statement of its published formulae, and over whole runs of single picks."""

from math import ceil, log, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_nodes import listed
from virtual_grid import VirtualGrid, adder, record

from fedstale.strategies import FedBuff
from fedstale.strategies.selection import Oort, OortSettings
from fedstale.strategies.types import Candidates, History, SelectionContext

RNG = np.random.default_rng
ANSWER = {"duration_s": 1.0, "loss": 1.0, "square_loss": 1.0, "staleness": 0, "version": 1}


def single_picks(oort, n_devices, n_picks, versions, *, n_in_flight):
    """Pick one device at a time, each of which answers at once; return how many were tried."""
    history, rng, tried = History(), RNG(0), set()
    for turn in range(n_picks):
        context = SelectionContext(n_in_flight=n_in_flight, version=versions(turn))
        candidates = history.candidates(np.arange(10, 10 + n_devices), context)
        (node,) = oort.select(candidates, 1, float(turn), rng)
        history.picked(node, float(turn))
        history.finished(node, examples=float(node), **ANSWER)
        tried.add(node)
    return len(tried)


def shares(n_rounds, first=0.9, decay=0.98, least=0.2):
    """The share of exploration in each round, counted from 1, as the paper has it."""
    return [max(first * decay**n, least) for n in range(1, n_rounds + 1)]


@pytest.mark.parametrize("per_version", [1, 5, 20])
def test_single_picks_explore_their_share_of_400_devices(per_version):
    versions = lambda turn: turn // per_version  # noqa: E731
    tried = single_picks(Oort(), 400, 600, versions, n_in_flight=19)
    expected = sum(share * per_version for share in shares(600 // per_version))
    # The first devices are new whatever the share.
    assert tried == pytest.approx(min(expected, 400), abs=2)
    assert tried > 130


def test_where_every_pick_is_a_round_of_its_own_600_of_them_explore_their_share():
    tried = single_picks(Oort(), 400, 600, lambda turn: 0, n_in_flight=0)
    assert tried == pytest.approx(sum(shares(600)), abs=2)


@pytest.mark.usefixtures("_identity")
def test_a_run_of_fedbuff_with_oort_goes_on_exploring():
    nodes = {n: adder(1.0, 1.0 + n % 7, examples=10, train_loss=1.0) for n in range(10, 410)}
    grid = VirtualGrid(nodes)
    FedBuff(4, 5, selector=Oort(), seed=1).start(grid, record(w=np.zeros(2)), num_rounds=120)
    tried = {message.metadata.dst_node_id for _, message in grid.sent}
    expected = sum(5 * share for share in shares(120))
    assert len(tried) == pytest.approx(expected, rel=0.05)


def test_selections_at_one_version_are_one_round():
    known = {"examples": [10.0, 20.0], "square_loss": [1.0, 1.0], "durations_s": [(1.0,)] * 2}
    oort, rng = Oort(), RNG(0)
    for version in (0, 0, 0, 1, 1, 2):
        oort.select(known_nodes(version, **known), 2, 0.0, rng)
    # Round 3, in which both were picked.
    expected = [sqrt(0.1 * log(3) / 3), 1.0 + sqrt(0.1 * log(3) / 3)]
    np.testing.assert_allclose(oort.utilities(known_nodes(2, **known)), expected)


def known_nodes(version, n_in_flight=1, **columns):
    names = list(columns)
    rows = zip(*columns.values(), strict=True)
    nodes = listed(
        {"node_id": 10 + i, **dict(zip(names, row, strict=True))} for i, row in enumerate(rows)
    )
    nodes.context = SelectionContext(version=version, n_in_flight=n_in_flight)
    return nodes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(1.0, 1e4), st.floats(0.0, 1e4), st.floats(0.1, 1e3)),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 6),
    st.sampled_from([0.5, 0.9, 0.95, 1.0]),
    st.sampled_from([0.1, 0.3, 1.0]),
)
def test_the_utility_is_the_formula_with_the_unclipped_range(rows, n_rounds, clip, percentile):
    examples, losses, durations = (list(column) for column in zip(*rows, strict=True))
    columns = {
        "examples": examples,
        "square_loss": losses,
        "durations_s": [(duration,) for duration in durations],
    }
    oort = Oort(OortSettings(clip=clip, first_percentile=percentile))
    for version in range(n_rounds):
        oort.select(known_nodes(version, **columns), len(rows), 0.0, RNG(version))
    n = len(rows)
    statistical = [b * sqrt(loss) for b, loss in zip(examples, losses, strict=True)]
    cap = sorted(statistical)[min(int(n * clip), n - 1)]
    preferred = sorted(durations)[min(int(n * percentile), n - 1)]
    spread = max(statistical) - min(statistical)
    expected = []
    for utility, duration in zip(statistical, durations, strict=True):
        scaled = (min(utility, cap) - min(statistical)) / spread if spread else 0.0
        scaled += sqrt(0.1 * log(n_rounds) / n_rounds)
        expected.append(scaled * (min(1.0, preferred / duration) ** 2 if percentile < 1 else 1.0))
    np.testing.assert_allclose(oort.utilities(known_nodes(n_rounds, **columns)), expected)


def test_a_clipped_outlier_keeps_the_others_apart_from_it():
    columns = {"examples": [10.0] * 40, "square_loss": [*([1.0] * 20), *([4.0] * 19), 1e6]}
    utilities = Oort(OortSettings(clip=0.9)).utilities(known_nodes(0, **columns))
    # The outlier counts as 20, and the range is that of 10 to 10,000.
    np.testing.assert_allclose(utilities, [*([0.0] * 20), *([10.0 / 9990.0] * 20)])


@pytest.mark.parametrize("column", ["times_failed", "times_picked"])
def test_a_device_that_was_tried_in_vain_is_not_explored_again(column):
    always = OortSettings(exploration=1.0, exploration_decay=1.0)
    tried = {column: [1, 0, 0, 0]}
    for seed in range(50):
        (node,) = Oort(always).select(known_nodes(0, **tried), 1, 0.0, RNG(seed))
        assert node != 10
    chosen = Oort(always).select(known_nodes(0, **tried), 4, 0.0, RNG(0))
    assert set(chosen) == {10, 11, 12, 13}


def test_a_device_that_failed_has_the_mean_utility_of_those_that_answered():
    columns = {
        "examples": [10.0, 30.0, np.nan],
        "square_loss": [1.0, 1.0, np.nan],
        "times_failed": [0, 0, 3],
    }
    np.testing.assert_allclose(Oort().utilities(known_nodes(0, **columns)), [0.0, 1.0, 0.5])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([1.0, 4.0, 9.0, 16.0]), min_size=1, max_size=24),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_the_pacer_compares_all_that_was_exploited_in_w_rounds(losses, window, per_round):
    exploiting = {"exploration": 0.0, "exploration_least": 0.0, "pacer_step": 0.05}
    oort = Oort(OortSettings(pacer_window=window, **exploiting))
    gained, percentile = [], 0.1
    for version, loss in enumerate(losses):
        columns = {"examples": [1.0] * 3, "square_loss": [loss] * 3, "durations_s": [(1.0,)] * 3}
        n = len(gained)
        if n >= 2 * window and n % window == 0:
            before, now = sum(gained[-2 * window : -window]), sum(gained[-window:])
            percentile = min(1.0, percentile + 0.05) if before > now else percentile
        for _ in range(per_round):
            oort.select(known_nodes(version, **columns), 2, 0.0, RNG(0))
        gained.append(per_round * 2 * sqrt(loss))
    assert oort._percentile == pytest.approx(percentile)


def test_what_rounding_takes_from_exploration_comes_back():
    fresh = Candidates.of(np.arange(10, 1000), SelectionContext(version=1, n_in_flight=9))
    half = {"exploration": 0.3, "exploration_decay": 1.0}
    oort, rng, explored = Oort(OortSettings(**half)), RNG(0), 0
    picked = np.zeros(len(fresh), dtype=np.int64)
    picked[:400] = 1
    both = Candidates.of(fresh.node_ids, fresh.context, times_picked=picked)
    for turn in range(1, 101):
        explored += sum(node >= 410 for node in oort.select(both, 2, 0.0, rng))
        assert ceil(0.6 * turn) - 1 <= explored <= ceil(0.6 * turn)


def test_a_checkpoint_holds_the_round_and_what_is_owed():
    one = Oort()
    single_picks(one, 50, 33, lambda turn: turn // 4, n_in_flight=3)
    two = Oort()
    two.load_state_dict(one.state_dict())
    later = [single_picks(oort, 50, 40, lambda t: 8 + t // 4, n_in_flight=3) for oort in (one, two)]
    assert later[0] == later[1]
    assert one.state_dict() == two.state_dict()
