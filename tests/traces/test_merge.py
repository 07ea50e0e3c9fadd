"""Recordings of several devices on one time line."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedstale.errors import TraceError
from fedstale.traces import Availability, Series, TraceSet
from fedstale.traces.merge import merged

HOUR = 3600.0


def merge(paths, **how):
    return merged({str(path): TraceSet.read(path) for path in paths}, **how)


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


def test_by_the_hour_a_record_repeats_before_its_recording_too(pair):
    fleet = merge(pair)
    assert list(fleet.device_ids) == ["b", "a"]
    assert fleet.epoch == "2026-03-01T00:00:00"
    assert fleet.compute_unit == "a unit"
    assert dict(fleet.repairs) == {"gap: no reading": 2}
    # Six hours are 216 records of 100 s: b begins its record at midnight as well.
    assert fleet.availability.is_available([0, 0, 0], [30.0, 130.0, 70.0]).tolist() == [1, 1, 0]
    assert fleet.compute.value_at([0, 0], [10.0, 40.0]).tolist() == [2, 4]


def test_every_instant_of_a_recording_is_in_the_merged_set(pair):
    fleet = merge(pair)
    for position, path in enumerate(pair):
        alone = TraceSet.read(path)
        at = np.arange(0.5, 100.0, 2.0)
        lead = pd.Timestamp(alone.epoch).hour * HOUR
        here = np.full(at.size, position)
        alike = fleet.availability.is_available(here, at + lead)
        assert (alike == alone.availability.is_available(0 * here, at)).all()
        assert (
            fleet.compute.value_at(here, at + lead) == alone.compute.value_at(0 * here, at)
        ).all()


def test_a_channel_that_one_recording_lacks_is_left_out_and_told(pair, tmp_path):
    bare = recording(tmp_path, "c", "2026-03-01T00:00:00", speed=None)
    fleet = merge([*pair, bare])
    assert fleet.known == ("availability",)
    assert fleet.compute_unit is None
    told = {"gap: no reading": 3, "left out: compute, not in a recording": 1}
    assert dict(fleet.repairs) == told


def test_units_that_differ_are_rejected(pair, tmp_path):
    other = recording(tmp_path, "c", "2026-03-01T00:00:00", unit="another unit")
    with pytest.raises(TraceError, match="counts compute in 'another unit'"):
        merge([*pair, other])


def test_one_device_twice_is_rejected(pair, tmp_path):
    (tmp_path / "again").mkdir()
    again = recording(tmp_path / "again", "a", "2026-03-03T00:00:00")
    with pytest.raises(TraceError, match=r"device 'a' is in .*a\.parquet too"):
        merge([*pair, again])


def test_what_is_no_recording_is_rejected(pair, tmp_path):
    path = tmp_path / "part.parquet"
    TraceSet.read(pair[0]).between(10.0, 50.0).write(path)
    with pytest.raises(TraceError, match="is a part of another record"):
        merge([path])
    replace(TraceSet.read(pair[0]), epoch=None).write(path)
    with pytest.raises(TraceError, match="knows no calendar time"):
        merge([path])
    replace(TraceSet.read(pair[0]), availability=None).write(path)
    with pytest.raises(TraceError, match="knows not when it is online"):
        merge([path])
    TraceSet.read(pair[0]).repeating(repeat=False).write(path)
    with pytest.raises(TraceError, match="stops at its end"):
        merge([pair[1], path])


def test_an_alignment_that_is_none_is_rejected(pair):
    with pytest.raises(TraceError, match="expected 'time-of-day' or 'time-of-week'"):
        merge(pair, align="week")


# Fleets of several kinds.


def fleet(prefix, epoch, days, *, step_s):
    """Return three devices that share rows, come at hours of their own and know a part of a log."""
    online = Availability.of(
        [[(i * HOUR, (i + 2) * HOUR)] for i in range(3)],
        days * 24 * HOUR,
        logs=(HOUR, days * 24 * HOUR - 2 * HOUR),
    )
    rates = Series.regular([np.arange(1.0, 40.0)], step_s=step_s).take([0, 0, 0])
    return TraceSet(
        device_ids=pd.Index([f"{prefix}{i}" for i in range(3)]),
        availability=online,
        compute=rates.scaled([1.0, 2.0, 3.0]).shifted([0.0, 7.0, 11.0]),
        compute_unit="u",
        epoch=epoch,
    )


@pytest.mark.parametrize("steps", [(60.0, 60.0), (60.0, 7.0)])
def test_fleets_keep_weekday_log_and_rates_in_their_own_weeks(steps):
    # A Thursday in one year, a Monday in another.
    thursdays = fleet("t", "2020-01-02T00:00:00", 7, step_s=steps[0])
    mondays = fleet("m", "2018-01-01T00:00:00", 14, step_s=steps[1])
    both = merged({"one": thursdays, "two": mondays}, align="time-of-week")
    assert both.epoch == "2018-01-01T00:00:00"
    at = np.arange(0.0, 3 * 7 * 24 * HOUR, 1700.0)
    for alone, first, lead in ((thursdays, 0, 3 * 24 * HOUR), (mondays, 3, 0.0)):
        for device in range(3):
            own, here = np.full(at.size, device), np.full(at.size, first + device)
            for question in ("is_available", "window_at_or_after"):
                found = getattr(both.availability, question)(here, at + lead)
                wanted = np.array(getattr(alone.availability, question)(own, at), dtype=float)
                if question == "window_at_or_after":
                    wanted += lead
                np.testing.assert_array_equal(found, wanted)
            logs = np.array(both.log_at(here, at + lead)) - lead
            np.testing.assert_allclose(logs, alone.log_at(own, at))
            np.testing.assert_allclose(
                both.compute.integral(here, at + lead, at + lead + 500.0),
                alone.compute.integral(own, at, at + 500.0),
            )
    assert both.compute.lengths.size == 2
