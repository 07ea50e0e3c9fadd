"""The validator names every fault of a file by row and column, and agrees with the reader."""

import json
from dataclasses import replace
from itertools import groupby

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.contrib.formats import faults
from fedstale.errors import TraceError
from fedstale.traces import Availability, Series, TraceSet

NAN, INF = float("nan"), float("inf")


def whole():
    """Return three devices, whose file has rows 0 to 2 of devices, 3 to 5 of availability,

    6 and 7 of compute with changes at instants of their own, 8 of downlink and 9 of uplink on
    grids.
    """
    online = Availability.of([[(0, 20), (50, 60)], [(10, 30)], []], 100.0, logs=(0.0, 90.0))
    online = online.with_gaps(np.array([25.0, 40.0]), np.array([35.0, 45.0]), [2, 0, 0])
    busy = Series.irregular(
        [([0.0, 5.0], [1.0, 2.0]), ([0.0, 8.0, 9.0], [3.0, 0.0, 1.0])], [9.0, 10.0]
    )
    grid = Series.regular([[8.0, 4.0]], step_s=5.0)
    return TraceSet(
        device_ids=pd.Index(["a", "b", "c"], dtype="str"),
        availability=online,
        compute=busy.take([0, 1, 1]),
        downlink=grid.take([0, 0, 0]),
        uplink=grid.take([0, 0, 0]),
        compute_unit="images",
        epoch="2024-05-06T00:00:00",
    )


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Return the rows, the metadata and the schema of a file without faults."""
    path = tmp_path_factory.mktemp("whole") / "devices.parquet"
    whole().write(path)
    table = pq.read_table(path)
    return table.to_pylist(), json.loads(table.schema.metadata[b"fedstale"]), table.schema


def write(path, rows, about, schema, key=b"fedstale"):
    about = about if isinstance(about, bytes) else json.dumps(about).encode()
    with pq.ParquetWriter(path, schema.with_metadata({key: about})) as writer:
        for _, group in groupby(rows, key=lambda row: row["record"]):
            writer.write_table(pa.Table.from_pylist(list(group), schema=schema))


def cell(row, column, value):
    return lambda rows, about: rows[row].update({column: value})


def field(name, value, *within):
    def change(rows, about):
        for key in within:
            about = about[key]
        if value is KeyError:
            del about[name]
        else:
            about[name] = value

    return change


BROKEN = {
    "another format": (field("format", "csv"), 'metadata, format: "csv": expected fedstale-traces'),
    "a later version": (field("version", 3), "metadata, version: 3: expected 2"),
    "no unit": (
        field("compute_unit", KeyError),
        "metadata, compute_unit: missing: expected words, or null",
    ),
    "no epoch": (
        field("epoch", KeyError),
        "metadata, epoch: missing: expected a time in ISO 8601, or null",
    ),
    "no step": (
        field("step_s", KeyError, "channels", "uplink"),
        "metadata, uplink, step_s: missing: expected s > 0, or null",
    ),
    "a step of 0": (
        field("step_s", 0, "channels", "uplink"),
        "metadata, uplink, step_s: 0: expected s > 0, or null",
    ),
    "no devices": (
        field("n_devices", 0),
        "metadata, n_devices: 0: expected a whole number above 0",
    ),
    "an unknown channel": (
        lambda rows, about: about["channels"].update(battery=about["channels"]["uplink"]),
        "metadata: unknown channel battery",
    ),
    "a row too few": (
        lambda rows, about: rows.pop(7),
        "metadata: 2 rows of compute: the file has 1",
    ),
    "a row of nothing": (
        cell(9, "record", "battery"),
        "row 9, column record: 'battery': expected one of device, availability, compute, downlink, "
        "uplink",
    ),
    "a row out of range": (
        cell(1, "compute_row", 2),
        "row 1, column compute_row: 2: expected 0 to 1",
    ),
    "a row below 0": (cell(1, "uplink_row", -1), "row 1, column uplink_row: -1: expected 0 to 0"),
    "a shift below 0": (
        cell(0, "compute_shift_s", -4.0),
        "row 0, column compute_shift_s: -4: expected 0 to 1.79769e+308",
    ),
    "no shift": (
        cell(0, "availability_shift_s", None),
        "row 0, column availability_shift_s: null or NaN: expected a value",
    ),
    "a scale of NaN": (
        cell(2, "downlink_scale", NAN),
        "row 2, column downlink_scale: null or NaN: expected a value",
    ),
    "a scale below 0": (
        cell(2, "downlink_scale", -1.0),
        "row 2, column downlink_scale: -1: expected 0 to inf",
    ),
    "no time for a rate of 0": (
        cell(1, "compute_scale", INF),
        "row 1, column compute_scale: inf: expected no rate of 0 with it",
    ),
    "a name twice": (
        cell(1, "device_id", "a"),
        "row 1, column device_id: 'a': expected distinct names",
    ),
    "a record without an end": (
        cell(3, "length_s", INF),
        "row 3, column length_s: inf: expected 0 to 1.79769e+308",
    ),
    "a log outside the record": (
        cell(4, "log_start_s", 100.0),
        "row 4, column log_start_s: 100.0: expected it before the record's end, 100.0",
    ),
    "a log below 0": (cell(4, "log_s", -1.0), "row 4, column log_s: -1: expected 0 to inf"),
    "windows out of order": (
        lambda rows, about: rows[3].update(starts_s=[50.0, 0.0], ends_s=[60.0, 20.0]),
        "row 3, column starts_s: [0.0, 20.0), place 1: expected spans inside [0, 100), apart",
    ),
    "a window after the end": (
        cell(4, "ends_s", [130.0]),
        "row 4, column starts_s: [10.0, 130.0), place 0: expected spans inside [0, 100), apart",
    ),
    "windows that touch": (
        lambda rows, about: rows[4].update(starts_s=[10.0, 20.0], ends_s=[20.0, 30.0]),
        "row 4, column starts_s: [20.0, 30.0), place 1: expected spans inside [0, 100), apart",
    ),
    "an end too few": (
        cell(3, "ends_s", [20.0]),
        "row 3, column ends_s, gap_ends_s: expected one end for each start",
    ),
    "a window of NaN": (
        cell(4, "starts_s", [NAN]),
        "row 4, column starts_s: [nan, 30.0), place 0: expected spans inside [0, 100), apart",
    ),
    "a gap after the log": (
        cell(3, "gap_ends_s", [35.0, 95.0]),
        "row 3, column gap_starts_s: [40.0, 95.0), place 1: expected spans inside [0, 90), apart",
    ),
    "a window in a gap": (
        cell(3, "gap_starts_s", [15.0, 40.0]),
        "row 3, column gap_starts_s: 15.0, place 0: expected no window in the gap",
    ),
    "instants that stand": (
        cell(7, "starts_s", [0.0, 8.0, 8.0]),
        "row 7, column starts_s: 8.0, place 1: expected it before the next, or the end",
    ),
    "a late first instant": (
        cell(6, "starts_s", [1.0, 5.0]),
        "row 6, column starts_s: expected one for each of 2 rates, the first 0",
    ),
    "a rate below 0": (
        cell(8, "values", [8.0, -4.0]),
        "row 8, column values: -4.0, place 1: expected a finite rate >= 0",
    ),
    "a rate without end": (
        cell(8, "values", [8.0, INF]),
        "row 8, column values: inf, place 1: expected a finite rate >= 0",
    ),
    "a rate of NaN": (
        cell(8, "values", [NAN, 4.0]),
        "row 8, column values: nan, place 0: expected a finite rate >= 0",
    ),
    "no rates": (cell(6, "values", []), "row 6, column values: expected one rate at least"),
    "a grid of another length": (
        cell(9, "length_s", 11.0),
        "row 9, column length_s: 11.0: expected 2 rates times 5.0",
    ),
}
LET_THROUGH = {
    "no such date": (
        field("epoch", "yesterday"),
        'metadata, epoch: "yesterday": expected a time in ISO 8601, or null',
    ),
    "a word for a truth": (
        field("repeat", "no", "channels", "uplink"),
        'metadata, uplink, repeat: "no": expected true or false',
    ),
    "an end below 0": (
        field("until_s", -3.0, "channels", "uplink"),
        "metadata, uplink, until_s: -3.0: expected s >= 0, or null",
    ),
    "what no device uses": (
        lambda rows, about: rows[0].update(compute_row=1),
        "row 6, column record: expected a device of this compute",
    ),
    "a log of a link": (
        cell(8, "log_s", 3.0),
        "row 8, column log_s: np.float64(3.0): expected null in a row of downlink",
    ),
}
"""What the format rules out and the reader does not look at."""


def told(tmp_path, parts, change):
    rows, about, schema = (
        json.loads(json.dumps(parts[0])),
        json.loads(json.dumps(parts[1])),
        parts[2],
    )
    change(rows, about)
    write(tmp_path / "broken.parquet", rows, about, schema)
    return tmp_path / "broken.parquet", list(faults(tmp_path / "broken.parquet"))


@pytest.mark.parametrize("name", BROKEN)
def test_each_fault_is_named_and_refused_by_the_reader_too(tmp_path, parts, name):
    change, sentence = BROKEN[name]
    path, found = told(tmp_path, parts, change)
    assert sentence in found
    with pytest.raises(TraceError):
        TraceSet.read(path, "native")


@pytest.mark.parametrize("name", LET_THROUGH)
def test_what_the_reader_lets_through_is_named(tmp_path, parts, name):
    change, sentence = LET_THROUGH[name]
    path, found = told(tmp_path, parts, change)
    assert sentence in found
    TraceSet.read(path, "native")


def test_a_file_without_faults_has_none(tmp_path, parts):
    path, found = told(tmp_path, parts, lambda rows, about: None)
    assert found == []
    assert TraceSet.read(path, "native").n_devices == 3


def test_all_faults_are_told_and_no_fault_twice(tmp_path, parts):
    def change(rows, about):
        for name in ("a shift below 0", "a rate below 0", "windows out of order", "a name twice"):
            BROKEN[name][0](rows, about)

    _, found = told(tmp_path, parts, change)
    assert len(found) == len(set(found)) == 4


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s.remove(s.get_field_index("log_s")), "column log_s: missing: expected double"),
        (
            lambda s: s.append(pa.field("note", pa.string())),
            "column note: string: expected no such column",
        ),
        (
            lambda s: s.set(1, pa.field("device_id", pa.int64())),
            "column device_id: int64: expected string",
        ),
        (
            lambda s: s.set(0, pa.field("record", pa.string())),
            "column record: string: expected string not null",
        ),
        (
            lambda s: pa.schema([*s][1:] + [*s][:1]),
            "columns: expected in the order record, device_id, availability_row",
        ),
    ],
)
def test_columns_are_those_of_the_format(tmp_path, parts, change, sentence):
    rows, about, schema = parts
    path, schema = tmp_path / "columns.parquet", change(schema)
    ids = {"device_id": None} if schema.field("device_id").type == pa.int64() else {}
    write(path, [row | ids for row in rows], about, schema)
    assert [said[: len(sentence)] for said in faults(path)] == [sentence]
    with pytest.raises(TraceError):
        TraceSet.read(path, "native")


def test_rows_of_two_records_share_no_row_group(tmp_path, parts):
    rows, about, schema = parts
    table = pa.Table.from_pylist(rows, schema=schema)
    pq.write_table(
        table.replace_schema_metadata({b"fedstale": json.dumps(about)}), tmp_path / "one"
    )
    assert "row 0, column record: expected one record in its row group, to row 10" in list(
        faults(tmp_path / "one")
    )
    with pytest.raises(TraceError):
        TraceSet.read(tmp_path / "one", "native")


def test_what_is_no_parquet_or_has_no_metadata(tmp_path, parts):
    rows, about, schema = parts
    (tmp_path / "text").write_text("device,start")
    write(tmp_path / "other", rows, about, schema, key=b"pandas")
    write(tmp_path / "words", rows, b"{", schema)
    cut = tmp_path / "cut"
    whole().write(cut)
    cut.write_bytes(cut.read_bytes()[:-40])
    for name, begins in (
        ("text", "not a readable"),
        ("other", "metadata, format: missing"),
        ("words", "not a readable"),
        ("cut", "not a readable"),
    ):
        assert next(faults(tmp_path / name)).startswith(begins)
        with pytest.raises(TraceError):
            TraceSet.read(tmp_path / name, "native")


PARTS = st.tuples(
    *(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**16), st.booleans(), st.booleans()),
    st.sets(st.sampled_from(("availability", "compute", "downlink", "uplink")), min_size=1),
)


@pytest.mark.slow
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(PARTS)
def test_what_is_written_has_no_fault(tmp_path, drawn):
    n, days, seed, repeat, is_cut, known = drawn
    traces = TraceSet.synthetic(n, days=days, seed=seed).repeating(repeat=repeat)
    traces = traces.between(3600.0, 7200.0) if is_cut else traces
    unknown = dict.fromkeys({"availability", "compute", "downlink", "uplink"} - known)
    replace(traces, **unknown).write(tmp_path / "drawn.parquet")
    assert list(faults(tmp_path / "drawn.parquet")) == []


@pytest.mark.parametrize("made", [whole(), TraceSet.ideal(3), TraceSet.synthetic(7, seed=1)])
def test_sets_of_all_kinds_have_no_fault(tmp_path, made):
    made.write(tmp_path / "made.parquet")
    assert list(faults(tmp_path / "made.parquet")) == []


def test_the_command_shows_twenty_and_ends_with_1(tmp_path, parts):
    def change(rows, about):
        rows[6].update(values=[-1.0] * 30, starts_s=[0.25 * k for k in range(30)])

    path, _ = told(tmp_path, parts, change)
    run = CliRunner().invoke(app, ["traces", "validate", str(path)])
    assert run.exit_code == 1
    assert run.stdout.splitlines()[0] == f"{path}: 30 faults"
    assert len(run.stdout.splitlines()) == 22
    assert run.stdout.splitlines()[-1] == "and 10 more"
    run = CliRunner().invoke(app, ["traces", "validate", str(path), "--json"])
    said = json.loads(run.stdout)
    assert (said["n_faults"], len(said["faults"])) == (30, 20)
    whole().write(path)
    run = CliRunner().invoke(app, ["traces", "validate", str(path)])
    assert (run.exit_code, run.stdout) == (0, f"{path}: 0 faults\n")
    assert CliRunner().invoke(app, ["traces", "validate", "none.parquet"]).exit_code == 2
