"""The process of a ClientApp, which answers one message and notes how far it has come.

It does what flwr-clientapp does, with Flower's own code. Flower's SuperNode waits for ever for a
ClientApp that was killed before its pull or in its push, and no one else knows of it: hence the
note, one byte that the SuperExec sees.
"""

import atexit
import json
import logging
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

from fedstale.deployment.processes import name_process
from fedstale.flower import supernode

_BEGUN, _PULLED, _PUSHING, _ENDED = b"0", b"1", b"2", b"3"
"""How far a ClientApp has come."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)


def leaves_waiting(stage: int) -> bool:
    """Return whether the SuperNode waits for ever for a ClientApp that ended at a stage.

    It does for one that ended before its pull, or in its push. In between it notices that
    heartbeats have ended.
    """
    return os.pread(stage, 1, 0) in {b"", _BEGUN, _PUSHING}


def has_answered(stage: int) -> bool:
    """Return whether a ClientApp's reply has been taken, or never will be."""
    return os.pread(stage, 1, 0) == _ENDED


def answer(spec: Any, stage: int, at_end: Callable[[], None]) -> NoReturn:  # noqa: ANN401 - Flower's
    """Be the process of a ClientApp, as flwr-clientapp is, and end.

    Args:
        spec: what flwr-clientapp is told, with the fields of Flower's `ExecutionSpec`.
        stage: descriptor of a file, empty at first, for how far this has come.
        at_end: called when the message is answered, or never will be.
    """
    status = 1
    forget()
    name_process(supernode.CLIENT_APP)
    sys.argv = [supernode.CLIENT_APP]
    logging.getLogger("flwr").info("Start `%s` process", supernode.CLIENT_APP)
    try:
        supernode.run_client_app(
            spec,
            pulling=partial(_noted, stage, _BEGUN, _PULLED),
            pushing=partial(_noted, stage, _PUSHING, _ENDED),
        )
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os.pwrite(stage, _ENDED, 0)
        at_end()
        _leave(status)


def become(spec: Any, stage: int) -> NoReturn:  # noqa: ANN401 - Flower's
    """Let a new interpreter take the place of this process, which is a fork, and answer."""
    # Not as arguments, which everybody may read.
    told = os.memfd_create("spec")
    os.write(told, json.dumps(asdict(spec)).encode())
    os.lseek(told, 0, os.SEEK_SET)
    os.dup2(told, 0)
    os.set_inheritable(stage, True)
    try:
        os.execv(sys.executable, [sys.executable, "-P", "-m", __name__, str(stage)])
    finally:
        os._exit(1)


def forget() -> None:
    """Be like a new interpreter: with the system's handlers of signals, and chance of its own."""
    for number in _SIGNALS:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)
    supernode.forget_exit_handlers()
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _noted(
    stage: int, during: bytes, after: bytes, part: Callable[..., object], *given: object
) -> object:
    """Do a part of what a ClientApp's process does, and note it."""
    os.pwrite(stage, during, 0)
    found = part(*given)
    os.pwrite(stage, after, 0)
    return found


def _leave(status: int) -> NoReturn:
    """End as an interpreter does, but for taking apart what a fork shares with its parent.

    With torch, that takes longer than all else that a message takes.
    """
    try:
        # What multiprocessing calls at the end of its forks, too.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    answer(SimpleNamespace(**json.load(sys.stdin)), int(sys.argv[1]), lambda: None)
