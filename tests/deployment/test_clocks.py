"""Clocks of devices and of the server that are wrong or jump, on Flower's own app."""

import datetime
import logging

import pytest
from hostile import Device
from starlette.middleware import Middleware
from superlink_app import PULL, SuperLink

from fedstale.deployment.clock import ServerClock, shift
from fedstale.deployment.superlink import guarded

# Flower's own migrations of its database warn.
pytestmark = pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")

HOUR_S = 3600.0


def at(offset_s):
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=offset_s)


def asked(link, device, offset_s=0.0):
    return link.post(PULL, device, device.asking(), device.headers(at(offset_s))).status_code


@pytest.fixture
def link():
    return SuperLink(guarded)


@pytest.mark.parametrize(
    ("offset_s", "side"), [(-600, "600 s behind"), (600, "600 s ahead of"), (7, "7 s ahead of")]
)
def test_a_node_whose_clock_is_wrong_waits_until_it_is_right(link, caplog, offset_s, side):
    without = SuperLink(lambda app: app)
    # A SuperNode that reads this ends.
    assert asked(without, without.victim, offset_s) == 401
    with caplog.at_level(logging.WARNING, "fedstale"):
        assert [asked(link, link.victim, offset_s) for _ in range(3)] == [503] * 3
        assert [asked(link, link.victim) for _ in range(2)] == [200] * 2
    wrong, right = [one.getMessage() for one in caplog.records if one.name.startswith("fedstale")]
    assert wrong.startswith(f"node {link.victim.node_id}: its clock is {side} this server's")
    assert right == f"node {link.victim.node_id}: its clock is right again"
    # It may join with a wrong clock, too.
    headers = link.victim.headers(at(offset_s))
    answer = link.post("/v1/fleet/activate-node", link.victim, link.victim.joining(), headers)
    assert answer.status_code == 503


def test_a_stranger_with_a_wrong_clock_is_no_node(link, caplog):
    stranger = Device(node_id=link.victim.node_id)
    assert asked(link, stranger, -600) == 401
    # The key of a node, with a signature that is none of its own.
    headers = stranger.headers(at(-600)) | {
        "flwr-public-key": link.victim.headers()["flwr-public-key"]
    }
    assert link.post(PULL, link.victim, link.victim.asking(), headers).status_code == 401
    for broken in (
        {"flwr-timestamp": "noon"},
        {"flwr-signature": "?"},
        {"flwr-public-key": "AA=="},
    ):
        headers = link.victim.headers(at(-600)) | broken
        assert link.post(PULL, link.victim, link.victim.asking(), headers).status_code == 401
    assert not [record for record in caplog.records if record.name.startswith("fedstale")]


class Clocks:
    """A wall clock that jumps, for the app and for Flower's `now` alike."""

    def __init__(self, monkeypatch):
        self.ahead_s = 0.0
        own = self

        class Jumping(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return at(own.ahead_s).astimezone(tz)

        fake = type("module", (), {"datetime": Jumping, "UTC": datetime.UTC})
        monkeypatch.setattr("flwr.supercore.date.datetime", fake)

    def guarded(self, app):
        guarded(app)
        ours = app.user_middleware
        place = [one.cls for one in ours].index(ServerClock)
        ours[place] = Middleware(ServerClock, wall=lambda: self.ahead_s, steady=lambda: 0.0)
        return app


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_jump_of_the_servers_clock_ends_no_run_and_loses_no_node(
    monkeypatch, tmp_path, caplog, jump_s
):
    clocks = Clocks(monkeypatch)
    ends = {}
    for name, wrap in (("before", lambda app: app), ("now", clocks.guarded)):
        clocks.ahead_s = 0.0
        link = SuperLink(wrap, str(tmp_path / f"{name}.db"))
        link.post(PULL, link.victim, link.victim.asking())
        clocks.ahead_s = jump_s
        # Any request lets Flower look for what has lapsed.
        link.post(PULL, link.victim, link.victim.asking(), link.victim.headers(at(jump_s)))
        (status,) = link.state.get_run_status({link.run_id}).values()
        online = link.state.get_nodes(link.run_id)
        until = link.state.get_node_info(node_ids=[link.victim.node_id])[0].online_until
        ends[name] = status.status, len(online), until - at(jump_s).timestamp() < 100
    # Backwards a node that has gone would count as online for an hour more.
    assert ends["before"] == (("finished", 0, True) if jump_s > 0 else ("running", 2, False))
    assert ends["now"] == ("running", 2, True)
    (line,) = [record.getMessage() for record in caplog.records if "jumped" in record.getMessage()]
    assert line.startswith(f"this server's clock has jumped by {jump_s:+.0f} s")


def test_what_is_alive_lives_as_much_longer_as_the_clock_has_jumped(tmp_path):
    link = SuperLink(guarded, str(tmp_path / "link.db"))

    def until():
        (task,) = link.state.get_tasks(run_ids=[link.run_id])
        (node,) = link.state.get_node_info(node_ids=[link.victim.node_id])
        return task.task_id, node.online_until

    before = until()
    shift(link.state, 60.0)
    assert until() == (before[0], pytest.approx(before[1] + 60.0))
    # In memory alone, nothing is known of.
    shift(SuperLink(guarded).state, 60.0)


def test_small_steps_of_the_clock_add_up():
    wall = iter([100.0, 104.0, 108.0]).__next__
    clock = ServerClock(None, wall=wall, steady=lambda: 0.0)
    assert (clock.jump_s(), clock.jump_s()) == (0.0, 8.0)
