"""Processes that do jobs, with signals and imports of their own."""

import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from places import ROOT

from fedstale.parallel import WorkerPool


def work(job, report):
    """Do what the job says."""
    kind, what = job
    if kind == "import":
        return import_module(what).__file__
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
