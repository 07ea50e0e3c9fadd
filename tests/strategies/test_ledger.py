"""Jobs that are out, and how they end."""

from fedstale.strategies.server.jobs import Ledger


def send(ledger, name, *, node=5, now=0.0, timeout=10.0, purpose="train"):
    return ledger.send(name, node_id=node, purpose=purpose, version=0, now=now, timeout_s=timeout)


def test_jobs_expire_in_the_order_of_their_deadlines_and_once():
    ledger = Ledger()
    send(ledger, "late", timeout=30.0)
    send(ledger, "early", timeout=10.0, node=6)
    assert ledger.next_deadline == 10.0
    assert ledger.expired(9.9) == []
    expired = ledger.expired(30.0)
    assert [job.message_id for job in expired] == ["early", "late"]
    for job in expired:
        ledger.end(job.message_id, "timed out")
    assert ledger.expired(99.0) == []
    assert ledger.next_deadline == float("inf")


def test_an_ended_job_has_no_deadline_any_more():
    ledger = Ledger()
    send(ledger, "a")
    ledger.end("a", "accepted")
    assert ledger.next_deadline == float("inf")
    assert ledger.endings == {"accepted": 1}


def test_a_node_is_busy_while_it_trains_and_not_while_it_evaluates():
    ledger = Ledger()
    send(ledger, "train", node=5)
    send(ledger, "evaluate", node=6, purpose="evaluate")
    assert set(ledger.busy_nodes) == {5}
    assert (ledger.n_training, ledger.n_open) == (1, 2)
    ledger.end("train", "failed")
    assert not ledger.busy_nodes


def test_a_job_that_was_given_up_is_awaited_until_its_reply_comes():
    ledger = Ledger()
    send(ledger, "a")
    send(ledger, "b", node=6)
    ledger.end("a", "cancelled")
    ledger.end("b", "accepted")
    assert list(ledger.awaited()) == ["a"]
    assert ledger.forget("a") == "cancelled"
    assert ledger.forget("a") is None
    assert ledger.forget("b") is None
    assert not ledger.awaited()


def test_the_node_of_a_cancelled_job_is_busy_until_it_answers():
    ledger = Ledger()
    send(ledger, "a", node=5)
    ledger.end("a", "cancelled")
    assert set(ledger.busy_nodes) == {5}
    ledger.forget("a")
    assert not ledger.busy_nodes


def test_the_node_of_a_cancelled_job_is_free_when_the_job_would_have_timed_out():
    ledger = Ledger()
    send(ledger, "a", node=5, timeout=10.0)
    ledger.end("a", "cancelled")
    assert ledger.next_deadline == 10.0
    assert ledger.expired(10.0) == []
    assert not ledger.busy_nodes
    assert ledger.next_deadline == float("inf")
    assert ledger.forget("a") == "cancelled"
