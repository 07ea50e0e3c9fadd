import json
import threading

import pytest
from told_run import ToldRun

import fedstale
from fedstale.live import Board, server
from fedstale.live.watching import Watcher
from fedstale.until import Until


def figure(board, name):
    return next(one for one in board.snapshot()["figures"] if one["id"] == name)


def test_an_empty_board_can_be_shown():
    shown = Board("digits", time_name="virtual time").snapshot()
    assert shown["figures"] == []
    assert shown["cards"] == [["virtual time", "not started"]]
    json.dumps(shown, allow_nan=False)


def test_a_board_shows_what_it_was_told():
    board = Board("digits", until=Until.parse("4m"), every_s=0.0)
    run = ToldRun(board)
    run.moved(30.0, online=5)
    run.measured(50.0, 1, "server", "accuracy", 0.5)
    run.merged(55.0, 2)
    run.merged(56.0, 2)
    run.failed(58.0, "phone-1", "interrupted", "went offline while training")
    run.moved(60.0, online=7)
    shown = board.snapshot()
    assert shown["share"] == 0.25
    assert ["accuracy", "50.0%"] in shown["cards"]
    assert ["aggregated", "2"] in shown["cards"]
    assert shown["failures"] == [["58 s", "phone-1", "interrupted", "went offline while training"]]
    assert figure(board, "devices")["traces"][0]["x"] == [30.0, 60.0]
    assert figure(board, "devices")["traces"][0]["y"] == [5.0, 7.0]
    assert ["mean staleness", "2"] in shown["cards"]


def test_a_job_that_is_given_up_and_fails_later_is_counted_once():
    board = Board("digits")
    run = ToldRun(board)
    run.moved(1.0)
    run.failed(2.0, "phone-1", "late", "reported too late", given_up="no reply within 300 s")
    shown = board.snapshot()
    assert ["came to nothing", "1"] in shown["cards"]
    assert shown["failures"] == [["2 s", "phone-1", "rejected", "no reply within 300 s"]]


def test_of_flowers_strategies_a_board_counts_the_trainings_that_were_answered(tmp_path):
    board = Board("digits")
    run = fedstale.simulate(
        "digits", traces="synthetic:20", until="5 rounds", out=tmp_path / "run", callbacks=[board]
    )
    used = int((run.jobs["status"] == "reported").sum())
    shown = board.snapshot()
    assert ["trained", f"{used}"] in shown["cards"]
    assert "mean staleness" not in dict(shown["cards"])


def test_a_board_does_not_grow_with_names_and_reasons():
    board = Board("digits")
    run = ToldRun(board)
    run.moved(1.0)
    for i in range(500):
        run.measured(1.0, 1, "train", f"loss-{i}", float("nan"))
        run.failed(1.0, "x" * 1000, f"ending {i}" * 50, "y" * 10_000)
    text = json.dumps(board.snapshot(), allow_nan=False)
    assert len(text) < 30_000


def test_readers_and_a_writer_do_not_meet():
    board, problems, done = Board("digits", every_s=0.0), [], threading.Event()
    run = ToldRun(board)

    def read():
        try:
            while not done.is_set():
                board.snapshot()
        except Exception as problem:
            problems.append(problem)

    thread = threading.Thread(target=read)
    thread.start()
    for i in range(2000):
        run.moved(float(i))
        run.measured(float(i), i, "server", f"loss-{i % 20}", 1.0)
        run.merged(float(i), i % 50)
    done.set()
    thread.join()
    assert problems == []


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_metric_that_is_not_finite_is_a_gap(value):
    board = Board("digits")
    run = ToldRun(board)
    run.moved(1.0)
    run.measured(1.0, 1, "server", "loss", value)
    assert figure(board, "loss")["traces"][0]["y"] == [None]


@pytest.mark.parametrize(("every_s", "n_looks"), [(1e6, 1), (0.0, 3)])
def test_a_display_looks_at_once_and_then_no_more_often_than_it_wants(every_s, n_looks):
    looks = []

    class Looks(Watcher):
        def look(self, run):
            looks.append(run.now())

    told = ToldRun(Looks(every_s=every_s))
    for now in (1.0, 2.0, 3.0):
        told.moved(now)
    assert looks == [1.0, 2.0, 3.0][:n_looks]


def test_the_board_tells_settings_and_how_long_the_rest_will_take(monkeypatch):
    monkeypatch.setattr(server.time, "perf_counter", lambda: now[0])
    now = [100.0]
    board = Board("digits", until=Until(time_s=100.0), settings="seed = 3\n", every_s=0.0)
    run = ToldRun(board)
    run.moved(0.0)
    assert board.snapshot()["left"] == ""
    now[0] = 110.0
    run.moved(25.0)
    snapshot = board.snapshot()
    assert (snapshot["share"], snapshot["left"]) == (0.25, "about 30 s left")
    assert snapshot["settings"] == "seed = 3\n"
    board.ended(run.runtime, "stopped", "at its limit")
    assert board.snapshot()["left"] == ""
