import json

import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces.sources import windows

HOUR, DAY = 3600.0, 86_400.0


def read(tmp_path, data):
    file = tmp_path / "ready_strict.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return windows.read_phones(file)


def read_days(tmp_path, data):
    file = tmp_path / "cached_timers.json"
    file.write_text(json.dumps(data))
    return windows.read_phones_over_days(file)


def phone(start, end, *windows, usable=True):
    return {"isSuccess": usable, "trace_start": start, "trace_end": end, "ready_time": windows}


def windows_of(traces, phone):
    return traces.availability.windows(traces.device_ids.get_loc(phone))[0].tolist()


def logged(traces, t, phone=0):
    start, end = traces.availability.log_at([phone], t)
    return start[0], end[0]


def test_a_phone_is_unknown_where_it_was_not_logged_and_not_away_on_another_day(tmp_path):
    traces = read(tmp_path, {"a": [[22 * HOUR, 23 * HOUR], [26 * HOUR, 28 * HOUR]]})
    assert windows_of(traces, "a") == [[2 * HOUR, 4 * HOUR], [22 * HOUR, 23 * HOUR]]
    assert traces.availability.windows(0)[1] == DAY
    assert logged(traces, 25 * HOUR) == (22 * HOUR, 28 * HOUR)
    assert logged(traces, 12 * HOUR) == (12 * HOUR, 12 * HOUR)
    # The same hour of the next day is the same hour of the record, and another log.
    assert traces.availability.is_available([0], 27 * HOUR + DAY)[0]
    assert logged(traces, 27 * HOUR + DAY) == (22 * HOUR + DAY, 28 * HOUR + DAY)


def test_a_log_of_more_than_a_day_takes_two_days_and_one_of_days_apart_does_not(tmp_path):
    two_days = [[20 * HOUR, 21 * HOUR], [40 * HOUR, 46 * HOUR]]
    apart = [[10 * HOUR, 13 * HOUR], [60 * HOUR, 62 * HOUR]]
    traces = read(tmp_path, {"a": two_days, "b": apart})
    assert traces.availability.windows(0)[1] == 2 * DAY
    assert logged(traces, 20 * HOUR) == (20 * HOUR, 46 * HOUR)
    assert windows_of(traces, "b") == [[10 * HOUR, 13 * HOUR]]
    assert dict(traces.repairs) == {"dropped: apart from the log by more than a day": 1}


def test_every_kind_of_mess_is_repaired_or_dropped_and_counted(tmp_path):
    messy = [
        [100, 90],
        [200, 200],
        [300, 301],
        [302, 302],
        [303, 310],
        [305, 308],
        [250, 260],
        [-200_000_000, 270],
        [200_000, 200_100],
        [1, "x"],
        [1, None],
        [True, 2],
        [1],
        7,
    ]
    traces = read(tmp_path, {"a": messy})
    assert windows_of(traces, "a") == [[200_000 - 2 * DAY, 200_100 - 2 * DAY]]
    traces = read(tmp_path, {"a": [*messy, [-5000, 5]]})
    assert windows_of(traces, "a") == [[0, 5], [250, 260], [300, 310], [DAY - 5000, DAY]]
    assert dict(traces.repairs) == {
        "dropped: apart from the log by more than a day": 1,
        "dropped: end before start": 1,
        "dropped: longer than a day, so the clock was set": 1,
        "dropped: no length": 1,
        "dropped: not a pair of numbers": 5,
        "merged: at most 1 s apart": 2,
        "merged: overlapping": 1,
        "sorted: out of order": 2,
    }


def test_a_phone_without_windows_is_kept_as_one_that_never_comes(tmp_path):
    traces = read(tmp_path, {"a": [], "b": [[1, 2]]})
    assert traces.n_devices == 2
    start, _ = traces.availability.window_at_or_after([0], 0.0)
    assert start == np.inf
    assert logged(traces, 5.0) == (5.0, 5.0)
    assert traces.repairs["kept: phone that is never online"] == 1


def test_days_keep_the_hours_and_the_weekday_of_their_log(tmp_path):
    # Four weeks and a day after instant 0, at 20:00, for three days.
    start = 29 * DAY + 20 * HOUR
    traces = read_days(
        tmp_path, {"a": phone(start, start + 3 * DAY, [start + 2 * HOUR, start + 5 * HOUR])}
    )
    assert traces.availability.windows(0)[1] == 3 * DAY
    assert logged(traces, 2 * DAY) == (DAY + 20 * HOUR, 4 * DAY + 20 * HOUR)
    begin, end = traces.availability.window_at_or_after([0], DAY + 20 * HOUR)
    assert (begin[0], end[0]) == (DAY + 22 * HOUR, 2 * DAY + HOUR)


def test_a_window_through_the_end_of_the_days_goes_on_at_their_beginning(tmp_path):
    traces = read_days(tmp_path, {"a": phone(6 * HOUR, 30 * HOUR, [20 * HOUR, 30 * HOUR])})
    assert windows_of(traces, "a") == [[0, 6 * HOUR], [20 * HOUR, DAY]]
    traces = read_days(
        tmp_path, {"a": phone(6 * HOUR, 30 * HOUR, [6 * HOUR, 7 * HOUR], [29 * HOUR, 30 * HOUR])}
    )
    assert windows_of(traces, "a") == [[5 * HOUR, 7 * HOUR]]


def test_phones_without_a_usable_log_are_left_out_and_counted(tmp_path):
    traces = read_days(
        tmp_path,
        {
            "a": phone(0.0, DAY, [1.0, 2.0], [-5.0, 1.0], [DAY - 1, DAY + 9]),
            "b": phone(None, None, usable=False),
            "c": phone(5.0, 5.0),
            "d": phone(0.0, DAY) | {"ready_time": "no"},
            "e": [],
            "f": phone(DAY, 0.0),
        },
    )
    assert list(traces.device_ids) == ["a"]
    assert dict(traces.repairs) == {
        "cut: started before instant 0": 1,
        "cut: went on after the end of the record": 1,
        "dropped: phone whose log has no span or no list of windows": 4,
        "dropped: phone without a usable log": 1,
        "merged: at most 1 s apart": 1,
        "sorted: out of order": 1,
    }
    with pytest.raises(TraceError, match="no phone with a log"):
        read_days(tmp_path, {"b": phone(0.0, 1.0, usable=False)})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "empty"),
        ('{"a": [[1, 2', "truncated"),
        ("[1, 2]", "expected a JSON object"),
        ("{}", "expected a JSON object"),
        ('{"a": [[1, 2]], "a": []}', "occurs twice"),
        ('{"a": 3}', "expected a list"),
        ('{"a": {"messages": ""}}', "expected a list"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        (b"\xff\xfe\x00\x01".decode("latin-1"), "not JSON"),
    ],
)
def test_what_is_not_this_format_is_one_sentence(tmp_path, content, says):
    with pytest.raises(TraceError, match=says):
        read(tmp_path, content)


def test_half_of_a_character_is_no_name(tmp_path):
    whole = read(tmp_path, '{"a\\ud83d\\ude00": [[1, 2]]}')
    assert list(whole.device_ids) == ["a\U0001f600"]
    for content in (b'{"a\\ud83d": [[1, 2]]}', b'{"a\xed\xa0\xbd": [[1, 2]]}'):
        file = tmp_path / "halves.json"
        file.write_bytes(content)
        with pytest.raises(TraceError, match="not JSON, or truncated"):
            windows.read_phones(file)
