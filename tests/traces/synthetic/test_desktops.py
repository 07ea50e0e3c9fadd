"""Generated desktops keep weekdays, as the recorded ones do, and phones are what they were."""

import tomllib
from importlib import resources

import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces import Job, TraceSet

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


def test_weekends_differ_from_weekdays_as_recorded(desktops, file):
    made, recorded = by_hour_of_week(desktops), np.array(file["targets"]["availability"]["hourly"])

    def weekend_at_noon(shares):
        noon = shares.reshape(7, 24)[:, 10:14].mean(axis=1)
        return noon[5:].mean() - noon[:5].mean()

    # On weekdays the desktops are taken at noon, at weekends free.
    assert weekend_at_noon(recorded) > 0.1
    assert weekend_at_noon(made) == pytest.approx(weekend_at_noon(recorded), abs=0.04)


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
