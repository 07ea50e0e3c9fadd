import json
from pathlib import Path

import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces.sources import flash

REAL = Path(__file__).parents[3] / ".." / "shared" / "traces" / "flash-ready-strict.json"
needs_real = pytest.mark.skipif(not REAL.exists(), reason=f"{REAL} is not on this machine")


def read(tmp_path, data, **options):
    file = tmp_path / "ready_strict.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return flash.read(file, **options)


def windows(traces, phone):
    return traces.availability.windows(traces.position(phone))[0].tolist()


def test_windows_are_read_as_they_are(tmp_path):
    traces = read(tmp_path, {"a": [[10.0, 20.0], [50, 60]], "b": [[5.0, 6.0]]})
    assert windows(traces, "a") == [[10, 20], [50, 60]]
    assert windows(traces, "b") == [[5, 6]]
    assert traces.known == ("availability",)
    assert not traces.repairs


def test_every_kind_of_mess_is_repaired_or_dropped_and_counted(tmp_path):
    messy = [
        [-50, -40],
        [-5, 5],
        [100, 90],
        [200, 200],
        [300, 301],
        [302, 302],
        [303, 310],
        [305, 308],
        [250, 260],
        [172_790, 172_900],
        [200_000, 200_100],
        [1, "x"],
        [1, None],
        [True, 2],
        [1],
        7,
    ]
    traces = read(tmp_path, {"a": messy})
    assert windows(traces, "a") == [[0, 5], [250, 260], [300, 310], [172_790, 172_800]]
    assert dict(traces.repairs) == {
        "cut: started before instant 0": 1,
        "cut: went on after the end of the record": 1,
        "dropped: after the end of the record": 1,
        "dropped: before instant 0": 1,
        "dropped: end before start": 1,
        "dropped: no length": 1,
        "dropped: not a pair of numbers": 5,
        "merged: at most 1 s apart": 2,
        "merged: overlapping": 1,
        "sorted: out of order": 1,
    }


def test_a_phone_without_windows_is_kept_as_one_that_never_comes(tmp_path):
    traces = read(tmp_path, {"a": [], "b": [[1, 2]]})
    assert traces.n_devices == 2
    start, _ = traces.availability.window_at_or_after([0], 0.0)
    assert start == np.inf
    assert traces.repairs["kept: phone that is never online"] == 1


def test_the_record_repeats_after_whole_days(tmp_path):
    traces = read(tmp_path, {"a": [[3600, 7200]]}, days=3)
    assert traces.availability.windows(0)[1] == 3 * 86_400
    start, _ = traces.availability.window_at_or_after([0], 3 * 86_400.0)
    assert start == 3 * 86_400 + 3600


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


def test_numbers_that_are_none_are_dropped(tmp_path):
    traces = read(
        tmp_path, '{"a": [[NaN, 1], [1, Infinity], [1e999, 2], [1, 2], [3, 1' + "0" * 400 + "]]}"
    )
    assert windows(traces, "a") == [[1, 2]]
    assert traces.repairs["dropped: not a pair of numbers"] == 4


def test_a_record_of_no_day_is_rejected(tmp_path):
    with pytest.raises(TraceError, match="days = 0"):
        read(tmp_path, {"a": []}, days=0)


@needs_real
def test_all_phones_of_the_published_file_load():
    traces = flash.read(REAL)
    raw = json.loads(REAL.read_text())
    assert traces.device_ids.tolist() == list(raw)
    n_raw = sum(len(w) for w in raw.values())
    gone = sum(n for k, n in traces.repairs.items() if k.startswith(("dropped", "merged")))
    assert traces.availability.starts.size == n_raw - gone


@needs_real
def test_merging_and_dropping_keep_the_available_time_of_the_published_file():
    traces = flash.read(REAL)
    raw = json.loads(REAL.read_text())
    for phone in list(raw)[:200]:
        expected = set()
        for start, end in raw[phone]:
            expected.update(range(max(int(start), 0), min(int(end), 172_800)))
        made = sum(end - start for start, end in windows(traces, phone))
        # Each gap of one second that is bridged adds that second.
        assert len(expected) <= made <= len(expected) + len(raw[phone])


@needs_real
def test_phones_of_the_published_file_come_at_night():
    traces = flash.read(REAL)
    hours = np.arange(24) + 0.5
    online = [
        traces.availability.is_available(np.arange(traces.n_devices), 86_400 + h * 3600).mean()
        for h in hours
    ]
    assert np.argmax(online) in (0, 1, 2, 3, 4, 5)
    assert max(online) > 3 * min(online)


def test_half_of_a_character_is_no_name(tmp_path):
    whole = read(tmp_path, '{"a\\ud83d\\ude00": [[1, 2]]}')
    assert list(whole.device_ids) == ["a\U0001f600"]
    for content in (b'{"a\\ud83d": [[1, 2]]}', b'{"a\xed\xa0\xbd": [[1, 2]]}'):
        file = tmp_path / "halves.json"
        file.write_bytes(content)
        with pytest.raises(TraceError, match="not JSON, or truncated"):
            flash.read(file)
