"""A process that watches the one of a simulation, and tells what ended it.

`fedstale simulate` forks before anything large is imported: the child simulates, and this process,
small and idle, waits. The child may be lost at any moment, by a client that calls `os._exit`, by a
segmentation fault, or because memory runs out; then this one writes the run's folder. Every signal
reaches the child once, and if this process is killed the child goes with it.
"""

import logging
import os
import signal
import sys
from collections.abc import Set

import typer

from fedstale.cli.output import note, say_json
from fedstale.errors import FedstaleError
from fedstale.last_call import Kept

SUPERVISED = "supervised"
"""The `obj` of a command's context whose process may be forked."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervised(*, as_json: bool) -> Kept | None:
    """Fork, and return in the child, with the files that it leaves when it is lost.

    In the parent this does not return: it raises `typer.Exit` with the status of the command.

    Args:
        as_json: whether the summary of a lost run is printed as JSON.

    Returns:
        None where the system cannot supervise: then this is the only process.
    """
    if not hasattr(signal, "sigwaitinfo") or not hasattr(os, "fork"):
        return None
    from fedstale.deployment.processes import end_with_parent

    try:
        kept = Kept()
    except OSError:
        # The run will need temporary files as well, and say so.
        return None
    heard = {*_FORWARDED, signal.SIGCHLD}
    # Where children's ends are ignored, nobody hears of them.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    sys.stdout.flush()
    sys.stderr.flush()
    parent, child = os.getpid(), os.fork()
    if not child:
        end_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return kept
    status, used_bytes = _ended(child, heard)
    if _told(kept, child, status, used_bytes, as_json=as_json):
        raise typer.Exit(2)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _FORWARDED:
        # End as the child did: a shell tells Ctrl-C from an error by it.
        number = os.WTERMSIG(status)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        note(f"fedstale: the process of the run was ended by {name} before the run began")
    raise typer.Exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 2)


def _ended(child: int, heard: Set[signal.Signals]) -> tuple[int, int]:
    """Wait for the child, and return the status of its end and the most memory that it had."""
    while True:
        received = signal.sigwaitinfo(heard)
        if received.si_signo == signal.SIGCHLD:
            pid, status, usage = os.wait4(child, os.WNOHANG)
            if pid:
                # Linux counts in kB.
                return status, usage.ru_maxrss * 1024
        elif received.si_code <= 0:
            # Of a process, to this one; the terminal's reach the child by themselves.
            os.kill(child, received.si_signo)


def _told(kept: Kept, child: int, status: int, used_bytes: int, *, as_json: bool) -> bool:
    """Write the folder of a lost run and say what ended it; return whether there was one."""
    if not kept.has_lost_run():
        return False
    # Only now: this process is to be small for as long as the run goes on.
    from fedstale.simulation.recovery import recovered

    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:
        run = recovered(kept, child, status, used_bytes=used_bytes)
    except FedstaleError as problem:
        note(f"fedstale: the process of the run was lost, and its folder not written: {problem}")
        return True
    if run is None:
        return False
    if as_json:
        say_json(run.folder, **run.summary)
    lines = run.summary["crash"]["lines"]
    note(f"fedstale: the run failed: {run.reason}; what was done is in {run.folder}")
    if lines:
        note("\n".join(["its last lines:", *(f"    {line}" for line in lines)]))
    return True
