"""The published recordings are read whole, and hold what their authors say."""

import json
import tarfile

import numpy as np
import pytest
from places import RECORDINGS
from published_phones import phones_of

from fedstale.traces import Job
from fedstale.traces.sources import speeds, windows

DAY, HOUR = 86_400.0, 3600.0
DESKTOPS = RECORDINGS / "library-desktops"
HOSTS = RECORDINGS / "planetlab-cpu.tar.gz"
CARS = RECORDINGS / "ev-norway-charging-reports.csv.xz"
PHONES = RECORDINGS / "flash-ready-strict.json"
PHONES_OVER_DAYS = RECORDINGS / "flash-days.json"

pytestmark = pytest.mark.skipif(not RECORDINGS.is_dir(), reason="published recordings are not here")


@pytest.fixture(scope="module")
def desktops():
    return windows.read_desktops(DESKTOPS)


@pytest.fixture(scope="module")
def phones():
    return windows.read_phones(PHONES)


def windows_of(traces, phone):
    return traces.availability.windows(traces.device_ids.get_loc(phone))[0].tolist()


def test_the_published_log_is_read_as_its_events_say(desktops):
    traces = desktops
    assert traces.n_devices == 219
    assert traces.repairs["dropped: state repeated"] == 5336
    availability = traces.availability
    devices = np.arange(traces.n_devices)
    # Of the logged time, on weekdays in term: freest at night.
    days = np.array([d for d in range(21, 90) if d % 7 < 5])
    share = []
    for hour in range(24):
        at = days * DAY + (hour + 0.5) * HOUR
        who, when = (x.ravel() for x in np.meshgrid(devices, at))
        starts, ends = availability.log_at(who, when)
        share.append(availability.is_available(who, when)[starts < ends].mean())
    assert 11 <= int(np.argmin(share)) <= 17
    assert min(share) < 0.45
    assert max(share) > 0.6


def test_all_published_hosts_load_with_the_numbers_of_their_files():
    traces = speeds.read_hosts(HOSTS)
    assert traces.n_devices == 9659
    assert traces.device_ids.str[:8].nunique() == 8
    with tarfile.open(HOSTS) as archive:
        first = next(m for m in archive if m.isfile())
        percent = [int(x) for x in archive.extractfile(first).read().split()]
    _, left, length = traces.compute.segments(
        traces.device_ids.get_loc(first.name.split("/", 1)[1])
    )
    assert length == 86_400
    np.testing.assert_allclose(left, 1 - np.array(percent) / 100, rtol=1e-6)


def test_published_cars_are_plugged_in_at_night():
    traces = windows.read_cars(CARS)
    devices = np.arange(traces.n_devices)
    assert traces.repairs["dropped: no user, plug-in or plug-out time"] == 26
    np.testing.assert_array_equal(traces.availability.logs_s, traces.availability.lengths)
    share = np.array(
        [traces.availability.is_available(devices, t).mean() for t in np.arange(0, 350 * DAY, 1800)]
    ).reshape(350, 48)
    assert share.mean() == pytest.approx(0.28, abs=0.06)
    assert share[:, 6].mean() > 2 * share[:, 26].mean()


def test_all_phones_of_the_published_file_load(phones):
    traces = phones
    raw = json.loads(PHONES.read_text())
    assert traces.device_ids.tolist() == list(raw)
    days, counts = np.unique(traces.availability.lengths / DAY, return_counts=True)
    assert days.tolist() == [1, 2, 3]
    assert counts[0] > 0.94 * traces.n_devices


def test_hours_of_the_published_file_are_where_they_were(phones):
    traces = phones
    raw = json.loads(PHONES.read_text())
    checked = 0
    for name in list(raw)[:200]:
        span = [x for window in raw[name] for x in window]
        if not span or max(span) - min(span) > DAY:
            continue
        checked += 1
        seconds = {
            second % DAY for start, end in raw[name] for second in range(*map(int, (start, end)))
        }
        made = windows_of(traces, name)
        assert seconds <= {second for start, end in made for second in range(int(start), int(end))}
        # Each gap of one second that is bridged adds that second.
        assert sum(end - start for start, end in made) <= len(seconds) + len(raw[name])
    assert checked > 100


def test_phones_of_the_published_file_come_at_night_and_no_day_is_empty(phones):
    traces = phones
    devices = np.arange(traces.n_devices)
    online = np.array(
        [traces.availability.is_available(devices, (h + 0.5) * HOUR).mean() for h in range(48)]
    )
    for day in (online[:24], online[24:]):
        assert np.argmax(day) in (0, 1, 2, 3, 4, 5)
        assert 2 * min(day) < max(day) < 4 * min(day)


def test_phones_over_days_are_ready_as_often_as_their_authors_log_says():
    traces = windows.read_phones_over_days(PHONES_OVER_DAYS)
    devices = np.arange(traces.n_devices)
    assert traces.n_devices == 513
    assert traces.repairs["dropped: phone without a usable log"] == 192
    starts, ends = traces.availability.log_at(devices, 0.0)
    assert np.all((starts <= 0) & (ends > 0))
    share = np.array(
        [traces.availability.is_available(devices, t).mean() for t in np.arange(0, 10 * DAY, 900)]
    )
    by_hour = share.reshape(10, 24, 4).mean(axis=(0, 2))
    assert share.mean() == pytest.approx(0.095, abs=0.003)
    assert by_hour[4] == pytest.approx(0.137, abs=0.01)
    assert by_hour[13] == pytest.approx(0.065, abs=0.01)


def test_published_recordings_compose_into_devices_that_report():
    traces = phones_of(5000, seed=0)
    job = Job(work=60.0, download_bytes=1_000_000, upload_bytes=1_000_000)
    reported = np.isfinite(traces.trips(np.arange(5000), 0.0, job).reported).mean()
    assert 0.2 < reported < 0.9
    assert traces.device_ids.is_unique
