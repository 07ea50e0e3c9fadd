"""What the room knows of a SuperLink's process, against the Flower that is installed."""

import logging

import pytest
from flwr.common import constant
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore import constant as supercore
from flwr.supercore.logger import console_handler
from starlette.middleware import Middleware
from superlink_app import SuperLink

from fedstale.deployment import long_polls
from fedstale.deployment.long_polls import LongPolls
from fedstale.deployment.superlink import guarded, run
from fedstale.errors import ConfigError
from fedstale.flower import SUPERLINK_NODE_ID, superlink

GATE = {"FleetGate"}
ALL = GATE | {"WaitsForDatabase", "LongPollMiddleware"}


def test_what_stands_on_the_wire_is_spelt_as_flower_spells_it():
    assert constant.TIMESTAMP_HEADER == superlink.TIMESTAMP
    assert supercore.FLEET_HTTP_SIGNATURE_HEADER == superlink.SIGNATURE
    assert supercore.FLEET_HTTP_PUBLIC_KEY_HEADER == superlink.PUBLIC_KEY
    assert supercore.NodeStatus.ONLINE == "online"
    assert constant.SUPERLINK_NODE_ID == SUPERLINK_NODE_ID
    assert supercore.OBJECT_PUSH_SESSION_TTL_SECONDS == long_polls._UPLOAD_S


def test_a_request_is_named_as_flower_has_parsed_it():
    (path,) = (path for _, path in superlink.calls() if path.endswith("fleet/push-messages"))
    link, seen = SuperLink(guarded), []
    link.app.user_middleware.append(Middleware(Noting, seen=seen))
    link.app.middleware_stack = None
    assert superlink.request_of({"type": "http"}) == ("", None)
    link.post(path.replace("push", "pull"), link.victim, link.victim.asking())
    ((name, request, response),) = seen
    assert (name, request) == ("PullMessagesRequest", link.victim.asking())
    assert list(response.messages_list) == []


class Noting:
    """Notes what it reads of a request."""

    def __init__(self, app, seen):
        self.app, self.seen = app, seen

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)
        if scope["type"] == "http":
            self.seen.append((*superlink.request_of(scope), superlink.response_of(scope)))


def test_objects_of_a_message_are_found_without_recursion():
    tree = ObjectTree(object_id="0")
    inner = tree
    for depth in range(90):
        inner = inner.children.add(object_id=str(depth + 1))
    tree.children.add(object_id="last")
    found = superlink.object_ids(tree)
    assert (found[0], len(found), set(found) >= {"90", "last"}) == ("0", 92, True)


def test_uvicorn_logs_as_much_as_flowers_console(monkeypatch):
    monkeypatch.setattr(console_handler, "level", logging.DEBUG)
    assert superlink.log_config()["loggers"]["uvicorn"]["level"] == logging.DEBUG


# What is done where a Flower lacks a name.


def placed(link):
    """Return the names of the middleware of fedstale's in an app."""
    return {
        one.cls.__name__
        for one in link.app.user_middleware
        if one.cls.__module__.startswith("fedstale.")
    }


def made():
    return SuperLink(lambda app: guarded(app, polls=LongPolls(hold_s=0.0)))


def test_what_lacks_a_name_is_left_out_and_the_log_says_so_once(without, caplog):
    assert placed(made()) == ALL
    without(name := "flwr.proto.fleet_pb2:PullMessagesResponse.MESSAGES_LIST_FIELD_NUMBER")
    caplog.clear()
    links = [made() for _ in range(2)]
    assert [placed(link) for link in links] == [ALL - {"LongPollMiddleware"}] * 2
    (line,) = [one.getMessage() for one in caplog.records if one.name == "fedstale.flower.features"]
    assert f"which has no {name}: " in line
    # The gate stands all the same, and a node is served.
    assert links[0].pulled(links[0].victim) == []


@pytest.mark.parametrize(
    "name",
    [
        "flwr.proto.message_pb2:Metadata.REPLY_TO_MESSAGE_ID_FIELD_NUMBER",
        "flwr.common.constant:TIMESTAMP_TOLERANCE",
    ],
)
def test_without_its_gate_no_superlink_starts(without, name, tmp_path, monkeypatch):
    without(name)
    monkeypatch.setattr(superlink, "app_of", lambda arguments: pytest.fail("it was made"))
    with pytest.raises(ConfigError, match=f"has no {name}: registered devices could give orders"):
        run(["--database", str(tmp_path / "superlink.db")])
    with pytest.raises(ConfigError, match=name):
        SuperLink(guarded)


def test_without_flowers_table_of_calls_there_is_no_proxy(without):
    without("flwr.supercore.protobuf.translation:PROTOBUF_REQUEST_TYPES")
    with pytest.raises(ConfigError, match=r"table of calls: .* no proxy can be set up"):
        superlink.calls()


def test_without_turns_flower_uses_its_own(without, tmp_path, monkeypatch):
    without("flwr.supercore.corestate.sql_corestate:SqlCoreState.store_object")
    monkeypatch.setattr(superlink, "take_turns", lambda: pytest.fail("it was installed"))
    monkeypatch.setattr("fedstale.deployment.superlink.os.umask", lambda mode: 0)

    class ReachedError(Exception):
        pass

    def app_of(arguments):
        raise ReachedError

    monkeypatch.setattr(superlink, "app_of", app_of)
    with pytest.raises(ReachedError):
        run([])
