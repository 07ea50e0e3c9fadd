"""What readings are taken to mean."""

import itertools
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.errors import TraceError
from fedstale.traces.recording.journal import RECORD, RecordingRun
from fedstale.traces.recording.monitor import Reading
from fedstale.traces.recording.to_traces import (
    RecordingRules,
    check_readable,
    highest_rates,
    traces_of,
)

NAN = float("nan")
NOON = 1_700_049_600.0  # 2023-11-15 12:00:00 UTC


def part(rows, *, run=0, interval_s=10.0, utc_offset_s=0.0):
    """Return the readings of a run from dictionaries; wall time follows steady time unless told."""
    readings = np.zeros(len(rows), dtype=RECORD)
    for k, row in enumerate(rows):
        full = {name: NAN for name in RECORD.names} | {"online": 1.0, "processor_left": 0.5}
        full |= {"instant": NOON + row["steady"]} | row
        readings[k] = tuple(full[name] for name in RECORD.names)
    about = RecordingRun(
        device_id="phone", interval_s=interval_s, utc_offset_s=utc_offset_s, run=run
    )
    return pd.DataFrame(readings).assign(**asdict(about))


def steady(*instants, **row):
    return [{"steady": float(t), **row} for t in instants]


def windows_of(readings, **rules):
    return traces_of(readings, RecordingRules(**rules)).availability.windows(0)[0].tolist()


def test_a_quiet_recording_is_one_window_that_ends_with_the_last_reading():
    traces = traces_of(part(steady(100, 110, 120)), RecordingRules())
    windows, length = traces.availability.windows(0)
    assert windows.tolist() == [[0, 20]]
    assert length == 20
    assert traces.known == ("availability",)
    assert dict(traces.repairs) == {}


def test_instant_0_has_the_local_time_of_the_first_reading():
    traces = traces_of(part(steady(100, 110), utc_offset_s=3600), RecordingRules())
    assert traces.epoch == "2023-11-15T13:01:40"


def test_a_reading_that_is_missing_counts_as_not_there():
    rows = [{"steady": 10.0 * k, "online": NAN if k == 1 else 1.0} for k in range(4)]
    assert windows_of(part(rows)) == [[0, 10], [20, 30]]


def test_charging_asks_for_both_and_recording_for_neither():
    rows = [
        {"steady": 0.0, "online": 1.0, "charging": 0.0},
        {"steady": 10.0, "online": 1.0, "charging": 1.0},
        {"steady": 20.0, "online": 0.0, "charging": 1.0},
        {"steady": 30.0},
    ]
    assert windows_of(part(rows), available="charging") == [[10, 20]]
    assert windows_of(part(rows), available="online") == [[0, 20]]
    assert windows_of(part(rows), available="recording") == [[0, 30]]


@pytest.mark.parametrize("name", ["charging", "online"])
def test_a_rule_that_needs_what_was_never_read_is_rejected(name):
    with pytest.raises(TraceError, match=f"cannot read whether it is {name}"):
        windows_of(part(steady(0, 10, **{name: NAN})), available=name)


def test_silence_is_a_gap_and_lateness_is_not():
    readings = part(steady(0, 10, 39, 70, 80))
    assert windows_of(readings) == [[0, 39], [70, 80]]
    assert dict(traces_of(readings, RecordingRules()).repairs) == {"gap: no reading": 1}


@pytest.mark.parametrize(
    ("step", "kind"), [(-7200.0, "gap: clock was set back"), (9e8, "gap: clock was set forward")]
)
def test_a_clock_that_is_set_is_a_gap_and_time_goes_on_steadily(step, kind):
    rows = steady(0, 10, 20, 30)
    for row in rows[2:]:
        row["instant"] = NOON + row["steady"] + step
    traces = traces_of(part(rows), RecordingRules())
    assert traces.availability.windows(0)[0].tolist() == [[0, 10], [20, 30]]
    assert dict(traces.repairs) == {kind: 1}


def test_calendar_time_is_that_of_the_last_clock():
    rows = steady(0, 10, 20, 30)
    rows[0]["instant"], rows[1]["instant"] = 0.0, 10.0
    assert traces_of(part(rows), RecordingRules()).epoch == "2023-11-15T12:00:00"


def test_a_clock_that_went_back_between_runs_is_a_gap_of_one_interval():
    later = [{"steady": s, "instant": NOON - 900 + s} for s in (0.0, 10.0)]
    readings = pd.concat([part(steady(0, 10)), part(later, run=1)])
    traces = traces_of(readings, RecordingRules())
    assert traces.availability.windows(0)[0].tolist() == [[0, 10], [20, 30]]
    assert dict(traces.repairs) == {"gap: clock was set back": 1}


def test_a_silence_of_decades_between_runs_is_shortened():
    early = [{"steady": s, "instant": s} for s in (0.0, 10.0)]
    readings = pd.concat([part(early), part(steady(0, 10), run=1)])
    traces = traces_of(readings, RecordingRules())
    day = 86_400
    assert traces.availability.windows(0)[0].tolist() == [[0, 10], [10 + 31 * day, 20 + 31 * day]]
    assert traces.repairs["shortened: silence of over 31 days"] == 1


def test_a_share_holds_for_the_time_before_its_reading():
    shares = [NAN, 0.25, 0.75, 0.75, 1.0]
    rows = [{"steady": 10.0 * k, "processor_left": s} for k, s in enumerate(shares)]
    rules = RecordingRules(speed=8.0, compute_unit="a unit")
    traces = traces_of(part(rows), rules)
    starts, rates, length = traces.compute.segments(0)
    assert starts.tolist() == [0, 10, 30]
    assert rates.tolist() == [2, 6, 8]
    assert length == 40
    assert traces.compute_unit == "a unit"
    assert dict(traces.repairs) == {}


def test_a_share_that_was_not_read_is_the_last_known_and_is_counted():
    shares = [NAN, NAN, 0.5, NAN, 1.0]
    rows = [{"steady": 10.0 * k, "processor_left": s} for k, s in enumerate(shares)]
    traces = traces_of(part(rows), RecordingRules(speed=2.0))
    assert traces.compute.value_at([0] * 4, [5.0, 15.0, 25.0, 35.0]).tolist() == [1, 1, 1, 2]
    assert traces.repairs["filled: share of the processor not read"] == 2


def test_compute_stays_unknown_without_a_speed_or_without_a_share():
    assert traces_of(part(steady(0, 10)), RecordingRules()).compute is None
    unread = part(steady(0, 10, processor_left=NAN))
    traces = traces_of(unread, RecordingRules(speed=1.0, compute_unit="a unit"))
    assert traces.compute is None
    assert traces.compute_unit is None


def test_links_are_what_was_stated_or_unknown_and_never_the_traffic():
    rows = part(steady(0, 10, received_bit_per_s=7e6, sent_bit_per_s=2e6))
    assert traces_of(rows, RecordingRules()).downlink is None
    traces = traces_of(rows, RecordingRules(link_bit_per_s=(5e7, 1e7)))
    assert traces.downlink.value_at([0], 3.0) == 5e7
    assert traces.uplink.value_at([0], 3.0) == 1e7


def test_the_highest_traffic_is_told():
    rows = [{"steady": 0.0, "received_bit_per_s": 5.0}, {"steady": 10.0, "received_bit_per_s": 3.0}]
    down, up = highest_rates(part(rows))
    assert down == 5.0
    assert np.isnan(up)


def test_what_the_journal_dropped_is_counted_among_the_repairs():
    traces = traces_of(part(steady(0, 10)), RecordingRules(), {"dropped: damaged reading": 3})
    assert dict(traces.repairs) == {"dropped: damaged reading": 3}


def test_one_reading_makes_no_trace():
    with pytest.raises(TraceError, match="expected at least 2"):
        traces_of(part(steady(0)), RecordingRules())


@pytest.mark.parametrize(
    "wrong",
    [
        {"available": "sometimes"},
        {"speed": 0.0},
        {"speed": NAN},
        {"link_bit_per_s": (1.0, -1.0)},
        {"link_bit_per_s": (float("inf"), 1.0)},
    ],
)
def test_rules_out_of_range_are_rejected(wrong):
    with pytest.raises(TraceError, match="expected"):
        RecordingRules(**wrong)


def test_a_device_that_cannot_read_what_the_rule_needs_is_told_before_it_records():
    desktop = Reading(instant=0.0, online=True)
    check_readable(desktop, "online")
    check_readable(Reading(instant=0.0), "recording")
    with pytest.raises(TraceError, match="cannot read whether it is charging"):
        check_readable(desktop, "charging")


CLOCKS = st.lists(
    st.tuples(
        st.integers(1, 100),  # s until this reading, by the steady clock
        st.one_of(st.just(0), st.integers(-(10**6), 10**6)),  # s by which the clock is set
        st.booleans(),  # whether a new run starts here
        st.booleans(),  # whether it is online
    ),
    min_size=2,
    max_size=30,
)


@settings(max_examples=40)
@given(CLOCKS)
def test_whatever_the_clocks_do_time_goes_on_and_every_stretch_is_what_was_read(story):
    now, error, runs = 0, 0, [[]]
    for waited, step, again, online in story:
        now, error = now + waited, error + step
        if again and runs[-1]:
            runs.append([])
        runs[-1].append({"steady": now, "instant": NOON + now + error, "online": float(online)})
    readings = pd.concat([part(rows, run=k) for k, rows in enumerate(runs)])
    traces = traces_of(readings, RecordingRules(speed=1.0))
    t = 0.0
    flat = [(k, row) for k, rows in enumerate(runs) for row in rows]
    for (run, row), (next_run, following) in itertools.pairwise(flat):
        by_wall = following["instant"] - row["instant"]
        elapsed = following["steady"] - row["steady"] if run == next_run else by_wall
        silent = elapsed <= 0 or elapsed > 30
        silent |= run == next_run and abs(by_wall - elapsed) > 2
        elapsed = 10.0 if elapsed <= 0 else elapsed
        there = bool(traces.availability.is_available([0], t + elapsed / 2)[0])
        assert there == (row["online"] == 1.0 and not silent)
        t += elapsed
    assert traces.availability.windows(0)[1] == t
    assert traces.compute.value_at([0], t / 2)[0] == 0.5
