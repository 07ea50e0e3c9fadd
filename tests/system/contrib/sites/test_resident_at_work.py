"""Trainers that stay, and processes of messages: started at once, killed on either side, ended."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress

import psutil
import pytest
from places import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="trainers are for Linux alone")

KILLS = 20

TRAINER = """
import os, sys, time
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
times = 0


@app.train()
def train(message, context):
    global times
    times += 1
    print("at message", times)
    before = context.state.get("seen", {"times": 0})
    context.state["seen"] = ConfigRecord({"times": before["times"] + 1})
    with open("ran", "a") as file:
        print(os.getpid(), message.metadata.message_id, file=file, flush=True)
    for name in ("fork", "sleep"):
        wait = context.run_config.get(name, 0.0)
        if name == "fork" and wait and not os.fork():
            time.sleep(wait)
            os._exit(0)
        # In the message's own process nothing of this is waited for.
        if name == "sleep" and sys.argv[0] != "flwr-clientapp":
            time.sleep(wait)
    metrics = {"pid": os.getpid(), "times": times}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
"""

MESSAGES = """
import json, os, signal, sys, threading, time
sys.argv = ["flwr-clientapp"]
sys.path[:0] = [os.getcwd(), {fixtures!r}]
from bench_device import context, message
from fedstale.contrib.sites import resident

app = resident("site_app.trainer:app", **{options!r})


def answered(key, state=None, **config):
    here = context(state, **config)
    return dict(app(message(key=key), here).content["metrics"]), here


def runs():
    return [line.split() for line in open("ran")] if os.path.exists("ran") else []


def until(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def tell(**about):
    # In one call, since processes share the pipe.
    os.write(1, f"{{json.dumps(about)}}\\n".encode())
"""


@pytest.fixture
def site(tmp_path):
    """Return a site's folder; trainers that it has are killed after the test."""
    (tmp_path / "site_app").mkdir()
    (tmp_path / "site_app" / "trainer.py").write_text(TRAINER)
    yield tmp_path
    for process in trainers(tmp_path):
        process.kill()


@pytest.fixture
def say(site):
    """Return a function that runs a script as a message's process; returns what it tells."""

    def say(script, **options):
        fixtures = str(ROOT / "tests" / "fixtures")
        code = MESSAGES.format(fixtures=fixtures, options=options) + textwrap.dedent(script)
        # It waits for whoever holds the pipe.
        ran = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", code],
            cwd=site,
            env={**os.environ, "FLWR_HOME": str(site / "home")},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        # The app prints too, where it runs in that process.
        return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]

    return say


ONE = """
metrics, here = answered("one")
tell(**metrics, own=os.getpid())
"""


def trainers(site):
    """Return the trainers of a site that run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_trainer = any("import stay" in word for word in words) and str(site) in words[-1]
        found += [process] if is_trainer else []
    return found


def wait_until_ended(pid, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "it goes on"
            time.sleep(0.05)


def test_a_trainer_outlives_the_processes_of_its_messages_which_wait_for_none_of_its_pipes(
    say, site
):
    began = time.monotonic()
    found = [say(ONE)[0] for _ in range(3)]
    assert [one["times"] for one in found] == [1, 2, 3]
    (pid,) = {one["pid"] for one in found}
    assert pid not in {one["own"] for one in found}
    # Else each would have been waited for until the trainer is idle.
    assert time.monotonic() - began < 60.0
    assert [process.pid for process in trainers(site)] == [pid]
    assert os.getsid(pid) == pid
    (log,) = (site / "home" / "trainers").glob("*.log")
    assert log.stat().st_mode & 0o777 == 0o600
    targets = {os.readlink(f"/proc/{pid}/fd/{n}") for n in (0, 1, 2)}
    assert targets == {"/dev/null", str(log)}
    assert log.read_text().splitlines() == [f"at message {i}" for i in (1, 2, 3)]


def test_of_many_processes_that_start_at_once_all_are_answered_by_one_trainer(say, site):
    found = say("""
        for number in range(6):
            if not os.fork():
                tell(**answered(f"m{number}")[0])
                os._exit(0)
        for _ in range(6):
            assert os.wait()[1] == 0
        """)
    assert sorted(one["times"] for one in found) == [1, 2, 3, 4, 5, 6]
    assert len({one["pid"] for one in found}) == 1
    # Those that were started too end by themselves.
    left = {process.pid for process in trainers(site)} - {found[0]["pid"]}
    for pid in left:
        wait_until_ended(pid)


def test_twenty_kills_of_the_trainer_cost_the_time_of_one_job_each(say, site):
    found = say(f"""
        def kill(key):
            until(lambda: any(k == key and int(p) != os.getpid() for p, k in runs()))
            os.kill(next(int(p) for p, k in runs() if k == key), 9)
        state = None
        for number in range({KILLS}):
            key = f"m{{number}}"
            killer = threading.Thread(target=kill, args=(key,))
            killer.start()
            metrics, here = answered(key, state, sleep=100.0)
            killer.join()
            state = here.state
            tell(**metrics, own=os.getpid(), ran=[int(p) for p, k in runs() if k == key])
        tell(**answered("last", state)[0], seen=state["seen"]["times"])
        """)
    last = found.pop()
    # The trainer began, and the message's process went on where it was killed.
    assert all(one["pid"] == one["own"] == one["ran"][1] != one["ran"][0] for one in found)
    assert [len(one["ran"]) for one in found] == [2] * KILLS
    assert len({one["ran"][0] for one in found}) == KILLS
    # The Context of each answer went on to the next message, and none is counted twice.
    assert last["seen"] == KILLS + 1
    assert last["times"] == 1
    assert last["pid"] not in {one["own"] for one in found}


def test_twenty_kills_of_the_messages_process_leave_the_trainer_as_it_is(say, site):
    found = say(f"""
        tell(**answered("first")[0])
        for number in range({KILLS}):
            if not (child := os.fork()):
                answered(f"m{{number}}", sleep=0.2)
                os._exit(0)
            until(lambda: runs()[-1][1] == f"m{{number}}")
            os.kill(child, 9)
            os.waitpid(child, 0)
            tell(**answered(f"after-{{number}}")[0])
        """)
    assert len({one["pid"] for one in found}) == 1
    # Jobs whose answers were dropped are done; none is done twice.
    assert [one["times"] for one in found] == [1, *range(3, 2 * KILLS + 3, 2)]
    (log,) = (site / "home" / "trainers").glob("*.log")
    assert log.read_text().count("an answer is dropped") == KILLS


def test_a_trainer_that_is_told_to_end_at_work_leaves_the_job_to_the_messages_process(say, site):
    (found,) = say("""
        def end():
            until(runs)
            os.kill(int(runs()[0][0]), 15)
        threading.Thread(target=end).start()
        tell(**answered("one", sleep=100.0)[0], own=os.getpid(), ran=int(runs()[0][0]))
        """)
    assert found["pid"] == found["own"]
    wait_until_ended(found["ran"])


def test_what_the_app_forks_keeps_no_dead_trainers_socket(say, site):
    began = time.monotonic()
    first, second = say("""
        first, _ = answered("one", fork=100.0)
        tell(**first)
        os.kill(first["pid"], 9)
        tell(**answered("two")[0])
        """)
    assert second["times"] == 1
    assert second["pid"] != first["pid"]
    assert time.monotonic() - began < 60.0


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"idle_s": 1.0}, lambda site, pid: None),
        ({"memory_bytes": 1}, lambda site, pid: None),
        ({}, lambda site, pid: (site / "home" / "trainers").rename(site / "gone")),
        ({}, lambda site, pid: os.kill(pid, signal.SIGTERM)),
        ({}, lambda site, pid: os.kill(pid, signal.SIGKILL)),
    ],
    ids=["idle", "memory", "folder", "SIGTERM", "SIGKILL"],
)
def test_a_trainer_that_has_ended_is_followed_by_another(say, site, options, end):
    (first,) = say(ONE, **options)
    end(site, first["pid"])
    wait_until_ended(first["pid"])
    (second,) = say(ONE, **options)
    assert second["times"] == 1
    assert second["pid"] not in (first["pid"], second["own"])


def test_a_trainer_within_its_limits_stays(say):
    found = [say(ONE, idle_s=60.0, memory_bytes=10**10)[0] for _ in range(2)]
    assert [one["times"] for one in found] == [1, 2]


def test_an_app_that_cannot_be_imported_is_its_own_error_until_it_can_be(say, site):
    app = site / "site_app" / "trainer.py"
    app.write_text("import a_library_that_nobody_has\n")
    script = """
        try:
            answered("one")
        except Exception as problem:
            tell(kind=str(type(problem)), text=str(problem), ended=not runs())
        """
    (found,) = say(script)
    assert found["kind"] == "<class 'ModuleNotFoundError'>"
    assert found["text"] == "No module named 'a_library_that_nobody_has'"
    (log,) = (site / "home" / "trainers").glob("*.log")
    assert "Traceback" in log.read_text()
    app.write_text(TRAINER)
    assert say(ONE)[0]["times"] == 1


def test_a_trainer_that_cannot_start_leaves_the_message_to_its_own_process(say, site):
    (found,) = say("""
        sys.executable = "/bin/false"
        tell(**answered("one")[0], own=os.getpid())
        """)
    assert found["pid"] == found["own"]
