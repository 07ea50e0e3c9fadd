"""The native file keeps what it was given, and rejects what it cannot understand."""

import json
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from same_traces import assert_equal

from fedstale.errors import TraceError
from fedstale.traces import Availability, Series, TraceSet
from fedstale.traces.io import parquet as file_writer
from fedstale.traces.trace_set import CHANNELS


def rich_set() -> TraceSet:
    """Return a set with everything: shared rows, shifts, scales, until, both kinds of series."""
    rng = np.random.default_rng(3)
    rows = np.array([1, 0, 1, 2, 2], dtype=np.int32)
    availability = Availability.of(
        [[(0.1, 0.30000000000000004), (5, 7)], np.empty((0, 2)), [(1 / 3, 9.9)]], [10.0, 20.0, 10.0]
    )
    irregular = Series.irregular(
        [([0.0, 0.1], [1.1, 0.0]), ([0.0], [2.0]), (np.arange(40) / 3, rng.random(40))],
        [0.7, 3.0, 20.0],
        repeat=False,
    )
    placed = {"rows": rows, "shifts": rng.random(5) * 10}
    regular = Series.regular([rng.random(n) for n in (1, 16, 33)], step_s=0.1)
    return TraceSet(
        device_ids=pd.Index(["a", "b", "ü/3", "", "e"], dtype="str"),
        availability=replace(availability, **placed, until=123.456),
        compute=replace(irregular, **placed, scales=rng.random(5)),
        downlink=replace(regular, **placed, scales=rng.random(5) * 1e9),
        uplink=Series.constant([1e300, 0.0, 1.0, 2.0, 1 / 3]),
        compute_unit="things",
        epoch="2018-03-06T00:00:00",
        repairs=MappingProxyType({"cut: something": 3}),
    )


def test_a_file_gives_back_every_bit_of_every_array(tmp_path):
    traces = rich_set()
    traces.write(tmp_path / "t.parquet")
    assert_equal(TraceSet.read(tmp_path / "t.parquet"), traces)


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_set_that_knows_one_channel_comes_back_with_that_one(tmp_path, channel):
    whole = rich_set()
    part = replace(whole, **{name: None for name in CHANNELS if name != channel})
    part.write(tmp_path / "t.parquet")
    assert_equal(TraceSet.read(tmp_path / "t.parquet"), part)


def test_rows_that_no_device_uses_are_not_written(tmp_path):
    traces = rich_set().take([0, 2])
    traces.write(tmp_path / "t.parquet")
    back = TraceSet.read(tmp_path / "t.parquet")
    assert back.downlink.lengths.size == 1
    t = np.linspace(0, 100, 50)
    for device in (0, 1):
        here = np.full(t.size, device)
        for name in ("compute", "downlink", "uplink"):
            wanted = getattr(traces, name).value_at(here, t)
            np.testing.assert_array_equal(getattr(back, name).value_at(here, t), wanted)
        np.testing.assert_array_equal(
            back.availability.window_at_or_after(here, t),
            traces.availability.window_at_or_after(here, t),
        )


def test_many_row_groups_come_back_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(file_writer, "_SAMPLES_A_GROUP", 40)
    monkeypatch.setattr(file_writer, "_DEVICES_A_GROUP", 2)
    traces = rich_set()
    traces.write(tmp_path / "t.parquet")
    assert pq.ParquetFile(tmp_path / "t.parquet").num_row_groups > 8
    assert_equal(TraceSet.read(tmp_path / "t.parquet"), traces)


def test_plain_pandas_reads_devices_and_windows_as_documented(tmp_path):
    rich_set().write(tmp_path / "t.parquet")
    frame = pd.read_parquet(tmp_path / "t.parquet")
    devices = frame[frame.record == "device"]
    assert list(devices.device_id) == ["a", "b", "ü/3", "", "e"]
    windows = frame[frame.record == "availability"]
    # Row 1 is used by device 0: it has no window.
    assert list(windows.starts_s.iloc[int(devices.availability_row.iloc[0])]) == []
    assert list(windows.ends_s.iloc[0]) == [0.30000000000000004, 7.0]


def test_a_folder_that_does_not_exist_is_one_clear_error(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere.*cannot be written"):
        TraceSet.ideal(2).write(tmp_path / "nowhere" / "t.parquet")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_one_clear_error(tmp_path, share):
    path = tmp_path / "t.parquet"
    rich_set().write(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(TraceError, match="cut short or damaged"):
        TraceSet.read(path)


def test_damaged_bytes_are_rejected_or_harmless(tmp_path):
    path = tmp_path / "t.parquet"
    traces = rich_set()
    traces.write(path)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    rejected = 0
    for place in rng.integers(4, len(data) - 8, 90):
        broken = bytearray(data)
        broken[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(broken)
        try:
            TraceSet.read(path)
        except TraceError:
            rejected += 1
    assert rejected > 30


def test_another_parquet_file_is_not_taken_for_traces(tmp_path):
    path = tmp_path / "t.parquet"
    pd.DataFrame({"x": [1]}).to_parquet(path)
    with pytest.raises(TraceError, match="a Parquet file, but not of traces"):
        TraceSet.read(path)


def test_a_missing_file_is_one_clear_error(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        TraceSet.read(tmp_path / "t.parquet")


def rewritten(path, *, about=None, change=None):
    """Write the file again with other metadata or with another table."""
    table = pq.read_table(path)
    described = json.loads(table.schema.metadata[b"fedstale"])
    described.update(about or {})
    if change is not None:
        table = change(table)
    table = table.replace_schema_metadata({b"fedstale": json.dumps(described).encode()})
    pq.write_table(table, path, row_group_size=1)


def test_a_later_version_is_rejected_by_its_number(tmp_path):
    path = tmp_path / "t.parquet"
    rich_set().write(path)
    rewritten(path, about={"version": 3})
    with pytest.raises(TraceError, match="version 3 of the format: expected 2"):
        TraceSet.read(path)


def test_rows_that_are_missing_are_noticed(tmp_path):
    path = tmp_path / "t.parquet"
    rich_set().write(path)
    rewritten(path, change=lambda table: table.slice(0, table.num_rows - 1))
    with pytest.raises(TraceError, match="rows of uplink: expected 1"):
        TraceSet.read(path)


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("downlink_row", 99, "downlink_row: expected 0 to 2"),
        ("compute_scale", float("nan"), "compute_scale: expected numbers >= 0"),
        ("compute_scale", float("inf"), "compute_scale is inf: expected no rate of 0 with it"),
        ("availability_shift_s", -1.0, "availability_shift_s: expected finite numbers >= 0"),
        ("uplink_scale", None, "uplink_scale has 1 nulls"),
    ],
)
def test_a_device_that_cannot_be_is_rejected(tmp_path, column, value, expected):
    path = tmp_path / "t.parquet"
    rich_set().write(path)

    def altered(table: pa.Table) -> pa.Table:
        i = table.schema.get_field_index(column)
        values = [value, *table[column].to_pylist()[1:]]
        return table.set_column(i, table.schema.field(i), pa.array(values, table.schema.types[i]))

    rewritten(path, change=altered)
    with pytest.raises(TraceError, match=expected):
        TraceSet.read(path)


def test_gaps_of_logs_are_kept_and_files_without_have_no_column_for_them(tmp_path):
    plain = Availability.of([[(1.0, 2.0)], [(1.0, 2.0), (6.0, 7.0)], np.empty((0, 2))], 10.0)
    gappy = plain.with_gaps(np.array([3.0, 2.0, 5.0]), np.array([4.0, 3.0, 6.0]), [0, 1, 2])
    gappy = replace(gappy, rows=np.array([2, 1], dtype=np.int32), shifts=np.zeros(2))
    made = TraceSet(device_ids=pd.Index(["a", "b"], dtype="str"), availability=gappy)
    made.write(tmp_path / "gaps.parquet")
    again = TraceSet.read(tmp_path / "gaps.parquet").availability
    assert again.log_at([0, 0, 1, 1], [2.5, 7.0, 3.5, 5.0])[1].tolist() == [2.5, 10.0, 3.5, 10.0]
    assert again.gap_offsets.tolist() == [0, 1, 3]
    TraceSet(device_ids=pd.Index(list("abc")), availability=plain).write(tmp_path / "plain.parquet")
    assert "gap_starts_s" not in pq.read_schema(tmp_path / "plain.parquet").names
