"""Results are judged by their quick forms: what has moved is found, and nothing else is."""

import json
import re
import subprocess

import pytest

import alive
from lab import results

SCRIPT = """
import json, sys
from pathlib import Path
assert "--quick" in sys.argv, "all of it was asked for"
assert sys.argv[1] == {place!r}, sys.argv
if {broken}:
    raise SystemExit("no such fleet")
from ours import CPU, HOURS
rows = [{{"arm": "ours", "hours": HOURS, "cpu_s": CPU, "processor_s": CPU, "commits": [CPU]}}]
folder = Path(__file__).parent / "results"
folder.mkdir(exist_ok=True)
def write_result(name, rows):
    if {writes}:
        (folder / name).write_text(json.dumps({{"rows": rows}}))
{call}
"""
CALL = 'write_result("hours-quick.json", rows)'


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with a result of its first commit, and a way to change its script."""
    place = tmp_path / "traces"
    monkeypatch.setattr(alive, "ROOT", tmp_path / "project")
    monkeypatch.setattr(alive, "RESULTS", tmp_path / "project" / "benchmarks" / "results")
    monkeypatch.setattr(alive, "STORE", alive.RESULTS / "quick")
    monkeypatch.setattr(results, "RESULTS", alive.RESULTS)
    # Two versions of a file may be of one second, and as long.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    alive.RESULTS.mkdir(parents=True)

    def git(*words):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        subprocess.run(command, cwd=alive.ROOT, check=True, capture_output=True)

    def change(hours=1.0, cpu=2.0, broken=False, writes=True, call=CALL):
        made = {"broken": broken, "writes": writes, "call": call}
        # What is measured is another file than what measures it.
        (alive.ROOT / "ours.py").write_text(f"HOURS, CPU = {hours}, {cpu}", encoding="utf-8")
        script = alive.ROOT / "benchmarks" / "hours.py"
        script.write_text(SCRIPT.format(place=str(place), **made), encoding="utf-8")
        git("add", "ours.py", "benchmarks/hours.py")
        git("commit", "-q", "-m", "change")

    git("init", "-q", "-b", "main")
    change()
    result = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/hours.py RECORDINGS --keep RUNS",
        "commit": results.commit(),
        "rows": [],
    }
    (alive.RESULTS / "hours.json").write_text(json.dumps(result), encoding="utf-8")

    def judged():
        monkeypatch.chdir(alive.ROOT)
        return alive.judged("hours", {"RECORDINGS": str(place)})

    return change, judged


@pytest.mark.parametrize(
    ("now", "verdict", "what"),
    [
        ({}, "same", ""),
        ({"hours": 1.005}, "close", ""),
        ({"hours": 1.02}, "moved", "hours of row 1: was 1, is 1.02"),
        ({"hours": "None"}, "moved", "hours of row 1: was 1, is None"),
        ({"hours": "float('nan')"}, "moved", "hours of row 1: was 1, is nan"),
        ({"hours": "True"}, "same", ""),
        # What a clock says beside other figures is another thing each time.
        ({"cpu": 20.0}, "same", ""),
        ({"cpu": 20.0, "hours": 2.0}, "moved", "hours of row 1: was 1, is 2"),
        ({"broken": True}, "failed", "no such fleet"),
        ({"writes": False}, "failed", "it writes no rows"),
    ],
)
def test_what_has_moved_since_a_result_is_found(project, now, verdict, what):
    change, judged = project
    change(**now, **({} if now else {"cpu": "2.0 + 0.0"}))
    found = judged()
    assert (found["verdict"], found["what"]) == (verdict, what)
    assert found["at"] == results.commit() != found["commit"]


def test_what_a_commit_gave_is_measured_once(project, monkeypatch):
    change, judged = project
    assert judged()["verdict"] == "same"
    monkeypatch.setattr(alive, "checkout", None)
    change(hours=3.0)
    assert judged()["what"] == "hours of row 1: was 1, is 3"


@pytest.fixture
def silent(project):
    """The same, where the quick form of the result's commit writes nothing."""
    change, judged = project
    change(call="")
    path = alive.RESULTS / "hours.json"
    made_at = json.loads(path.read_text())["commit"]
    path.write_text(path.read_text().replace(made_at, str(results.commit())))
    return change, judged


def test_where_a_quick_form_wrote_nothing_todays_script_tells(silent):
    change, judged = silent
    change()
    found = judged()
    assert (found["verdict"], found["scripts"]) == ("same", "today's")
    assert json.loads((alive.STORE / "hours.json").read_text())["scripts"] == "today's"
    # It goes by what is kept, from then on.
    change(hours=3.0)
    assert judged()["what"] == "hours of row 1: was 1, is 3"


def test_where_todays_script_fails_the_commits_own_tells(project):
    change, judged = project
    change(hours=3.0, broken='Path(__file__).resolve().parents[1].name != "project"')
    found = judged()
    assert (found["verdict"], found["scripts"]) == ("moved", "its own")


def test_todays_script_that_fails_on_a_commit_tells_nothing(silent, tmp_path):
    change, judged = silent
    # Of the project, and not of the commit's work tree.
    change(broken='Path(__file__).resolve().parents[1].name != "project"')
    found = judged()
    assert (found["verdict"], found["what"]) == (
        "unknown",
        "its commit has no quick form that gives rows",
    )


def test_a_result_of_a_lost_commit_is_not_known(project):
    _, judged = project
    path = alive.RESULTS / "hours.json"
    made_at = json.loads(path.read_text())["commit"]
    path.write_text(path.read_text().replace(made_at, f"{made_at}-dirty"))
    found = judged()
    assert found["verdict"] == "unknown"
    assert "files differ from their commit" in str(found["what"])


def test_rows_are_compared_whole():
    rows = [{"a": [1.0, {"b": 2.0}], "c": "x"}]
    assert alive.compared(rows, rows) == ("same", "")
    assert alive.compared(rows, []) == ("moved", "1 rows, now 0")
    assert alive.compared(rows, [{"a": [1.0, {"b": 3.0}], "c": "x"}])[1] == (
        "b of row 1: was 2, is 3"
    )
    assert alive.compared(rows, [{"a": [1.0], "c": "x"}])[0] == "moved"
    assert alive.compared(rows, [{"a": rows[0]["a"], "c": "y"}])[0] == "moved"
    assert alive.compared(rows, [{**rows[0], "d": 1}])[1] == "d of row 1: was None, is 1"
    nan = [{"a": float("nan")}]
    assert alive.compared(nan, nan)[0] == "same"
    assert alive.compared([{"wall_s": 1.0}], [{"wall_s": 2.5}], by_clock=True)[0] == "close"
    assert alive.compared([{"a": 1.0}], [{"a": 3.5}], by_clock=True)[0] == "moved"
    said = [[{"a": f"2 processes: {ms} ms"}] for ms in ("35.2", "366", "none in")]
    assert alive.compared(*said[:2], by_clock=True)[0] == "close"
    assert alive.compared(*said[1:], by_clock=True)[0] == "moved"


def test_a_quick_form_keeps_nothing_and_knows_its_places(tmp_path):
    command = "python benchmarks/x.py RECORDINGS --out FOLDER --keep RUNS --seeds 1"
    words = alive.quick(command, {"RECORDINGS": "there"}, tmp_path)
    out = str(tmp_path / "out")
    assert words == ["benchmarks/x.py", "there", "--out", out, "--seeds", "1", "--quick"]
    with pytest.raises(ValueError, match="expected a place for PLAYS"):
        alive.quick("python benchmarks/x.py PLAYS", {}, tmp_path)


def test_each_script_that_writes_results_has_a_quick_form():
    folder = results.RESULTS.parent
    without = [
        str(path.relative_to(folder))
        for path in sorted(folder.glob("*/*.py"))
        if re.search(r"\bwrite_result\(", text := path.read_text(encoding="utf-8"))
        and path.parent.name not in {"lab", "tests"}
        and ('"--quick"' not in text or "quick=" not in text)
    ]
    # Nothing of the first is published; of the others `given` in sites/run.py reads what is asked.
    assert without == ["agent/exponents.py", "sites/links.py", "sites/strategies.py"]


def test_what_the_moment_of_a_fault_decides_is_not_judged(project, monkeypatch):
    change, judged = project
    change(hours=2.0)
    assert judged()["verdict"] == "moved"
    monkeypatch.setitem(alive.BY_MOMENT, "hours", frozenset({"hours"}))
    assert judged()["verdict"] == "same"


@pytest.mark.parametrize("name", alive.published())
def test_the_command_of_a_result_names_options_that_its_script_has(name):
    result = results.read_result(name)
    script = (alive.ROOT / alive.script(result)).read_text(encoding="utf-8")
    assert all(f'"{option}"' in script for option in re.findall(r"--[a-z-]+", result["command"]))


def test_results_that_a_clock_or_the_moment_gave_are_published():
    assert set(alive.published()) >= alive.TIMED | alive.BY_MOMENT.keys()


def test_what_results_took_is_said_where_it_was_noted(project, monkeypatch):
    path = alive.RESULTS / "hours.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"wall_s": 5400.0}))
    (alive.RESULTS / "old.json").write_text(json.dumps({"rows": []}))
    *each, whole = alive.costs(["hours", "old"])
    assert [" ".join(line.split()) for line in each] == ["hours 90.0 min", "old not noted"]
    assert whole.startswith("1 of 2 results took 1.5 h")
