"""Clocks of devices and of the server that are wrong or jump, on Flower's own app."""

import datetime
import logging
from types import SimpleNamespace

import pytest
from databases import on_disk
from flwr.supercore import date
from hostile import Device
from superlink_app import PULL, SuperLink

from fedstale.deployment.superlink import guarded
from fedstale.deployment.waiting import SteadyClock
from fedstale.flower.superlink import reckon_by, shift

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


@pytest.fixture
def wall(monkeypatch):
    """Return a wall clock that jumps, in s ahead of the right time, for Flower's `now` as well."""
    ahead = {"s": 0.0}
    read = SimpleNamespace(now=lambda tz: at(ahead["s"]).astimezone(tz))
    monkeypatch.setattr(date, "datetime", SimpleNamespace(datetime=read, UTC=datetime.UTC))
    return ahead


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_jump_of_the_servers_clock_ends_no_run_and_loses_no_node(wall, tmp_path, caplog, jump_s):
    def become_of(link):
        wall["s"] = jump_s
        # Flower looks for what has lapsed in threads of its own, too.
        link.state.get_run_status({link.run_id})
        link.post(PULL, link.victim, link.victim.asking(), link.victim.headers(at(jump_s)))
        (status,) = link.state.get_run_status({link.run_id}).values()
        until = link.state.get_node_info(node_ids=[link.victim.node_id])[0].online_until
        online = link.state.get_nodes(link.run_id)
        return status.status, len(online), until - at(jump_s).timestamp() < 100

    before = become_of(on_disk(lambda app: app, tmp_path / "before.db"))
    # Backwards a node that has gone would count as online for an hour more.
    assert before == (("finished", 0, True) if jump_s > 0 else ("running", 2, False))
    wall["s"] = 0.0
    clock = SteadyClock(wall=lambda: at(wall["s"]).timestamp())
    reckon_by(clock.now)
    link = on_disk(lambda app: guarded(app, clock=clock), tmp_path / "now.db")
    assert become_of(link) == ("running", 2, True)
    (line,) = [record.getMessage() for record in caplog.records if "jumped" in record.getMessage()]
    assert line.startswith(f"this server's clock has jumped by {jump_s:+.0f} s")


def test_what_is_alive_lives_as_much_longer_as_the_clock_has_jumped(tmp_path):
    link = on_disk(guarded, tmp_path / "link.db")

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
    clock = SteadyClock(wall=wall, steady=lambda: 0.0)
    assert clock.now(datetime.UTC).timestamp() == 100.0
    assert (clock.jump_s(), clock.jump_s()) == (0.0, 8.0)
