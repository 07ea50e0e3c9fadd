import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces.sources import windows

HOUR, DAY = 3600.0, 86_400.0
HEAD = '"location";"user_id";"session_id";"plugin_time";"plugout_time";"connection_time"\n'


def session(user, start, end):
    return f'"A";"{user}";"s";{start};{end};13,2\n'


def nights(user, first, last):
    """Plugged in from 20:00 to 06:00, from one day of January 2020, a Wednesday, on."""
    return "".join(
        session(user, f"2020-01-{d:02d} 20:00:00", f"2020-01-{d + 1:02d} 06:00:00")
        for d in range(first, last)
    )


def read(folder, rows, head=HEAD):
    (folder / "reports.csv").write_text(head + rows)
    return windows.read_cars(folder / "reports.csv")


def test_a_car_is_online_while_it_is_plugged_in_at_the_hours_and_days_it_was(tmp_path):
    traces = read(tmp_path, nights("a", 1, 20))
    availability = traces.availability
    # From Wednesday 20:00 for whole weeks: what remains of 18 days and 10 hours less a week.
    assert availability.logs_s.tolist() == [7 * DAY]
    assert availability.log_at([0], 3 * DAY)[0] == 2 * DAY + 20 * HOUR
    begin, end = availability.window_at_or_after([0], 2 * DAY + 19 * HOUR)
    assert (begin[0], end[0]) == (2 * DAY + 20 * HOUR, 3 * DAY + 6 * HOUR)


def test_the_last_week_is_cut_because_a_log_ends_plugged_in_for_no_other_reason(tmp_path):
    long_last = nights("a", 1, 11) + session("a", "2020-01-12 20:00:00", "2020-01-24 20:00:00")
    traces = read(tmp_path, long_last)
    assert traces.availability.logs_s.tolist() == [14 * DAY]
    assert traces.repairs["cut: went on after the end of the record"] == 1


def test_a_short_log_keeps_whole_days_and_one_without_any_is_left_out(tmp_path):
    traces = read(tmp_path, nights("a", 1, 12) + nights("b", 1, 4))
    assert list(traces.device_ids) == ["a"]
    assert traces.availability.lengths.tolist() == [3 * DAY]
    assert traces.repairs["dropped: car with a log of less than a week and a day"] == 1
    with pytest.raises(TraceError, match="no car with sessions over more than a week"):
        read(tmp_path, nights("b", 1, 4))


def test_sessions_a_month_apart_are_not_one_log(tmp_path):
    # The last night ends on 20 January at 6:00.
    later = session("a", "2020-02-19 06:00:01", "2020-02-19 20:00:00") + session(
        "a", "2020-02-20 06:00:00", "2020-02-20 20:00:00"
    )
    traces = read(tmp_path, later + nights("a", 1, 20))
    assert traces.availability.logs_s.tolist() == [7 * DAY]
    assert traces.repairs["dropped: apart from the log by more than 30 days"] == 2
    assert "sorted: out of order" not in traces.repairs
    earlier = later.replace("06:00:01", "06:00:00")
    assert read(tmp_path, earlier + nights("a", 1, 20)).availability.logs_s.tolist() == [42 * DAY]


def test_every_kind_of_mess_is_repaired_or_dropped_and_counted(tmp_path):
    mess = (
        session("a", "2020-01-05 20:00:00", "")
        + session("", "2020-01-05 20:00:00", "2020-01-05 21:00:00")
        + session("a", "2020-01-05 20:00:00", "2020-01-05 19:00:00")
        + session("a", "noon", "2020-01-05 19:00:00")
        + session("a", "2020-01-05 18:00:00+01:00", "2020-01-05 19:00:00")
        + session("a", "2020-01-05 23:00:00", "2020-01-06 05:00:00")
    )
    traces = read(tmp_path, nights("a", 1, 20) + mess)
    repairs = dict(traces.repairs)
    assert repairs.pop("dropped: no user, plug-in or plug-out time") == 4
    assert repairs.pop("dropped: end before start") == 1
    assert repairs.pop("merged: overlapping") == 1
    assert repairs.pop("sorted: out of order") == 1
    plain = read(tmp_path, nights("a", 1, 20))
    np.testing.assert_array_equal(traces.availability.starts, plain.availability.starts)


@pytest.mark.parametrize(
    ("head", "rows"),
    [
        ("", ""),
        ("a;b\n", "1;2\n"),
        ("user_id,plugin_time,plugout_time\n", "a,b,c\n"),
        ("\x00\n", ""),
    ],
)
def test_what_is_not_this_format_is_one_sentence(tmp_path, head, rows):
    with pytest.raises(TraceError, match=r"is empty|expected columns user_id"):
        read(tmp_path, rows, head)
