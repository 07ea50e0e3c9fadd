"""Jobs that are out, and how they end."""

import numpy as np

from fedstale.strategies.server.jobs import OpenJobs
from fedstale.strategies.types import Job, NodeSet


def send(open_jobs, name, *, node=5, now=0.0, timeout=10.0, purpose="train"):
    job = Job(node, purpose, 0, job_id=open_jobs.n_sent, message_id=name, sent_at=now)
    open_jobs.open(job, timeout)
    return job


def idle_of(open_jobs):
    return open_jobs.idle(NodeSet.of(np.array([5, 6], dtype=np.uint64))).ids.tolist()


def test_jobs_expire_in_the_order_of_their_deadlines_and_once():
    open_jobs = OpenJobs()
    send(open_jobs, "late", timeout=30.0)
    send(open_jobs, "early", timeout=10.0, node=6)
    assert open_jobs.next_deadline == 10.0
    assert open_jobs.expired(9.9) == []
    expired = open_jobs.expired(30.0)
    assert [job.message_id for job in expired] == ["early", "late"]
    for job in expired:
        open_jobs.end(job.message_id, "timed out")
    assert open_jobs.expired(99.0) == []
    assert open_jobs.next_deadline == float("inf")


def test_an_ended_job_has_no_deadline_any_more():
    open_jobs = OpenJobs()
    send(open_jobs, "a")
    open_jobs.end("a", "accepted")
    assert open_jobs.next_deadline == float("inf")
    assert open_jobs.endings == {"accepted": 1}


def test_a_node_is_busy_while_it_trains_and_not_while_it_evaluates():
    open_jobs = OpenJobs()
    send(open_jobs, "train", node=5)
    send(open_jobs, "evaluate", node=6, purpose="evaluate")
    assert idle_of(open_jobs) == [6]
    assert (open_jobs.n_out["train"], len(open_jobs.out)) == (1, 2)
    open_jobs.end("train", "failed")
    assert idle_of(open_jobs) == [5, 6]


def test_a_job_that_was_given_up_is_awaited_until_its_reply_comes():
    open_jobs = OpenJobs()
    send(open_jobs, "a")
    send(open_jobs, "b", node=6)
    open_jobs.end("a", "cancelled")
    open_jobs.end("b", "accepted")
    assert list(open_jobs.awaited) == ["a"]
    assert open_jobs.forget("a") == "cancelled"
    assert open_jobs.forget("a") is None
    assert open_jobs.forget("b") is None
    assert not open_jobs.awaited


def test_the_node_of_a_cancelled_job_is_busy_until_it_answers():
    open_jobs = OpenJobs()
    send(open_jobs, "a", node=5)
    open_jobs.end("a", "cancelled")
    assert idle_of(open_jobs) == [6]
    open_jobs.forget("a")
    assert idle_of(open_jobs) == [5, 6]


def test_the_node_of_a_cancelled_job_is_free_when_the_job_would_have_timed_out():
    open_jobs = OpenJobs()
    send(open_jobs, "a", node=5, timeout=10.0)
    open_jobs.end("a", "cancelled")
    assert open_jobs.next_deadline == 10.0
    assert open_jobs.expired(10.0) == []
    assert idle_of(open_jobs) == [5, 6]
    assert open_jobs.next_deadline == float("inf")
    assert open_jobs.forget("a") == "cancelled"
