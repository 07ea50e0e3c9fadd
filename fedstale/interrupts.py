"""Signals that end what goes on as Ctrl-C does: SIGTERM, and SIGHUP of a terminal that is closed.

A container, systemd and a batch system stop a process by SIGTERM. Whoever has a handler of their
own for it, or ignores it, keeps that.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dis import opname

CTRL_C = "Ctrl-C"
_SAME_S = 1.0


@contextmanager
def on_signals(act: Callable[[int], object], *numbers: signal.Signals) -> Iterator[None]:
    """Call a function with the number of a signal that comes; only the main thread hears any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, lambda number, frame: act(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def end_on_signals(*, with_ctrl_c: bool = True) -> Iterator[Callable[[], str]]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP, so that all clean-up is done.

    Where nobody catches it, the process then ends with the code of the signal, 143 or 129.

    A signal that comes to a process and to its group comes twice: a second one within a second of
    the first is the same, and does not disturb the clean-up. That holds for Ctrl-C too.

    Args:
        with_ctrl_c: whether that is heard as well, which raises it in any case.

    Yields:
        A function that tells which signal was heard first, such as "SIGTERM" or "Ctrl-C", for who
        would miss the exception; empty if none was.
    """
    last_at, first = float("-inf"), ""

    def end(number: int) -> None:
        nonlocal last_at, first
        # Virtual time has the place of other clocks in the thread of a simulated ServerApp.
        before, last_at = last_at, time.perf_counter()
        first = first or (CTRL_C if number == signal.SIGINT else signal.Signals(number).name)
        if last_at - before >= _SAME_S:
            raise KeyboardInterrupt(first)

    # Windows has no SIGHUP.
    numbers = (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP"))
    usual: dict[signal.Signals, object] = {n: signal.SIG_DFL for n in numbers if n is not None}
    if with_ctrl_c:
        usual[signal.SIGINT] = signal.default_int_handler
    with on_signals(end, *(n for n, handler in usual.items() if signal.getsignal(n) is handler)):
        try:
            yield lambda: first
        except KeyboardInterrupt:
            if first in {"", CTRL_C}:
                raise
            raise SystemExit(exit_code(first)) from None


def is_of_signal(problem: KeyboardInterrupt) -> bool:
    """Test whether the handler of a signal has raised an interrupt, and not the code it came to.

    Python's own handler has no frame: what it raises comes from no `raise`.
    """
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = [getattr(handler, "__code__", None) for handler in handlers]
    last = trace = problem.__traceback__
    while trace is not None:
        last, trace = trace, trace.tb_next
        if last.tb_frame.f_code in codes:
            return True
    return not last or opname[last.tb_frame.f_code.co_code[last.tb_lasti]] != "RAISE_VARARGS"


def exit_code(heard: str) -> int:
    """Return the code with which a process ends that such a signal has ended; Ctrl-C if none was.

    Example:
        >>> exit_code("SIGTERM")
        143
    """
    return 128 + (signal.SIGINT if heard in {"", CTRL_C} else signal.Signals[heard])
