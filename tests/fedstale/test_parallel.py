"""A pool of workers that do jobs: in threads, so that what is told and when is seen alone."""

import threading

import pytest
from thread_processes import threads_for_processes

from fedstale.errors import ConfigError
from fedstale.parallel import WorkerPool

__all__ = ["threads_for_processes"]

pytestmark = pytest.mark.usefixtures("threads_for_processes")


def work(job, report):
    """Do what the job says."""
    kind, what = job
    if kind == "say":
        report(f"half of {what}")
        return threading.get_ident()
    if kind == "reject":
        raise ConfigError(what)
    if kind == "exit":
        raise SystemExit(what)
    raise ValueError(what)


def events_of(pool, *jobs):
    return list(pool.work(jobs, workers=2))


def test_a_worker_tells_what_it_does_and_takes_the_next_job(tmp_path):
    job = ("say", "it")
    with WorkerPool(work, tmp_path / "log") as pool:
        said, done = events_of(pool, job)
        assert said == (job, "progress", "half of it")
        assert done[:2] == (job, "done")
        assert done[2] != threading.get_ident()
        assert events_of(pool, job)[1] == done
        # A job that cannot be done is told in words, and its worker goes on.
        rejected = ("reject", "no such file")
        assert events_of(pool, rejected) == [(rejected, "rejected", "no such file")]
        assert events_of(pool, job)[1] == done


def test_as_many_jobs_as_there_are_workers_are_done_at_a_time(tmp_path):
    jobs = [("say", i) for i in range(5)]
    with WorkerPool(work, tmp_path / "log") as pool:
        found = events_of(pool, *jobs)
    assert sorted(job for job, news, _ in found if news == "done") == jobs
    assert len({who for _, news, who in found if news == "done"}) <= 2


@pytest.mark.parametrize(("job", "code"), [(("exit", 3), 3), (("fail", "a bug"), 1)])
def test_a_worker_that_dies_is_told_and_the_next_job_gets_a_new_one(tmp_path, job, code):
    log = tmp_path / "log"
    with WorkerPool(work, log) as pool:
        died = f"its process ended with code {code}; {log} may say why"
        assert events_of(pool, job) == [(job, "died", died)]
        assert [news for _, news, _ in events_of(pool, ("say", 1))] == ["progress", "done"]
