import zipfile

import numpy as np
import pytest
from places import RECORDINGS

from fedstale.errors import TraceError
from fedstale.traces.sources import links

REAL = RECORDINGS / "uccmisl-5g.zip"
needs_real = pytest.mark.skipif(not REAL.exists(), reason=f"{REAL} is not on this machine")
HEADER = "Timestamp,Longitude,DL_bitrate,UL_bitrate,State\n"


def log(*rows):
    """Rows of (second of the day, downlink, uplink)."""
    lines = [
        f"2020.02.13_{s // 3600:02d}.{s // 60 % 60:02d}.{s % 60:02d},-8.4,{down},{up},D\n"
        for s, down, up in rows
    ]
    return HEADER + "".join(lines)


def read(tmp_path, text):
    file = tmp_path / "session.csv"
    file.write_text(text)
    return links.read_sessions(file)


def rates(traces, device=0):
    return traces.downlink.segments(device)[1].tolist()


def test_rates_are_bits_per_second_on_a_grid_of_one_second(tmp_path):
    traces = read(tmp_path, log((10, 8, 1), (11, 0, 2), (12, 16, 3)))
    assert rates(traces) == [8000, 0, 16000]
    assert traces.downlink.step_s == 1.0
    assert traces.device_ids.tolist() == ["session"]
    assert not traces.repairs


def test_readings_of_one_second_are_averaged(tmp_path):
    traces = read(tmp_path, log((10, 8, 1), (10, 16, 1), (10, 0, 1), (11, 2, 1)))
    assert rates(traces) == [8000, 2000]
    assert traces.repairs["averaged: further reading of the same second"] == 2


def test_a_short_silence_holds_the_last_rate(tmp_path):
    traces = read(tmp_path, log((10, 8, 1), (13, 16, 1)))
    assert rates(traces) == [8000, 8000, 8000, 16000]
    assert traces.repairs["filled: second without a reading"] == 2


def test_a_long_silence_is_closed_up(tmp_path):
    traces = read(tmp_path, log((10, 8, 1), (3000, 16, 1)))
    assert rates(traces) == [8000, 16000]
    assert traces.repairs["closed up: silence above 10 s"] == 1


def test_a_clock_that_goes_back_is_closed_up(tmp_path):
    traces = read(tmp_path, log((100, 8, 1), (101, 16, 1), (50, 24, 1), (51, 32, 1)))
    assert rates(traces) == [8000, 16000, 24000, 32000]
    assert traces.repairs["closed up: clock went back"] == 1


def test_lines_in_reverse_order_are_sorted(tmp_path):
    rows = [(10, 8, 1), (11, 16, 1), (11, 24, 1), (13, 32, 1)]
    traces = read(tmp_path, log(*reversed(rows)))
    assert rates(traces) == rates(read(tmp_path, log(*rows)))
    assert traces.repairs["sorted: session whose lines were in reverse order"] == 1
    assert not any("clock" in kind for kind in traces.repairs)


@pytest.mark.parametrize("kept", ["2020.02.13_00.00.12,-8.4,2", "2020.02.13_00.00.12,-8.4,2512,3"])
def test_a_last_line_that_was_cut_short_is_dropped(tmp_path, kept):
    traces = read(tmp_path, log((10, 8, 1), (11, 16, 1)) + kept)
    assert rates(traces) == [8000, 16000]
    assert traces.repairs["dropped: last line, which was cut short"] == 1


@pytest.mark.parametrize(
    ("rate", "kind"),
    [
        ("-", "dropped: row whose rate is not a number"),
        ("", "dropped: row whose rate is not a number"),
        ("nan", "dropped: row whose rate is not a number"),
        ("inf", "dropped: row whose rate is not a number"),
        ("fast", "dropped: row whose rate is not a number"),
        ("-3", "dropped: row whose rate is negative or above 1 Tbit/s"),
        ("1e30", "dropped: row whose rate is negative or above 1 Tbit/s"),
    ],
)
def test_a_rate_that_cannot_be_is_dropped_and_counted(tmp_path, rate, kind):
    traces = read(tmp_path, log((10, 8, 1), (11, rate, 1), (12, 16, 1)))
    assert rates(traces) == [8000, 8000, 16000]
    assert traces.repairs[kind] == 1


def test_a_row_without_a_time_is_dropped_and_counted(tmp_path):
    text = log((10, 8, 1), (11, 9, 1)) + "yesterday,-8.4,5,5,D\n" + "2020.13.45_10.00.00,0,5,5,D\n"
    traces = read(tmp_path, text)
    assert rates(traces) == [8000, 9000]
    assert traces.repairs["dropped: row without a readable time"] == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("a,b\n1,2\n", "expected columns"),
        (HEADER, "no session with a readable rate"),
        (log((10, "-", 1)), "no session with a readable rate"),
        ("\x00\x01\x02\n\x00", "not a G-NetTrack CSV"),
        (HEADER + '"unclosed', "not a G-NetTrack CSV|no session"),
    ],
)
def test_what_is_not_this_format_is_one_sentence(tmp_path, text, says):
    with pytest.raises(TraceError, match=says):
        read(tmp_path, text)


def archive(tmp_path, names):
    path = tmp_path / "logs.zip"
    with zipfile.ZipFile(path, "w") as out:
        for i, name in enumerate(names):
            out.writestr(name, log((10, i, 1), (11, i, 1)))
    return path


def test_only_sessions_that_load_the_link_are_read_by_default(tmp_path):
    names = ["d/Download/Static/a.csv", "d/Netflix/b.csv", "__MACOSX/d/Download/._a.csv"]
    path = archive(tmp_path, names)
    traces = links.read_sessions(path)
    assert traces.device_ids.tolist() == ["Download/Static/a"]
    assert traces.repairs["left out: session that does not load the link"] == 1
    path = archive(tmp_path, ["d/Static/a.csv", "d/Driving/b.csv"])
    assert links.read_sessions(path).device_ids.tolist() == ["Driving/b", "Static/a"]


def test_a_folder_is_read_like_the_zip_of_it(tmp_path):
    path = archive(tmp_path, ["d/Download/a.csv", "d/Netflix/b.csv"])
    with zipfile.ZipFile(path) as packed:
        packed.extractall(tmp_path / "out")
    assert links.read_sessions(tmp_path / "out").device_ids.tolist() == ["Download/a"]
    assert links.read_sessions(tmp_path / "out" / "d").device_ids.tolist() == ["Download/a"]
    assert links.read_sessions(tmp_path / "out" / "d" / "Download").device_ids.tolist() == ["a"]


@needs_real
def test_the_download_sessions_of_the_published_archive_load():
    traces = links.read_sessions(REAL)
    assert traces.n_devices == 21
    driving = traces.device_ids.str.startswith("Download/Driving/")
    assert (driving.sum(), (~driving).sum()) == (16, 5)


@needs_real
def test_the_mean_rate_of_a_published_session_is_that_of_a_loop_over_its_rows():
    name = "Download/Static/B_2020.02.14_13.21.26"
    with zipfile.ZipFile(REAL) as packed:
        lines = packed.read(f"5G-production-dataset/{name}.csv").decode().splitlines()
    at = lines[0].split(",").index("DL_bitrate")
    by_second = {}
    for line in lines[1:]:
        clock = line.split(",")[0].split("_")[1].split(".")
        second = sum(int(x) * f for x, f in zip(clock, (3600, 60, 1), strict=True))
        by_second.setdefault(second, []).append(float(line.split(",")[at]) * 1e3)
    expected, held = [], 0.0
    for second in range(min(by_second), max(by_second) + 1):
        held = np.mean(by_second[second]) if second in by_second else held
        expected.append(held)
    traces = links.read_sessions(REAL)
    np.testing.assert_allclose(
        rates(traces, device=traces.device_ids.get_loc(name)), expected, rtol=1e-6
    )
