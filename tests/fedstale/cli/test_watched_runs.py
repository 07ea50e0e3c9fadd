"""What a simulation tells while it goes on, and what it leaves where it fails at once."""

import json
import logging
import os

import pytest
from small_app import SERVER, write_small_app
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.live.watching import ProgressNotes
from fedstale.runs import LOG
from fedstale.until import Until

DIGITS = [os.path.join("runs", name) for name in ("digits", "digits-2", "digits-3")]
SHORT = ("--traces", "synthetic:30", "-c", "num-server-rounds=3")


def called(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("strategy", "text"),
    [("flower.FedAvg()", "[ROUND 3/3]"), ("FedBuff(5, 2)", "FedBuff(concurrency=5")],
)
def test_a_run_has_its_whole_log_and_the_terminal_what_is_amiss(place, strategy, text):
    words = ("simulate", "digits", *SHORT, "-c", f"strategy='{strategy}'", "--out")
    stderr = called(*words, "run").stderr
    log = (place / "run" / LOG).read_text().splitlines()
    assert [line.startswith("INFO ") for line in log if text in line] == [True]
    assert text not in stderr
    assert ("WARNING" in stderr) == any(line.startswith("WARNING") for line in log)


def test_a_log_goes_on_with_its_run(place):
    done = called("simulate", "digits", *SHORT, "--until", "2 rounds", "--out", "run")
    assert done.exit_code == 0, done.output
    before = (place / "run" / LOG).read_text()
    assert called("simulate", "--resume", "run", "--until", "3 rounds").exit_code == 0
    assert (place / "run" / LOG).read_text().startswith(before)
    assert "[ROUND 3/3]" in (place / "run" / LOG).read_text().removeprefix(before)


def test_a_run_that_is_not_kept_changes_no_handler(place):
    shown = [(h.level, vars(h).get("stream")) for h in logging.getLogger("flwr").handlers]
    refused = called("simulate", "digits", *SHORT, "-c", "unheard-of=1")
    assert refused.exit_code == 2
    assert shown == [(h.level, vars(h).get("stream")) for h in logging.getLogger("flwr").handlers]
    assert refused.stderr.count("\n") == 1
    assert not (place / "runs").exists()


def test_the_same_command_takes_the_next_free_folder_and_offers_to_go_on(place):
    words = ("simulate", "digits", *SHORT, "--json")
    first, second = (called(*words) for _ in range(2))
    assert [json.loads(run.stdout)["out"] for run in (first, second)] == DIGITS[:2]
    assert DIGITS[1] in second.stderr
    assert "--resume" not in second.stderr
    # As a kill leaves it.
    (place / DIGITS[1] / "summary.json").unlink()
    third = called(*words)
    assert json.loads(third.stdout)["out"] == DIGITS[2]
    assert f"--resume {DIGITS[1]} goes on" in third.stderr
    refused = [called(*words, "--out", folder).stderr for folder in DIGITS[:2]]
    assert ["--resume" in sentence for sentence in refused] == [False, True]
    assert all("--overwrite" in sentence for sentence in refused)
    assert called("simulate", "--resume", DIGITS[1]).exit_code == 0
    replaced = called(*words, "--overwrite")
    assert json.loads(replaced.stdout)["out"] == DIGITS[0]
    assert not (place / f"{DIGITS[0]}-4").exists()


def test_a_run_in_which_nothing_was_sent_leaves_no_table_and_no_folder(place):
    server = SERVER.replace("def main(grid, context):\n", "def main(grid, context):\n    1 / 0\n")
    assert server != SERVER
    write_small_app(place / "app", server=server)
    failed = called("simulate", "app", "--traces", "synthetic:5")
    assert failed.exit_code == 1
    assert failed.stdout == ""
    assert "the ServerApp raised ZeroDivisionError" in failed.stderr
    assert not list((place / "runs").glob("*"))
    described = json.loads(called("simulate", "app", "--traces", "synthetic:5", "--json").stdout)
    assert (described["out"], described["status"]) == (None, "failed")


class At:
    """Where a run is."""

    rounds, now_s = 0, 0.0

    def now(self):
        return self.now_s

    def n_online(self):
        return 7

    def n_in_flight(self):
        return 2


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    said, run = [], At()
    notes = ProgressNotes(said.append, Until(rounds=10), every_s=30.0)
    for step in range(100):
        now_s, notes.rounds = 100.0 + step, step // 20
        notes.time_moved(run)
    notes.ended(run, "finished", "")
    assert said == [
        "10% done, round 1, 0 s, 7 online, 2 in flight, 4.5 min left",
        "30% done, round 3, 0 s, 7 online, 2 in flight, 2.3 min left",
        "40% done, round 4, 0 s, 7 online, 2 in flight, 2.2 min left",
    ]


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        ([], "in flight"),
        ([{"loss": 0.5, "lag": 3.0}], "loss 0.5"),
        ([{"loss": 0.5}, {"loss": 0.4, "accuracy": 0.8765}, {"train_loss": 0.3}], "accuracy 0.876"),
    ],
)
def test_a_line_ends_with_the_last_accuracy_or_else_the_last_metric(measured, shown):
    said, run = [], At()
    notes = ProgressNotes(said.append, Until(), every_s=0.0)
    for values in measured:
        notes.metrics(run, 1, "server", values)
    notes.look(run)
    assert said[0].endswith(shown)
