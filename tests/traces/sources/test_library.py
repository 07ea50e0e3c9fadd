import lzma

import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces.sources import windows

HOUR, DAY = 3600.0, 86_400.0
# A Thursday.
LOG = """\
D1,available,2016-01-28 15:00:00.000
D2,in-use,2016-01-28 16:00:00.250
D1,in-use,2016-01-28 17:00:00.000
D1,restarted,2016-01-28 18:00:00.000
D1,available,2016-01-28 18:01:00.000
D2,available,2016-01-28 20:00:00.000
D1,offline,2016-01-29 00:00:00.000
D2,available,2016-01-30 00:00:00.000
"""


def read(folder, text=LOG, name="FullLogonData-020.csv"):
    (folder / name).write_text(text, encoding="utf-8-sig")
    return windows.read_desktops(folder / name)


def windows_of(traces, desktop):
    return traces.availability.windows(traces.device_ids.get_loc(desktop))[0].tolist()


def test_a_desktop_is_free_while_it_is_on_and_no_one_is_logged_on(tmp_path):
    traces = read(tmp_path)
    assert traces.epoch == "2016-01-25T00:00:00"
    at = 3 * DAY
    assert windows_of(traces, "D1") == [
        [at + 15 * HOUR, at + 17 * HOUR],
        [at + 18 * HOUR, at + 24 * HOUR],
    ]
    assert dict(traces.repairs) == {"dropped: state repeated": 1}


def test_a_desktop_is_known_from_its_first_event_to_its_last(tmp_path):
    traces = read(tmp_path)
    starts, ends = traces.availability.log_at([0, 1], 3 * DAY + 16.5 * HOUR)
    assert starts.tolist() == [3 * DAY + 15 * HOUR, 3 * DAY + 16 * HOUR + 0.25]
    assert ends.tolist() == [4 * DAY, 5 * DAY]
    # What its last event begins, nothing is known of.
    assert windows_of(traces, "D2") == [[3 * DAY + 20 * HOUR, 5 * DAY]]
    np.testing.assert_array_equal(traces.availability.log_at([0], 6 * DAY), [[6 * DAY], [6 * DAY]])


def test_files_of_a_folder_follow_one_another_packed_or_not(tmp_path):
    lines = LOG.splitlines(keepends=True)
    (tmp_path / "FullLogonData-001.csv").write_text("".join(lines[:4]), encoding="utf-8-sig")
    (tmp_path / "FullLogonData-002.csv.xz").write_bytes(lzma.compress("".join(lines[4:]).encode()))
    (tmp_path / "semesters.csv").write_text("semester,startDate\nSP16,1/11/16\n")
    both = windows.read_desktops(tmp_path)
    (tmp_path / "one").mkdir()
    whole = read(tmp_path / "one")
    np.testing.assert_array_equal(both.availability.starts, whole.availability.starts)
    assert list(both.device_ids) == ["D1", "D2"]


def test_what_is_no_event_is_dropped_and_counted(tmp_path):
    bad = (
        "D1,asleep,2016-01-28 15:30:00.000\nD1,available\n,available,2016-01-28 15:00:00.000\n"
        "D1,available,2016-02-31 15:00:00.000\nD1,available,2016-01-28 15:00:00.000,x\n\n"
    )
    traces = read(tmp_path, LOG + bad)
    assert windows_of(traces, "D1") == windows_of(read(tmp_path), "D1")
    assert traces.repairs["dropped: not a machine, a state and a local time"] == 6


def test_events_out_of_order_are_sorted_and_counted(tmp_path):
    # In the night in which clocks go back, an hour comes twice.
    text = (
        "D1,available,2016-11-06 00:30:00.000\nD1,in-use,2016-11-06 01:50:00.000\n"
        "D1,available,2016-11-06 01:10:00.000\nD1,offline,2016-11-06 02:00:00.000\n"
    )
    traces = read(tmp_path, text)
    assert traces.repairs["sorted: out of order"] == 1
    begin, end = traces.availability.window_at_or_after([0], 6 * DAY)
    assert (begin[0], end[0]) == (6 * DAY + 0.5 * HOUR, 6 * DAY + HOUR + 50 * 60)


def test_a_desktop_with_one_event_is_kept_and_unknown(tmp_path):
    traces = read(tmp_path, LOG + "D3,available,2016-01-28 15:00:00.000\n")
    assert windows_of(traces, "D3") == []
    start, end = traces.availability.log_at([2], 3 * DAY + 15 * HOUR)
    assert start == end
    assert traces.repairs["kept: desktop with one event, of which nothing is known"] == 1


@pytest.mark.parametrize("text", ["\n", "a,b\n", "machine,state,time\n"])
def test_what_is_not_this_format_is_one_sentence(tmp_path, text):
    with pytest.raises(TraceError, match=r"expected desktops' log|is empty"):
        read(tmp_path, text)


def test_a_folder_without_a_log_is_one_sentence(tmp_path):
    (tmp_path / "semesters.csv").write_text("semester\n")
    with pytest.raises(TraceError, match="expected desktops' log"):
        windows.read_desktops(tmp_path)
