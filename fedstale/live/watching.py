"""Watchers of a run: progress lines, Ctrl-C, and those that an app's run config asks for.

Most are callbacks, which count rounds and look at the clock a few times a second of wall time.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import inf

import tomli_w
from flwr.app import Context
from flwr.serverapp import Grid

from fedstale.flower import command_line
from fedstale.reports import time_text
from fedstale.strategies.server import Callback, Runtime, SuperLinkGrid, connected
from fedstale.until import Until

logger = logging.getLogger(__name__)

NO_LIMIT = Until()
_WIDTH = 79


class Watcher(Callback):
    """Counts rounds, and calls `look` a few times a second and at the end of the run."""

    def __init__(self, until: Until = NO_LIMIT, *, every_s: float = 0.25) -> None:
        """Watch a run.

        Args:
            until: what ends it, or how many rounds the app makes.
            every_s: wall time between two looks.
        """
        self.until, self.rounds = until, 0
        self.latest = ""
        """The last metric in words: an accuracy, if one is measured."""
        self._every_s, self._due_at = every_s, -inf

    def share(self, run: Runtime) -> float | None:
        """Return the share of the run that is done, in [0, 1]; None if unknown."""
        return self.until.share(run.now(), self.rounds)

    def look(self, run: Runtime) -> None:
        """Show the progress; a subclass has its way."""

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Count rounds, and keep what was measured last."""
        self.rounds = run.rounds
        accuracies = [name for name in values if "acc" in name]
        for name in accuracies or ([] if "acc" in self.latest else list(values)[:1]):
            self.latest = f"{name} {values[name]:.3g}"

    def time_moved(self, run: Runtime) -> None:
        """Look, a few times a second."""
        # The thread of a simulated ServerApp sees virtual time in `time.monotonic`.
        now = time.perf_counter()
        if now >= self._due_at:
            self._due_at = now + self._every_s
            self.look(run)

    def ended(self, run: Runtime, status: str, reason: str) -> None:
        """Look once more."""
        self.look(run)


class RepeatedInterrupt(Callback):
    """Interrupts a run that goes on although it was interrupted.

    The KeyboardInterrupt of a signal is raised wherever the ServerApp is just then. A bare `except`
    of the app swallows it, and so does NumPy while it asks an enumeration for attributes.
    """

    def __init__(self, heard: Callable[[], str]) -> None:
        """Insist; `heard` tells by which signal the run was interrupted, if it was."""
        self._heard = heard

    def time_moved(self, run: Runtime) -> None:
        """Interrupt the run again.

        Raises:
            KeyboardInterrupt: it was interrupted before.
        """
        if told := self._heard():
            raise KeyboardInterrupt(told)


class ProgressNotes(Watcher):
    """Says the progress of a run, by default every half minute."""

    def __init__(
        self, say: Callable[[str], object], until: Until, *, every_s: float = 30.0
    ) -> None:
        """Give each line to `say`."""
        super().__init__(until, every_s=every_s)
        self._say, self._began_at = say, time.perf_counter()
        self._due_at = self._began_at + every_s

    def look(self, run: Runtime) -> None:
        """Say a line."""
        share, elapsed_s = self.share(run), time.perf_counter() - self._began_at
        done, left = "", ""
        if share:
            left_s = elapsed_s * (1.0 - share) / share
            done, left = f"{share:.0%} done, ", f", {left_s / 60:.1f} min left"
        counts = f"{run.n_online()} online, {run.n_in_flight()} in flight"
        latest = f", {self.latest}" if self.latest else ""
        self._say(f"{done}round {self.rounds}, {time_text(run.now())}, {counts}{latest}{left}")

    def ended(self, run: Runtime, status: str, reason: str) -> None:
        """Say nothing: the result follows."""


@contextmanager
def progress_line(progress: bool | None) -> Iterator[Callable[[str], object] | None]:
    """Show a line on stderr that is written again and again, below what Flower logs.

    Args:
        progress: whether to show it; None where it is seen, on a terminal or in a notebook.

    Yields:
        What writes the line; None if none is shown.
    """
    if progress is None:
        progress = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not progress:
        yield None
        return

    def say(text: str) -> None:
        # Notebooks know a carriage return too, where the displays of rich need widgets.
        sys.stderr.write(f"\r{text[:_WIDTH]:<{_WIDTH}}\r")
        sys.stderr.flush()

    def cleared(record: logging.LogRecord) -> bool:
        say("")
        return True

    log = command_line.console()
    log.addFilter(cleared)
    try:
        yield say
    finally:
        log.removeFilter(cleared)
        say("")


@contextmanager
def watched(grid: Grid, context: Context, *, app: str) -> Iterator[Grid]:
    """Show a run on real devices while it goes on, as its run config says.

    A simulation has `--live`, and many of one run config may go on at once: it is left as it is.

    Args:
        grid: the devices.
        context: with live-port and metrics-port in its run config; 0 shows nothing there.
        app: its name.

    Raises:
        ConfigError: a port is not free, or a package is not installed.
    """
    config = context.run_config
    live, metrics = int(config["live-port"]), int(config["metrics-port"])
    if not (live or metrics) or not isinstance(own := connected(grid), SuperLinkGrid):
        yield grid
        return
    # Nothing of it is imported unless it is wanted.
    from fedstale.live.prometheus import exported  # noqa: PLC0415
    from fedstale.live.server import Board, observed, serving  # noqa: PLC0415

    with ExitStack() as stack:
        stack.enter_context(own)
        if live:
            until = Until(rounds=int(config["num-server-rounds"]))
            settings = tomli_w.dumps(dict(config))
            board = Board(app, until=until, settings=settings)
            logger.info("live page: %s", stack.enter_context(serving(board, port=live)))
            observed(own, board)
        exporting = exported(own, metrics, app=app, run_id=context.run_id)
        yield stack.enter_context(exporting)
