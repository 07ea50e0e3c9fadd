"""Whatever a record holds, verifying it ends in words: no traceback, no code, no memory."""

import json
import random
import resource

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_record import chained, lines_of, written

from fedstale.contrib.audit import verify
from fedstale.contrib.audit.record import RECORD
from fedstale.errors import ConfigError

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["inf", "-inf", "", "Oort", "os.system", "x" * 3000, [], {}, [[1]], [None]]),
    st.lists(st.integers(-2, 2**65), max_size=4),
    st.dictionaries(st.sampled_from(["class", "settings", "opaque", "selector"]), st.text()),
)
KINDS = {"start", "pick", "sent", "heard", "stated", "ended", "evaluate", "end"}
QUIET = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def paths_in(value, path=()):
    """Yield the path of every field, however deep."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from paths_in(inner, (*path, key))


@QUIET
@given(data=st.data())
def test_a_field_of_any_line_may_be_anything(data, recorded, tmp_path):
    lines = lines_of(recorded.folder / RECORD)[:60]
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(lines) - 1))
        facts = json.loads(lines[i])
        path = data.draw(st.sampled_from(list(paths_in(facts))))
        at = facts
        for key in path[:-1]:
            at = at[key]
        if data.draw(st.booleans()) or not isinstance(at, dict):
            at[path[-1]] = data.draw(ODD)
        else:
            del at[path[-1]]
        lines[i] = json.dumps(facts).encode()
    checked = verify(written(tmp_path / "r", chained(lines)))
    # The end is missing, at least.
    assert checked.faults
    assert all(len(fault) < 1000 and "\n" not in fault for fault in checked.faults)


@QUIET
@given(data=st.data())
def test_lines_may_be_in_any_order_and_any_number(data, recorded, tmp_path):
    lines = lines_of(recorded.folder / RECORD)
    n = len(lines)
    places = data.draw(st.lists(st.integers(0, n - 1), max_size=30))
    other = [lines[i] for i in places]
    path = written(tmp_path / "r", chained(other) if data.draw(st.booleans()) else other)
    assert verify(path).faults


@QUIET
@given(noise=st.binary(max_size=300), seed=st.integers(0, 2**31))
def test_bytes_anywhere_are_found(noise, seed, shortly_recorded, tmp_path):
    data = (shortly_recorded.folder / RECORD).read_bytes()
    rng = random.Random(seed)
    start, end = sorted(rng.randrange(len(data)) for _ in range(2))
    end = min(end, start + 400)
    other = data[:start] + noise + data[end:]
    (tmp_path / "r").write_bytes(other)
    head = verify(shortly_recorded).head if seed % 10 == 0 else None
    assert bool(verify(tmp_path / "r", head=head).faults) == (other != data)


def test_every_single_edit_drop_swap_and_copy_is_found(shortly_recorded, tmp_path):
    lines = lines_of(shortly_recorded.folder / RECORD)
    assert {json.loads(line)["kind"] for line in lines} == KINDS
    for j in range(0, len(lines) - 1, 3):
        for other in (
            [*lines[:j], *lines[j + 1 :]],
            [*lines[:j], lines[j + 1], lines[j], *lines[j + 2 :]],
            [*lines[: j + 1], *lines[j:]],
            [*lines[:j], lines[j].replace(b":", b": ", 1), *lines[j + 1 :]],
        ):
            assert verify(written(tmp_path / "r", other)).faults


def test_a_folder_a_device_and_a_missing_file_are_no_records(tmp_path):
    for path in (tmp_path, tmp_path / "none", "/dev/zero"):
        with pytest.raises(ConfigError, match=r"has no record\.jsonl"):
            verify(path)


def test_an_endless_line_takes_no_memory(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr("fedstale.contrib.audit.chain.MOST_LINE", 10_000)
    first = lines_of(recorded.folder / RECORD)[0]
    (tmp_path / "r").write_bytes(first + b"\n" + b"[" * 5_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (fault,) = verify(tmp_path / "r").faults
    assert fault == "line 2 cannot be read: it has more than 10,000 bytes"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
