import math
import socket
import sys
import time
from collections import namedtuple
from types import SimpleNamespace

import pytest

from fedstale.errors import ConfigError
from fedstale.traces.recording.monitor import PsutilMonitor, Reading

psutil = pytest.importorskip("psutil", reason="needs fedstale[client]")


Times = namedtuple("Times", "user idle iowait guest")


class FakePsutil:
    """A machine that is busy for a quarter, moves 1000 bytes in and 500 out between readings."""

    def __init__(self):
        self.busy, self.idle, self.boot = 100.0, 900.0, 1e9
        self.received, self.sent = 0, 0
        self.battery = SimpleNamespace(percent=80, power_plugged=True)
        self.up = True
        self.address = "10.0.0.7"

    def cpu_times(self):
        self.busy, self.idle = self.busy + 0.5, self.idle + 1.5
        return Times(user=self.busy, idle=self.idle - 200.0, iowait=200.0, guest=30.0)

    def boot_time(self):
        return self.boot

    def net_io_counters(self, pernic):
        assert pernic
        self.received += 1000
        self.sent += 500
        return {
            "lo": SimpleNamespace(bytes_recv=10**9 * self.received, bytes_sent=0),
            "wlan0": SimpleNamespace(bytes_recv=self.received, bytes_sent=self.sent),
        }

    def sensors_battery(self):
        return self.battery

    def net_if_stats(self):
        return {"lo": SimpleNamespace(isup=True), "wlan0": SimpleNamespace(isup=self.up)}

    def net_if_addrs(self):
        return {
            # Some machines give their loopback an address that could be routed.
            "lo": [
                SimpleNamespace(family=socket.AF_INET, address="127.0.0.1"),
                SimpleNamespace(family=socket.AF_INET, address="10.9.9.9"),
            ],
            "wlan0": [SimpleNamespace(family=socket.AF_INET, address=self.address)],
        }


class Steady:
    """A clock that goes on by two seconds whenever it is asked."""

    now = 0.0

    def __call__(self):
        self.now += 2.0
        return self.now


@pytest.fixture
def machine(monkeypatch):
    fake = FakePsutil()
    monkeypatch.setitem(sys.modules, "psutil", fake)
    return fake


@pytest.fixture
def monitor(machine):
    return PsutilMonitor(wall=lambda: 5.0, steady=Steady())


def test_later_readings_know_everything_and_leave_the_loopback_out(monitor):
    monitor.read()
    assert monitor.read() == Reading(
        instant=5.0,
        processor_left=0.75,
        received_bit_per_s=8 * 1000 / 2,
        sent_bit_per_s=8 * 500 / 2,
        battery=0.8,
        charging=True,
        online=True,
    )


def test_a_counter_that_goes_back_is_an_unknown_rate(machine, monitor):
    monitor.read()
    machine.received = -5000
    assert math.isnan(monitor.read().received_bit_per_s)
    assert monitor.read().received_bit_per_s == 4000


def test_a_machine_without_battery_does_not_know_whether_it_charges(machine, monitor):
    machine.battery = None
    reading = monitor.read()
    assert math.isnan(reading.battery)
    assert reading.charging is None


@pytest.mark.parametrize(("up", "address"), [(False, "10.0.0.7"), (True, "169.254.3.4")])
def test_without_a_routable_address_the_device_is_offline(machine, monitor, up, address):
    machine.up, machine.address = up, address
    assert monitor.read().online is False


@pytest.mark.parametrize("problem", [PermissionError, AttributeError, NotImplementedError])
def test_what_cannot_be_read_is_missing_and_no_error(machine, monitor, problem):
    def refuse(*args, **kwargs):
        raise problem("hidden")

    names = ("cpu_times", "net_io_counters", "sensors_battery", "net_if_stats", "net_if_addrs")
    monitor.read()
    for name in names:
        setattr(machine, name, refuse)
    reading = monitor.read()
    assert reading.instant == 5.0
    assert [reading.charging, reading.online] == [None, None]
    numbers = (
        reading.processor_left,
        reading.received_bit_per_s,
        reading.sent_bit_per_s,
        reading.battery,
    )
    assert all(math.isnan(x) for x in numbers)


def test_without_psutil_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ConfigError, match=r"needs psutil, .*\[client\]"):
        PsutilMonitor()


def test_this_machine_can_be_read():
    monitor = PsutilMonitor()
    monitor.read()
    time.sleep(1.1)
    reading = monitor.read()
    assert 0 <= reading.processor_left <= 1
    assert reading.instant > 1.6e9
    assert reading.received_bit_per_s >= 0 or math.isnan(reading.received_bit_per_s)
