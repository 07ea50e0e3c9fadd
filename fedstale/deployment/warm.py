"""ClientApps that start in a fork of a process which has their libraries already.

Flower's SuperExec starts a new interpreter for each message. That one imports Flower and then
whatever the app imports, which takes seconds of processor time, mostly the same each time. Here the
SuperExec of a SuperNode has imported Flower, and each message has a fork of it, in which Flower's
own `run_clientapp` does what it always does: one process a message, of which nothing is left. Each
notes in one byte how far it has come, because Flower's SuperNode waits for ever for a ClientApp
that was killed before its pull or in its push.

What an app imports besides its own files is learnt from the first message. A fork tries to import
the same, and only if nothing came of it that a fork cannot inherit (threads of Python, an opened
GPU) does the SuperExec import it too. The app itself is never imported there, so that what the app
starts, CUDA above all, starts in the fork.

This holds for one app at a time, known by the hash of its bundle: another one may have files of
the same names as libraries, so its messages get new interpreters. If three in a row are for others,
or libraries were installed, or after so many forks or hours, the SuperExec ends as soon as no
ClientApp runs, and `fedstale.deployment.node` starts a new one.
"""

import argparse
import atexit
import gc
import importlib
import json
import logging
import math
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from fedstale.deployment.node import FLOWERS_WAY, STUCK
from fedstale.deployment.processes import name_process
from fedstale.flower import command_line, features, supernode

logger = logging.getLogger(__name__)
_log = logging.getLogger("flwr")

_OTHERS = 3
_MOST_BYTES = 10_000_000
_POLL_S = 0.1
"""Pause before each question for work, which the SuperNode then holds."""
_ENDS_S = 1.0
"""How long a ClientApp that has answered may take to end before the next question."""
_NOTICED = os.WEXITED | os.WNOHANG | os.WNOWAIT
"""Whether a child has ended, which is waited for later."""
_GPUS = "/dev/nvidia", "/dev/kfd", "/dev/dri"
_MODULE = "fedstale.deployment.warm"
_BEGUN, _PULLED, _PUSHING, _ENDED = b"0", b"1", b"2", b"3"
"""How far a ClientApp has come."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)


@dataclass(slots=True)
class _App:
    """The process of a ClientApp that answers a message."""

    imported: IO[str] = field(default_factory=lambda: _nameless("imported"))
    """What a fork has imported when it ends."""
    stage: IO[str] = field(default_factory=lambda: _nameless("stage"))
    """How far it has come."""

    def close(self) -> None:
        """Forget what it has told."""
        self.imported.close()
        self.stage.close()


@dataclass(eq=False, kw_only=True)
class WarmExecutor:
    """Starts ClientApps by a fork of this process, and does all else as Flower does."""

    flowers: Any
    """Flower's own executor."""
    most_forks: int = 1000
    """After so many, a new process takes its place."""
    longest_s: float = 86_400.0
    """After so many s likewise."""
    owner: int = field(default_factory=os.getppid)
    """Process with which ClientApps end. If it were this one, a SuperNode whose SuperExec is killed
    would wait for ever for the answer of a ClientApp that was stopped."""
    fab_hash: str | None = field(default=None, init=False)
    """Of the app whose libraries are here, or will be."""
    n_forks: int = field(default=0, init=False)
    """Messages that had a fork."""
    _apps: dict[int, _App] = field(default_factory=dict, init=False)
    """Those that run, by process."""
    _trial: tuple[int, list[str]] | None = field(default=None, init=False)
    """The fork that tries to import libraries, and which."""
    _tried: set[str] = field(default_factory=set, init=False)
    """All that were ever tried."""
    _others: int = field(default=0, init=False)
    """Messages in a row that were for other apps."""
    _since: float = field(default_factory=time.monotonic, init=False)
    _installed: dict[Path, int] = field(init=False)
    _is_outdated: bool = field(default=False, init=False)
    """Whether other libraries are installed now."""

    def __post_init__(self) -> None:
        self._installed = installed()
        gc.freeze()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.flowers, name)

    def launch(self, spec: Any) -> Any:
        """Start the ClientApp for a message; its process never returns from here."""
        if spec.task_type != supernode.CLIENT_APP:
            return self.flowers.launch(spec)
        if self.fab_hash is None:
            self.fab_hash = spec.fab_hash
        is_ours = spec.fab_hash is not None and spec.fab_hash == self.fab_hash
        self._others = 0 if is_ours else self._others + 1
        self._is_outdated |= installed() != self._installed
        # A runtime of its own has libraries of its own.
        is_warm = is_ours and not spec.runtime_dependency_install and not self._is_outdated
        app = _App()
        known = self._tried.union(sys.modules)
        try:
            pid = _fork()
        except OSError as problem:
            app.close()
            return supernode.launched(f"no process could be forked: {problem.strerror}")
        if not pid:
            self._apps.clear()
            spec = replace(spec, parent_pid=self.owner)
            if not is_warm:
                become(spec, app.stage.fileno())
            answer(spec, app.stage.fileno(), lambda: _report_imports(app.imported, known))
        self._apps[pid] = app
        self.n_forks += is_warm
        return supernode.launched()

    def reconcile(self) -> None:
        """Reap ended forks, import libraries that have proved harmless, and end in time.

        A SuperNode has no other message before one is answered, so until then nobody asks for one.

        Raises:
            SystemExit: another process is to take its place; or the SuperNode's as well.
        """
        deadline = math.inf
        while self._apps and not os.waitid(os.P_ALL, 0, _NOTICED) and time.monotonic() < deadline:
            if all(has_answered(app.stage.fileno()) for app in self._apps.values()):
                deadline = min(deadline, time.monotonic() + _ENDS_S)
            time.sleep(_POLL_S)
        for pid, status in _ended():
            if pid in self._apps:
                with closing(self._apps.pop(pid)) as app:
                    self._try(_imports_in(app.imported))
                    if leaves_waiting(app.stage.fileno()):
                        _log.error("a ClientApp was killed as it spoke with its SuperNode")
                        raise SystemExit(STUCK)
            elif self._trial is not None and pid == self._trial[0]:
                names, self._trial = self._trial[1], None
                self._share(names, is_harmless=status == 0)
        is_old = time.monotonic() > self._since + self.longest_s or self.n_forks >= self.most_forks
        is_worn = is_old or self._is_outdated or self._others >= _OTHERS
        if is_worn and not self._apps and self._trial is None:
            raise SystemExit(0)

    def _try(self, names: list[str]) -> None:
        """Import libraries in a fork, to see whether that does harm."""
        new = [name for name in names if name not in self._tried]
        if not new or self._trial is not None:
            return
        self._tried.update(new)
        pid = _fork()
        if not pid:
            forget()
            _import(new)
            os._exit(0 if is_harmless() else 1)
        self._trial = pid, new

    def _share(self, names: list[str], *, is_harmless: bool) -> None:
        """Import libraries for all forks from now on, if that does no harm."""
        if not is_harmless:
            first = ", ".join(sorted({name.partition(".")[0] for name in names}))
            _log.warning("imported for each message anew, since a fork cannot: %s", first)
            return
        _import(names)
        # A fork shares what it does not write, and collecting garbage writes.
        gc.collect()
        gc.freeze()


def leaves_waiting(stage: int) -> bool:
    """Return whether the SuperNode waits for ever for a ClientApp that ended at a stage.

    It does for one that ended before its pull, or in its push. In between it notices that
    heartbeats have ended.
    """
    return os.pread(stage, 1, 0) in {b"", _BEGUN, _PUSHING}


def has_answered(stage: int) -> bool:
    """Return whether a ClientApp's reply has been taken, or never will be."""
    return os.pread(stage, 1, 0) == _ENDED


def answer(spec: Any, stage: int, at_end: Callable[[], None]) -> NoReturn:
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


def become(spec: Any, stage: int) -> NoReturn:
    """Replace this process, which is a fork, by a new interpreter that answers."""
    # Not as arguments, which everybody may read.
    told = os.memfd_create("spec")
    os.write(told, json.dumps(asdict(spec)).encode())
    os.lseek(told, 0, os.SEEK_SET)
    os.dup2(told, 0)
    os.set_inheritable(stage, True)
    try:
        os.execv(sys.executable, [sys.executable, "-P", "-m", _MODULE, "--answer", str(stage)])
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


def installed() -> dict[Path, int]:
    """List the distributions installed for this interpreter, and when each was, in ns."""
    found = (info for path in sys.path if path for info in Path(path).glob("*.dist-info"))
    try:
        return {info: info.stat().st_mtime_ns for info in found}
    except OSError:
        # Just now something is.
        return {}


def is_harmless() -> bool:
    """Test if a fork of this process is as able as the process.

    Threads are not forked: those of Python count, while those of BLAS are made again in the fork by
    BLAS itself. A GPU that is open cannot be used in a fork.
    """
    files = Path("/proc/self/fd")
    opened = [os.readlink(f) for f in files.iterdir() if f.is_symlink()] if files.is_dir() else []
    return threading.active_count() == 1 and not any(name.startswith(_GPUS) for name in opened)


def _ended() -> Iterator[tuple[int, int]]:
    """Wait for each child that has ended; return their pids and statuses."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _fork() -> int:
    # What is not written yet would be written twice.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return os.fork()


def _nameless(name: str) -> IO[str]:
    """Open a file that is in memory alone, and that forks share."""
    return os.fdopen(os.memfd_create(name), "w+", encoding="utf-8")


def _report_imports(report: IO[str], known: set[str]) -> None:
    """Write which modules were imported here and are no files of an app, in their order."""
    apps = command_line.flower_home() / "apps"
    names = []
    for name, module in list(sys.modules.items()):
        if name not in known:
            origin = getattr(getattr(module, "__spec__", None), "origin", None)
            if origin and not Path(origin).is_relative_to(apps):
                names.append(name)
    json.dump(names, report)
    report.flush()


def _imports_in(report: IO[str]) -> list[str]:
    """Return the modules that a ClientApp has imported; none if it was killed, or ended itself."""
    report.seek(0)
    try:
        names = json.loads(report.read(_MOST_BYTES))
    except ValueError:
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _import(names: Iterable[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            # Such as a module that a library makes up as it goes.
            logger.debug("%s is not imported beforehand", name, exc_info=True)


def _wait_for(address: str) -> None:
    """Wait until a SuperNode listens; Flower would write into the log that it does not."""
    host, _, port = address.rpartition(":")
    while True:
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), 5.0):
            return
        time.sleep(_POLL_S)


def main() -> None:
    """Run Flower's SuperExec with warm ClientApps until a new one is to take its place.

    With --answer this is a ClientApp that answers the message which standard input describes.

    Raises:
        SystemExit: this Flower lacks what they stand on.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", nargs="?", help="of the SuperNode's Runtime API")
    parser.add_argument("--root-certificates", help="if it is not plain")
    parser.add_argument("--answer", type=int, help="descriptor of a ClientApp's note")
    options = parser.parse_args()
    if options.answer is not None:
        answer(SimpleNamespace(**json.load(sys.stdin)), options.answer, lambda: None)
    # That imports all that they need, which all forks then share.
    if not features.has("warm ClientApps"):
        raise SystemExit(FLOWERS_WAY)
    _wait_for(options.address)
    os.environ["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = str(_POLL_S)
    supernode.run_superexec(
        lambda flowers: WarmExecutor(flowers=flowers), options.address, options.root_certificates
    )


if __name__ == "__main__":
    main()
