"""Replies of a SuperLink one by one, and what is said where a SuperLink says nothing."""

import pytest
from flwr.app import Message, RecordDict
from loop_link import LoopLink, asked, grid_of
from virtual_grid import identity

from fedstale.flower import ErrorCode, superlink_grid
from fedstale.flower.superlink_grid import Silence
from fedstale.strategies.server.superlink import SuperLinkGrid, connected


@pytest.fixture(autouse=True)
def who():
    with identity():
        yield


@pytest.fixture
def silent(monkeypatch):
    """Let the SuperLink leave messages unanswered, as that of Flower 1.43 does."""
    made = Silence.__init__

    def make(silence, grid):
        made(silence, grid)
        silence._is_needed = True

    monkeypatch.setattr(Silence, "__init__", make)


class Online:
    """A grid that tells who is online, and counts how often it is asked."""

    def __init__(self, *nodes):
        self.nodes, self.n_asked = set(nodes), 0

    def get_node_ids(self):
        self.n_asked += 1
        return self.nodes


def message(node, ttl=None):
    return Message(RecordDict(), node, "train", ttl=ttl, group_id="7")


def codes(errors):
    return [(error.metadata.reply_to_message_id, error.error.code) for error in errors]


@pytest.mark.usefixtures("silent")
def test_a_node_that_goes_offline_is_answered_for_once():
    grid = Online(5, 6)
    silence = Silence(grid)
    for node in (5, 6):
        silence.sent(f"m{node}", message(node), now=10.0)
    assert silence.errors(["m5", "m6"], now=11.0) == []
    grid.nodes.remove(5)
    found = silence.errors(["m5", "m6"], now=30.0)
    assert codes(found) == [("m5", ErrorCode.NODE_UNAVAILABLE)]
    assert found[0].metadata.group_id == "7"
    assert silence.errors(["m5", "m6"], now=60.0) == []


@pytest.mark.usefixtures("silent")
def test_a_node_that_came_after_the_last_look_is_not_taken_for_gone():
    grid = Online()
    silence = Silence(grid)
    silence.sent("m4", message(4), now=0.0)
    assert len(silence.errors(["m4"], now=1.0)) == 1
    # Joins at 2, is sent something at 3, and the list of who is online is of 1.
    grid.nodes.add(5)
    silence.sent("m5", message(5), now=3.0)
    assert silence.errors(["m5"], now=3.5) == []
    assert silence.errors(["m5"], now=30.0) == []


@pytest.mark.usefixtures("silent")
def test_a_message_that_expires_is_answered_for_although_its_node_is_online():
    silence = Silence(Online(5))
    silence.sent("m5", message(5, ttl=60.0), now=10.0)
    assert silence.errors(["m5"], now=69.9) == []
    assert codes(silence.errors(["m5"], now=70.0)) == [("m5", ErrorCode.MESSAGE_UNAVAILABLE)]


@pytest.mark.usefixtures("silent")
def test_a_reply_that_exists_is_waited_for_and_one_that_is_not_asked_for_stays_unknown():
    grid = Online()
    silence = Silence(grid)
    silence.sent("m5", message(5), now=0.0)
    silence.sent("m6", message(6), now=0.0)
    silence.answered(["m5"])
    assert codes(silence.errors(["m5"], now=30.0)) == []
    assert codes(silence.errors(["m5", "m6"], now=31.0)) == [("m6", ErrorCode.NODE_UNAVAILABLE)]


def test_a_superlink_that_answers_itself_is_asked_nothing():
    grid = Online()
    silence = Silence(grid)
    silence._is_needed = False
    silence.sent("m5", message(5, ttl=1.0), now=0.0)
    assert silence.errors(["m5"], now=99.0) == []
    assert grid.n_asked == 0


@pytest.mark.usefixtures("silent")
def test_the_grid_of_a_serverapp_ends_the_job_of_a_node_that_is_gone(monkeypatch):
    link = LoopLink({7: None})
    monkeypatch.setattr(link, "_answer", lambda *_: None)
    grid = connected(grid_of(link))
    ids = list(grid.push_messages([message(7)]))
    assert not list(grid.pull_messages(ids))
    link.apps.clear()
    silence = grid._uploads._silence
    silence._looked_at -= 60.0
    silence._sent[ids[0]].at -= 60.0
    (error,) = grid.pull_messages(ids)
    assert codes([error]) == [(ids[0], ErrorCode.NODE_UNAVAILABLE)]
    assert grid._open == {}


def test_all_open_messages_are_asked_for_without_a_filter(monkeypatch):
    link, questions = LoopLink({7: None}), []
    monkeypatch.setattr(link, "_answer", lambda *_: None)
    pull = link.PullMessages
    monkeypatch.setattr(
        link, "PullMessages", lambda request: questions.append(asked(request)) or pull(request)
    )
    grid = SuperLinkGrid(grid_of(link))
    ids = list(grid.push_messages([message(7), message(7, ttl=50.0)]))
    grid.pull_messages()
    grid.pull_messages(message_ids=ids[:1])
    grid.pull_messages(ids[1:])
    assert questions == [ids, ids[:1], ids[1:]]
    grid.pull_messages([])
    assert len(questions) == 3


def test_without_its_names_flowers_own_grid_pulls(monkeypatch):
    monkeypatch.setattr(superlink_grid, "has", lambda name: False)
    inner = grid_of(LoopLink({}))
    pulled = []
    monkeypatch.setattr(inner, "pull_messages", lambda ids: pulled.append(ids) or [])
    assert connected(inner).pull_messages(["m1"]) == []
    assert pulled == [["m1"]]
