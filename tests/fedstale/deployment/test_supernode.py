"""A SuperExec's question for a task that waits at the SuperNode, tried on Flower's own app."""

import re
import socket
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PushTaskOutputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.runtime.runtime_http_client import RuntimeHttpClient
from flwr.supernode import main
from flwr.supernode.cli.flower_supernode import _start_supernode_http_api
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.start_client_internal import start_client_internal
from loopback import Loopback

from fedstale.deployment import supernode
from fedstale.deployment.supernode import ReplyWait, WaitingTask, holding
from fedstale.flower import command_line, features

HOLD_S, BRIEF_S = 3.0, 0.3
ASK = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])


class Node:
    """A SuperNode's state and its Runtime API, served."""

    def __init__(self, port, task, pauses, state):
        self.port, self.task, self.pauses, self.state = port, task, pauses, state

    def client(self, *interceptors):
        return RuntimeHttpClient.from_server_address(
            f"127.0.0.1:{self.port}",
            insecure=True,
            root_certificates=None,
            interceptors=[
                *interceptors,
                RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            ],
        )

    def asks(self):
        """Return whether a SuperExec is given a task, and after how many seconds."""
        with closing(self.client()) as client:
            began = time.monotonic()
            answer = client.AcquireTask(ASK)
        return answer.HasField("task"), time.monotonic() - began

    def has_message(self):
        """Do what the SuperNode's loop does when a message has come with all its objects."""
        assert self.state.create_task(task_type=TaskType.CLIENT_APP, run_id=1, fab_hash="a")
        self.task.say()

    def later(self, delay_s, act):
        timer = threading.Timer(delay_s, act)
        timer.start()
        return timer


@contextmanager
def served(hold_s=HOLD_S):
    factory = NodeStateFactory(objectstore_factory=ObjectStoreFactory())
    task, pauses = WaitingTask(), ReplyWait()
    app = holding(create_app(state_factory=factory), task, pauses, hold_s)
    with Loopback().installed() as here, here.asgi(app) as (_, port):
        yield Node(port, task, pauses, factory.state())
        task.close()


@pytest.fixture
def node():
    with served() as node:
        yield node


@pytest.fixture
def brief():
    """Serve a SuperNode that holds questions for a moment."""
    with served(BRIEF_S) as node:
        yield node


def test_a_question_waits_for_a_message_and_is_answered_at_once(node):
    timer = node.later(0.3, node.has_message)
    has_task, took_s = node.asks()
    timer.join()
    assert has_task
    assert 0.25 < took_s < HOLD_S - 0.5


def test_a_question_is_held_for_no_longer_than_was_said(brief):
    has_task, took_s = brief.asks()
    assert not has_task
    assert BRIEF_S - 0.1 < took_s < BRIEF_S + 5.0


def test_a_task_that_is_there_without_a_word_is_given_when_the_time_is_over(brief):
    # It is not lost, whatever the SuperNode's loop does.
    assert brief.state.create_task(task_type=TaskType.CLIENT_APP, run_id=1, fab_hash="a")
    has_task, took_s = brief.asks()
    assert has_task
    assert took_s > BRIEF_S - 0.1


def test_the_question_of_a_superexec_that_was_killed_takes_no_task(node):
    body = ASK.SerializeToString()
    head = (
        "POST /v1/runtime/acquire-task HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: application/x-protobuf\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", node.port)) as killed:
        killed.sendall(head.encode() + body)
        time.sleep(0.2)
    time.sleep(0.2)
    node.has_message()
    time.sleep(0.2)
    has_task, took_s = node.asks()
    assert has_task
    assert took_s < 1.0


def test_a_client_app_that_has_answered_ends_a_pause_of_the_supernode(node):
    node.has_message()
    with closing(node.client()) as client:
        token = client.AcquireTask(ASK).token
    with closing(node.client(RuntimeTokenHttpInterceptor(token))) as client:
        timer = node.later(0.2, lambda: client.PushTaskOutput(PushTaskOutputRequest()))
        began = time.monotonic()
        node.pauses.sleep(60.0)
        assert 0.15 < time.monotonic() - began < 30.0
        timer.join()
    began = time.monotonic()
    node.pauses.sleep(0.2)
    assert time.monotonic() - began > 0.19


def test_nothing_else_is_held(node):
    began = time.monotonic()
    response = httpx.get(f"http://127.0.0.1:{node.port}/health")
    assert response.status_code == httpx.codes.OK
    assert time.monotonic() - began < 1.0


def test_nobody_waits_for_a_supernode_that_ends(node):
    timer = node.later(0.2, node.task.close)
    has_task, took_s = node.asks()
    timer.join()
    assert not has_task
    assert took_s < HOLD_S - 0.5
    assert node.asks()[1] < 1.0


@pytest.fixture
def parts(monkeypatch):
    """Return what Flower's loop finds by name, and put it back afterwards."""
    parts = start_client_internal.__globals__
    for name in ("time", "_push_messages", "_pull_and_store_message"):
        monkeypatch.setitem(parts, name, parts[name])
    monkeypatch.setattr(main, "create_app", create_app)
    monkeypatch.setattr(supernode, "name_process", lambda name: None)
    monkeypatch.setattr("flwr.supercore.exit.add_exit_handler", lambda *given, **named: None)
    monkeypatch.setattr(sys, "argv", [])
    return parts


def test_flowers_own_loop_says_when_a_message_is_whole_and_its_api_holds(monkeypatch, parts):
    replies, said, made, pull = [], [], [], parts["_pull_and_store_message"]
    parts["_push_messages"] = lambda **given: replies.append(given)
    monkeypatch.setattr(WaitingTask, "say", property(lambda task: lambda: said.append(task)))

    def flower_supernode():
        # As Flower's does, which looks both up by these names.
        made.append(main.create_app(state_factory=None))
        parts["_push_messages"](state=1)

    monkeypatch.setattr(command_line, "program", {"flower-supernode": flower_supernode}.get)
    supernode.run(["--insecure"])
    assert sys.argv == ["flower-supernode", "--insecure"]
    assert replies == [{"state": 1}]
    held = [one for one in made[0].user_middleware if one.cls is supernode.TaskLongPoll]
    assert [one.kwargs["task"] for one in held] == said
    names = start_client_internal.__code__.co_names
    assert {"_push_messages", "_pull_and_store_message"} <= set(names)
    assert parts["_pull_and_store_message"].__wrapped__ is pull
    assert isinstance(parts["time"], ReplyWait)
    used = re.findall(r"\btime\.\w+", Path(start_client_internal.__code__.co_filename).read_text())
    assert used == ["time.sleep"] * 3
    assert "create_app" in _start_supernode_http_api.__code__.co_names


def test_a_supernode_whose_parts_are_others_runs_as_it_is(monkeypatch, parts):
    before, ran = dict(parts), []
    monkeypatch.setattr(features, "has", lambda name: False)
    monkeypatch.setattr(command_line, "program", lambda name: lambda: ran.append(name))
    supernode.run(["--insecure"])
    assert ran == ["flower-supernode"]
    assert {name for name in before if parts[name] is not before[name]} == set()
    assert main.create_app is create_app
