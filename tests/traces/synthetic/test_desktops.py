"""Generated desktops keep weekdays, as the recorded ones do, and phones are what they were."""

import tomllib
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
from shared_fleets import synthetic

from fedstale.errors import TraceError
from fedstale.traces import Availability, Job, TraceSet
from fedstale.traces.synthetic import diurnal
from fedstale.traces.synthetic.fit import availability_marginal, fit
from fedstale.traces.trace_set import numbered

DAY_S, WEEK_S = 86_400.0, 7 * 86_400.0


@pytest.fixture(scope="module")
def file():
    """Return the file of the embedded desktops."""
    text = (resources.files("fedstale.traces.synthetic") / "desktops.toml").read_text("utf-8")
    assert len(text) < 1_000_000
    return tomllib.loads(text)


@pytest.fixture(scope="module")
def desktops():
    return TraceSet.synthetic(400, days=28, seed=0, population="desktops")


def by_hour_of_week(traces: TraceSet) -> np.ndarray:
    """Return the share of devices online at the middle of each hour of the week."""
    everyone = np.arange(traces.n_devices)
    weeks = int(traces.availability.lengths.max() // WEEK_S)
    instants = 1800.0 + 3600.0 * np.arange(168 * weeks)
    shares = [traces.availability.is_available(everyone, t).mean() for t in instants]
    return np.reshape(shares, (weeks, 168)).mean(axis=0)


def test_generated_desktops_have_the_recorded_marginals(desktops, file):
    wanted = file["targets"]["availability"]
    found = availability_marginal(desktops.availability, cycle_s=WEEK_S)
    assert len(wanted["hourly"]) == 168
    error = np.abs(np.subtract(found["hourly"], wanted["hourly"]))
    assert error.max() < 0.1
    assert error.mean() < 0.03
    assert np.corrcoef(found["hourly"], wanted["hourly"])[0, 1] > 0.85
    np.testing.assert_allclose(found["autocorrelation"], wanted["autocorrelation"], atol=0.1)
    assert len(wanted["autocorrelation"]) == 5
    # The upper quantiles of the shares are those of devices that keep one habit for good.
    np.testing.assert_allclose(found["share"][:3], wanted["share"][:3], atol=0.1)
    for lengths in ("session_s", "gap_s"):
        ratio = np.array(found[lengths]) / wanted[lengths]
        assert np.all((ratio > 1 / 1.5) & (ratio < 1.5))


def test_weekends_differ_from_weekdays_as_recorded(desktops, file):
    made, recorded = by_hour_of_week(desktops), np.array(file["targets"]["availability"]["hourly"])

    def weekend_at_noon(shares):
        noon = shares.reshape(7, 24)[:, 10:14].mean(axis=1)
        return noon[5:].mean() - noon[:5].mean()

    # On weekdays the desktops are taken at noon, at weekends free.
    assert weekend_at_noon(recorded) > 0.1
    assert weekend_at_noon(made) == pytest.approx(weekend_at_noon(recorded), abs=0.04)


def test_weeks_of_another_library_are_found_again():
    # Free at night and all weekend, from a recording that begins on a Wednesday.
    rng = np.random.default_rng(0)
    rows, wednesday = [], 2
    for _ in range(40):
        windows, begin = [], 0.0
        for day in range(28):
            if (day + wednesday) % 7 < 5:
                morning = day * DAY_S + 9 * 3600 + rng.random() * 1800
                windows.append((begin, morning))
                begin = morning + 8 * 3600
        rows.append([*windows, (begin, 28 * DAY_S)])
    recording = TraceSet(
        device_ids=numbered("d", 40),
        availability=Availability.of(rows, 28 * DAY_S, logs=(1.0, 28 * DAY_S - 2 * DAY_S)),
        epoch="2024-01-03T00:00:00",
    )
    some = synthetic(5, days=2)
    found, targets = fit(
        availability=recording,
        network=[some],
        background=some_load(),
        compute=speeds(),
        cycle="week",
    )
    made = TraceSet.synthetic(200, days=14, seed=1, population=found)
    shares = by_hour_of_week(made).reshape(7, 24)
    assert shares[:5, 11:15].max() < 0.1
    assert shares[5:, 11:16].min() > 0.9
    # An hour and a half is what a part of the day blurs.
    assert shares[1:5, :7].min() > 0.9
    recorded = np.reshape(targets["availability"]["hourly"], (7, 24))
    assert np.abs(recorded - shares).mean() < 0.1
    assert np.corrcoef(recorded.ravel(), shares.ravel())[0, 1] > 0.9


def some_load() -> TraceSet:
    from fedstale.traces import Series

    return TraceSet(
        device_ids=numbered("h", 2), compute=Series.regular(np.full((2, 60), 0.5), step_s=300.0)
    )


def speeds() -> TraceSet:
    stated = TraceSet.constant(1, compute=3.0, downlink_bit_per_s=1, uplink_bit_per_s=1)
    return replace(stated, compute_unit="u")


def test_time_that_was_not_logged_is_neither_a_gap_nor_online():
    # Seen for two weeks of a year, online every other hour; then for two weeks, always offline.
    hours = np.arange(0.0, 14 * 24, 2.0) * 3600.0
    rows = [np.stack([hours + i, hours + 3600.0 + i], axis=1) for i in range(20)]
    year = 364 * DAY_S
    seen = Availability.of(rows, year, logs=(0.0, 14 * DAY_S))
    model = diurnal.fit(seen, cycle_s=WEEK_S)
    longest = max(gap[-1] for group in model.groups for gap in group.gap_s)
    assert longest == pytest.approx(3600.0)
    starts, ends, _ = diurnal.draw(model, 200, 7, np.random.default_rng(0))
    assert (ends - starts).sum() / (200 * WEEK_S) == pytest.approx(0.5, abs=0.02)


def test_links_are_the_stated_wire_and_compute_the_stated_speed_under_a_load(desktops):
    at = np.linspace(0.0, 3 * DAY_S, 40)
    for device in (0, 7, 399):
        here = np.full(40, device)
        # The file keeps six digits of a logarithm.
        for link in (desktops.downlink, desktops.uplink):
            np.testing.assert_allclose(link.value_at(here, at), 100e6, rtol=1e-4)
            assert np.ptp(link.value_at(here, at)) == 0
        left = desktops.compute.value_at(here, at)
        assert (left >= 0).all()
        assert (left <= 3.0 + 1e-6).all()
        assert np.unique(left).size > 5
    everyone = np.arange(desktops.n_devices)
    start, _ = desktops.availability.window_at_or_after(everyone, np.zeros(everyone.size))
    job = Job(work=10.0, download_bytes=1000, upload_bytes=1000)
    outcome = desktops.trips(everyone, np.where(np.isfinite(start), start, 0.0), job)
    assert np.isfinite(outcome.reported).mean() > 0.5


def test_a_population_does_not_begin_otherwise_than_it_goes_on():
    channel = TraceSet.synthetic(1500, days=70, seed=2, population="desktops").availability
    everyone = np.arange(1500)
    shares = [
        np.mean([channel.is_available(everyone, w * WEEK_S + h * 7200.0).mean() for h in range(84)])
        for w in range(10)
    ]
    assert np.ptp(shares) < 0.03


@pytest.mark.parametrize("name", ["cars", "", "Desktops", "desktops@desktops"])
def test_an_unknown_population_is_one_sentence_with_those_that_exist(name):
    with pytest.raises(TraceError) as raised:
        TraceSet.load(f"synthetic:5@{name}", seed=0)
    assert str(raised.value) == (
        f"traces = 'synthetic:5@{name}': no population {name!r}; "
        "expected synthetic:N@NAME with one of phones, desktops, sites"
    )


def test_a_record_of_desktops_is_whole_weeks():
    with pytest.raises(TraceError, match="days = 10: expected whole weeks"):
        TraceSet.synthetic(3, days=10, seed=0, population="desktops")
