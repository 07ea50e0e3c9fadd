import gzip
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import RECORDINGS

from fedstale.errors import TraceError
from fedstale.traces.sources import links

REAL = RECORDINGS / "mahimahi"
needs_real = pytest.mark.skipif(not REAL.exists(), reason=f"{REAL} is not on this machine")
PACKET = 12_000


def write(folder, **files):
    for name, times in files.items():
        text = times if isinstance(times, str) else "".join(f"{t}\n" for t in times)
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_opportunities_of_a_second_become_a_rate(tmp_path):
    write(tmp_path, a_up=[500, 600, 2000], a_down=[1000, 1001, 2000, 3000])
    traces = links.read_opportunities(tmp_path)
    assert traces.device_ids.tolist() == ["a"]
    assert traces.uplink.segments(0)[1].tolist() == [2 * PACKET, PACKET]
    assert traces.downlink.segments(0)[1].tolist() == [PACKET, 2 * PACKET, PACKET]


def test_the_trace_repeats_after_its_last_line(tmp_path):
    traces = links.read_opportunities(write(tmp_path, a_up=[500, 1500], a_down=[1]))
    assert traces.uplink.segments(0)[2] == 1.5
    assert traces.uplink.integral([0], 0.0, 15.0) == pytest.approx(20 * PACKET)


@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=30).map(sorted).filter(lambda t: t[-1] > 0)
)
def test_every_bin_keeps_its_bytes_exactly(tmp_path_factory, times):
    folder = write(tmp_path_factory.mktemp("m"), a_up=times)
    series = links.read_opportunities(folder).uplink
    last = times[-1] / 1e3
    for k in range(math.ceil(last)):
        low, high = k, min(k + 1, last)
        packets = sum(1 for t in times if low < t / 1e3 <= high or (k == 0 and t == 0))
        got = series.integral([0], low, high)[0]
        assert got == pytest.approx(packets * PACKET, abs=1e-3 * PACKET)


def test_a_file_given_alone_brings_its_other_half_along(tmp_path):
    write(tmp_path, a_up=[1], a_down=[1], b_up=[1])
    assert links.read_opportunities(tmp_path / "a.down").known == ("downlink", "uplink")
    assert links.read_opportunities(tmp_path / "b.up").known == ("uplink",)


def test_a_link_with_one_direction_is_dropped_where_others_are_whole(tmp_path):
    write(tmp_path, a_up=[1], a_down=[1], b_up=[1])
    traces = links.read_opportunities(tmp_path)
    assert traces.device_ids.tolist() == ["a"]
    assert traces.repairs["dropped: link with one direction missing"] == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("1\ntwo\n3\n", "line 2 is 'two'"),
        ("1\n2.5\n", "line 2 is '2.5'"),
        ("1\n" + "9" * 400, "line 2 is"),
        ("5\n3\n", "line 2 is 3"),
        ("-5\n3\n", "line 1 is -5"),
        ("0\n0\n", "ends at 0 ms"),
        ("1\n999999999999\n", "31 days"),
        ("\x00\x01\x02", "line 1"),
    ],
)
def test_what_is_not_this_format_is_one_sentence(tmp_path, text, says):
    with pytest.raises(TraceError, match=says):
        links.read_opportunities(write(tmp_path, a_up=text) / "a.up")


def test_folders_and_names_that_hold_no_link_say_so(tmp_path):
    with pytest.raises(TraceError, match=r"expected files NAME\.up"):
        links.read_opportunities(tmp_path)
    with pytest.raises(TraceError, match="no such file"):
        links.read_opportunities(tmp_path / "a.up")
    (tmp_path / "a.txt").write_text("1")
    with pytest.raises(TraceError, match=r"ends in \.up"):
        links.read_opportunities(tmp_path / "a.txt")


@needs_real
def test_all_published_links_keep_every_opportunity():
    traces = links.read_opportunities(REAL)
    assert traces.n_devices == 4
    for i, name in enumerate(traces.device_ids):
        for channel, suffix in (("uplink", "up"), ("downlink", "down")):
            lines = gzip.decompress((REAL / f"{name}.{suffix}.gz").read_bytes()).split()
            series = getattr(traces, channel)
            total = series.integral([i], 0.0, int(lines[-1]) / 1e3)[0]
            np.testing.assert_allclose(total, len(lines) * PACKET, rtol=1e-6)
