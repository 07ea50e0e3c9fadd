"""What can be seen of a run while it goes on, told to whoever shows it.

A simulation calls a `RunWatch` whenever its clock has moved. It only ever reads, so a run that is
watched has the same events, byte for byte, as one that is not.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fedstale.simulation import flight as fl
from fedstale.simulation.flight import Flight
from fedstale.simulation.progress import Progress
from fedstale.simulation.trace_grid import TraceGrid


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A run at one instant."""

    now: float
    """Instant in s: of device time in a simulation, since the start on real devices."""
    online: int
    """Devices that are there."""
    n_in_flight: int
    """Jobs whose end the server has not seen."""
    rounds: int
    """Rounds, or versions of the model, so far."""
    share: float | None = None
    """How much of the run is done, in [0, 1]; None where nothing limits it but the app."""


class Sink(Protocol):
    """Is told what happens in a run; calls come from the thread that runs it."""

    def moved(self, moment: Moment) -> None:
        """Hear where the run is; a few times a second of wall time."""
        ...

    def measured(self, at: float, version: int, source: str, name: str, value: float) -> None:
        """Hear a metric of a version, measured at an instant."""
        ...

    def merged(self, at: float, staleness: float, weight: float) -> None:
        """Hear that an update was merged."""
        ...

    def failed(self, at: float, who: str, ending: str, reason: str) -> None:
        """Hear that a job came to nothing, by its device, its ending and why."""
        ...


class RunWatch:
    """Watches a simulation for some sinks; pass it to `simulate` as `watch`."""

    def __init__(self, sinks: Sequence[Sink], every_s: float = 0.25) -> None:
        """Look at most once in `every_s` seconds of wall time."""
        self._sinks, self._every_s = sinks, every_s
        self._looked_at = float("-inf")
        self._seen_rows = 0
        self._grid: TraceGrid | None = None
        self._run: Progress | None = None

    def __call__(self, grid: TraceGrid, run: Progress) -> None:
        """Look, unless it has just been done."""
        if self._grid is not grid:
            self._grid, self._run = grid, run
            grid.on_job = self._job
        # The ServerApp's thread sees virtual time in `time.monotonic`.
        wall = time.perf_counter()
        if wall - self._looked_at >= self._every_s:
            self._looked_at = wall
            self._look(grid, run)

    def close(self) -> None:
        """Take a last look, at the end of the run."""
        if self._grid is not None and self._run is not None:
            self._look(self._grid, self._run)

    def _look(self, grid: TraceGrid, run: Progress) -> None:
        moment = Moment(
            now=grid.now(),
            online=grid.n_online,
            n_in_flight=grid.n_in_flight,
            rounds=run.rounds,
            share=_share(grid.now(), run),
        )
        rows, self._seen_rows = run.rows[self._seen_rows :], len(run.rows)
        for sink in self._sinks:
            sink.moved(moment)
            for row in rows:
                sink.measured(*row)

    def _job(self, job: Flight) -> None:
        grid = self._grid
        assert grid is not None
        if job.aggregated_version >= 0:
            for sink in self._sinks:
                sink.merged(grid.now(), job.staleness, job.weight)
        elif job.status != fl.REPORTED:
            for sink in self._sinks:
                sink.failed(grid.now(), grid.device_id(job.device), job.status, job.reason)


def _share(now: float, run: Progress) -> float | None:
    if run.until.rounds is not None:
        return min(1.0, run.rounds / run.until.rounds)
    if run.until.time_s < float("inf"):
        return min(1.0, now / run.until.time_s)
    return None
