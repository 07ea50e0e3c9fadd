"""Trace sets: splits that stay honest, devices by name, and what is rejected."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedstale.errors import TraceError
from fedstale.traces import Availability, Series, TraceSet
from fedstale.traces.trace_set import CHANNELS, numbered

RATES = ("compute", "downlink", "uplink")


@pytest.fixture
def five():
    """Return five devices that differ in every channel."""
    rng = np.random.default_rng(3)
    rows = rng.uniform(1.0, 9.0, (3, 5, 4)).astype(np.float32)
    return TraceSet(
        device_ids=numbered("phone", 5),
        availability=Availability.of([[(k, 10.0 + k)] for k in range(5)], 20.0),
        compute=Series.regular(rows[0], step_s=5.0),
        downlink=Series.regular(rows[1], step_s=5.0),
        uplink=Series.regular(rows[2], step_s=5.0),
        compute_unit="a step of the test",
        epoch="2020-02-28T23:30:00",
        repairs={"overlapping windows joined": 7},
    )


def rates_at(traces, t):
    devices = np.arange(traces.n_devices)
    return np.stack([getattr(traces, name).value_at(devices, t) for name in RATES])


def test_take_keeps_each_device_with_all_its_channels(five):
    some = five.take([3, 0])
    assert some.device_ids.tolist() == ["phone-3", "phone-0"]
    np.testing.assert_array_equal(rates_at(some, 6.0), rates_at(five, 6.0)[:, [3, 0]])
    assert some.availability.window_at_or_after([0, 1], 0.0)[0].tolist() == [3.0, 0.0]


def test_what_describes_a_set_is_kept_by_take_and_between(five):
    for part in (five.take([1]), five.between(0.0, 5.0)):
        assert part.repairs == {"overlapping windows joined": 7}
        assert part.compute_unit == "a step of the test"


def test_between_moves_every_channel_and_the_epoch(five):
    part = five.between(1800.0, 2000.0)
    assert pd.Timestamp(part.epoch) == pd.Timestamp("2020-02-29T00:00:00")
    np.testing.assert_array_equal(rates_at(part, 7.0), rates_at(five, 1807.0))
    t = np.full(5, 7.0)
    assert part.availability.is_available(range(5), t).tolist() == (
        five.availability.is_available(range(5), t + 1800.0).tolist()
    )


def test_nothing_happens_from_the_end_of_between_on(five):
    part = five.between(2.0, 9.0)
    assert not rates_at(part, 7.0).any()
    assert rates_at(part, 6.9).all()
    assert not part.availability.is_available(range(5), 7.0).any()
    moved = [part.downlink.integral(range(5), 0.0, end) for end in (7.0, 99.0)]
    np.testing.assert_array_equal(*moved)


def test_records_stop_or_repeat_as_told(five):
    stopped = five.repeating(repeat=False)
    assert not rates_at(stopped, 25.0).any()
    assert not stopped.availability.is_available(range(5), 29.0).any()
    again = stopped.repeating(repeat=True)
    np.testing.assert_array_equal(rates_at(again, 25.0), rates_at(five, 5.0))
    assert again.availability.is_available(range(5), 29.0).all()


def test_an_incomplete_set_names_what_is_known_and_what_is_missing(five):
    partial = replace(five, compute=None, uplink=None)
    assert partial.known == ("availability", "downlink")
    assert partial.channel("availability") is five.availability
    with pytest.raises(
        TraceError, match="know availability, downlink but not compute, uplink: compose them"
    ):
        partial.complete()


def test_two_devices_of_one_name_are_rejected():
    with pytest.raises(TraceError, match="device 'a' occurs twice"):
        TraceSet(device_ids=pd.Index(["a", "b", "a"], dtype="str"))


@pytest.mark.parametrize("name", CHANNELS)
def test_a_channel_for_another_number_of_devices_is_rejected(name):
    channel = Availability.always(3) if name == "availability" else Series.constant(np.ones(3))
    with pytest.raises(TraceError, match=f"{name} has 3 devices: expected 2"):
        TraceSet(device_ids=numbered("d", 2), **{name: channel})


def test_constant_devices_are_always_there_with_the_rates_given():
    traces = TraceSet.constant(3, compute=2.0, downlink_bit_per_s=3.0, uplink_bit_per_s=4.0)
    assert rates_at(traces, 1e6).tolist() == [[2.0] * 3, [3.0] * 3, [4.0] * 3]
    assert traces.availability.is_available(range(3), 1e6).all()
    assert traces.known == CHANNELS


def test_ids_count_up_and_sort_as_they_count():
    assert numbered("d", 3).tolist() == ["d-0", "d-1", "d-2"]
    assert numbered("d", 11)[[0, 10]].tolist() == ["d-00", "d-10"]
    assert numbered("d", 1000).is_monotonic_increasing


def test_a_word_means_generated_devices_or_a_file(tmp_path):
    assert TraceSet.is_synthetic("synthetic:5")
    assert not TraceSet.is_synthetic("synthetic.parquet")
    made = TraceSet.load("synthetic:5", seed=3)
    same = TraceSet.synthetic(5, days=7, seed=3)
    assert made.availability.starts.tobytes() == same.availability.starts.tobytes()
    made.write(tmp_path / "t.parquet")
    assert list(TraceSet.load(str(tmp_path / "t.parquet"), seed=0).device_ids) == list(
        made.device_ids
    )


REJECTED = {
    "between.*: expected 0 <= start < end": (
        "between",
        [(-1.0, 5.0), (5.0, 5.0), (6.0, 5.0), (np.nan, 5.0)],
    ),
    "expected synthetic:N, such as synthetic:100": (
        "load",
        ["synthetic:", "synthetic:0", "synthetic:x", "synthetic:1e3"],
    ),
    "at least one device": ("ideal", [0]),
}


@pytest.mark.parametrize("expected", REJECTED)
def test_an_argument_that_cannot_be_is_named(five, expected):
    method, arguments = REJECTED[expected]
    seed = {"seed": 0} if method == "load" else {}
    for argument in arguments:
        values = argument if isinstance(argument, tuple) else (argument,)
        with pytest.raises(TraceError, match=expected.format(*values)):
            getattr(five, method)(*values, **seed)
