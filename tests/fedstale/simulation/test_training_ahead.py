"""Clients run as late as can be, and together with others that will run for certain."""

from dataclasses import replace

import pandas as pd
from flwr.app import ConfigRecord
from tiny import COSTS, counting_app, message_to

from fedstale.simulation import InlineExecutor
from fedstale.strategies.stages.local_work import asking

ALWAYS = [(0, 1000)]


class Together(InlineExecutor):
    """Notes which nodes are trained together."""

    def __init__(self, batch):
        super().__init__(counting_app())
        self.batch, self.runs = batch, []

    def run(self, calls):
        self.runs.append([call.context.node_id for call in calls])
        return super().run(calls)


def pull_all(grid, ids):
    """Pull until every message is answered; return what the server saw, in order."""
    seen, left = [], set(ids)
    while left:
        for reply in grid.pull_messages(left):
            left.discard(reply.metadata.reply_to_message_id)
            state = None if reply.has_error() else dict(reply.content["metrics"])
            seen.append((grid.now(), reply.metadata.reply_to_message_id, state))
    return seen


def run(make_grid, windows, batch, *, compute=1.0, repeats=2, before=lambda grid, ids: None):
    executor = Together(batch)
    grid = make_grid(windows, app=executor, compute=compute)
    ids = []
    for _ in range(repeats):
        nodes = [1000 + i for i in range(len(windows))]
        ids += grid.push_messages([message_to(node, ttl=400.0) for node in nodes])
    before(grid, ids)
    seen = pull_all(grid, ids)
    return seen, executor, grid


SPEEDS = [1.0, 0.5, 0.25, 0.8]


def test_the_server_sees_the_same_whether_jobs_are_trained_ahead_or_not(make_grid):
    lazy, one, first = run(make_grid, [ALWAYS] * 4, 1, compute=SPEEDS)
    ahead, many, second = run(make_grid, [ALWAYS] * 4, 3, compute=SPEEDS)
    assert lazy == ahead
    pd.testing.assert_frame_equal(first.events().to_pandas(), second.events().to_pandas())
    assert max(map(len, one.runs)) == 1
    assert many.runs[0] == [1000, 1003, 1001]
    assert sum(map(len, many.runs)) == len(ahead) == 8


def test_a_nodes_second_job_sees_the_state_of_its_first(make_grid):
    seen, executor, _ = run(make_grid, [ALWAYS] * 2, 8, compute=[1.0, 0.5])
    times = [(state["partition"], state["times"]) for _, _, state in seen]
    assert sorted(times) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert all(len(set(nodes)) == len(nodes) for nodes in executor.runs)


def test_work_that_the_trace_loses_is_never_trained(make_grid):
    windows = [ALWAYS, [(0, 5)], ALWAYS]
    seen, executor, _ = run(make_grid, windows, 8, repeats=1)
    assert sum(state is None for _, _, state in seen) == 1
    assert 1001 not in [node for nodes in executor.runs for node in nodes]


def promising(make_grid, n, executor, compute=1.0):
    """Return a grid of an app that promises the size of its replies, and has shown it once."""
    costs = replace(COSTS, constant_replies=True)
    grid = make_grid([ALWAYS] * n, app=executor, compute=compute, costs=costs)
    grid.send_and_receive([message_to(1000)])
    executor.runs.clear()
    return grid


def test_never_more_than_a_batch_is_trained_ahead(make_grid):
    executor = Together(3)
    grid = promising(make_grid, 8, executor, [1.0 / (i + 1) for i in range(8)])
    ids = list(grid.push_messages([message_to(1000 + i, ttl=900.0) for i in range(8)]))
    assert len(list(grid.pull_messages(ids))) == 1
    # The server loses interest in what is on its way, and asks for the slowest alone.
    assert not list(grid.pull_messages(ids[-1:]))
    while not list(grid.pull_messages(ids[-1:])):
        pass
    assert executor.runs == [[1000, 1001, 1002], [1007]]


def test_no_job_is_trained_along_that_is_lost_or_would_report_after_the_end(make_grid):
    executor, costs = Together(8), replace(COSTS, constant_replies=True)
    windows, speeds = [ALWAYS, ALWAYS, [(0, 20)], ALWAYS], [1.0, 0.5, 0.5, 0.1]
    grid = make_grid(windows, app=executor, compute=speeds, costs=costs, until_s=90.0)
    grid.send_and_receive([message_to(1000)])
    executor.runs.clear()
    ids = list(grid.push_messages([message_to(1000 + i) for i in range(4)]))
    assert len(list(grid.pull_messages(ids))) == 1
    assert executor.runs == [[1000, 1001]]


def test_a_job_trained_ahead_on_an_old_state_is_trained_again(make_grid):
    executor = Together(2)
    grid = promising(make_grid, 2, executor, [1.0, 0.5])
    first, *_ = grid.push_messages([message_to(1000)])
    other, old = grid.push_messages([message_to(1001), message_to(1000)])
    wait_for = [other, old]
    while not (replies := list(grid.pull_messages(wait_for))):
        pass
    # Node 1000 has reported its first job too, which nobody pulled until now.
    (late,) = grid.pull_messages([first])
    seen = [dict(r.content["metrics"]) for r in (*replies, late)]
    assert len(seen) >= 2
    wait_for = [i for i in wait_for if i not in {r.metadata.reply_to_message_id for r in replies}]
    rest = [dict(r.content["metrics"]) for r in pull(grid, wait_for)]
    assert sorted(s["times"] for s in seen + rest if s["partition"] == 0) == [2, 3]


def pull(grid, ids):
    left, replies = set(ids), []
    while left:
        for reply in grid.pull_messages(left):
            left.discard(reply.metadata.reply_to_message_id)
            replies.append(reply)
    return replies


def test_where_a_whole_job_is_asked_for_nothing_is_trained_to_learn_its_work(make_grid):
    executor = Together(1)
    grid = promising(make_grid, 2, executor)
    messages = [message_to(1000), message_to(1001)]
    for message in messages:
        message.content["config"] = asking(message.content["config"], 1.0)
    ids = list(grid.push_messages(messages))
    grid.sleep(500.0)
    assert executor.runs == []
    assert len(list(grid.pull_messages(ids))) == 2


def test_a_state_that_is_empty_is_not_written_to_ahead(make_grid):
    executor = Together(4)
    grid = promising(make_grid, 2, executor, [1.0, 0.5])
    grid._clients._contexts[1001] = grid._clients._new_context(1001)
    ids = list(grid.push_messages([message_to(1000), message_to(1001)]))
    grid.pull_messages(ids)
    assert executor.runs == [[1000, 1001]]
    assert not grid._clients._contexts[1001].state
    assert isinstance(grid._clients._contexts[1000].state["seen"], ConfigRecord)
