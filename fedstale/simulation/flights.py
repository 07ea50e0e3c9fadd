"""All jobs of a run, in memory as long as they may change and on disk afterwards.

A job may change until its reply has been delivered, and the strategy may say later what became of
the reply. So jobs that are over wait in memory for a while; one that is written already and is
merged or refused after all is read back. Memory then grows with the jobs in flight, not with jobs.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import pandas as pd
import pyarrow as pa

from fedstale.simulation import flight as fl
from fedstale.simulation.flight import Flight
from fedstale.simulation.job_rows import JobRows
from fedstale.simulation.saved import flights_in, flights_out

State = dict[str, Any]

BLOCK = 1 << 16
"""Jobs of one table of events, which is one row group of events.parquet."""
_WRITTEN_TOGETHER = 4096
_PREFIX = "message-"


class Flights:
    """The jobs by number and by message."""

    def __init__(self) -> None:
        """Start with none."""
        self._n = 0
        self._open: dict[int, Flight] = {}
        self._over: dict[int, Flight] = {}
        self._rows = JobRows()
        self._write_at = 2 * _WRITTEN_TOGETHER

    def __len__(self) -> int:
        """Number of jobs sent so far."""
        return self._n

    @staticmethod
    def message_id(job_id: int) -> str:
        """Return the id of a job's message."""
        return f"{_PREFIX}{job_id}"

    def add(self, flight: Flight) -> None:
        """Take in the next job."""
        assert flight.job_id == self._n
        self._open[flight.job_id] = flight
        self._n += 1

    def __getitem__(self, job_id: int) -> Flight:
        """Return a job; changes to it are kept."""
        flight = self._open.get(job_id) or self._over.get(job_id)
        if flight is None:
            flight = self._over[job_id] = self._rows.flight(job_id)
        return flight

    def of_message(self, message_id: str) -> Flight | None:
        """Return the job of a message, or None if no such message was sent."""
        number = message_id.removeprefix(_PREFIX)
        if number == message_id or not number.isdecimal() or int(number) >= self._n:
            return None
        return self[int(number)]

    def end(self, flight: Flight, now: float) -> None:
        """Note that the server has seen the end of a job, at this instant."""
        self._over[flight.job_id] = self._open.pop(flight.job_id)
        if len(self._over) >= self._write_at:
            self._write_oldest(now)

    def tables(
        self, settled: Callable[[list[Flight]], list[Flight]], device_ids: pd.Index
    ) -> Iterator[pa.Table]:
        """Yield the events of all jobs in the order of sending, `BLOCK` at a time.

        Args:
            settled: returns jobs that may be under way as they stand now.
            device_ids: name of each device of the traces.
        """
        known = settled(self._in_memory())
        ids = [flight.job_id for flight in known]
        for first in range(0, max(self._n, 1), BLOCK):
            rows = self._rows.read(first, min(first + BLOCK, self._n))
            here = known[bisect_left(ids, first) : bisect_left(ids, first + BLOCK)]
            rows[[flight.job_id - first for flight in here]] = self._rows.rows_of(here)
            yield fl.table(self._rows.columns(rows), device_ids)

    def state_dict(self) -> State:
        """Return all jobs."""
        return {
            "n": self._n,
            "in_memory": flights_out(self._in_memory()),
            "on_disk": self._rows.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, in place of the jobs that there are.

        Raises:
            ResumeError: another release wrote it.
            FedstaleError: the disk is full, or the folder of temporary files is not writable.
        """
        self._open, self._over, self._rows = {}, {}, JobRows()
        self._rows.load_state_dict(state.get("on_disk", {}))
        self._n = state["n"]
        for flight in flights_in(state["in_memory"]):
            place = self._open if flight.delivered_at == fl.NEVER else self._over
            place[flight.job_id] = flight

    def _in_memory(self) -> list[Flight]:
        return sorted(
            (*self._open.values(), *self._over.values()), key=lambda flight: flight.job_id
        )

    def _write_oldest(self, now: float) -> None:
        """Move the jobs that were over first to disk, except where the device still works."""
        oldest = list(islice(self._over.values(), len(self._over) - _WRITTEN_TOGETHER))
        done = [flight for flight in oldest if flight.ended_at <= now]
        if done:
            self._rows.write(done)
        for flight in done:
            del self._over[flight.job_id]
        self._write_at = len(self._over) + _WRITTEN_TOGETHER
