"""When a SuperExec starts a ClientApp in a fork, and when it makes way for a new process.

The forks themselves are those of `test_warm_forks.py`.
"""

import gc
import itertools
import os
import sys
from types import SimpleNamespace

import pytest
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec, SubprocessExecutor
from flwr.supercore.superexec.run_superexec import run_superexec

from fedstale.deployment import warm
from fedstale.deployment.node import FLOWERS_WAY
from fedstale.flower import features

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux alone")


class Children:
    """The children of a process that has none: they end when a test says so."""

    def __init__(self):
        self.pids, self.ended, self.running = itertools.count(10**7), [], set()

    def fork(self):
        self.running.add(pid := next(self.pids))
        return pid

    def waitid(self, *given):
        return SimpleNamespace() if self.ended or not self.running else None

    def waitpid(self, *given):
        if self.ended:
            self.running.discard(pid := self.ended.pop())
            return pid, 0
        if not self.running:
            raise ChildProcessError
        return 0, 0


@pytest.fixture
def children(monkeypatch):
    children = Children()
    for name in ("fork", "waitid", "waitpid"):
        monkeypatch.setattr(os, name, getattr(children, name))
    yield children
    gc.unfreeze()


@pytest.fixture
def executor(children, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    executor = warm.WarmExecutor(flowers=SimpleNamespace(launch=lambda spec: spec.task_type))
    yield executor
    for app in executor._apps.values():
        app.close()


def launched(executor, app="a", kind=TaskType.CLIENT_APP):
    return executor.launch(
        ExecutionSpec(
            task_type=kind,
            runtime_api_address="127.0.0.1:1",
            token="token",
            insecure=True,
            root_certificates_path=None,
            runtime_dependency_install=False,
            parent_pid=os.getpid(),
            suppress_output=False,
            task_id=1,
            fab_hash=app,
        )
    )


def end(executor, children, stage=warm._ENDED):
    """Let a ClientApp end, as far as it has come."""
    ((pid, app),) = executor._apps.items()
    os.pwrite(app.stage.fileno(), stage, 0)
    children.ended.append(pid)


def answered(executor, children, *apps):
    for app in apps:
        launched(executor, app)
        end(executor, children)
        executor.reconcile()


def test_what_is_no_client_app_is_started_as_flower_does(executor):
    assert launched(executor, kind=TaskType.SERVER_APP) == TaskType.SERVER_APP
    assert not executor._apps


def test_all_else_is_asked_of_flowers_own_executor():
    flowers = SubprocessExecutor()
    executor = warm.WarmExecutor(flowers=flowers)
    assert executor.get_eligible_capacity == flowers.get_eligible_capacity
    assert executor.close == flowers.close
    gc.unfreeze()


def test_flowers_superexec_runs_with_warm_client_apps(monkeypatch):
    parts, made = run_superexec.__globals__, []
    monkeypatch.setitem(parts, "get_executor", parts["get_executor"])
    # What it does next when it has its executor.
    monkeypatch.setitem(parts, "RuntimeTracingInterceptor", lambda: sys.exit(len(made)))
    monkeypatch.setattr(warm, "_wait_for", lambda address: None)
    monkeypatch.setattr(warm, "WarmExecutor", lambda **given: made.append(given))
    monkeypatch.setattr(sys, "argv", ["warm", "127.0.0.1:1"])
    monkeypatch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "1")
    with pytest.raises(SystemExit) as ended:
        warm.main()
    assert ended.value.code == 1
    ((name, flowers),) = made[0].items()
    assert name == "flowers"
    assert isinstance(flowers, SubprocessExecutor)


def test_without_a_part_of_flowers_it_says_that_flower_is_to_go_its_own_way(monkeypatch, caplog):
    gone = "flwr.supernode.runtime.run_clientapp:pull_task_input"
    resolves = features.resolves
    features.has.cache_clear()
    monkeypatch.setattr(features, "resolves", lambda name: name != gone and resolves(name))
    monkeypatch.setattr(sys, "argv", ["warm", "127.0.0.1:1"])
    with pytest.raises(SystemExit) as ended:
        warm.main()
    features.has.cache_clear()
    assert ended.value.code == FLOWERS_WAY
    (said,) = caplog.messages
    assert said.startswith("warm ClientApps: off with Flower ")
    assert gone in said


def test_no_process_to_be_had_is_said_and_not_an_end(executor, monkeypatch):
    def fail():
        raise BlockingIOError(11, "Resource unavailable")

    monkeypatch.setattr(os, "fork", fail)
    result = launched(executor)
    assert result.status == "failed"
    assert result.message == "no process could be forked: Resource unavailable"
    executor.reconcile()


def test_another_app_gets_new_interpreters_and_after_three_messages_a_process_of_its_own(
    executor, children
):
    # Two that take turns.
    answered(executor, children, *"abababab", "b")
    assert executor.n_forks == 4
    with pytest.raises(SystemExit) as ended:
        answered(executor, children, "b")
    assert ended.value.code == 0


@pytest.mark.parametrize("worn", [{"most_forks": 1}, {"longest_s": 0.0}])
def test_it_makes_way_for_a_new_process_when_no_client_app_runs(executor, children, worn):
    for name, value in worn.items():
        setattr(executor, name, value)
    launched(executor)
    launched(executor)
    (_, app), (pid, other) = executor._apps.items()
    os.pwrite(other.stage.fileno(), warm._ENDED, 0)
    children.ended.append(pid)
    executor.reconcile()
    assert list(executor._apps.values()) == [app]
    end(executor, children)
    with pytest.raises(SystemExit) as ended:
        executor.reconcile()
    assert ended.value.code == 0


def test_what_is_installed_meanwhile_is_there_for_the_next_message(executor, children, tmp_path):
    answered(executor, children, "a")
    (tmp_path / "new-1.0.dist-info").mkdir()
    launched(executor)
    assert executor.n_forks == 1
    end(executor, children)
    with pytest.raises(SystemExit) as ended:
        executor.reconcile()
    assert ended.value.code == 0


def test_it_asks_for_no_other_message_before_one_is_answered(executor, children, monkeypatch):
    launched(executor)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 30:
            end(executor, children)

    monkeypatch.setattr(warm.time, "sleep", sleep)
    executor.reconcile()
    assert len(waits) == 30
    assert not executor._apps


def test_a_client_app_that_has_answered_and_does_not_end_keeps_no_other_message_back(
    executor, monkeypatch
):
    launched(executor)
    ((pid, app),) = executor._apps.items()
    os.pwrite(app.stage.fileno(), warm._ENDED, 0)
    clock = itertools.count(0.0, 0.25)
    monkeypatch.setattr(warm, "time", SimpleNamespace(monotonic=clock.__next__, sleep=lambda s: 0))
    executor._since = 0.0
    executor.reconcile()
    assert list(executor._apps) == [pid]
    assert next(clock) < 5.0
