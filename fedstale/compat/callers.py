"""Whose code runs, the app's, a library's or fedstale's own, and what it calls in place of what.

Time is virtual for the app, and for what it does through Python's own pools, queues and event
loops. A library that polls what it has started, or measures how long it takes, means the wall.

A function is replaced under every name that modules of the app have bound it to, for the time of a
run. A type is not replaced: some of its methods are, so that it stays the type that it is, wherever
it was imported, subclassed or asked for by `isinstance`.
"""

import concurrent.futures.thread
import ctypes
import gc
import multiprocessing.pool
import os
import queue
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

_HERE = f"{Path(__file__).parent}{os.sep}"
# Of any environment: libraries may be those of another one that this one sees.
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
_STDLIB = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
# What these wait for, or read of the clock, is for their caller.
_PASSED = (
    *("threading.", "queue.", "sched.", "contextlib.", "selectors.", "_pydatetime.", "asyncio/"),
    *("multiprocessing/pool.", "concurrent/futures/thread.", "concurrent/futures/_base."),
)
_PASSED_PACKAGES = {"pandas"}
_APP_PACKAGES = {"flwr", "anyio", "fedstale"}
"""Libraries that wait for what the app has given them to do, and where apps come from."""
_POOLS = {"joblib"}
"""Those that give it to threads of the app or else to processes, and poll."""

_packages: set[str] = set()
"""Import names of the app that runs now."""


_has_threads: Callable[[], bool] = bool
"""Tells whether the app has more than one thread now."""


def set_app(packages: Sequence[str], has_threads: Callable[[], bool]) -> None:
    """Set the app's packages, wherever they are installed, and if it has threads."""
    global _packages, _has_threads
    _packages, _has_threads = set(packages), has_threads
    is_library.cache_clear()


def is_called_by_app() -> bool:
    """Return whether the app itself asks in this thread, and no library on its own account."""
    frame = _caller()
    if frame is None:
        return True
    file = frame.f_code.co_filename
    if is_library(file):
        return _package(file) in _POOLS and _has_threads()
    return not _is_ours(frame)


def is_called_by_us() -> bool:
    """Return whether fedstale asks in this thread."""
    frame = _caller()
    return frame is not None and _is_ours(frame)


def _caller() -> FrameType | None:
    """Return the caller's frame, below frames that ask for theirs; None if all of a thread do."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _is_passed(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("fedstale.")


def is_of_app(thread: threading.Thread) -> bool:
    """Return whether a thread does the work of the app, and not a library's own."""
    code = getattr(_run_by(thread), "__code__", None)
    if code is None:
        return True
    if code.co_filename == multiprocessing.pool.__file__:
        # Those of a ThreadPool; others serve processes, or look after their workers.
        given = getattr(thread, "_args", ())
        is_local = any(isinstance(each, queue.SimpleQueue) for each in given)
        return is_local and code.co_name in ("worker", "_handle_tasks", "_handle_results")
    if code.co_name == "_do_waitpid":
        return False
    return _is_passed(code.co_filename) or not is_library(code.co_filename)


def _run_by(thread: threading.Thread) -> object:
    """Return the function that a thread runs, before it has begun."""
    runs: Any = type(thread).run
    if runs is threading.Thread.run:
        runs = getattr(thread, "_target", None)
    runs = getattr(runs, "func", runs)  # of a partial
    return getattr(runs, "__func__", runs)


def pools_of(thread: threading.Thread) -> list[Callable[[], ThreadPoolExecutor | None]]:
    """Return the pool, weakly, for which a thread works that has not begun to; if it does."""
    is_worker = getattr(thread, "_target", None) is concurrent.futures.thread._worker
    return [thread._args[0]] if is_worker else []  # type: ignore[attr-defined]


def computing(thread: threading.Thread) -> list[Callable[[], bool]]:
    """Return a test whether processes are at work, if a thread waits for their results."""
    target: Any = getattr(thread, "_target", None)
    given: Sequence[Any] = getattr(thread, "_args", ())
    if target is multiprocessing.pool.Pool._handle_results:  # type: ignore[attr-defined]
        open_: Any = given[2]
    else:
        open_ = getattr(thread, "pending_work_items", None)
    return [] if open_ is None else [lambda: bool(open_) and thread.is_alive()]


@cache
def _is_passed(file: str) -> bool:
    if file.startswith((_HERE, "<frozen ")):
        return True
    if package := _package(file):
        return package in _PASSED_PACKAGES
    return any(file.startswith(s) and file.removeprefix(s).startswith(_PASSED) for s in _STDLIB)


@cache
def is_library(file: str) -> bool:
    """Return whether a file is one of Python or of an installed package other than the app's."""
    if package := _package(file):
        return package not in _packages | _APP_PACKAGES
    return file.startswith(_STDLIB)


@cache
def _package(file: str) -> str:
    """Return the package or module that is installed with a file, or nothing."""
    found = _INSTALLED.match(file)
    return found[1].removesuffix(".py") if found else ""


@contextmanager
def replaced(stand_ins: Sequence[tuple[Any, Any]], within: Sequence[str]) -> Iterator[None]:
    """Put functions in the place of others wherever modules of some packages have bound these.

    Args:
        stand_ins: each function or class with its stand-in.
        within: names of packages or modules; with their sub-modules.
    """
    prefixes = tuple(f"{package}." for package in within)
    wanted = {id(original): (original, stand_in) for original, stand_in in stand_ins}
    bound = [
        (module, name, *wanted[id(value)])
        for path, module in list(sys.modules.items())
        if module is not None and f"{path}.".startswith(prefixes)
        for name, value in list(vars(module).items())
        if id(value) in wanted
    ]
    try:
        for module, name, _, stand_in in bound:
            setattr(module, name, stand_in)
        yield
    finally:
        for module, name, original, _ in bound:
            setattr(module, name, original)


@contextmanager
def wrapped(owner: object, names: Sequence[str], around: Callable[..., Any]) -> Iterator[None]:
    """Put a function around methods of one object; it is given the method first.

    Args:
        owner: the object, which has none of its own by these names.
        names: of the methods.
        around: called with a method and its arguments in the method's place.
    """
    for name in names:
        setattr(owner, name, partial(around, getattr(owner, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(owner, name)


@contextmanager
def changed(kind: type, methods: Mapping[str, Any]) -> Iterator[None]:
    """Give a type other methods, also one that is written in C and lets nobody set them.

    Args:
        kind: the type, as CPython makes types: with a dict of its own.
        methods: in the place of the type's own by these names, where it has them.
    """
    (names,) = gc.get_referents(vars(kind))
    methods = {name: method for name, method in methods.items() if name in names}
    before = {name: names[name] for name in methods}

    def put(ours: Mapping[str, Any]) -> None:
        names.update(ours)
        # What Python remembers of the type's attributes.
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))

    try:
        put(methods)
        yield
    finally:
        put(before)
