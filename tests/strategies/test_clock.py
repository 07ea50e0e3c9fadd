"""Virtual or wall time, and who is told what happens."""

import time

from virtual_grid import VirtualGrid

from fedstale.strategies.server.clock import Clock, WallClock, clock_of
from fedstale.strategies.server.observer import LogObserver, Observer, observer_of


def test_a_grid_with_a_clock_and_an_observer_is_both():
    grid = VirtualGrid({})
    assert clock_of(grid) is grid
    assert observer_of(grid) is grid


def test_any_other_grid_gets_wall_time_and_the_log():
    assert isinstance(clock_of(object()), WallClock)
    assert isinstance(observer_of(object()), LogObserver)
    assert isinstance(WallClock(), Clock)
    assert isinstance(LogObserver(), Observer)


def test_wall_time_wakes_up_at_the_instant_or_at_the_next_poll():
    clock = WallClock(poll_s=0.02)
    start = clock.now()
    assert clock.wait(start + 1e6)
    assert 0.02 <= clock.now() - start < 5.0
    assert clock.wait(start)


def test_a_jump_of_the_machines_clock_ends_no_job(monkeypatch):
    clock = WallClock()
    start, real = clock.now(), time.time
    for jump_s in (-7200.0, 86_400.0):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real() + jump_s)
        assert 0.0 <= clock.now() - start < 60.0


def test_the_log_names_the_job_and_the_reason(caplog):
    caplog.set_level("DEBUG")
    log = LogObserver()
    log.job_aggregated("m1", base_version=1, version=3, staleness=1, weight=0.5)
    log.job_rejected("m2", reason="late")
    log.measured(version=3, source="server", metrics={"loss": 1.0})
    assert "m1: trained from 1, merged into 3, staleness 1, weight 0.5" in caplog.text
    assert "m2: refused: late" in caplog.text
    assert "version 3, server: {'loss': 1.0}" in caplog.text
