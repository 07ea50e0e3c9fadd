"""Processes that do jobs, with signals, exit codes and imports of their own."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from places import ROOT

from fedstale.errors import ConfigError
from fedstale.parallel import WorkerPool


def work(job, report):
    """Do what the job says."""
    kind, what = job
    if kind == "say":
        report(f"half of {what}")
        return os.getpid()
    if kind == "import":
        return import_module(what).__file__
    if kind == "reject":
        raise ConfigError(what)
    if kind == "exit":
        os._exit(what)
    if kind == "fail":
        raise ValueError(what)
    if kind == "swallow":
        report("asleep")
        with suppress(KeyboardInterrupt):
            time.sleep(60)
        for _ in range(600):
            report("awake")
            time.sleep(0.1)
        what.touch()
    try:
        report("asleep")
        time.sleep(60)
    except KeyboardInterrupt:
        what.touch()
        raise


def events_of(pool, *jobs):
    return list(pool.work(jobs, workers=2))


def test_a_process_tells_what_it_does_and_takes_the_next_job(tmp_path):
    job = ("say", "it")
    with WorkerPool(work, tmp_path / "log") as pool:
        said, done = events_of(pool, job)
        assert said == (job, "progress", "half of it")
        assert done[:2] == (job, "done")
        assert done[2] != os.getpid()
        assert events_of(pool, job)[1] == done
        # A job that cannot be done is told in words, and its process goes on.
        rejected = ("reject", "no such file")
        assert events_of(pool, rejected) == [(rejected, "rejected", "no such file")]
        assert events_of(pool, job)[1] == done


@pytest.mark.parametrize(("job", "code"), [(("exit", 3), 3), (("fail", "a bug"), 1)])
def test_a_process_that_dies_is_told_and_the_next_job_gets_a_new_one(tmp_path, job, code):
    log = tmp_path / "log"
    with WorkerPool(work, log) as pool:
        died = f"its process ended with code {code}; {log} may say why"
        assert events_of(pool, job) == [(job, "died", died)]
        assert [news for _, news, _ in events_of(pool, ("say", 1))] == ["progress", "done"]
    if code == 1:
        assert "ValueError: a bug" in log.read_text()


def test_leaving_interrupts_jobs_and_they_can_write_down_what_they_have(tmp_path):
    job = ("sleep", tmp_path / "written")
    with WorkerPool(work, tmp_path / "log") as pool:
        assert next(pool.work([job], workers=1)) == (job, "progress", "asleep")
        begin = time.monotonic()
    assert time.monotonic() - begin < 30
    assert (tmp_path / "written").exists()


def test_leaving_ends_a_job_that_swallows_its_interrupt_when_it_reports(tmp_path):
    job = ("swallow", tmp_path / "went on")
    with WorkerPool(work, tmp_path / "log") as pool:
        assert next(pool.work([job], workers=1)) == (job, "progress", "asleep")
        begin = time.monotonic()
    assert time.monotonic() - begin < 20
    assert not (tmp_path / "went on").exists()


def test_a_process_imports_what_this_one_does(tmp_path):
    # It has the name of a folder of tests.
    job = ("import", "fedstale.comparison.plan")
    with WorkerPool(work, tmp_path / "log") as pool:
        assert events_of(pool, job) == [(job, "done", import_module(job[1]).__file__)]


def test_a_process_of_a_bare_pytest_does_so_too():
    one = f"{__file__}::{test_a_process_imports_what_this_one_does.__name__}"
    bare = subprocess.run(
        [Path(sys.executable).with_name("pytest"), "-q", "-p", "no:cacheprovider", one],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert bare.returncode == 0, bare.stdout
