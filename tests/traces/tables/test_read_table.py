"""A table means what its user states and what its names and values leave no doubt of."""

import numpy as np
import pandas as pd
import pytest

from fedstale.errors import TraceError
from fedstale.traces import TraceSet
from fedstale.traces.tables import TableOptions, UnclearLogError, open_table, read_table

HOUR, DAY = 3600.0, 86_400.0
MIDNIGHT = 1_717_200_000  # 2024-06-01 00:00 UTC


def windows(**columns: list[object]) -> pd.DataFrame:
    return pd.DataFrame({"device": ["a"] * len(columns["start"]), **columns})


def samples(seconds: list[float], online: list[object], device: str = "a") -> pd.DataFrame:
    return pd.DataFrame({"device": device, "time": seconds, "online": online})


def rates(seconds: list[float], values: list[object]) -> pd.DataFrame:
    return pd.DataFrame({"device": "a", "time": seconds, "rate": values})


def found(traces: TraceSet, device: int = 0) -> list[list[float]]:
    windows: list[list[float]] = traces.availability.windows(device)[0].tolist()  # type: ignore[union-attr]
    return windows


def test_windows_are_sorted_and_merged_and_counted():
    frame = windows(start=[50, 10, 20, 40, 60], end=[60, 30, 25, 40, None])
    traces = TraceSet.from_frame(frame, unit="s")
    assert found(traces) == [[10, 30], [50, 60]]
    assert dict(traces.repairs) == {
        "dropped: no length": 1,
        "dropped: no start or no end": 1,
        "merged: overlapping": 1,
        "sorted: out of order": 1,
    }


def test_a_reading_holds_until_the_next_one_and_the_last_ends_the_log():
    traces = TraceSet.from_frame(samples([0, 10, 20, 30], [True, True, False, True]), unit="s")
    assert found(traces) == [[0, 20]]
    assert traces.availability.log_at([0], 15.0) == (0.0, 30.0)


def test_readings_at_fractions_of_a_second_are_one_stretch():
    seconds = [k / 10 for k in range(1000)]
    traces = TraceSet.from_frame(samples(seconds, [1] * 1000), unit="s", max_gap_s=1)
    assert found(traces) == [[0, 99.9]]
    link = TraceSet.from_frame(rates(seconds, [1] * 1000), unit=["s", "B/s"], max_gap_s=1)
    assert not link.repairs


def test_readings_of_one_instant_are_one_and_the_last_counts():
    traces = TraceSet.from_frame(samples([30, 0, 0, 10, 10, 20], [0, 1, 0, 0, 1, 0]), unit="s")
    assert found(traces) == [[10, 20]]
    assert dict(traces.repairs) == {
        "replaced: further reading of one instant": 2,
        "sorted: out of order": 1,
    }


def test_a_gap_is_unknown_and_what_is_around_it_is_known():
    seconds = [0, 10, 20, 500, 510, 520, 530, 900]
    online = [1, 1, 1, 0, 1, 1, 1, 1]
    traces = TraceSet.from_frame(samples(seconds, online), unit="s", max_gap_s=60)
    assert found(traces) == [[0, 20], [510, 530]]
    logs = np.stack(traces.availability.log_at([0] * 3, [15.0, 200.0, 515.0]), axis=1)
    assert logs.tolist() == [[0, 20], [200, 200], [500, 530]]
    assert not traces.repairs
    whole = TraceSet.from_frame(samples(seconds, online), unit="s", max_gap_s=np.inf)
    assert found(whole) == [[0, 500], [510, 900]]


def test_a_reading_holds_for_the_longest_gap_and_no_longer():
    seconds, stated = [0, 10, 20, 31], {"unit": ["s", "B/s"], "kind": "samples", "max_gap_s": 10}
    frame = samples(seconds, [1] * 4).assign(rate=[1, 2, 3, 4])
    assert found(TraceSet.from_frame(frame, **stated | {"unit": "s"})) == [[0, 20]]
    link = TraceSet.from_frame(frame, **stated | {"kind": "rates"}).downlink
    assert link.segments(0)[1].tolist() == [8, 16]
    assert link.lengths.tolist() == [20]


def test_a_row_is_dropped_for_one_reason():
    frame = samples([0, None, 10, 20, None], [1, None, None, 1, 1])
    traces = TraceSet.from_frame(frame, unit="s")
    assert found(traces) == [[0, 20]]
    assert traces.repairs == {"dropped: no time": 2, "dropped: no state": 1}
    link = rates([0, None, 10, 20], [1, None, None, 1])
    repairs = TraceSet.from_frame(link, unit=["s", "B/s"]).repairs
    assert repairs == {"dropped: no time": 1, "dropped: no rate or no interval": 1}


def test_windows_far_apart_are_not_one_log():
    frame = windows(start=[0, 20, 5000], end=[10, 30, 5005])
    traces = TraceSet.from_frame(frame, unit="s", max_gap_s=60)
    assert found(traces) == [[0, 10], [20, 30], [5000, 5005]]
    assert traces.availability.log_at([0, 0], [25.0, 40.0])[1].tolist() == [30, 40]
    assert not traces.repairs


def test_ids_are_whole_numbers_though_one_is_missing():
    frame = pd.DataFrame({"device": [7, None, 8], "start": 0, "end": 5})
    traces = TraceSet.from_frame(frame, unit="s")
    assert list(traces.device_ids) == ["7", "8"]
    assert traces.repairs == {"dropped: no device": 1}


def test_a_device_of_one_reading_is_left_out():
    frame = pd.concat([samples([0, 10], [1, 1], "a"), samples([5], [1], "b")])
    traces = TraceSet.from_frame(frame, unit="s")
    assert list(traces.device_ids) == ["a"]
    assert traces.repairs == {"dropped: device of which no time is known": 1}


@pytest.mark.parametrize(
    "stamps",
    [
        [MIDNIGHT, MIDNIGHT + 60],
        [MIDNIGHT * 1000, MIDNIGHT * 1000 + 60_000],
        pd.to_datetime([MIDNIGHT, MIDNIGHT + 60], unit="s", utc=True),
        ["2024-06-01T00:00:00Z", "2024-06-01 00:01:00Z"],
        ["2024/06/01 02:00:00+0200", "2024/05/31 19:01:00-0500"],
    ],
)
def test_one_instant_is_the_same_however_it_is_written(stamps):
    frame = pd.DataFrame({"id": 7, "ts": stamps, "available": ["yes", "no"]})
    traces = TraceSet.from_frame(frame, time_zone="Europe/Oslo")
    assert traces.epoch == "2024-06-01T02:00:00"
    assert list(traces.device_ids) == ["7"]
    assert found(traces) == [[0, 60]]
    assert traces.availability.record_s().tolist() == [DAY]


def test_the_offset_of_all_times_is_the_zone_of_the_clock():
    frame = windows(start=["2024-06-01T08:00+0200"], end=["2024-06-01T09:00+0200"])
    read = read_table(frame, TableOptions())
    assert found(read.traces) == [[0, HOUR]]
    assert read.traces.epoch == "2024-06-01T08:00:00"
    assert "clock changes" not in read.interpretation


def test_a_window_through_a_change_of_clocks_lasts_as_long_as_it_did():
    frame = windows(
        start=["2024-03-30 23:00", "2024-10-27 02:30"], end=["2024-03-31 05:00", "2024-10-27 04:00"]
    )
    read = read_table(frame, TableOptions(time_zone="Europe/Oslo"))
    assert found(read.traces) == [[0, 5 * HOUR]]
    assert read.traces.epoch == "2024-03-30T23:00:00"
    assert "clock changes" in read.interpretation
    # Half past two came twice on that day: which of the two is not known.
    assert read.traces.repairs == {
        "dropped: local time that came twice or never, as clocks were changed": 1,
    }


def test_a_battery_is_online_while_it_charges_and_has_the_least_level():
    frame = pd.DataFrame(
        {
            "device": "a",
            "time": [0, 10, 20, 30, 40],
            "charging": ["Charging", "charging", "not charging", "charging", "charging"],
            "level": [70, 80, 90, 80, 60],
        }
    )
    assert found(TraceSet.from_frame(frame, unit="s")) == [[0, 20], [30, 40]]
    assert found(TraceSet.from_frame(frame, unit="s", min_level=80)) == [[10, 20], [30, 40]]
    level_alone = frame.drop(columns="charging")
    assert found(TraceSet.from_frame(level_alone, unit="s", min_level=90)) == [[20, 30]]


def test_a_rate_holds_until_the_next_one_and_silences_are_closed_up():
    frame = rates([MIDNIGHT + s for s in (3600, 3610, 3600, 3620, 9000, 9010)], [1, 3, 3, 9, 5, 7])
    frame["ul_kbps"] = 8
    read = read_table(frame, TableOptions(unit=("downlink=Mbit/s",), max_gap_s=60))
    starts, values, length = read.traces.downlink.segments(0)
    assert (starts.tolist(), values.tolist(), length) == ([0, 10, 20], [2e6, 3e6, 5e6], 30.0)
    assert read.traces.uplink.segments(0)[1].tolist() == [8000.0] * 3
    assert read.traces.epoch is None
    assert read.traces.repairs["closed up: silence in which no rate is known"] == 1
    assert read.traces.repairs["averaged: further reading of one instant"] == 1
    whole = TraceSet.from_frame(frame, unit="downlink=Mbit/s", max_gap_s=np.inf)
    assert whole.epoch == "2024-06-01T01:00:00"
    assert whole.downlink.value_at([0, 0], [HOUR, 5405.0]).tolist() == [9e6, 5e6]


def test_a_direction_that_is_not_named_beside_one_that_is_stays_unknown():
    frame = rates([0, 10], [1, 1]).assign(ul_kbps=8)
    assert TraceSet.from_frame(frame, unit=["s", "kbit/s"]).known == ("downlink", "uplink")
    named = TraceSet.from_frame(frame, unit=["s", "kbit/s"], columns={"downlink": "rate"})
    assert named.known == ("downlink",)


def test_bytes_are_of_the_time_since_the_line_before():
    frame = rates([0, 2, 4, 4, 5], [9e9, 500, 1000, 1000, 125])
    traces = TraceSet.from_frame(frame, unit=["s", "bytes/interval"])
    starts, values, length = traces.downlink.segments(0)
    assert (starts.tolist(), values.tolist(), length) == ([0, 2, 4], [2000, 8000, 1000], 5.0)


def test_speeds_without_what_a_unit_of_them_is_are_told_and_left_out():
    nodes = pd.DataFrame({"host": ["a", "b"], "speed": [1, 2], "downlink_kbps": [8, 16]})
    read = read_table(nodes, TableOptions())
    assert read.traces.known == ("downlink",)
    assert "not used" in read.interpretation["speed"]
    assert read.traces.downlink.value_at([0, 1], 0.0).tolist() == [8000, 16000]


def test_the_order_of_rows_changes_nothing_but_what_is_counted():
    rng = np.random.default_rng(0)
    start = np.sort(rng.integers(0, 5000, 60)).astype(float)
    frame = pd.DataFrame({"device": [f"d{i % 3}" for i in range(60)], "start": start})
    frame["end"] = start + rng.integers(1, 90, 60)
    frame["time"], frame["online"] = start, rng.integers(0, 2, 60)
    frame = frame.drop_duplicates(["device", "time"])
    for kind in ("windows", "samples"):
        sets = [
            TraceSet.from_frame(rows, unit="s", kind=kind, max_gap_s=300)
            for rows in (frame, frame.sample(frac=1, random_state=1))
        ]
        for device in range(3):
            assert found(sets[0], device) == found(sets[1], device)


def test_a_published_log_is_read_as_its_own_reader_reads_it(tmp_path):
    rng = np.random.default_rng(3)
    at = pd.Timestamp("2016-01-28") + pd.to_timedelta(np.sort(rng.integers(0, 9 * DAY, 200)), "s")
    state = rng.choice(["available", "in-use", "offline", "restarted"], 200)
    machine = rng.choice(["m1", "m2", "m3"], 200)
    log = tmp_path / "FullLogonData-000.csv"
    lines = zip(machine, state, at, strict=True)
    log.write_text("".join(f"{m},{s},{t:%Y-%m-%d %H:%M:%S}.000\n" for m, s, t in lines))
    published = TraceSet.read(log)
    stated = TableOptions(
        columns={"device": "1", "online": "2", "time": "3"},
        online_values=("available", "restarted"),
        time_zone="UTC",
        max_gap_s=np.inf,
    )
    own = read_table(open_table(log), stated).traces
    # The record of the reader begins on a Monday, the log later.
    later_s = (pd.Timestamp(own.epoch) - pd.Timestamp(published.epoch)).total_seconds()
    assert published.epoch == "2016-01-25T00:00:00"
    assert 3 * DAY < later_s < 4 * DAY
    for device in range(3):
        expected = published.availability.windows(device)[0] - later_s
        np.testing.assert_array_equal(own.availability.windows(device)[0], expected)


AB = {"device": ["a", "b"], "start": [1, 2], "end": [3, 4]}


@pytest.mark.parametrize(
    ("frame", "options", "expected"),
    [
        (windows(start=[5], end=[2]), {"unit": "s"}, r"row 0: end = '2': before its start '5'"),
        (windows(start=[5], end=[7]), {}, "a number without its unit"),
        (windows(start=["2024-01-02 10:00"], end=["2024-01-02 11:00"]), {}, "time zone"),
        (windows(start=["2/3/2024 1:00"], end=["2/3/2024 2:00"]), {}, "day or the month"),
        (
            windows(start=["2024-01-02 10:00", "2024-01-02 10:00Z"], end=["2024-01-03Z"] * 2),
            {"time_zone": "UTC"},
            "row 0: start = '2024-01-02 10:00': has no zone, other rows do",
        ),
        (windows(start=[MIDNIGHT], end=[MIDNIGHT]), {"time_zone": "Oslo"}, "time_zone = 'Oslo'"),
        (windows(start=[5], end=[7]), {"unit": "s", "time_zone": "UTC"}, "count from no date"),
        (windows(start=[-5], end=[7]), {"unit": "s"}, "times begin at -5 s"),
        (windows(start=[1], end=[10**13]), {"unit": "s"}, "after the year 2100 in s"),
        (rates([0, MIDNIGHT], [1, 1]), {"unit": ["s", "B/s"]}, "row 0: time = '0': before 1990"),
        (windows(start=[5], end=[MIDNIGHT]), {"unit": "s"}, "start and end: one is dated, the oth"),
        (windows(start=[5], end=[5]), {"unit": "s"}, "no device is known for any time"),
        (samples([0, 1, 2, 99], [1] * 4), {"unit": "s"}, "every 1 s, and once after 97 s"),
        (samples([0, 1], [1, "maybe"]), {"unit": "s"}, "row 1: online = 'maybe'"),
        (samples([0, 1], [1, 2]), {"unit": "s", "online_values": ["on"]}, "none is in column"),
        (rates([0, 1, 2, 99], [1] * 4), {"unit": ["s", "B/s"]}, "every 1 s, and once after 97 s"),
        (
            rates([0, 1], [1, 2]).assign(uplink=1),
            {"unit": ["s", "rate=bytes/interval", "uplink=B/s"]},
            "expected both of one kind",
        ),
        (
            samples([0, 1], [1, None]).assign(device=None),
            {"unit": "s", "columns": {"device": "device"}},
            "no row has all",
        ),
        (rates([0, 1], [1, 2]), {"unit": "s"}, "'rate': a rate without its unit"),
        (
            rates([0, 1], [1, -2]),
            {"unit": ["s", "B/s"]},
            "row 1: rate = '-2': expected",
        ),
        (rates([0, 1], [1, 1e300]), {"unit": ["s", "TB/s"]}, "unit = 'TB/s': expected '"),
        (
            rates([0, 1], [1, 1e300]),
            {"unit": ["s", "MB/s"]},
            "row 1: rate = '1e.300': MB/s: expect",
        ),
        (rates(["10:00"], [1]), {"time_format": "%H:%M", "time_zone": "UTC"}, "from 1990 to 2100"),
        (rates(["10:00"], [1]), {"time_format": "%Q", "time_zone": "UTC"}, "time_format = '%Q'"),
        (rates([0, 1], ["1,500", "2,250"]), {"unit": ["s", "B/s"]}, "decimal or thousands"),
        (rates([0, 1], ["1.5", "x"]), {"unit": ["s", "B/s"]}, "row 1: rate = 'x'"),
        (
            rates([0, 1], [1, 2]).assign(interval=1),
            {"unit": ["s", "bytes/interval"]},
            "'interval': an interval without its unit",
        ),
        (
            samples([0, 1], [1, 1]).assign(start=[0, 1], end=[1, 2]),
            {},
            "could be windows or samples",
        ),
        (samples([0, 1], [1, 1]).assign(ts=0), {}, "'time', 'ts' could each be time"),
        (samples([0, 1], [1, 1]).drop(columns="device"), {}, "or a device"),
        (samples([0, 1], [1, 1]), {"kind": "rates"}, "is known to be downlink: expected downlink="),
        (
            pd.DataFrame({"device": [1], "moment": [1], "x": [1]}),
            {"columns": {"online": "x"}},
            "cannot tell what the columns 'device' .such as '1'., 'moment'",
        ),
        (
            pd.DataFrame({"x": [1], "y": [2]}),
            {},
            "cannot tell what the columns 'x' .such as '1'., 'y'",
        ),
        (pd.DataFrame(AB), {"columns": {"phone": "device"}}, "no role 'phone'"),
        (pd.DataFrame(AB), {"columns": {"start": "strat"}}, "'strat': expected 'start'"),
        (
            pd.DataFrame({**AB, "x": [1, 2]}),
            {"columns": {"time": "x"}, "unit": "s"},
            "columns: time = 'x': expected none, since a log of windows has start, end",
        ),
        (
            pd.DataFrame(AB),
            {"columns": {"device": "device"}, "device": "x", "unit": "s"},
            "columns: device = 'device': expected none",
        ),
        (pd.DataFrame([["a", 1, 2]], columns=["device", "x", "x"]), {}, "'x' occurs twice"),
        (pd.DataFrame(AB), {"unit": "s", "max_gap_s": 0}, "max_gap_s = 0"),
        (pd.DataFrame(AB), {"unit": "week"}, "unit = 'week'"),
        (pd.DataFrame(AB), {"unit": ["s", "Mbit/s"]}, "unit = 'Mbit/s': expected a unit of a col"),
        (pd.DataFrame(AB), {"unit": ["s", "ms"]}, "expected one for each of time and rate"),
        (pd.DataFrame(AB), {"unit": "s", "min_level": 5}, "min_level = 5: expected none for wind"),
        (pd.DataFrame(AB), {"kind": "sessions"}, "kind = 'sessions'"),
        (pd.DataFrame({"node": ["a"], "speed": [1]}), {}, "compute_unit = None"),
        (
            pd.DataFrame({"node": ["a", "a"], "speed": [1, 2]}),
            {"compute_unit": "s"},
            "row 1: device = 'a': came with other numbers before",
        ),
        (
            pd.DataFrame({"device": "a", "time": [0, 1], "level": [5, 6]}),
            {"unit": "s"},
            "a level does not say when",
        ),
    ],
)
def test_what_has_more_than_one_reading_or_none_is_one_sentence(frame, options, expected):
    with pytest.raises(TraceError, match=expected) as error:
        TraceSet.from_frame(frame, **options)
    assert "\n" not in str(error.value)


AT = ["2024-06-01T08:00Z", "2024-06-01T08:10Z", "2024-06-01T08:20Z"]
PARTS: dict[str, dict[str, list[object]]] = {
    "windows": {"device": ["a"] * 2, "start": AT[:2], "end": AT[1:]},
    "spans": {"device": ["a"] * 2, "start": AT[:2], "duration": ["5 min", "00:05:00"]},
    "samples": {"device": ["a"] * 3, "time": AT, "online": ["up", "down", "up"]},
    "battery": {
        "device": ["a"] * 3,
        "time": AT,
        "charging": ["yes", "no", "yes"],
        "level": [5] * 3,
    },
    "rates": {"device": ["a"] * 3, "time": AT, "downlink": [8] * 3, "uplink": [8] * 3},
}


@pytest.mark.parametrize(
    ("kind", "role", "names"),
    [
        ("samples", "device", "hostname device_uuid deviceUUID agent.hostname vehicleId"),
        ("samples", "time", "reported_at lastSeen @timestamp dateTime last_changed"),
        ("samples", "online", "isConnected host_state reachable Status availability_status"),
        ("windows", "start", "SessionStart connected_at lease.start event_start_time"),
        ("windows", "end", "SessionEnd disconnected_at lease.end event_stop_time"),
        ("spans", "duration", "session_duration callDuration elapsed"),
        ("battery", "charging", "is_charging isCharging BatteryState charge_status"),
        ("battery", "level", "battery_level batteryPct BatteryPercentage soc"),
        ("rates", "downlink", "rx_mbps download_kbps rxkB/s bits_per_second dl_bytes_per_sec"),
        ("rates", "uplink", "tx_mbps uploadKbps txMiB/s ul(kbit/s) OutboundBps"),
    ],
)
def test_columns_are_found_by_the_words_and_units_of_their_names(kind, role, names):
    for name in names.split():
        named = {"downlink": "rx_bps", "uplink": "tx_bps"} | {role: name}
        frame = pd.DataFrame(PARTS[kind]).rename(columns=named)
        assert (
            read_table(frame, TableOptions()).interpretation[role].startswith(f"column {name!r}")
        ), name


def test_times_in_the_unit_of_their_name():
    for name, size in {
        "ts_ms": 1e3,
        "timestampMillis": 1e3,
        "time_s": 1,
        "epochMicros": 1e6,
    }.items():
        frame = pd.DataFrame({"node": "a", name: [0, 10 * size], "online": [1, 0]})
        assert found(TraceSet.from_frame(frame)) == [[0, 10]]


def test_what_is_no_link_is_not_taken_for_one():
    others = {"rx_packets": [9] * 3, "tx_errors": [9] * 3, "time_zone": ["UTC"] * 3}
    frame = pd.DataFrame(PARTS["samples"] | others)
    assert TraceSet.from_frame(frame).known == ("availability",)


def test_intervals_that_state_what_devices_were_are_online_and_offline_and_else_unknown():
    frame = windows(start=[0, 10, 20, 50], end=[10, 20, 30, 60]).assign(state=[1, 0, 1, 1])
    read = read_table(frame, TableOptions(unit=("s",)))
    assert found(read.traces) == [[0, 10], [20, 30], [50, 60]]
    assert read.traces.availability.log_at([0, 0], [15.0, 40.0])[1].tolist() == [30, 40]
    # A column that may state it is asked for, and can be told to say something else.
    asked = frame.rename(columns={"state": "event_type"})
    with pytest.raises(UnclearLogError, match=r"online=event_type .* or online=none") as problem:
        TraceSet.from_frame(asked, unit="s")
    assert problem.value.words == ("--columns", "online=event_type")
    columns = {"online": "event_type"}
    assert found(TraceSet.from_frame(asked, unit="s", columns=columns)) == found(read.traces)
    always = TraceSet.from_frame(asked, unit="s", columns={"online": "none"})
    assert found(always) == [[0, 30], [50, 60]]


def test_a_start_and_a_duration_are_a_window():
    frame = windows(start=[0, 3600]).assign(duration_s=[600, 1200])
    assert found(TraceSet.from_frame(frame, unit="s")) == [[0, 600], [3600, 4800]]
    spelt = windows(start=[0, 3600]).assign(lasted=["10 min", "00:20:00"])
    assert found(TraceSet.from_frame(spelt, unit="start=s")) == [[0, 600], [3600, 4800]]


def test_a_device_is_online_while_its_pings_come_and_their_longest_silence_is_asked_for():
    frame = pd.DataFrame({"device": "a", "time": [0, 60, 120, 600, 660]})
    with pytest.raises(UnclearLogError, match="the longest silence is 480 s") as problem:
        TraceSet.from_frame(frame, unit="s")
    assert problem.value.words == ("--max-gap", "3m")
    traces = TraceSet.from_frame(frame, unit="s", max_gap_s=180)
    assert found(traces) == [[0, 120], [600, 660]]
    # Silence is known: the device is offline in it.
    assert traces.availability.log_at([0], 300.0)[1] == 660
    positions = frame.assign(lat=[1.5, 2.5, 3.5, 4.5, 5.5], lon=[1.5, 2.5, 3.5, 4.5, 5.5])
    with pytest.raises(UnclearLogError) as problem:
        TraceSet.from_frame(positions, unit="s")
    assert problem.value.words == ("--kind", "pings", "--max-gap", "3m")


def test_columns_that_are_each_of_a_device_are_rows():
    frame = pd.DataFrame({"Time": [0, 60, 120], "h1": [1, 0, 1], "10.0.0.2": [1, None, 1]})
    with pytest.raises(UnclearLogError, match="cannot tell") as problem:
        TraceSet.from_frame(frame, unit="s")
    assert problem.value.words == ("--columns", "online=*")
    traces = TraceSet.from_frame(frame, unit="s", columns={"online": "*"})
    assert list(traces.device_ids) == ["10.0.0.2", "h1"]
    assert [found(traces, k) for k in range(2)] == [[[0, 120]], [[0, 60]]]
    links = pd.DataFrame({"t": [0, 60], "a": ["1.5 Mb/s", "2 Mb/s"], "b": ["20 kb/s", "-"]})
    rates = TraceSet.from_frame(links, unit="time=s", columns={"time": "t", "downlink": "*"})
    assert rates.downlink.segments(0)[1].tolist() == [1.5e6]


def test_few_rows_that_cannot_be_read_are_dropped_and_told_and_many_are_a_fault():
    start = list(range(0, 2000, 10))
    frame = windows(start=start, end=[s + 5 for s in start]).astype("object")
    frame.loc[[7, 9], "end"] = 1
    frame.loc[30, "start"] = "soon"
    frame.loc[31, "end"] = None
    read = read_table(frame, TableOptions(unit=("s",)))
    assert len(found(read.traces)) == 196
    assert read.traces.repairs == {
        "dropped: end before start": 2,
        "dropped: no start or no end": 1,
        "dropped: no time": 1,
    }
    assert read.interpretation["dropped for end before start"] == "2, the first in row 7: end = '1'"
    frame.loc[40:60, "end"] = 1
    frame.loc[70:90, "start"] = "soon"
    with pytest.raises(UnclearLogError) as problem:
        TraceSet.from_frame(frame, unit="s")
    assert [said.partition(":")[0] for said in problem.value.said] == ["row 30", "row 7"]


def test_a_local_hour_that_comes_twice_is_counted_once():
    local = pd.date_range("2024-10-27 01:00", "2024-10-27 04:00", freq="30min").astype("str")
    frame = samples([*local], [1] * len(local))
    read = read_table(frame, TableOptions(time_zone="Europe/Oslo", max_gap_s=np.inf))
    assert read.traces.repairs == {
        "dropped: local time that came twice or never, as clocks were changed": 2
    }
    both = windows(start=["2024-10-27 02:10", "2024-10-26 10:00"], end=["2024-10-27 02:50"] * 2)
    both.loc[1, "end"] = "2024-10-26 12:00"
    repairs = TraceSet.from_frame(both, time_zone="Europe/Oslo").repairs
    assert sum(repairs.values()) == 1


def test_a_date_that_can_only_be_one_is_not_asked_for():
    frame = samples(["01.10.2024 08:00", "21.10.2024 08:00"], [1, 1])
    assert TraceSet.from_frame(frame, time_zone="UTC").epoch == "2024-10-01T08:00:00"
    american = windows(start=["6/1/2024 8:00 AM"], end=["6/13/2024 1:30 PM"])
    assert TraceSet.from_frame(american, time_zone="UTC").epoch == "2024-06-01T08:00:00"
    with pytest.raises(UnclearLogError, match=r"'%d\.%m\.%Y' or '%m\.%d"):
        TraceSet.from_frame(samples(["01.10.2024", "02.10.2024"], [1, 1]), time_zone="UTC")


@pytest.mark.parametrize(
    "texts",
    [
        ["1.7172288e12", "1.71722886e12"],
        ["1717228800000000", "1717228860000000"],
        ["20240601T080000Z", "20240601T080100Z"],
        ["20240601080000", "20240601080100"],
        ["2024-W22-6T08:00", "2024-W22-6T08:01"],
        ["Sat, 01 Jun 2024 08:00:00 GMT", "Sat, 01 Jun 2024 08:01:00 GMT"],
        ["01/Jun/2024:08:00:00 +0000", "01/Jun/2024:08:01:00 +0000"],
        ["2024-06-01 08:00:00,000", "2024-06-01 08:01:00,000"],
    ],
)
def test_a_time_is_the_same_however_a_program_writes_it(texts):
    frame = pd.DataFrame({"device": "a", "ts": texts, "online": ["on", "off"]})
    traces = TraceSet.from_frame(frame, time_zone="UTC")
    assert (traces.epoch, found(traces)) == ("2024-06-01T08:00:00", [[0, 60]])


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["1,234.5", "12"], [1234.5, 12]),
        (["1.234,5", ",5"], [1234.5, 0.5]),
        (["1'234'567", "+2"], [1234567, 2]),
        (["45%", "3 %"], [45, 3]),
        (["1.5e3", ".5"], [1500, 0.5]),
        (["1,5e3", "0,5"], [1500, 0.5]),
    ],
)
def test_a_number_is_the_same_however_a_program_writes_it(texts, values):
    frame = pd.DataFrame({"device": "a", "time": [0, 10, 20], "rx_bps": [*texts, texts[1]]})
    rates = TraceSet.from_frame(frame, unit="time=s")
    np.testing.assert_allclose(rates.downlink.segments(0)[1], values, rtol=1e-6)


def test_rows_of_several_things_at_one_instant_are_asked_for():
    frame = pd.DataFrame({"host": "a", "time": [0, 0, 9, 9, 18, 18], "rx_bps": [0, 5, 0, 6, 0, 7]})
    frame["iface"] = ["lo", "eth0"] * 3
    with pytest.raises(UnclearLogError, match="differ in column 'iface'") as problem:
        TraceSet.from_frame(frame, unit="time=s")
    assert problem.value.words == ("--only", "iface=eth0")
    link = TraceSet.from_frame(frame, unit="time=s", only="iface=eth0").downlink
    assert link.segments(0)[1].tolist() == [5, 6]


def test_all_that_is_unclear_is_said_at_once():
    frame = pd.DataFrame({"box": ["a"] * 2, "when": ["6/1/2024 8:00", "6/2/2024 8:00"]})
    frame = frame.assign(st=["standby", "busy"])
    with pytest.raises(UnclearLogError) as problem:
        TraceSet.from_frame(frame)
    assert len(problem.value.said) == 5
    # Nothing says the device, nor which word means so: there is no command to type yet.
    assert problem.value.words == ()
    frame["st"], frame.attrs = ["up", "busy"], {"name": "my box"}
    with pytest.raises(UnclearLogError) as problem:
        TraceSet.from_frame(frame)
    assert problem.value.words == (
        *("--columns", "online=st", "--device", "my box"),
        *("--time-format", "%d/%m/%Y %H:%M", "--time-zone", "UTC", "--online-values", "up"),
    )
