"""What all tests share: compiled files, signals, log levels, and which tests one process runs."""

import logging
import os
import signal
import sys
from pathlib import Path

import pytest

# In here fedstale is a folder of tests, for which a process that a test starts would take it.
sys.path.remove(str(Path(__file__).parent))

# Tests start many processes: all of them load what the first one compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts what runs in its background with Ctrl-C ignored, and children inherit that; tests
# interrupt theirs.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST_FIRST = (
    "tests/deployment/",
    "tests/project/test_docs.py",
    "tests/fedstale/cli/",
    "tests/agents/training/",
    "tests/project/",
    "tests/fedstale/",
)
"""Files that take long, by how their paths begin: what is begun last must be short."""


@pytest.fixture(autouse=True)
def _root_logger_as_before():
    """Undo what an app under test does to the root logger: other tests ask what is not logged."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def pytest_collection_modifyitems(items):
    """Begin with what takes longest."""

    def place(item):
        begins = (i for i, path in enumerate(LONGEST_FIRST) if item.nodeid.startswith(path))
        return next(begins, len(LONGEST_FIRST))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers():
    """Take one process more than there are cores: tests of deployments often wait."""
    return (yield) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep the tests of a file in one process, which makes what they share once."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            if file == "tests/deployment/test_kills.py":
                # Each has a deployment of its own, which waits most of the time.
                return nodeid
            # These share a deployment.
            return "deployment" if file.startswith("tests/deployment/") else file

    # Files go out in the order above, and not by their number of tests.
    config.option.loadscopereorder = False
    return Scheduling(config, log)
