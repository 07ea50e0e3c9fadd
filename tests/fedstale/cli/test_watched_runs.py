"""What a simulation tells while it goes on, and what it leaves where it fails at once."""

import json
import logging
import re

import pytest
from small_app import SERVER, write_small_app
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.config import Until
from fedstale.live.watching import ProgressNotes

SHORT = ("--traces", "synthetic:30", "-c", "num-server-rounds=3")


def called(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_events_are_lines_of_json_the_same_each_time_and_tell_what_the_tables_do(place):
    for name in ("a", "b"):
        done = called("simulate", "digits", *SHORT, "-o", name, "--events", f"{name}.jsonl", "-q")
        assert done.exit_code == 0, done.output
    text = (place / "a.jsonl").read_text()
    assert (place / "b.jsonl").read_text() == text
    events = [json.loads(line) for line in text.splitlines()]
    instants = [event["at_s"] for event in events]
    assert instants == sorted(instants)
    summary = json.loads((place / "a" / "summary.json").read_text())
    counts = {name: sum(e["event"] == name for e in events) for name in ("sent", "reply", "ended")}
    assert counts["sent"] == summary["jobs"]["sent"]
    assert counts["reply"] == summary["jobs"]["reported"] > 0
    assert (counts["ended"], events[-1]["event"]) == (1, "ended")
    assert events[-1]["reason"] == summary["reason"]
    (last,) = [e for e in events if e["event"] == "metrics" and e["version"] == 3][-1:]
    assert last["values"]


def test_a_log_file_has_everything_whatever_is_shown(place):
    done = called("simulate", "digits", *SHORT, "-q", "--log-file", "log")
    assert done.exit_code == 0, done.output
    assert "[ROUND 3/3]" not in done.stderr
    lines = (place / "log").read_text().splitlines()
    assert sum("[ROUND 3/3]" in line for line in lines) == 1


@pytest.mark.parametrize("option", ["--events", "--log-file"])
def test_a_file_that_cannot_be_written_is_one_sentence(place, option):
    shown = [(h.level, vars(h).get("stream")) for h in logging.getLogger("flwr").handlers]
    refused = called("simulate", "digits", *SHORT, option, "nowhere/file")
    assert refused.exit_code == 2
    assert shown == [(h.level, vars(h).get("stream")) for h in logging.getLogger("flwr").handlers]
    assert re.match(rf"fedstale: {option[2:]} = 'nowhere/file' cannot be written", refused.stderr)
    assert refused.stderr.count("\n") == 1
    assert not (place / "runs").exists()


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
    notes = ProgressNotes(said.append, Until(), of_rounds=10, every_s=30.0)
    for step in range(100):
        now_s, notes.rounds = 100.0 + step, step // 20
        notes.time_moved(run)
    notes.ended(run, "finished", "")
    assert said == [
        "10% done, round 1, 0d 00:00:00, 7 online, 2 in flight, 4.5 min left",
        "30% done, round 3, 0d 00:00:00, 7 online, 2 in flight, 2.3 min left",
        "40% done, round 4, 0d 00:00:00, 7 online, 2 in flight, 2.2 min left",
    ]
