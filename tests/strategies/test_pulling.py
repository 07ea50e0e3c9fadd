"""Fetching replies from a SuperLink while some devices are still uploading."""

import json
import logging
import threading
import time
import tracemalloc
from math import inf

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from flwr.app.error import Error
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from loop_link import asked, grid_of
from virtual_grid import VirtualGrid, content, identity, record

from fedstale.strategies import GapAware
from fedstale.strategies.server.checks import sizes_of
from fedstale.strategies.server.superlink import (
    SuperLinkGrid,
    Uploads,
    connected,
    without_stalls,
)

N = 3


class SuperLink:
    """The Runtime API of a SuperLink as a client of it sees it, without a network."""

    def __init__(self, delay_s=lambda node: 0.0):
        self.delay_s = delay_s
        self.lock = threading.Lock()
        self.replies, self.told, self.objects, self.confirmed = {}, set(), {}, []
        self.polls = self.at_once = self.most_at_once = self.n_pulled = 0
        self.lost, self.fails = set(), None

    def answer(self, message, answer):
        reply = Message(answer, reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        ready = time.monotonic() + self.delay_s(message.metadata.dst_node_id)
        objects = {i: (o.deflate(), ready) for i, o in get_all_nested_objects(reply).items()}
        proto = message_to_proto(remove_content_from_message(reply))
        with self.lock:
            self.objects.update(objects)
            self.replies[message.metadata.message_id] = (proto, get_object_tree(reply))
        return get_object_tree(reply).object_id

    def PullMessages(self, request):  # noqa: N802
        with self.lock:
            self.polls += 1
            wanted = set(asked(request))
            assert not wanted & self.told, "a second question gets an error"
            found = [self.replies[i] for i in sorted(wanted & self.replies.keys())]
            self.told |= wanted & self.replies.keys()
            return PullAppMessagesResponse(
                messages_list=[proto for proto, _ in found],
                message_object_trees=[tree for _, tree in found],
            )

    def PullObject(self, request):  # noqa: N802
        if self.fails:
            raise self.fails
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(0.002)
        with self.lock:
            self.at_once -= 1
            if request.object_id in self.lost:
                return PullObjectResponse(object_found=False)
            data, ready = self.objects[request.object_id]
            self.n_pulled += data.startswith(b"ArrayChunk")
            if time.monotonic() < ready:
                return PullObjectResponse(object_found=True, object_available=False)
            return PullObjectResponse(object_found=True, object_available=True, object_content=data)

    def ConfirmMessageReceived(self, request):  # noqa: N802
        self.confirmed.append(request.message_object_id)

    def close(self):
        pass


@pytest.fixture(autouse=True)
def who():
    with identity():
        yield


def message(node):
    sent = Message(RecordDict(), node, "train")
    sent.metadata.__dict__["_message_id"] = f"m{node}"
    return sent


def arrays(value):
    return content(record(w=np.full(50, value)), examples=2)


def gather(grid, ids, n, limit_s=10.0):
    """Pull as the event loop does; return the instant at which each reply came."""
    start, came = time.monotonic(), {}
    while len(came) < n and time.monotonic() < start + limit_s:
        grid.wait(start + limit_s)
        for reply in grid.pull_messages([i for i in ids if i not in came]):
            came[reply.metadata.reply_to_message_id] = (time.monotonic() - start, reply)
    return came


def test_a_slow_upload_holds_up_nobody_else():
    link = SuperLink(delay_s=lambda node: 1.5 if node == 0 else 0.0)
    for node in range(N):
        link.answer(message(node), arrays(float(node)))
    with without_stalls(grid_of(link)) as grid:
        came = gather(grid, ["m0", "m1", "m2"], N)
    assert max(came["m1"][0], came["m2"][0]) < 1.0
    assert 1.5 <= came["m0"][0] < 4.0
    for node in range(N):
        assert came[f"m{node}"][1].content["arrays"]["w"].numpy()[0] == node
    assert len(link.confirmed) == N


def test_flowers_own_grid_waits_for_the_slowest():
    link = SuperLink(delay_s=lambda node: 0.8 if node == 0 else 0.0)
    for node in range(N):
        link.answer(message(node), arrays(1.0))
    start = time.monotonic()
    assert len(list(grid_of(link).pull_messages([f"m{i}" for i in range(N)]))) == N
    assert time.monotonic() - start > 0.8


def test_a_reply_is_the_same_as_flower_gives():
    def pulled(wrap):
        link = SuperLink()
        link.answer(message(7), arrays(3.0))
        if not wrap:
            (reply,) = grid_of(link).pull_messages(["m7"])
            return reply
        with without_stalls(grid_of(link)) as grid:
            return gather(grid, ["m7"], 1)["m7"][1]

    theirs, ours = pulled(wrap=False), pulled(wrap=True)
    assert ours.content.object_id == theirs.content.object_id
    assert ours.metadata.reply_to_message_id == theirs.metadata.reply_to_message_id
    assert ours.metadata.src_node_id == theirs.metadata.src_node_id


def test_an_upload_that_was_broken_off_becomes_flowers_error_reply():
    link = SuperLink(delay_s=lambda node: 1e9)
    root = link.answer(message(1), arrays(1.0))
    with without_stalls(grid_of(link)) as grid:
        assert gather(grid, ["m1"], 1, limit_s=0.5) == {}
        link.lost.add(root)
        came = gather(grid, ["m1"], 1)
    assert came["m1"][1].has_error()
    assert "unavailable" in came["m1"][1].error.reason


def another_kind(link, root):
    link.objects[root] = (RecordDict().deflate(), 0.0)


def noise(link, root):
    link.objects[root] = (b"\xff" * 1000, 0.0)


def deeper_noise(link, root):
    tree = link.replies["m0"][1].children[0]
    assert link.objects[tree.object_id][0].startswith(b"RecordDict")
    link.objects[tree.object_id] = (b"RecordDict  3\0\xff\xff\xff", 0.0)


def in_anothers_name(link, root):
    sent = message(1)
    sent.metadata.__dict__["_dst_node_id"] = 2
    forged = Message(arrays(1.0), reply_to=sent)
    forged.metadata.__dict__["_message_id"] = forged.object_id
    for object_id, made in get_all_nested_objects(forged).items():
        link.objects[object_id] = made.deflate(), 0.0
    link.objects[root] = link.objects[forged.object_id]
    proto, _ = link.replies["m0"]
    link.replies["m0"] = proto, get_object_tree(forged)


@pytest.mark.parametrize("spoil", [another_kind, noise, deeper_noise, in_anothers_name])
def test_a_reply_that_cannot_be_read_is_an_error_of_its_own_job_alone(spoil, caplog):
    link = SuperLink()
    root, *_ = [link.answer(message(node), arrays(float(node))) for node in range(N)]
    spoil(link, root)
    with without_stalls(grid_of(link)) as grid:
        came = gather(grid, [f"m{k}" for k in range(N)], N)
    about = {i: reply for i, (_, reply) in came.items()}
    assert set(about) == {"m0", "m1", "m2"}
    assert [about[f"m{k}"].has_error() for k in range(N)] == [True, False, False]
    assert about["m0"].error.reason.startswith("the reply cannot be read: ")
    assert about["m0"].metadata.src_node_id == 0
    assert "node 0: its reply cannot be read" in caplog.text


def repeated(link, node, times):
    """Let the only array of a reply hold its only chunk many times."""
    array = next(x for x, (data, _) in link.objects.items() if data.startswith(b"Array "))
    head, _, body = link.objects[array][0].partition(b"\0")
    said = json.loads(body) | {"arraychunk_ids": [0] * times}
    link.objects[array] = head + b"\0" + json.dumps(said).encode(), 0.0


def pulled_within(most_bytes, body, spoil=None):
    """What comes of a reply, the requests for its objects, and the peak of memory."""
    link = SuperLink()
    link.answer(message(1), body)
    if spoil is not None:
        spoil(link)
    with without_stalls(grid_of(link)) as grid:
        grid.runtime.most_bytes = most_bytes
        tracemalloc.start()
        (reply,) = [reply for _, reply in gather(grid, ["m1"], 1).values()]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert len(link.confirmed) == 1
    return reply, link, peak


@pytest.mark.parametrize("most_bytes", [10**6, inf])
def test_a_chunk_that_stands_in_an_array_many_times_is_no_way_to_fill_memory(most_bytes, caplog):
    body = content(record(w=np.zeros(10**5, np.uint8)), 2)
    reply, _, peak = pulled_within(most_bytes, body, lambda link: repeated(link, 1, 50_000))
    assert "it has 5,00" in reply.error.reason
    assert "node 1: its reply cannot be read" in caplog.text
    assert peak < 10**7
    # So an honest array of zeros travels.
    reply, _, _ = pulled_within(most_bytes, body, lambda link: repeated(link, 1, 8))
    assert len(reply.content["arrays"]["w"].data) == 8 * (10**5 + 128)


def test_a_reply_of_more_than_a_loop_takes_in_is_not_fetched_whole(caplog):
    chunks = 40
    body = content(record(**{f"w{k}": np.full(10**5, k, np.uint8) for k in range(chunks)}), 2)
    reply, link, _ = pulled_within(10**6, body)
    assert reply.error.reason.startswith("the reply cannot be read: it has 2,0")
    assert link.n_pulled < chunks
    assert reply.metadata.src_node_id == 1
    reply, link, _ = pulled_within(4 * 10**6, body)
    assert len(reply.content["arrays"]) == chunks


def test_small_arrays_are_not_taken_for_a_large_reply():
    body = content(record(**{f"w{k}": np.zeros(1) + k for k in range(150)}), 2)
    reply, _, _ = pulled_within(sizes_of(body)[0], body)
    assert len(reply.content["arrays"]) == 150


def test_an_error_reply_passes():
    link = SuperLink()
    link.answer(message(1), Error(5, "gone"))
    with without_stalls(grid_of(link)) as grid:
        assert gather(grid, ["m1"], 1)["m1"][1].error.reason == "gone"


def test_what_is_fetched_ahead_is_bounded():
    link = SuperLink()
    ids = []
    for node in range(20):
        link.answer(message(node), arrays(1.0))
        ids.append(f"m{node}")
    uploads = Uploads(grid_of(link), workers=2, max_held=4)
    grid = SuperLinkGrid(grid_of(link), uploads=uploads)
    assert not grid.pull_messages(ids)
    time.sleep(0.5)
    assert len(link.confirmed) == 4
    first = list(grid.pull_messages(ids))
    assert len(first) == 4
    done = {reply.metadata.reply_to_message_id for reply in first}
    assert len(gather(grid, [i for i in ids if i not in done], 16)) == 16
    uploads.close()


def test_a_failure_in_a_worker_reaches_the_event_loop():
    link = SuperLink()
    link.answer(message(1), arrays(1.0))
    link.fails = ConnectionError("the SuperLink is gone")
    with without_stalls(grid_of(link)) as grid, pytest.raises(ConnectionError, match="is gone"):
        gather(grid, ["m1"], 1)


def test_polls_become_rarer_while_nothing_happens_and_frequent_again_after_a_push():
    grid = Uploads(grid_of(SuperLink()), poll_s=0.01, longest_poll_s=0.2)
    start = time.monotonic()
    grid.wait(start + 1e6)
    assert time.monotonic() - start < 0.15
    grid._active_at -= 100.0
    start = time.monotonic()
    grid.wait(start + 1e6)
    assert time.monotonic() - start >= 0.2
    start = time.monotonic()
    grid.wait(start)
    assert time.monotonic() - start < 0.1
    grid.close()


def test_it_keeps_the_clock_and_leaves_grids_with_a_runtime_alone():
    with without_stalls(grid_of(SuperLink())) as grid:
        assert grid.runtime.clock is grid
    simulated = VirtualGrid({})
    with without_stalls(simulated) as grid:
        assert grid is simulated


def test_a_strategy_trains_over_it_while_one_device_uploads_slowly(monkeypatch):
    link = SuperLink(delay_s=lambda node: 30.0 if node == 0 else 0.01)
    inner = grid_of(link)
    sent = []

    def push(messages):
        for one in messages:
            one.metadata.__dict__["_message_id"] = f"m{len(sent)}"
            sent.append(one)
            link.answer(one, arrays(1.0))
        return [one.metadata.message_id for one in messages]

    monkeypatch.setattr(inner, "push_messages", push)
    monkeypatch.setattr(inner, "get_node_ids", lambda: [0, 1, 2])
    start = time.monotonic()
    with without_stalls(inner) as grid:
        result = GapAware(concurrency=3, buffer_size=2, seed=1).start(
            grid, record(w=np.zeros(50)), num_rounds=3, timeout=60
        )
    assert time.monotonic() - start < 15.0
    assert set(result.train_metrics_clientapp) == {1, 2, 3}


def test_the_log_of_a_run_goes_where_flowers_goes(monkeypatch):
    lines = []

    class Handler(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [Handler()])
    ours = logging.getLogger("fedstale.strategies.any")
    before = logging.getLogger("fedstale").level
    with without_stalls(grid_of(SuperLink())):
        ours.info("shown")
        ours.debug("not shown")
    ours.info("not shown any more")
    assert lines == ["shown"]
    assert logging.getLogger("fedstale").level == before
    monkeypatch.setattr(logging.getLogger("fedstale"), "handlers", [logging.NullHandler()])
    with without_stalls(grid_of(SuperLink())):
        ours.info("its user has said where it goes")
    assert lines == ["shown"]


def test_a_grid_of_flowers_has_one_runtime_however_often_it_is_connected_to():
    inner = grid_of(SuperLink())
    grid = connected(inner)
    assert connected(inner) is grid
    assert connected(grid) is grid
    with without_stalls(inner) as again:
        assert again is grid


def test_its_threads_may_end_and_fetch_again():
    link = SuperLink()
    inner = grid_of(link)
    for node in range(2):
        link.answer(message(node), arrays(1.0))
        with without_stalls(inner) as grid:
            assert len(gather(grid, [f"m{node}"], 1)) == 1


def test_an_upload_of_some_seconds_is_seen_soon_after_its_end():
    link = SuperLink(delay_s=lambda node: 1.6)
    link.answer(message(0), arrays(1.0))
    with without_stalls(grid_of(link)) as grid:
        came = gather(grid, ["m0"], 1)
    # Looks that double, at .1, .3, .7, 1.5 and 3.1 s, would be late.
    assert came["m0"][0] < 2.5


def test_an_upload_that_is_under_way_is_looked_at_between_polls():
    link = SuperLink(delay_s=lambda node: 0.3)
    link.answer(message(0), arrays(1.0))
    uploads = Uploads(grid_of(link), poll_s=5.0, longest_poll_s=5.0)
    grid = SuperLinkGrid(grid_of(link), uploads=uploads)
    assert not grid.pull_messages(["m0"])
    start = time.monotonic()
    grid.wait(start + 60.0)
    assert time.monotonic() - start < 2.0
    assert len(grid.pull_messages(["m0"])) == 1
    uploads.close()
