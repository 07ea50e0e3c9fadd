import os
import time

import pytest

from fedstale.errors import ConfigError
from fedstale.parallel import WorkerPool


def work(job, say):
    """Do what the job says."""
    kind, what = job
    if kind == "say":
        say(f"half of {what}")
        return os.getpid()
    if kind == "refuse":
        raise ConfigError(what)
    if kind == "exit":
        os._exit(what)
    if kind == "fail":
        raise ValueError(what)
    try:
        say("asleep")
        time.sleep(60)
    except KeyboardInterrupt:
        what.touch()
        raise


def news_of(crew, *jobs):
    for job in jobs:
        crew.give(job)
    heard = []
    while crew.n_busy:
        heard += crew.heard()
    return heard


def test_a_process_tells_what_it_does_and_takes_the_next_job(tmp_path):
    job = ("say", "it")
    with WorkerPool(work, tmp_path / "log") as crew:
        said, done = news_of(crew, job)
        assert said == (job, "said", "half of it")
        assert done[:2] == (job, "done")
        assert done[2] != os.getpid()
        assert news_of(crew, job)[1] == done
        # A job that cannot be done is told in words, and its process goes on.
        refused = ("refuse", "no such file")
        assert news_of(crew, refused) == [(refused, "rejected", "no such file")]
        assert news_of(crew, job)[1] == done


@pytest.mark.parametrize(("job", "code"), [(("exit", 3), 3), (("fail", "a bug"), 1)])
def test_a_process_that_dies_is_told_and_the_next_job_gets_a_new_one(tmp_path, job, code):
    log = tmp_path / "log"
    with WorkerPool(work, log) as crew:
        died = f"its process ended with code {code}; {log} may say why"
        assert news_of(crew, job) == [(job, "died", died)]
        assert [news for _, news, _ in news_of(crew, ("say", 1))] == ["said", "done"]
    if code == 1:
        assert "ValueError: a bug" in log.read_text()


def test_leaving_interrupts_jobs_and_they_can_write_down_what_they_have(tmp_path):
    job = ("sleep", tmp_path / "written")
    with WorkerPool(work, tmp_path / "log") as crew:
        crew.give(job)
        heard = []
        while not heard:
            heard += crew.heard()
        assert heard == [(job, "said", "asleep")]
        begin = time.monotonic()
    assert time.monotonic() - begin < 30
    assert (tmp_path / "written").exists()
