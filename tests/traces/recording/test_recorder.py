"""The loop that records, on a clock and a device that are made up."""

import itertools

import pytest

from fedstale.errors import ConfigError
from fedstale.traces.recording import journal as journals
from fedstale.traces.recording import monitor
from fedstale.traces.recording.journal import Journal, RecordingRun, record
from fedstale.traces.recording.monitor import Reading


class Device:
    """A steady clock, a device that it drives, and a user who may press Ctrl-C."""

    def __init__(self, *, stop_at=float("inf"), sleeps=(), slow_s=0.0):
        self.now, self.stop_at, self.sleeps, self.slow_s = 50.0, stop_at, dict(sleeps), slow_s

    def steady(self):
        return self.now

    def read(self):
        self.now += self.slow_s
        return Reading(instant=1000.0 + self.now, online=True)

    def wait(self, seconds):
        assert seconds >= 0
        self.now += seconds + self.sleeps.pop(self.now, 0.0)
        return self.now >= self.stop_at


def steadies_of(folder):
    readings, _ = journals.read(folder)
    return readings["steady"].tolist()


def recorded(folder, device, *, interval_s=5.0, duration_s=float("inf")):
    about = RecordingRun(device_id="phone", interval_s=interval_s, utc_offset_s=0.0)
    with Journal(folder, about, max_bytes=10**6) as journal:
        return record(
            device,
            journal,
            interval_s=interval_s,
            duration_s=duration_s,
            wait=device.wait,
            steady=device.steady,
        )


def test_readings_come_at_the_interval_until_the_time_is_over(tmp_path):
    device = Device()
    assert recorded(tmp_path / "j", device, duration_s=22.0) == 5
    assert steadies_of(tmp_path / "j") == [50, 55, 60, 65, 70]
    assert device.now == 72, "the whole time is waited for"


def test_the_end_of_the_time_is_read_if_a_reading_is_due_then(tmp_path):
    assert recorded(tmp_path / "j", Device(), duration_s=20.0) == 5


def test_a_stop_ends_between_two_readings(tmp_path):
    assert recorded(tmp_path / "j", Device(stop_at=60.0)) == 2
    assert steadies_of(tmp_path / "j") == [50, 55]


def test_readings_that_a_sleep_swallowed_are_not_made_up_for(tmp_path):
    device = Device(sleeps={55.0: 31.0}, stop_at=100.0)
    recorded(tmp_path / "j", device)
    assert steadies_of(tmp_path / "j") == [50, 55, 91, 95]


def test_a_slow_reading_does_not_shift_the_next(tmp_path):
    recorded(tmp_path / "j", Device(slow_s=1.5), duration_s=15.0)
    assert steadies_of(tmp_path / "j") == [51.5, 56.5, 61.5, 66.5]


@pytest.mark.parametrize("interval_s", [0.5, 0.0, -1.0, 61.0, float("nan")])
def test_an_interval_out_of_range_is_rejected(tmp_path, interval_s):
    with pytest.raises(ConfigError, match="expected 1 to 60 s"):
        record(
            Device(),
            None,
            interval_s=interval_s,
            duration_s=1.0,
            wait=lambda s: True,
            steady=lambda: 0.0,
        )


def test_a_duration_of_nothing_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="duration_s = 0"):
        recorded(tmp_path / "j", Device(), duration_s=0.0)


def test_calibration_counts_the_products_of_the_time(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(monitor, "_CALIBRATION_S", 10.5)
    monkeypatch.setattr(monitor, "_SIZE", 8)
    # Requested once at the start and once before each product: ten products take ten ticks.
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    speed = monitor.calibrate()
    monkeypatch.undo()
    assert speed == pytest.approx(10 * 2 * 8**3 / 1e9 / 11)
