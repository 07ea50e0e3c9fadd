"""Generated sites: mostly on, behind a wire, busy at work, and as fast as is stated."""

import tomllib
from importlib import resources

import numpy as np
import pytest

from fedstale.traces import TraceSet

DAY_S, HOUR_S = 86_400.0, 3600.0
N, DAYS = 600, 56


@pytest.fixture(scope="module")
def sites():
    return TraceSet.synthetic(N, days=DAYS, seed=0, population="sites")


def embedded(name):
    text = (resources.files("fedstale.traces.synthetic") / name).read_text("utf-8")
    return tomllib.loads(text)


def busy(traces, hour):
    """Return the mean load of all processors at an hour of the day, over a week."""
    everyone = np.arange(traces.n_devices)
    speed = traces.compute.scales
    left = [traces.compute.value_at(everyone, d * DAY_S + hour * HOUR_S) for d in range(7)]
    return 1.0 - np.mean(left / speed)


def test_a_site_is_down_every_other_week_for_an_hour_in_the_median(sites):
    starts, ends = sites.availability.starts, sites.availability.ends
    share = (ends - starts).sum() / (N * DAYS * DAY_S)
    assert share == pytest.approx(14 / 14.25, abs=0.005)
    gaps = (starts[1:] - ends[:-1])[ends[:-1] < starts[1:]]
    assert gaps.size / N == pytest.approx(DAYS / 14.25, rel=0.1)
    # A gap at night is longer, one at work shorter.
    assert np.median(gaps) == pytest.approx(HOUR_S, rel=0.35)
    assert gaps.mean() > 3 * np.median(gaps)


def test_outages_have_no_memory_of_where_the_record_begins(sites):
    ends = sites.availability.ends
    weeks = np.bincount((ends[ends < DAYS * DAY_S] // (7 * DAY_S)).astype(int), minlength=8)
    assert np.abs(weeks / weeks.mean() - 1).max() < 0.25


def test_processors_are_busier_at_noon_than_at_night_and_over_a_day_as_recorded(sites):
    assert busy(sites, 13) > 1.5 * busy(sites, 4)
    recorded = embedded("desktops.toml")["targets"]["background"]["load"]
    everyone = np.arange(N)
    shares = [
        1.0 - sites.compute.value_at(everyone, k * HOUR_S + 60.0) / sites.compute.scales
        for k in range(24)
    ]
    found = np.quantile(shares, (0.05, 0.25, 0.5, 0.75, 0.95))
    np.testing.assert_allclose(found, recorded, atol=0.06)


def test_hours_move_with_the_time_zone_of_a_site():
    spread = TraceSet.synthetic(400, days=7, seed=1, time_zones="spread", population="sites")
    # Everywhere at once it is as busy at any hour.
    assert busy(spread, 13) == pytest.approx(busy(spread, 4), rel=0.25)


def test_speeds_are_four_classes_of_one_size_and_links_constant(sites):
    speeds, counts = np.unique(sites.compute.scales.round(3), return_counts=True)
    np.testing.assert_allclose(speeds, [3, 6, 9, 12])
    assert counts.min() > N / 4 * 0.8
    everyone = np.arange(N)
    down, up = sites.downlink.value_at(everyone, 0.0), sites.uplink.value_at(everyone, 0.0)
    np.testing.assert_allclose(up / down, 0.5, rtol=1e-3)
    np.testing.assert_array_equal(down, sites.downlink.value_at(everyone, 5 * HOUR_S))
    assert np.median(down) == pytest.approx(100e6, rel=0.15)


def test_an_app_names_sites_as_it_names_phones():
    twelve = TraceSet.load("synthetic:12@sites", seed=3)
    assert twelve.n_devices == 12
    assert twelve.known == ("availability", "compute", "downlink", "uplink")
