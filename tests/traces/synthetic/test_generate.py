"""Generated devices are reproducible and independent of their number."""

import re
from importlib import resources

import numpy as np
import pytest
from shared_fleets import synthetic

from fedstale.errors import TraceError
from fedstale.traces import TraceSet
from fedstale.traces.synthetic.marginals import availability_marginal
from fedstale.traces.synthetic.population import BLOCK, generate, load

DAY_S = 86_400.0


def test_same_seed_gives_the_same_bytes_and_another_seed_does_not():
    one, same, other = (
        synthetic(50, days=2, seed=5),
        TraceSet.synthetic(50, days=2, seed=5),
        TraceSet.synthetic(50, days=2, seed=8),
    )
    assert one.availability.starts.tobytes() == same.availability.starts.tobytes()
    assert one.downlink.values.tobytes() == same.downlink.values.tobytes()
    assert one.compute.scales.tobytes() == same.compute.scales.tobytes()
    assert one.availability.starts.tobytes() != other.availability.starts.tobytes()
    assert one.downlink.scales.tobytes() != other.downlink.scales.tobytes()


def test_a_device_is_the_same_however_many_others_there_are():
    few, many = (
        synthetic(50, days=2, seed=5),
        TraceSet.synthetic(BLOCK + 10, days=2, seed=5),
    )
    t = np.linspace(0, 3 * DAY_S, 500)
    for device in (0, 7, 49):
        here = np.full(t.size, device)
        np.testing.assert_array_equal(
            few.availability.window_at_or_after(here, t),
            many.availability.window_at_or_after(here, t),
        )
        for name in ("compute", "downlink", "uplink"):
            a, b = getattr(few, name), getattr(many, name)
            np.testing.assert_array_equal(a.value_at(here, t), b.value_at(here, t))


def test_devices_of_different_blocks_are_different():
    traces = TraceSet.synthetic(2 * BLOCK, days=1, seed=0)
    assert traces.downlink.scales[0] != traces.downlink.scales[BLOCK]
    counts = np.diff(traces.availability.offsets)
    assert not np.array_equal(counts[:BLOCK], counts[BLOCK:])


def test_spread_time_zones_move_devices_by_whole_hours():
    same, spread = (
        synthetic(3000, days=2),
        TraceSet.synthetic(3000, days=2, seed=0, time_zones="spread"),
    )
    shifts = spread.availability.shifts
    assert set(np.unique(shifts)) == {hour * 3600.0 for hour in range(24)}
    hourly = [availability_marginal(x.availability)["hourly"] for x in (same, spread)]
    assert np.ptp(hourly[1]) < np.ptp(hourly[0]) / 3
    assert same.epoch is not None
    assert spread.epoch is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 1, 0), "n = 0: expected an integer >= 1"),
        ((1, 0, 0), "days = 0"),
        ((1, 1.5, 0), "days = 1.5"),
        ((1, 1, -1), "seed = -1: expected an integer >= 0"),
        ((True, 1, 0), "n = True"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, expected):
    with pytest.raises(TraceError, match=expected):
        generate(*arguments)


def test_an_unknown_word_for_time_zones_is_named():
    with pytest.raises(TraceError, match="time_zones = 'world': expected 'same' or 'spread'"):
        TraceSet.synthetic(1, days=1, seed=0, time_zones="world")


@pytest.mark.slow
def test_a_million_devices_for_a_week_fit_in_two_kilobytes_each():
    traces = TraceSet.synthetic(1_000_000, days=7, seed=0)
    assert traces.nbytes / traces.n_devices < 2048


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("population = [", "not a TOML file"),
        ("a = 1", r"expected a table \[population\]"),
        ("[population]\nspeed = [1.0]", "not the numbers of a population"),
    ],
)
def test_a_file_that_holds_no_population_is_one_clear_error(tmp_path, text, expected):
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(TraceError, match=expected):
        load(tmp_path / "p.toml")


def test_a_missing_file_is_one_clear_error(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        load(tmp_path / "p.toml")


def test_a_probability_above_one_is_rejected(tmp_path):
    text = (resources.files("fedstale.traces.synthetic") / "synthetic.toml").read_text("utf-8")
    (tmp_path / "p.toml").write_text(re.sub("another = .*", "another = 1.5", text, count=1))
    with pytest.raises(TraceError, match=r"another is not in \[0, 1\)"):
        load(tmp_path / "p.toml")
