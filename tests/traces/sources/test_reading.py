import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces import TraceSet
from fedstale.traces.sources import SOURCES
from fedstale.traces.sources.catalogue import kind_of

CSV = "Timestamp,DL_bitrate,UL_bitrate\n2020.02.13_10.00.00,8,1\n2020.02.13_10.00.01,8,1\n"
FLASH = json.dumps({"a": [[1, 2]]})
DAYS = json.dumps(
    {"a": {"isSuccess": True, "trace_start": 0, "trace_end": 86400, "ready_time": [[1, 2]]}}
)
EVENTS = "a,available,2016-01-28 15:00:00.000\na,offline,2016-01-28 16:00:00.000\n"
SESSIONS = "user_id;plugin_time;plugout_time\n" + "".join(
    f"a;2020-01-{day:02} 20:00:00;2020-01-{day + 1:02} 06:00:00\n" for day in range(1, 12)
)
PHONES = json.dumps([{"Model": "a", "CPU_F_AI_Score": "5"}])
BEHAVIOUR = pickle.dumps({1: {"active": [1], "inactive": [2], "finish_time": 9}})
CAPACITY = pickle.dumps({1: {"computation": 1.0, "communication": 2.0}})


def example(folder: Path, kind: str) -> Path:
    """Write the smallest file of a kind; its name gives it away only where nothing else does."""
    if kind == "mahimahi":
        (folder / "a.up").write_text("1\n")
        return folder
    if kind == "planetlab":
        (folder / "20110303").mkdir()
        (folder / "20110303" / "host").write_text("5\n")
        return folder
    content = {
        "flash": FLASH.encode(),
        "flash_days": DAYS.encode(),
        "library_desktops": EVENTS.encode(),
        "car_charging": SESSIONS.encode(),
        "aibenchmark": PHONES.encode(),
        "gnettrack": CSV.encode(),
        "fedscale_behaviour": BEHAVIOUR,
        "fedscale_capacity": CAPACITY,
    }[kind]
    names = {"gnettrack": "x.csv", "library_desktops": "FullLogonData-000.csv"}
    file = folder / names.get(kind, "x")
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("kind", SOURCES)
def test_a_kind_is_found_out_and_read(tmp_path, kind):
    path = example(tmp_path, kind)
    assert kind_of(path) == kind
    traces = TraceSet.read(path)
    assert traces.n_devices == 1
    if kind != "mahimahi":
        assert traces.known == tuple(
            c for c in ("availability", "compute", "downlink", "uplink") if c in traces.known
        )
        assert set(traces.known) == set(SOURCES[kind].channels)
    assert (traces.compute_unit is not None) == ("compute" in SOURCES[kind].channels)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_kind_that_is_named_is_not_guessed(tmp_path, kind):
    assert TraceSet.read(str(example(tmp_path, kind)), kind).n_devices == 1


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 50, b"garbage", b"{", b"PK\x03\x04", b"\x1f\x8b"]
)
def test_every_reader_answers_garbage_with_a_trace_error(tmp_path, kind, content):
    (tmp_path / "x.up").write_bytes(content)
    with pytest.raises(TraceError):
        TraceSet.read(tmp_path / "x.up", kind)


@pytest.mark.parametrize("kind", SOURCES)
def test_every_reader_answers_a_missing_path_with_a_trace_error(tmp_path, kind):
    with pytest.raises(TraceError, match="no such file"):
        TraceSet.read(tmp_path / "nothing.up", kind)


@pytest.mark.parametrize("kind", sorted(set(SOURCES) - {"mahimahi", "planetlab"}))
def test_every_reader_answers_a_truncated_file_with_a_trace_error_or_less_data(tmp_path, kind):
    path = example(tmp_path, kind)
    whole = path.read_bytes()
    for cut in range(0, len(whole), 3):
        path.write_bytes(whole[:cut])
        try:
            found = TraceSet.read(path, kind)
        except TraceError:
            continue
        # A log that ends early is a shorter log; nothing else may pass.
        if kind == "gnettrack":
            assert found.downlink.segments(0)[2] <= 2.0
        else:
            online_s = {"library_desktops": 3600.0, "car_charging": 108_000.0}[kind]
            assert np.diff(found.availability.windows(0)[0]).sum() <= online_s


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n", pickle.dumps({"a": 1})])
def test_an_unknown_kind_lists_what_is_accepted(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(TraceError) as error:
        TraceSet.read(tmp_path / "x")
    assert "native" in str(error.value)
    for kind in SOURCES:
        assert kind in str(error.value)


def test_a_log_in_a_folder_named_as_a_day_is_no_host_of_planetlab(tmp_path):
    folder = tmp_path / "20240601"
    folder.mkdir()
    (folder / "log.txt").write_text("1717200000 5 12\n1717200060 7 12\n")
    with pytest.raises(TraceError, match="not a trace of a known kind"):
        TraceSet.read(folder / "log.txt")


def test_an_empty_folder_and_a_missing_path_say_so(tmp_path):
    with pytest.raises(TraceError, match="not a trace of a known kind"):
        TraceSet.read(tmp_path)
    with pytest.raises(TraceError, match="no such file"):
        TraceSet.read(tmp_path / "nothing")


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(TraceError, match=r"source = 'flsh': expected .*flash"):
        TraceSet.read(example(tmp_path, "flash"), "flsh")


def test_archives_are_told_apart_by_what_is_in_them(tmp_path):
    for name, member in (
        ("a", "d/x.csv"),
        ("b", "d/20110303/host"),
        ("c", "d/readme"),
        ("e", "d/FullLogonData-000.csv"),
    ):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(member, "1")
    assert kind_of(tmp_path / "a") == "gnettrack"
    assert kind_of(tmp_path / "b") == "planetlab"
    assert kind_of(tmp_path / "e") == "library_desktops"
    with pytest.raises(TraceError, match="known kind"):
        kind_of(tmp_path / "c")


def test_a_parquet_file_is_native(tmp_path):
    (tmp_path / "x").write_bytes(b"PAR1")
    assert kind_of(tmp_path / "x") == "native"
