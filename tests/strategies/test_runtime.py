"""Virtual or wall time, and who is told what happens."""

import time
from math import inf

import pytest
from flwr.app import Error, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from virtual_grid import Notes, VirtualGrid, weighed

from fedstale.errors import RunEnded
from fedstale.flower import identity, quote_error, stamp
from fedstale.strategies.server.runtime import Callback, ResumedClock, RunLogger, Runtime, WallClock

UPDATE = weighed("m1", base_version=1, staleness=1)


def test_a_callback_is_told_everything_with_the_run_it_happened_in():
    told = []

    class Names(Callback):
        pass

    def noting(name):
        return lambda self, run, *args, **facts: told.append((name, run, args, facts))

    kinds = [name for name, x in vars(Callback).items() if callable(x)]
    for name in kinds:
        setattr(Names, name, noting(name))
    runtime = Runtime(WallClock(), Names())
    runtime.started()
    runtime.sending([])
    runtime.job_sent("m1", None)
    runtime.reply("m1", None, "reported")
    runtime.rejected("m2", reason="NaN")
    runtime.new_version(3, None, [UPDATE])
    runtime.metrics(3, "train", {"loss": 1.0})
    runtime.time_moved()
    runtime.ended("finished", "")
    assert [name for name, *_ in told] == kinds
    assert all(run is runtime for _, run, *_ in told)
    assert told[5][2:] == ((3, None, [UPDATE]), {})
    assert told[6][2:] == ((3, "train", {"loss": 1.0}), {})


@pytest.mark.parametrize("first", [True, False])
def test_whoever_ends_a_run_does_so_after_all_have_been_told(first):
    class Ending(Callback):
        def metrics(self, run, version, source, values):
            raise RunEnded("enough")

    notes, ending = Notes(), Ending()
    runtime = Runtime(WallClock(), *([ending, notes] if first else [notes, ending]))
    with pytest.raises(RunEnded, match="enough"):
        runtime.metrics(1, "server", {"accuracy": 1.0})
    assert [row[1:] for row in notes.metered] == [(1, "server", {"accuracy": 1.0})]


def test_versions_of_a_second_loop_count_on_and_a_nested_loop_gives_its_count_back():
    notes = Notes()
    runtime = Runtime(WallClock(), notes)

    def trains(*versions):
        for version in versions:
            runtime.metrics(version, "train", {})

    with runtime.loop(None):
        trains(1, 2)
        with runtime.loop(None):
            trains(1)
        trains(3, 4)
    with runtime.loop(None):
        runtime.metrics(0, "server", {})
        trains(1)
        runtime.new_version(2, None, [UPDATE])
    assert [row[1:3] for row in notes.metered] == [
        *[(i, "train") for i in (1, 2, 3, 3, 4)],
        (4, "server"),
        (5, "train"),
    ]
    assert runtime.rounds == 5
    _, facts = notes.merged[-1]
    assert (facts["base_version"], facts["version"]) == (4 + 1, 4 + 2)
    assert UPDATE.base_version == 1, "it is the strategy's"


def test_a_loop_that_tells_a_round_again_begins_another_count():
    runtime = Runtime(WallClock(), notes := Notes())
    with runtime.loop(None):
        for version in (1, 2, 1, 2):
            runtime.new_round(version)
            runtime.metrics(version, "train", {})
    assert [row[1] for row in notes.metered] == [1, 2, 3, 4]


def test_queries_are_rounds_until_something_is_trained():
    runtime = Runtime(WallClock())
    runtime.metrics(3, "query", {})
    assert runtime.rounds == 3
    runtime.metrics(1, "train", {}, is_over=False)
    assert runtime.rounds == 3
    runtime.metrics(1, "train", {})
    assert runtime.rounds == 1


def test_a_grid_is_the_clock_of_its_own_run():
    grid = VirtualGrid({})
    assert grid.runtime.clock is grid
    grid.move(7.0)
    assert grid.runtime.now() == 7.0


@given(st.floats(0.0, 9e6), st.floats(0.0, 1e7), st.floats(0.0, 1e5))
def test_a_resumed_clock_goes_on_and_reaches_each_instant(time, stopped_at, wait_s):
    grid = VirtualGrid({})
    grid.time = time
    clock = ResumedClock(grid, stopped_at)
    assert clock.now() == pytest.approx(stopped_at, abs=1e-6)
    until = clock.now() + wait_s
    clock.wait(until)
    assert until <= clock.now() == pytest.approx(until, abs=1e-6)
    assert not clock.wait(inf)


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


def test_the_log_names_node_and_job_and_quotes_the_reason(caplog):
    caplog.set_level("DEBUG")
    runtime = Runtime(WallClock(), RunLogger())
    runtime.new_version(3, {}, [UPDATE])
    with identity(1):
        message = Message(RecordDict(), 5, "train")
        stamp(message, "m2", 0.0)
        reply = Message(Error(2, "no\n\x1b[31mlayer"), reply_to=message)
    runtime.reply("m2", quote_error(reply), "client-error")
    runtime.metrics(3, "server", {"loss": 1.0})
    assert "m1: trained from 1, aggregated into 3, staleness 1, weight 0.5" in caplog.text
    assert "node 5: m2: error 2: no \\n \\x1b[31mlayer" in caplog.text
    assert "version 3, server: {'loss': 1.0}" in caplog.text
