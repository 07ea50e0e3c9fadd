"""The benchmark of strategies deals as it says, and compares in pairs."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from places import RECORDINGS, ROOT

from fedstale.strategies import FedBuff
from fedstale.strategies.selection import Random

RESULTS = ROOT / "benchmarks" / "results"
published = pytest.mark.skipif(not RECORDINGS.is_dir(), reason="published recordings are not here")


@pytest.fixture
def comparing():
    """Return the benchmark's module."""
    from methods import run

    return run


@pytest.fixture
def runs():
    """Return the module of one run."""
    from methods import runs

    return runs


def test_rare_classes_are_dealt_to_their_owners_alone(runs):
    labels = np.repeat(np.arange(10), 140)
    owners = np.arange(60) % 4 == 0
    for seed in range(5):
        deal = runs.deal_rare_to(owners, labels, (7, 8, 9), alpha=0.1, seed=seed)
        assert sorted(np.concatenate(deal)) == list(range(len(labels)))
        assert min(map(len, deal)) >= 1
        held = [labels[mine] for mine in deal]
        common = np.concatenate([x for x, own in zip(held, owners, strict=True) if not own])
        rare = np.concatenate([x for x, own in zip(held, owners, strict=True) if own])
        assert common.max() <= 6
        # A twentieth of 7 x 140 others, less what went to devices without any.
        assert np.sum(rare >= 7) == 3 * 140
        assert np.sum(rare < 7) <= 7 * 7


def test_a_curve_holds_the_last_value_and_averages_ten_readings(runs):
    seen = np.array([[0.0, 0.0, 1.0], [150.0, 1.0, 0.5]])
    # A job counts from when it begins; one that never does moves nothing.
    jobs = {"started_at": [90.0, 10.0, np.nan], "downloaded_bytes": [2e9, 1e9, 0.0]}
    events = pd.DataFrame(jobs | {"uploaded_bytes": [0.0, 5e8, 0.0]})
    curve = runs.read_curve(seen, events, 1200.0, 60.0)
    assert curve.gigabytes.tolist() == [1.5] + [3.5] * 19
    assert curve.outcome(0.2)["gigabytes_to_target"] == 3.5
    # Read at 60, 120, ...: from the third reading on the second value holds.
    assert curve.accuracy[:4] == pytest.approx([0.0, 0.0, 0.1, 0.2])
    assert curve.slow[[1, 2, 11]] == pytest.approx([1.0, 0.95, 0.5])
    assert curve.versions == 1
    assert curve.to_target_s(0.2) == pytest.approx(240.0)
    assert not curve.reaches(1.01)
    assert curve.to_target_s(1.01) == pytest.approx(1200.0)


class _Made:
    """Reaches 1 after about 1000 s divided by the rate; tuning looks at the first half."""

    def __init__(self, comparing, seed):
        self.comparing, self.seed, self.asked = comparing, seed, []

    def run(self, rate, until_s):
        self.asked.append((rate, until_s))
        instants = np.arange(60.0, until_s + 1, 60.0)
        accuracy = (instants >= (1000.0 + self.seed) / rate).astype(float)
        return self.comparing.Curve(
            **{"accuracy": accuracy, "slow": accuracy / 2, "gigabytes": instants},
            **{"versions": 7, "grid_s": 60.0},
        )


def _comparison(comparing, settings, **more):
    return comparing.Comparison(
        title="made",
        settings=settings,
        tuning_seeds=(101,),
        seeds=(1, 2, 3),
        target=0.8,
        horizon_s=7200.0,
        **more,
    )


def test_a_strategy_is_tuned_on_its_own_seeds_and_compared_in_pairs(comparing):
    settings = {seed: _Made(comparing, seed) for seed in (1, 2, 3, 101)}
    comparison = _comparison(comparing, settings)
    trials = {
        "slow": comparing.Trial(make=lambda rate, seed: min(rate, 0.5)),
        "fast": comparing.Trial(make=lambda rate, seed: rate, per_rate=0.1),
    }
    slow, fast = comparing.compare(comparison, trials, (0.3, 10.0))
    assert [until for _, until in settings[101].asked] == [3600.0] * 4
    assert [until for _, until in settings[1].asked] == [7200.0] * 2
    assert (slow["server_rate"], fast["server_rate"]) == (10.0, 1.0)
    assert slow["hours_to_target_by_seed"] == pytest.approx([2040 / 3600] * 3, abs=1e-4)
    assert fast["speed_up"] == fast["fewer_gigabytes"] == pytest.approx([2.0, 2.0, 2.0])
    assert fast["final_slow_accuracy"] == pytest.approx(0.5)
    assert slow["reached"] == fast["reached"] == 3


def test_windows_of_different_seeds_lie_on_different_days_and_tuning_at_other_hours(comparing):
    for kind, starts in comparing.STARTS.items():
        places = [place for place in comparing.PLACES.values() if place.kind == kind]
        assert places
        assert {*comparing.TUNING_SEEDS, *comparing.SEEDS} <= set(starts)
        assert len({day for day, _ in starts.values()}) == len(starts)
    # Records of phones repeat within these days, so a day alone does not keep tuning apart.
    longest = max(place.horizon_s for place in comparing.PLACES.values() if place.kind == "phones")
    for seed in comparing.TUNING_SEEDS:
        tuned = _hours(comparing.STARTS["phones"][seed][1], longest / 2)
        for reported in comparing.SEEDS:
            assert not tuned & _hours(comparing.STARTS["phones"][reported][1], longest)


def _hours(start, lasts_s):
    """Return the minutes of the day that a run covers."""
    return {(start * 60 + minute) % 1440 for minute in range(round(lasts_s / 60))}


def test_forty_devices_and_more_were_online_in_each_window_that_was_measured(comparing):
    rows = json.loads((RESULTS / "strategy_windows.json").read_text())["rows"]
    assert {(row["fleet"], row["seed"]) for row in rows} == {
        (kind, seed) for kind, starts in comparing.STARTS.items() for seed in starts
    }
    assert min(row["online_least"] for row in rows) >= 40
    # The jobs that run are not those of twenty devices in turn: updates come stale.
    assert min(row["staleness_median"] for row in rows) >= 2
    for kind in comparing.STARTS:
        assert len({row["begins"][:10] for row in rows if row["fleet"] == kind}) == 7


@published
@pytest.mark.parametrize("kind", ["phones", "desktops"])
def test_the_server_can_choose_while_twenty_jobs_run(comparing, kind):
    (row,) = (
        row
        for row in json.loads((RESULTS / "strategy_windows.json").read_text())["rows"]
        if (row["fleet"], row["seed"]) == (kind, 3)
    )
    traces = comparing.devices(RECORDINGS, kind, 3)
    assert traces.n_devices == comparing.N_DEVICES
    assert traces.epoch == row["begins"]
    place = next(each for each in comparing.PLACES.values() if each.kind == kind)
    online = comparing.online(traces, place.horizon_s).sum(1)
    assert (online.min(), online.max()) == (row["online_least"], row["online_most"])
    free = []

    class Counting(Random):
        """Notes among how many devices it chooses."""

        def select(self, candidates, k, now, rng):
            free.append(len(candidates))
            return super().select(candidates, k, now, rng)

    setting = place.open(RECORDINGS, 3)
    strategy = FedBuff(comparing.IN_FLIGHT, comparing.MERGE_SIZE, seed=3, selector=Counting())
    curve = setting.run(strategy, 300.0)
    assert curve.versions >= 2
    # Whoever is online and has no job: with twenty jobs in flight at least twenty more.
    assert np.median(free) >= comparing.IN_FLIGHT


@pytest.fixture
def staleness():
    from papers import staleness

    return staleness


def test_the_scheduled_rate_warms_up_and_falls_to_a_tenth_twice(staleness):
    rate = staleness.scheduled(2000)
    steps = (1, 50, 100, 101, 1000, 1001, 1500, 1501, 2000)
    expected = (0.001, 0.05, 0.1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001)
    assert [rate(step) for step in steps] == pytest.approx(expected)
    assert max(map(rate, range(1, 2001))) == 0.1


def test_at_the_scheduled_rate_gap_aware_beats_sa_and_penalises_less_as_it_falls(staleness):
    ours, sa = (
        staleness.run(staleness.WEIGHTINGS[name](), 64, 600, 3, staleness.scheduled(600))
        for name in ("gap-aware", "staleness-aware")
    )
    assert ours > sa
    weights = []

    class Watched(staleness.Gap):
        def weigh(self, update):
            weights.append(super().weigh(update))
            return weights[-1]

    staleness.run(Watched(decay=0.999), 64, 600, 3, staleness.scheduled(600))
    early, late = np.mean(weights[200:290]), np.mean(weights[520:])
    assert late > 2 * early


def test_fisher_information_gains_in_the_first_merges_and_little_in_a_long_stream():
    text = (ROOT / "examples" / "fisher_merge.out").read_text(encoding="utf-8")
    found = re.findall(r": ([\d.]+) \(.*\) by the mean, ([\d.]+) ", text)
    once, five, early, late = (float(fisher) - float(mean) for mean, fisher in found)
    assert min(once, early) > 0.08
    assert 0 < max(five, late) < 0.04
