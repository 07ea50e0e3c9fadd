"""What survives the process of a run, if one of its clients ends it.

The run's folder holds which client the process is in (see `fedstale.last_call`). Where a
supervisor watches the process, files that it has opened hold the rest: all jobs, and in a log what
was measured. `recovered` in `fedstale.simulation.recovery` makes a run's folder of these.
"""

import faulthandler
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import BinaryIO

from fedstale.flower import head_of
from fedstale.last_call import Kept, LastCallFile
from fedstale.runs import RunFolder
from fedstale.simulation.clock import VirtualClock
from fedstale.simulation.executors.base import CallWatch, ClientCall
from fedstale.strategies.server import Callback, Runtime

Row = tuple[float, int, str, str, float]
"""Instant in s, version, source, name and value of a measurement."""


class BlackBox(CallWatch, Callback):
    """Notes what a run does where its process cannot take it along."""

    def __init__(self, kept: Kept | None = None) -> None:
        """Note in the folder alone, or for a supervisor too.

        Args:
            kept: files of the supervisor. This process then does nothing but the run: it may be
                ended by a limit, and its standard streams and fatal signals are listened to.
        """
        self._kept, self._limit_s = kept, 0.0
        self._file: LastCallFile | None = None
        self.clock = VirtualClock()
        """Of the run."""

    @property
    def is_supervised(self) -> bool:
        """Whether this process may end at any time, because another one tells of it."""
        return self._kept is not None

    @property
    def jobs(self) -> BinaryIO | None:
        """File for the table of jobs, if a supervisor has opened one."""
        return None if self._kept is None else self._kept.jobs

    @contextmanager
    def open(
        self,
        folder: RunFolder,
        limit_s: float | None,
        about: Mapping[str, str],
    ) -> Iterator[None]:
        """Note while a run goes on; nothing is left if it ends by itself.

        Args:
            folder: of the run.
            limit_s: wall-clock s after which a client in this process ends it, if any; only where a
                supervisor watches.
            about: what the summary says of the run's app and executor.

        """
        self._limit_s = limit_s or 0.0
        self._file = LastCallFile(folder.path)
        self._log("run", str(folder.path.resolve()), dict(about))
        try:
            with nullcontext() if self._kept is None else self._file.listening():
                yield
        finally:
            file, self._file = self._file, None
            file.close()

    def entered(self, call: ClientCall, together: int = 1) -> None:
        """Note that a client begins, and end this process if it takes too long."""
        if self._file is None:
            return
        self._file.entered(*head_of(call.message), self.clock.now, together)
        if self._limit_s:
            limit_s = self._limit_s * together
            faulthandler.dump_traceback_later(limit_s, exit=True, file=self._file.file)

    def left(self) -> None:
        """Note that no client runs any more."""
        if self._file is not None:
            self._file.left()
            if self._limit_s:
                faulthandler.cancel_dump_traceback_later()

    def word(self, number: int, text: str) -> None:
        """Keep a text of the table of jobs."""
        self._log("word", number, text)

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Keep what was measured."""
        self._log("metrics", run.now(), version, source, dict(values))

    def measured_before(self, rows: Sequence[Row]) -> None:
        """Keep what was measured before a checkpoint, in the place of all that came so far."""
        self._log("checkpoint")
        for now, version, source, name, value in rows:
            self._log("metrics", now, version, source, {name: value})

    def _log(self, *what: object) -> None:
        if self._kept is not None:
            # Of a full disk the run itself speaks, when it has to write to it.
            with suppress(OSError):
                self._kept.write(*what)
