"""Stages in a run: what they are told, in which order, and what they may change."""

import sys
from collections import Counter
from math import nan
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.app.error import Error
from virtual_grid import VirtualGrid, adder, identity, record

from fedstale.errors import ConfigError
from fedstale.strategies import (
    Checkpoints,
    FedAvg,
    FedBuff,
    ForecastRequest,
    Stage,
    StaleStrategy,
    stages,
)
from fedstale.strategies.schedule import Schedule
from fedstale.strategies.types import RejectionError


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


class Notes(Stage):
    """Notes what it is told."""

    saved = ("n_out",)

    def __init__(self, told=None):
        self.told, self.n_out = told, 0

    def __deepcopy__(self, memo):
        return type(self)(self.told)

    def note(self, what, job, *more):
        if self.told is not None:
            self.told.append((what, job, *more))

    def outgoing(self, job, content):
        self.n_out += 1
        self.note("out", job)
        return content

    def incoming(self, job, content):
        self.note("incoming", job)

    def accepted(self, update):
        self.note("accepted", update, update.weight)

    def ended(self, job, end):
        self.note("ended", job, end.how, end.reason)


def failing(message, grid):
    return 2.0, Error(7, "broken")


def silent(message, grid):
    return 0.0, None


def unreadable(message, grid):
    return 3.0, RecordDict({"nothing": ConfigRecord({})})


def start(nodes, strategy, rounds=4):
    grid = VirtualGrid(nodes)
    result = strategy.start(grid, record(w=np.zeros(2)), num_rounds=rounds, timeout=50.0)
    return grid, result


NODES = {10: adder(1.0, 5.0), 11: failing, 12: silent, 13: unreadable, 14: adder(1.0, 4.0)}


def test_every_job_is_sent_and_ends_once():
    told = []
    start(NODES, FedBuff(4, 2, stages=[Notes(told)], min_evaluate_nodes=1), rounds=12)
    out = Counter(job.message_id for what, job, *_ in told if what == "out")
    ended = Counter(job.message_id for what, job, *_ in told if what == "ended")
    assert out == ended
    assert set(out.values()) == {1}
    hows = {how for what, _, *more in told if what == "ended" for how in more[:1]}
    assert hows == {"accepted", "rejected", "failed", "timed out", "cancelled"}


def test_a_job_that_fails_ends_with_its_reason():
    told = []
    start(NODES, FedBuff(4, 2, stages=[Notes(told)]), rounds=12)
    reasons = {reason for what, _, *more in told if what == "ended" for reason in more[1:]}
    assert {"error 7: broken", "no reply within 50 s"} <= reasons


def test_what_is_accepted_came_in_and_ended_before():
    told = []
    start({10: NODES[10]}, FedBuff(1, 1, stages=[Notes(told)]), rounds=2)
    assert [what for what, *_ in told] == ["out", "incoming", "ended", *["accepted"] * 2] * 2
    # Before and after it is weighed.
    weights = [weight for what, _, *more in told if what == "accepted" for weight in more]
    np.testing.assert_array_equal(weights, [nan, 1.0] * 2)


def test_a_job_whose_message_the_grid_does_not_take_ends_too(monkeypatch):
    told, push = [], VirtualGrid.push_messages

    def take(grid, messages):
        ids = iter(push(grid, [m for m in messages if m.metadata.dst_node_id != 14]))
        return [None if m.metadata.dst_node_id == 14 else next(ids) for m in messages]

    monkeypatch.setattr(VirtualGrid, "push_messages", take)
    start({10: NODES[10], 14: NODES[14]}, FedAvg(stages=[Notes(told)]), rounds=2)
    hows = {(job.node_id, more[0]) for what, job, *more in told if what == "ended"}
    assert (14, "not sent") in hows
    assert not any(job.node_id == 14 for what, job, *_ in told if what == "incoming")


class Rejecting(Stage):
    """Rejects the replies of one node."""

    def incoming(self, job, content):
        if job.node_id == 14:
            raise RejectionError("mine", "not from here")


def test_a_stage_may_reject_a_reply():
    told = []
    strategy = FedBuff(2, 1, stages=[Rejecting(), Notes(told)])
    grid, _ = start({10: NODES[10], 14: NODES[14]}, strategy, rounds=3)
    assert strategy.rejections["rejected: mine"] >= 1
    assert {reason for _, reason in grid.refused} == {"not from here"}
    # Those behind it do not see the reply, and see the end of its job.
    came = {job for what, job, *_ in told if what == "incoming"}
    rejected = {job for what, job, *more in told if what == "ended" and more[0] == "rejected"}
    assert rejected
    assert not came & rejected


class Telling(Stage):
    """Says in the config of each training who trains."""

    def outgoing(self, job, content):
        job.notes[self.name] = job.node_id
        config = ConfigRecord({**content["config"], "you-are": job.node_id})
        return RecordDict({**content, "config": config})

    def incoming(self, job, content):
        assert job.notes[self.name] == job.node_id


def test_each_node_is_sent_what_the_stages_made_for_it():
    grid, _ = start({k: adder(1.0, 5.0) for k in (10, 11, 12)}, FedBuff(3, 3, stages=[Telling()]))
    for _, message in grid.sent:
        assert message.content["config"]["you-are"] == message.metadata.dst_node_id


def test_what_a_stage_changes_is_not_in_the_messages_of_others():
    class First(Telling):
        def outgoing(self, job, content):
            return super().outgoing(job, content) if job.node_id == 10 else content

        def incoming(self, job, content):
            pass

    grid, _ = start({k: adder(1.0, 5.0) for k in (10, 11)}, FedBuff(2, 2, stages=[First()]))
    for _, message in grid.sent:
        assert ("you-are" in message.content["config"]) == (message.metadata.dst_node_id == 10)


def test_a_run_that_goes_on_has_the_state_and_the_notes_of_its_stages(tmp_path):
    class Kept(Notes):
        seen: list

        def begin(self, run, state):
            super().begin(run, state)
            type(self).seen.append((run.is_resumed, self.n_out))

    Kept.seen = []
    nodes = {k: adder(1.0, 5.0) for k in (10, 11)}
    start(nodes, FedBuff(2, 1, stages=[Kept()], checkpoints=Checkpoints(tmp_path)), rounds=5)
    grid = VirtualGrid(nodes)
    grid.sent = [None] * 20
    strategy = FedBuff(2, 1, stages=[Kept()], resume=tmp_path)
    strategy.start(grid, record(w=np.zeros(2)), num_rounds=8, timeout=50.0)
    assert Kept.seen[0] == (False, 0)
    assert Kept.seen[1][0]
    assert Kept.seen[1][1] >= 5


def test_a_strategy_that_is_started_twice_begins_with_fresh_stages():
    class Counting(Stage):
        counts: list

        def __init__(self):
            self.n = 0

        def begin(self, run, state):
            run.on_end.append(lambda problem, version: type(self).counts.append(self.n))

        def outgoing(self, job, content):
            self.n += 1
            return content

    Counting.counts = []
    strategy = FedBuff(1, 1, stages=[Counting()])
    for _ in range(2):
        start({10: NODES[10]}, strategy, rounds=3)
    assert Counting.counts == [3, 3]
    assert strategy.stages[0].n == 0


def test_without_stages_none_of_them_is_on_the_path_of_a_job():
    strategy, called = FedBuff(1, 1), set()
    where = str(Path(stages.__file__).parent)

    def watch(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(where):
            called.add(frame.f_code.co_qualname)

    sys.setprofile(watch)
    try:
        start({10: NODES[10]}, strategy)
    finally:
        sys.setprofile(None)
    assert called == set()


@pytest.mark.parametrize("given", [["int8"], [Notes(), Notes()], [Notes]])
def test_what_are_no_stages_of_different_names_are_refused(given):
    with pytest.raises(
        ConfigError, match=r"strategy\.(StaleStrategy\.)?stages = .*expected instances of Stage"
    ):
        StaleStrategy(stages=given)


def test_a_stage_with_queries_lets_nodes_be_asked_before_they_are_picked():
    class Asking(Stage):
        query, wait_s = "query.mood", 5.0

        def __init__(self):
            self.asked = False

        def queries(self, candidates, now):
            first, self.asked = not self.asked, True
            return candidates.node_ids.tolist() if first else []

    def node(message, grid):
        if message.metadata.message_type == Asking.query:
            return 1.0, RecordDict({})
        return adder(1.0, 2.0)(message, grid)

    strategy = StaleStrategy(
        schedule=Schedule(concurrency=2), stages=[Asking()], min_evaluate_nodes=0
    )
    grid, _ = start({10: node, 11: node}, strategy, rounds=1)
    kinds = [message.metadata.message_type for _, message in grid.sent]
    assert kinds == ["query.mood"] * 2 + ["train"] * 2


def test_two_stages_that_send_queries_are_refused():
    class Asking(Stage):
        query = "query.mood"

    with pytest.raises(ConfigError, match=r"'Asking', 'ForecastRequest'.*at most"):
        StaleStrategy(stages=[Asking(), ForecastRequest()])
