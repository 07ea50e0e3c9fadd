"""Fitted numbers describe the recordings, survive their file, and find a known truth again."""

from dataclasses import replace

import numpy as np
import pytest
from shared_fleets import synthetic

from fedstale.errors import TraceError
from fedstale.traces import DAY_S, Availability, Series, TraceSet
from fedstale.traces.synthetic import diurnal, population
from fedstale.traces.synthetic.rates import draw_links, draw_loads
from fedstale.traces.trace_set import numbered
from populations.fit import fit, fit_availability, fit_loads, fit_regimes, main, save
from populations.marginals import availability_marginal


def test_availability_fitted_to_generated_devices_generates_alike():
    truth = TraceSet.synthetic(1000, days=4, seed=1).availability
    again = fit_availability(truth)
    starts, ends, counts = diurnal.draw(again, 1000, 4, np.random.default_rng(0))
    from fedstale.traces import Availability

    drawn = Availability.packed(starts, ends, counts, 4 * 86_400.0)
    a, b = availability_marginal(truth), availability_marginal(drawn)
    np.testing.assert_allclose(a["hourly"], b["hourly"], atol=0.03)
    np.testing.assert_allclose(np.log(a["session_s"]), np.log(b["session_s"]), atol=np.log(1.5))


def test_regimes_fitted_to_a_steady_noisy_link_have_its_spread_and_memory():
    rng = np.random.default_rng(0)
    z = np.zeros(20_000)
    for t in range(1, z.size):
        z[t] = 0.8 * z[t - 1] + 0.6 * rng.standard_normal()
    model = fit_regimes([np.exp(0.5 * z)])
    drawn = np.log(draw_links(model, 50, 2000, rng))
    assert drawn.std() == pytest.approx(0.5, rel=0.1)
    lagged = [(x[:-1] * x[1:]).mean() / (x * x).mean() for x in drawn - drawn.mean()]
    assert np.mean(lagged) == pytest.approx(0.8, abs=0.1)


def test_a_link_that_is_out_a_tenth_of_the_time_is_drawn_so():
    rng = np.random.default_rng(1)
    link = np.exp(rng.standard_normal(20_000) * 0.3)
    link[rng.random(2000).repeat(10) < 0.1] = 0.0
    drawn = draw_links(fit_regimes([link]), 50, 2000, rng)
    assert (drawn == 0).mean() == pytest.approx(0.1, abs=0.02)


def test_background_finds_its_own_frequencies_and_memory_again():
    rng = np.random.default_rng(2)
    truth = population.load().background
    again = fit_loads(list(draw_loads(truth, 2000, 288, rng)), 300.0)
    np.testing.assert_allclose(again.load, truth.load, atol=0.05)
    assert again.own == pytest.approx(truth.own, abs=0.08)


def test_numbers_survive_their_file(tmp_path):
    known = population.load()
    save(known, tmp_path / "p.toml", provenance={"a": "b"}, targets={})
    assert population.load(tmp_path / "p.toml") == known
    assert [p.name for p in tmp_path.iterdir()] == ["p.toml"]


def tiny(**changes: object) -> dict:
    some = synthetic(100, days=2).take(np.arange(5))
    speeds = TraceSet(
        device_ids=numbered("m", 3), compute=Series.constant([1.0, 2.0, 3.0]), compute_unit="u"
    )
    idle = TraceSet(
        device_ids=numbered("h", 2), compute=Series.regular(np.full((2, 60), 0.5), step_s=300.0)
    )
    parts = {
        "availability": synthetic(100, days=2),
        "network": [some],
        "background": idle,
        "compute": speeds,
    }
    return parts | changes


def test_generated_recordings_can_be_fitted():
    assert fit(**tiny())[0].speed == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"availability": TraceSet.ideal(3)}, "whole days"),
        (
            {"compute": TraceSet.constant(2, compute=0, downlink_bit_per_s=1, uplink_bit_per_s=1)},
            "speed 0",
        ),
        ({"network": []}, "at least one set of links"),
        ({"background": TraceSet(device_ids=numbered("d", 1))}, "but not compute"),
    ],
)
def test_recordings_that_do_not_suffice_are_named(part, expected):
    with pytest.raises(TraceError, match=expected):
        fit(**tiny(**part))


def by_hour_of_week(traces: TraceSet) -> np.ndarray:
    """Return the share of devices online at the middle of each hour of the week."""
    everyone = np.arange(traces.n_devices)
    weeks = int(traces.availability.lengths.max() // diurnal.WEEK_S)
    instants = 1800.0 + 3600.0 * np.arange(168 * weeks)
    shares = [traces.availability.is_available(everyone, t).mean() for t in instants]
    return np.reshape(shares, (weeks, 168)).mean(axis=0)


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
    model = fit_availability(seen, cycle_s=diurnal.WEEK_S)
    longest = max(gap[-1] for group in model.groups for gap in group.gap_s)
    assert longest == pytest.approx(3600.0)
    starts, ends, _ = diurnal.draw(model, 200, 7, np.random.default_rng(0))
    assert (ends - starts).sum() / (200 * diurnal.WEEK_S) == pytest.approx(0.5, abs=0.02)


def test_a_command_writes_a_population_and_says_of_what(tmp_path, monkeypatch):
    parts = tiny()
    for name in ("availability", "background", "compute"):
        parts[name].write(tmp_path / f"{name}.parquet")
    given = [
        w for n in ("availability", "background", "compute") for w in (f"--{n}", f"{n}.parquet")
    ]
    out = ["--network", "20M,5M", "--out", "population.toml"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fit.py", *given, *out])
    main()
    assert TraceSet.synthetic(4, seed=0, population=tmp_path / "population.toml").n_devices == 4
    text = (tmp_path / "population.toml").read_text()
    assert 'name = "compute.parquet"' in text
    assert str(tmp_path) not in text
