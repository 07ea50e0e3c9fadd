"""Recorded fleets: complete devices of three kinds, whose parts have nothing in common."""

import json
import lzma
from functools import cache
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from places import RECORDINGS

from fedstale.errors import TraceError
from fedstale.traces import Job, TraceSet

DAY_S = 86_400.0
HOUR = 3600


@pytest.fixture(scope="module")
def fleets():
    """Return the benchmark's module, which makes a fleet once."""
    from lab import fleets as recorded_fleets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_fleets, "fleets", cache(recorded_fleets.fleets))
        yield recorded_fleets


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """Return a folder of small recordings in their authors' formats.

    A desktop is free at night, a car is plugged in at night: both for twenty weeks, each day a
    second later than the day before.
    """
    folder = tmp_path_factory.mktemp("recordings")
    rng = np.random.default_rng(0)
    phones = {
        f"phone{i}": {
            "isSuccess": True,
            "trace_start": float(i % 5 * HOUR),
            "trace_end": float(i % 5 * HOUR + 4 * DAY_S),
            "ready_time": [[d * DAY_S + 20 * HOUR, d * DAY_S + 23 * HOUR] for d in range(3)],
        }
        for i in range(24)
    }
    (folder / "flash-days.json").write_text(json.dumps(phones))
    models = [{"Model": f"m{i}", "CPU_F_AI_Score": str(100 * (i + 1))} for i in range(5)]
    (folder / "ai-benchmark-devices.json").write_text(json.dumps(models))
    events, sessions = [], []
    for device in range(12):
        for k, day in enumerate(pd.date_range("2016-02-01", periods=140)):
            morning, evening = (day + pd.Timedelta(hours=h, seconds=k) for h in (8, 18))
            events += [(f"D{device}", "in-use", morning), (f"D{device}", "available", evening)]
            sessions.append((f"C{device}", evening, morning + pd.Timedelta(days=1)))
    (folder / "library-desktops").mkdir()
    lines = [f"{d},{state},{at:%Y-%m-%d %H:%M:%S}.000" for d, state, at in events]
    for k, part in enumerate((lines[:2000], lines[2000:])):
        path = folder / "library-desktops" / f"FullLogonData-{20 + k:03d}.csv.xz"
        path.write_bytes(lzma.compress(("\ufeff" + "\n".join(part)).encode()))
    rows = [f"OSL;{c};s{i};{a};{b};1,5;2,5" for i, (c, a, b) in enumerate(sessions)]
    header = "location;user_id;session_id;plugin_time;plugout_time;connection_time;energy_session"
    text = "\n".join([header, *rows]).encode()
    (folder / "ev-norway-charging-reports.csv.xz").write_bytes(lzma.compress(text))
    for day in range(8):
        hosts = folder / "planetlab-cpu.tar.gz" / f"2011030{day}"
        hosts.mkdir(parents=True)
        for host in range(12):
            (hosts / f"host{host}").write_text("\n".join(map(str, rng.integers(0, 90, 288))))
    drives = folder / "uccmisl-5g.zip" / "Download" / "Driving"
    drives.mkdir(parents=True)
    for session in range(12):
        began = pd.Timestamp("2019-12-14 10:00:00")
        seconds = [began + pd.Timedelta(seconds=s) for s in range(120)]
        rates = rng.integers(1_000, 90_000, len(seconds))
        drive = [f"{at:%Y.%m.%d_%H.%M.%S},{r},5" for at, r in zip(seconds, rates, strict=True)]
        text = "\n".join(["Timestamp,DL_bitrate,UL_bitrate", *drive])
        (drives / f"B_{session:02d}.csv").write_text(text)
    return folder


@pytest.fixture(scope="module", params=["sample", "published"])
def recordings(request, sample):
    """Return a folder of recordings: the small ones, and the published ones where they are."""
    if request.param == "published" and not RECORDINGS.is_dir():
        pytest.skip("published recordings are not here")
    return sample if request.param == "sample" else RECORDINGS


@pytest.fixture(scope="module", params=["phones", "desktops", "cars", "mixed"])
def made(request, recordings, fleets):
    """Return the kind of a fleet and its parts."""
    return request.param, fleets.fleets(recordings, 0, request.param, assumed=fleets.ASSUMED)


def test_no_device_is_in_two_parts(made):
    kind, parts = made
    assert list(parts) == ["learn", "stop", "test"]
    for a, b in combinations(parts.values(), 2):
        assert not set(a.device_ids) & set(b.device_ids)
    assert min(part.n_devices for part in parts.values()) >= 3, kind


def test_no_load_of_one_part_is_in_another(made):
    # A host's day is 288 readings: a day of another part would have most of them in common.
    _, parts = made
    days = [_days_of(part) for part in parts.values()]
    for a, b in combinations(days, 2):
        assert a
        assert b
        assert not a & b


@pytest.mark.parametrize("kind", ["phones", "desktops", "cars"])
def test_a_device_that_is_there_again_has_other_days_and_the_same_hours(kind, sample, fleets):
    parts = fleets.fleets(sample, 0, kind, assumed=fleets.ASSUMED)
    again = fleets.fleets(sample, 0, kind, assumed=fleets.ASSUMED, times=3)
    for name, part in parts.items():
        more = again[name]
        online, ids = more.channel("availability"), more.device_ids.str.partition("#")
        own = ids.get_level_values(0)
        assert more.device_ids.is_unique
        assert set(own) == set(part.device_ids)
        assert own.value_counts().max() == 3
        # Nobody is there twice on the same days, nor at other hours of a day.
        assert len(set(zip(own, online.shifts, strict=True))) == more.n_devices
        assert not np.mod(online.shifts, DAY_S).any()
        assert (online.shifts < online.record_s()).all()
    with pytest.raises(ValueError, match="times = 0: expected"):
        fleets.fleets(sample, 0, kind, assumed=fleets.ASSUMED, times=0)


def _days_of(traces: TraceSet) -> set[bytes]:
    """Return each day of load that a set's devices have, those that hardly vary left out."""
    found = set()
    for row in np.unique(traces.compute.rows):
        _, left = traces.compute.row_segments(int(row))
        for day in left.reshape(-1, 288):
            if np.unique(day).size > 50:
                found.add(day.round(4).tobytes())
    return found


def test_no_session_of_a_link_of_one_part_is_in_another(made):
    kind, parts = made
    if kind == "desktops":
        for part in parts.values():
            assert set(part.downlink.fastest()) == set(part.uplink.fastest()) == {100e6}
        return
    # A minute of rates, once a second, is like no other.
    minutes = []
    for part in parts.values():
        own = set()
        for row in np.unique(part.downlink.rows):
            rates = part.downlink.row_segments(int(row))[1]
            if np.ptp(rates):
                windows = np.lib.stride_tricks.sliding_window_view(rates[: 6 * HOUR], 60)[::7]
                own |= {w.tobytes() for w in windows if np.unique(w).size > 30}
        minutes.append(own)
    for a, b in combinations(minutes, 2):
        assert a
        assert not a & b


def test_hosts_days_and_sessions_are_divided_by_name(recordings, fleets):
    loads = TraceSet.read(recordings / "planetlab-cpu.tar.gz")
    links = TraceSet.read(recordings / "uccmisl-5g.zip")
    hosts, days, sessions = ([], [], [])
    for name in ("learn", "stop", "test"):
        ids = loads.device_ids[fleets.loads_of(name, loads, 0)].str.split("/")
        hosts.append(set(ids.str[1]))
        days.append(set(ids.str[0]))
        sessions.append(set(fleets.sessions_of(name, links, 0)))
    for parts in (hosts, sessions):
        assert all(parts)
        assert not any(a & b for a, b in combinations(parts, 2))
    assert max(days[0] | days[1]) < min(days[2])
    assert set.union(*sessions) == set(range(links.n_devices))


def test_tests_of_desktops_are_later_than_anything_learnt(recordings, fleets):
    parts = fleets.fleets(recordings, 0, "desktops", assumed=fleets.ASSUMED)

    def dates(part):
        logs = part.availability
        ends = logs.log_starts + logs.logs_s
        epoch = pd.Timestamp(part.epoch)
        assert epoch.day_of_week == 0
        return epoch + pd.Timedelta(seconds=logs.log_starts.min()), epoch + pd.Timedelta(
            seconds=ends.max()
        )

    learnt = max(dates(parts[name])[1] for name in ("learn", "stop"))
    assert learnt <= pd.Timestamp(parts["test"].epoch)
    assert dates(parts["test"])[0] >= learnt


def test_tests_of_cars_are_later_than_anything_learnt(recordings, fleets):
    # Dates are not kept in the sets, so they are looked up in the file, session by session.
    (file,) = recordings.glob("ev-norway*")
    table = pd.read_csv(file, sep=";", dtype="str").dropna(subset=["plugin_time", "plugout_time"])
    begin, end = (pd.to_datetime(table[f"plug{way}_time"]) for way in ("in", "out"))
    table = table.assign(begin=begin, lasts=(end - begin).dt.total_seconds())
    dates = {}
    for name, part in fleets.fleets(recordings, 0, "cars", assumed=fleets.ASSUMED).items():
        owner, starts, ends = part.availability.sessions(np.arange(part.n_devices))
        lasts = pd.DataFrame(
            {"user_id": part.device_ids[owner], "hour": starts % DAY_S, "lasts": ends - starts}
        )
        table["hour"] = (table["begin"] - table["begin"].dt.normalize()).dt.total_seconds()
        seen = table.merge(lasts, on=["user_id", "hour", "lasts"])
        assert len(seen) > 0.6 * len(lasts)
        once = seen.groupby(["user_id", "hour", "lasts"])["begin"].agg(["min", "max"])
        # A car may have two sessions that look alike: those say nothing.
        dates[name] = once["min"][once["min"] == once["max"]]
    for name in ("learn", "stop"):
        assert dates[name].max() < dates["test"].min()


def test_every_device_has_finite_rates_and_can_do_a_job_where_it_is_online(made):
    _, parts = made
    job = Job(work=1.0, download_bytes=1000, upload_bytes=1000)
    for part in parts.values():
        part.complete()
        everyone = np.arange(part.n_devices)
        start, _ = part.availability.window_at_or_after(everyone, np.zeros(part.n_devices))
        comes = np.isfinite(start)
        assert comes.mean() > 0.8
        devices, at = everyone[comes], start[comes] + 0.5
        for name in ("compute", "downlink", "uplink"):
            mean = getattr(part, name).integral(devices, at, at + DAY_S) / DAY_S
            assert np.isfinite(mean).all()
            assert (mean > 0).all()
        outcome = part.trips(devices, at, job)
        assert np.isfinite(outcome.reported).mean() > 0.7


def test_nothing_but_the_stated_link_repeats_within_a_day(made):
    kind, parts = made
    for part in parts.values():
        assert (part.compute.record_s() >= 3 * DAY_S).all()
        moves = part.downlink.lengths[part.downlink.rows] > 1.0
        assert (part.downlink.record_s()[moves] >= 3 * DAY_S).all()
        assert moves.any() == (kind != "desktops")


def test_what_was_not_logged_is_unknown_and_a_repetition_is_another_log(made):
    kind, parts = made
    part = parts["test"]
    online = part.availability
    everyone = np.arange(part.n_devices)
    length = online.record_s()
    assert (length % DAY_S == 0).all()
    instants = np.random.default_rng(1).random((200, 1)) * length
    known, repeated = np.zeros((2, part.n_devices))
    for at in instants:
        start, end = part.log_at(everyone, at)
        assert ((start <= at) & (at <= end)).all()
        logged = start < end
        # Whoever is online is so in a log.
        assert logged[online.is_available(everyone, at)].all()
        assert (end - start <= length + 1e-6).all()
        known += logged
        again = part.log_at(everyone, at + length)
        assert (again[0][logged] >= start[logged] + length[logged] - 1e-6).all()
        repeated += np.less(*again)
    assert (known == repeated).all()
    logged_share = np.minimum(online.logs_s, online.lengths)[online.rows] / length
    assert abs((known / 200 - logged_share).mean()) < 0.02
    if kind == "desktops":
        assert (logged_share < 1).any()


def test_a_fleet_follows_from_its_seed(sample, fleets):
    def shown(seed):
        made = fleets.fleets.__wrapped__(sample, seed, "mixed", assumed=fleets.ASSUMED)
        test = made["test"]
        rates = [test.downlink.value_at(np.arange(test.n_devices), 5000.0 * k) for k in range(5)]
        return list(test.device_ids), np.array(rates).tobytes(), test.compute.scales.tobytes()

    first = shown(3)
    assert shown(3) == first
    assert shown(4)[0] != first[0]


def test_mixed_is_all_three_in_one_week(sample, fleets):
    mixed = fleets.fleets(sample, 0, "mixed", assumed=fleets.ASSUMED)["test"]
    alone = {
        k: fleets.fleets(sample, 0, k, assumed=fleets.ASSUMED)["test"] for k in fleets.KINDS[:3]
    }
    ids = [device for part in alone.values() for device in part.device_ids]
    assert list(mixed.device_ids) == ids
    epoch = pd.Timestamp(mixed.epoch)
    for part in alone.values():
        lead = (pd.Timestamp(part.epoch) - epoch).total_seconds() % (7 * DAY_S)
        at = np.arange(0.0, 7 * DAY_S, 1800.0)
        for own, device in enumerate(part.device_ids):
            here = np.full(at.size, mixed.device_ids.get_loc(device))
            there = part.availability.is_available(np.full(at.size, own), at)
            assert (mixed.availability.is_available(here, at + lead) == there).all()


def test_what_no_record_says_has_to_be_said(sample, fleets):
    for kind in ("desktops", "mixed"):
        with pytest.raises(ValueError, match=f"assumed is missing: .* no record says of {kind}"):
            fleets.fleets(sample, 0, kind)
    with pytest.raises(ValueError, match="kind = 'planes': expected one of phones, desktops, cars"):
        fleets.fleets(sample, 0, "planes")
    said = fleets.Assumed(desktop_speed=7.0, wired_bit_per_s=(5e6, 1e6))
    test = fleets.fleets(sample, 0, "desktops", assumed=said)["test"]
    assert set(test.downlink.fastest()) == {5e6}
    assert set(test.uplink.fastest()) == {1e6}
    assert 5.0 < test.compute.fastest().max() <= 7.0


def test_devices_of_two_kinds_do_not_share_a_draw(recordings, fleets):
    for part in fleets.fleets(recordings, 0, "mixed", assumed=fleets.ASSUMED).values():
        moves = np.flatnonzero(part.downlink.record_s() > 1.0)
        rates = np.array([part.downlink.value_at(moves, 1000.0 * k) for k in range(40)]).T
        assert len(np.unique(rates, axis=0)) == moves.size


def test_a_missing_recording_is_named(tmp_path, sample, fleets):
    with pytest.raises(TraceError, match=r"planetlab-cpu\.tar\.gz: no such file or folder"):
        fleets.fleets(tmp_path, 0)
    for name in ("planetlab-cpu.tar.gz", "uccmisl-5g.zip", "ai-benchmark-devices.json"):
        (tmp_path / name).symlink_to(sample / name)
    for kind, file in (("desktops", "FullLogonData"), ("cars", "ev-norway"), ("phones", "flash")):
        with pytest.raises(TraceError, match=rf"{file}.*: no such file"):
            fleets.fleets(tmp_path, 0, kind, assumed=fleets.ASSUMED)
