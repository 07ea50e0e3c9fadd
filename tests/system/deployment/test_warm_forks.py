"""What a fork in place of a new interpreter may share, and when it must not."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux alone")

# Functions are what ClientApps do; a message names one, and its app.
SCRIPT = """
import json, os, random, signal, sys, time
from pathlib import Path
from unittest.mock import patch

from flwr.supercore.constant import TaskType
from flwr.supercore.exit import register_signal_handlers
from flwr.supercore.exit.exit_handler import registered_exit_handlers
from flwr.supercore.superexec.executor import ExecutionSpec
from flwr.supercore.telemetry import EventType
from flwr.supernode.runtime import run_clientapp as module
from fedstale.deployment import warm

def pull_task_input(client): pass
def push_message(client, message, context): pass

def run_clientapp(token, **options):
    pull_task_input(None)
    globals()[token]()
    push_message(None, None, None)
    sys.exit(0)

module.run_clientapp = run_clientapp

def tell(**about):
    with open("said", "a") as file:
        file.write(json.dumps(about) + "\\n")

def launched(executor, token, app="a", *, own_runtime=False):
    return executor.launch(ExecutionSpec(
        task_type=TaskType.CLIENT_APP, runtime_api_address="127.0.0.1:1", token=token,
        insecure=True, root_certificates_path=None, runtime_dependency_install=own_runtime,
        parent_pid=os.getpid(), suppress_output=False, task_id=1, fab_hash=app,
    ))

def instead(spec, stage):
    tell(new=spec.fab_hash)
    os.pwrite(stage, warm._ENDED, 0)
    os._exit(0)

def settle(executor):
    deadline = time.monotonic() + 30.0
    while executor._apps or executor._trial:
        executor.reconcile()
        assert time.monotonic() < deadline
        time.sleep(0.01)

def answered(executor, *tokens, app="a"):
    for token in tokens:
        launched(executor, token, app)
        settle(executor)
"""


@pytest.fixture
def said(tmp_path):
    """Return a function that runs a script and returns what its ClientApps have told."""
    home, libraries = tmp_path / "home", tmp_path / "libraries"
    (home / "apps" / "own").mkdir(parents=True)
    libraries.mkdir()
    (home / "apps" / "own" / "own_file.py").write_text("COUNT = 0\n")
    (libraries / "a_library.py").write_text("COUNT = 0\n")
    (libraries / "with_thread.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    (libraries / "with_cuda.py").write_text("import torch\nONE = torch.ones(1, device='cuda')\n")
    (libraries / "with_gpu.py").write_text("DEVICE = open('/dev/null')\n")
    (libraries / "with_trap.py").write_text(
        "import os, sys\nif sys.argv != ['flwr-clientapp']: os.abort()\n"
    )

    def run(script):
        result = subprocess.run(
            [sys.executable, "-P", "-c", SCRIPT + textwrap.dedent(script)],
            cwd=tmp_path,
            env={**os.environ, "FLWR_HOME": str(home), "PYTHONPATH": str(libraries)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        lines = (tmp_path / "said").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


def test_a_fork_is_like_a_new_interpreter(said):
    first, second = said("""
        import numpy as np
        register_signal_handlers(EventType.RUN_SUPEREXEC_LEAVE, exit_handlers=[lambda: tell(bad=1)])
        def app():
            options = sys._getframe(1).f_locals["options"]
            tell(
                chance=[random.random(), np.random.rand()],
                handlers=[signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGQUIT)],
                interrupt=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                at_exit=len(registered_exit_handlers),
                argv=sys.argv,
                parent=options["parent_pid"],
                name=Path("/proc/self/comm").read_text().strip(),
            )
        answered(warm.WarmExecutor(flowers=None, owner=7), "app", "app")
        """)
    # It outlives the SuperExec, and ends with the node.
    assert first["parent"] == 7
    assert first.pop("chance") != second.pop("chance")
    assert first == second
    assert first["handlers"] == [0, 0]
    assert first["interrupt"]
    assert first["at_exit"] == 0
    assert (first["argv"], first["name"]) == (["flwr-clientapp"], "flwr-clientapp")


def test_libraries_are_shared_and_neither_the_files_nor_the_state_of_an_app(said):
    found = said("""
        def app():
            here = [name in sys.modules for name in ("a_library", "own_file")]
            sys.path.insert(0, str(Path(os.environ["FLWR_HOME"]) / "apps" / "own"))
            import a_library, own_file
            tell(here=here, counts=[a_library.COUNT, own_file.COUNT])
            a_library.COUNT = own_file.COUNT = 1
        answered(warm.WarmExecutor(flowers=None), "app", "app", "app")
        """)
    assert found == [{"here": [here, False], "counts": [0, 0]} for here in (False, True, True)]


@pytest.mark.parametrize("library", ["with_thread", "with_gpu", "with_trap"])
def test_a_library_that_a_fork_cannot_inherit_is_not_shared(said, library):
    found = said(f"""
        warm._GPUS = "/dev/null"
        # Every process has it open here, but as this library does.
        warm.is_harmless.__globals__["os"].readlink = (
            lambda path, read=os.readlink: "" if path.name in "012" else read(path)
        )
        def app():
            tell(here="{library}" in sys.modules)
            import {library}
        executor = warm.WarmExecutor(flowers=None)
        answered(executor, "app", "app", "app")
        tell(main="{library}" in sys.modules)
        """)
    assert found == [{"here": False}] * 3 + [{"main": False}]


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "with_cuda"])
def test_forks_compute_on_a_gpu_with_the_torch_of_their_parent(said, library):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that CUDA knows")
    found = said(f"""
        def app():
            here = "torch" in sys.modules
            import torch, {library}
            tell(here=here, sum=torch.ones(3, device="cuda").sum().item())
        executor = warm.WarmExecutor(flowers=None)
        answered(executor, "app", "app", "app")
        tell(main="{library}" in sys.modules, harmless=warm.is_harmless())
        """)
    # What opens the GPU as it is imported is imported in each fork.
    is_shared = library == "torch"
    told = [{"here": here, "sum": 3.0} for here in (False, is_shared, is_shared)]
    assert found == [*told, {"main": is_shared, "harmless": True}]


def test_a_fork_ends_as_an_interpreter_does(said):
    found = said("""
        import atexit, threading
        def app():
            file = open("late", "w")
            sys.stdout = open("printed", "w")
            print("buffered")
            atexit.register(tell, at="exit")
            threading.Thread(target=lambda: (time.sleep(0.3), tell(at="end of a thread"))).start()
        answered(warm.WarmExecutor(flowers=None), "app")
        tell(printed=Path("printed").read_text())
        """)
    assert found == [{"at": "end of a thread"}, {"at": "exit"}, {"printed": "buffered\n"}]


@pytest.mark.parametrize(
    ("where", "end"),
    [
        ("pull_task_input", {"end": 76}),
        ("app", {"end": None}),
        ("push_message", {"end": 76}),
        ("at_exit", {"end": None}),
    ],
)
def test_a_kill_that_leaves_the_supernode_waiting_is_told(said, where, end):
    found = said(f"""
        import atexit
        def die(*_): os.kill(os.getpid(), 9)
        def app():
            if "{where}" == "app": die()
            if "{where}" == "at_exit": atexit.register(die)
        globals()["{where}"] = app if "{where}" == "app" else die
        try:
            answered(warm.WarmExecutor(flowers=None), "app")
            tell(end=None)
        except SystemExit as end:
            tell(end=end.code)
        """)
    assert found == [end]


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "sys.exit(1)"])
def test_an_app_that_ends_itself_takes_nothing_else_along(said, end):
    found = said(f"""
        def bad():
            {end}
        def app():
            tell(app=1)
        executor = warm.WarmExecutor(flowers=None)
        answered(executor, "bad", "app")
        assert executor.n_forks == 2
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            tell(zombies=0)
        """)
    assert found == [{"app": 1}, {"zombies": 0}]


def test_what_an_app_leaks_or_forks_is_neither_the_next_messages_nor_the_nodes(said):
    found = said("""
        import multiprocessing
        import psutil
        kept = []
        def app():
            kept.append(b"x" * 100_000_000)
            with multiprocessing.get_context("fork").Pool(2) as pool:
                total = sum(pool.map(abs, [-1, -2]))
            if not os.fork():
                # It outlives the message.
                os.closerange(0, 3)
                time.sleep(5)
                os._exit(0)
            tell(total=total, kept=len(kept))
        me, executor = psutil.Process(), warm.WarmExecutor(flowers=None)
        answered(executor, "app", "app")
        before = me.memory_info().rss
        answered(executor, "app", "app")
        tell(grown=me.memory_info().rss - before > 10_000_000, children=len(me.children()))
        """)
    assert found == [{"total": 3, "kept": 1}] * 4 + [{"grown": False, "children": 0}]


def test_an_app_with_a_runtime_of_its_own_gets_new_interpreters(said):
    found = said("""
        warm.become = instead
        executor = warm.WarmExecutor(flowers=None)
        launched(executor, "app", own_runtime=True)
        settle(executor)
        """)
    assert found == [{"new": "a"}]


NEW_INTERPRETER = """
import json, os, sys

if "--answer" in sys.orig_argv:
    from flwr.supernode.runtime import run_clientapp as module

    def die(*_):
        os.kill(os.getpid(), 9)

    def end(*_):
        pass

    pull_task_input = push_message = end
    if "WHERE" != "app":
        globals()["WHERE"] = die

    def run_clientapp(**given):
        pull_task_input(None)
        if "WHERE" == "app":
            die()
        is_told = given["token"] == "secret" and "secret" not in sys.orig_argv
        with open("said", "a") as file, open("/proc/self/comm") as name:
            print(json.dumps({"told": is_told, "name": name.read().strip()}), file=file)
        push_message(None, None, None)
        sys.exit(0)

    module.run_clientapp = run_clientapp
"""


@pytest.mark.parametrize(
    ("where", "codes"),
    [("pull_task_input", [76]), ("app", [None]), ("push_message", [76]), ("nowhere", [None])],
)
def test_a_new_interpreter_is_told_what_a_fork_is_and_watched_as_one(said, tmp_path, where, codes):
    script = NEW_INTERPRETER.replace("WHERE", where)
    (tmp_path / "libraries" / "sitecustomize.py").write_text(script)
    *said_there, end = said("""
        def app(): pass
        executor = warm.WarmExecutor(flowers=None)
        answered(executor, "app")
        try:
            answered(executor, "secret", app="b")
            tell(end=None)
        except SystemExit as end:
            tell(end=end.code)
        """)
    assert [end["end"]] == codes
    if where in {"push_message", "nowhere"}:
        assert said_there == [{"told": True, "name": "flwr-clientapp"}]
