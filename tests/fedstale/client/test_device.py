"""Counters of the kernel between processes, on a machine made of a few numbers."""

import math
from collections import namedtuple
from types import SimpleNamespace

import pytest
from bench_device import Bench
from flwr.app import ConfigRecord, RecordDict

from fedstale.client import ForecastMod
from fedstale.client.device import COUNTERS_RECORD, CountingMonitor, MessageHistory

Times = namedtuple("Times", "user nice system idle iowait guest guest_nice")


@pytest.fixture
def machine(monkeypatch):
    """Return a machine with a kernel of four counters; a new monitor is a new process."""
    kernel = {"busy": 100.0, "idle": 900.0, "boot": 1e9}
    state = RecordDict()

    def start():
        monitor = CountingMonitor(state)
        monitor._monitor._psutil = SimpleNamespace(
            # A guest of 30 s is counted within user.
            cpu_times=lambda: Times(kernel["busy"], 0.0, 0.0, kernel["idle"], 0.0, 30.0, 0.0),
            boot_time=lambda: kernel["boot"],
        )
        return monitor

    return kernel, state, start


def test_the_first_reading_of_a_process_covers_the_time_since_the_last(machine):
    kernel, _, start = machine
    assert math.isnan(start().read().processor_left)
    kernel["busy"] += 25.0
    kernel["idle"] += 75.0
    assert start().read().processor_left == pytest.approx(0.75)


@pytest.mark.parametrize(
    "change",
    [
        {"boot": 2e9, "idle": 1000.0},
        {"idle": 10.0},
        {"idle": 900.5},
    ],
)
def test_counters_of_another_start_say_nothing(machine, change):
    kernel, _, start = machine
    start().read()
    kernel.update(change)
    assert math.isnan(start().read().processor_left)


@pytest.mark.parametrize("stored", [{}, {"boot": 1e9}, {"boot": "x", "idle": 1.0, "total": 2.0}])
def test_counters_that_cannot_be_read_say_nothing(machine, stored):
    _, state, start = machine
    state[COUNTERS_RECORD] = ConfigRecord(stored)
    assert math.isnan(start().read().processor_left)


def test_a_kernel_without_counters_says_nothing(machine):
    _, state, start = machine
    monitor = start()
    monitor._monitor._psutil = SimpleNamespace()
    assert math.isnan(monitor.read().processor_left)
    assert COUNTERS_RECORD not in state


def test_the_mod_reads_the_machine_it_runs_on():
    state = RecordDict()
    for _ in range(2):
        bench = Bench(ForecastMod(), state=state, monitor=CountingMonitor(state))
        said = bench.train(20.0)
    assert "error" not in said
    left = MessageHistory.read(state)["processor_left"][-1]
    assert math.isnan(left) or 0.0 <= left <= 1.0
    assert COUNTERS_RECORD in state
