"""Recordings of several devices on one time line."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedstale.errors import TraceError
from fedstale.traces import Availability, Series, TraceSet
from fedstale.traces.recording.to_traces import merge

HOUR = 3600.0


def recording(folder, name, epoch, *, windows=((0.0, 60.0),), speed=2.0, unit="a unit"):
    compute = None
    if speed is not None:
        compute = Series.irregular([([0.0, 30.0], [speed, 2 * speed])], [100.0])
    traces = TraceSet(
        device_ids=pd.Index([name], dtype="str"),
        availability=Availability.of([windows], 100.0),
        compute=compute,
        epoch=epoch,
        compute_unit=unit if speed else None,
        repairs={"gap: no reading": 1},
    )
    traces.write(folder / f"{name}.parquet")
    return folder / f"{name}.parquet"


@pytest.fixture
def pair(tmp_path):
    return [
        recording(tmp_path, "b", "2026-03-02T06:00:00"),
        recording(tmp_path, "a", "2026-03-01T05:00:00", windows=((10.0, 20.0),), speed=1.0),
    ]


def test_by_the_calendar_a_device_is_not_there_before_its_recording(pair):
    fleet = merge(pair, align="calendar")
    assert list(fleet.device_ids) == ["b", "a"]
    assert fleet.epoch == "2026-03-01T00:00:00"
    assert fleet.availability.windows(0)[0].tolist() == [[30 * HOUR, 30 * HOUR + 60]]
    assert fleet.availability.windows(1)[0].tolist() == [[5 * HOUR + 10, 5 * HOUR + 20]]
    assert fleet.availability.windows(1)[1] == 5 * HOUR + 100
    assert fleet.compute_unit == "a unit"
    assert dict(fleet.repairs) == {"gap: no reading": 2}


def test_by_the_hour_a_record_repeats_before_its_recording_too(pair):
    fleet = merge(pair, align="time-of-day")
    # Six hours are 216 records of 100 s: b begins its record at midnight as well.
    assert fleet.availability.is_available([0, 0, 0], [30.0, 130.0, 70.0]).tolist() == [1, 1, 0]
    assert fleet.compute.value_at([0, 0], [10.0, 40.0]).tolist() == [2, 4]


@pytest.mark.parametrize("align", ["time-of-day", "calendar"])
def test_a_rate_keeps_its_mean_however_late_its_recording_began(pair, align):
    fleet = merge(pair, align=align)
    for position, speed in enumerate((2.0, 1.0)):
        mean = fleet.compute.integral([position], 0.0, 86_400.0)[0] / 86_400
        assert mean == pytest.approx(1.7 * speed)


@pytest.mark.parametrize(("align", "day"), [("time-of-day", 0.0), ("calendar", 24 * HOUR)])
def test_every_instant_of_a_recording_is_in_the_merged_set(pair, align, day):
    fleet = merge(pair, align=align)
    for position, path in enumerate(pair):
        alone = TraceSet.read(path)
        at = np.arange(0.5, 100.0, 2.0)
        hours = pd.Timestamp(alone.epoch).hour * HOUR
        lead = hours + (day if position == 0 else 0.0)
        here = np.full(at.size, position)
        alike = fleet.availability.is_available(here, at + lead)
        assert (alike == alone.availability.is_available(0 * here, at)).all()
        assert (
            fleet.compute.value_at(here, at + lead) == alone.compute.value_at(0 * here, at)
        ).all()


def test_a_merged_set_can_be_written_and_read(pair, tmp_path):
    merge(pair).write(tmp_path / "fleet.parquet")
    assert TraceSet.read(tmp_path / "fleet.parquet").n_devices == 2


def test_a_channel_that_one_recording_lacks_is_rejected_or_left_out(pair, tmp_path):
    bare = recording(tmp_path, "c", "2026-03-01T00:00:00", speed=None)
    with pytest.raises(TraceError, match=r"c\.parquet: does not know compute"):
        merge([*pair, bare])
    fleet = merge([*pair, bare], only=["availability"])
    assert fleet.known == ("availability",)
    assert fleet.compute_unit is None


def test_units_that_differ_are_rejected(pair, tmp_path):
    other = recording(tmp_path, "c", "2026-03-01T00:00:00", unit="another unit")
    with pytest.raises(TraceError, match="counts compute in 'another unit'"):
        merge([*pair, other])


def test_one_device_twice_is_rejected(pair, tmp_path):
    (tmp_path / "again").mkdir()
    again = recording(tmp_path / "again", "a", "2026-03-03T00:00:00")
    with pytest.raises(TraceError, match=r"device 'a' is in .*a\.parquet too"):
        merge([*pair, again])
    with pytest.raises(TraceError, match="given twice"):
        merge([pair[0], pair[0]])


def test_what_is_no_recording_is_rejected(pair, tmp_path):
    path = tmp_path / "part.parquet"
    TraceSet.read(pair[0]).between(10.0, 50.0).write(path)
    with pytest.raises(TraceError, match="is a part of another record"):
        merge([path])
    replace(TraceSet.read(pair[0]), epoch=None).write(path)
    with pytest.raises(TraceError, match="knows no calendar time"):
        merge([path])
    TraceSet.read(pair[0]).with_after_end("stop").write(path)
    with pytest.raises(TraceError, match="stops at its end"):
        merge([pair[1], path])


@pytest.mark.parametrize("only", [["compute"], ["availability", "battery"]])
def test_channels_that_make_no_set_are_rejected(pair, only):
    with pytest.raises(TraceError, match="expected availability and some of"):
        merge(pair, only=only)


def test_nothing_to_merge_and_an_unknown_alignment_are_rejected(pair):
    with pytest.raises(TraceError, match="no recordings"):
        merge([])
    with pytest.raises(TraceError, match="expected 'time-of-day' or 'calendar'"):
        merge(pair, align="week")
