"""Jobs that are over, as rows of a file: memory then holds only those that can still change.

The file has no name, so it goes with the process, whatever ends it. A row has a fixed length and
its place by the number of its job; words, of which there are few different ones, are numbered.
"""

import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fedstale.errors import FedstaleError, ResumeError
from fedstale.simulation import flight as fl
from fedstale.simulation.flight import Flight
from fedstale.traces import Status

State = dict[str, Any]
Rows = npt.NDArray[np.void]

_KINDS: Mapping[object, str] = {float: "f8", int: "i8", str: "i4"}
_LAYOUT = np.dtype([(name, _KINDS[kind]) for name, kind in fl.COLUMNS.items()])
_WORDS = [name for name, kind in fl.COLUMNS.items() if kind is str]


class JobRows:
    """Rows of jobs in a temporary file, in the system's folder for them (TMPDIR)."""

    def __init__(self) -> None:
        """Make the file when there is something to write."""
        self._file: IO[bytes] | None = None
        self._words: dict[str, int] = {}
        self._end = 0

    def write(self, flights: Sequence[Flight]) -> None:
        """Write some jobs, at least one, in any order; those that are there already are replaced.

        Raises:
            FedstaleError: the disk is full, or the folder is not writable.
        """
        rows = self.rows_of(sorted(flights, key=lambda flight: flight.job_id))
        breaks = np.flatnonzero(np.diff(rows["job_id"]) != 1) + 1
        for part in np.split(rows, breaks):
            self._put(part, int(part["job_id"][0]))

    def rows_of(self, flights: Sequence[Flight]) -> Rows:
        """Return jobs as rows, not written."""
        rows = np.empty(len(flights), _LAYOUT)
        for name in fl.COLUMNS:
            values = [getattr(flight, name) for flight in flights]
            rows[name] = [self._number(word) for word in values] if name in _WORDS else values
        return rows

    def read(self, start: int, stop: int) -> Rows:
        """Return the rows of jobs start to stop; those never written are zeros."""
        rows = np.zeros(stop - start, _LAYOUT)
        if self._file is not None:
            size = _LAYOUT.itemsize
            data = os.pread(self._file.fileno(), len(rows) * size, start * size)
            there = np.frombuffer(data, _LAYOUT)
            rows[: len(there)] = there
        return rows

    def flight(self, job_id: int) -> Flight:
        """Return a job that was written, as an object that can be changed and written again."""
        row = self.read(job_id, job_id + 1)[0]
        words = list(self._words)
        values = {
            name: words[row[name]] if name in _WORDS else row[name].item() for name in fl.COLUMNS
        }
        return Flight(
            message=None,
            asked=(fl.UNKNOWN,) * 5,
            outcome=Status.REPORTED,
            visible_at=values["delivered_at"],
            failure=None,
            **values,
        )

    def columns(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of some rows, words as words."""
        words = np.array(list(self._words), dtype=object)
        return {
            name: words[rows[name]] if name in _WORDS else np.ascontiguousarray(rows[name])
            for name in fl.COLUMNS
        }

    def state_dict(self) -> State:
        """Return all rows; they are not read into memory for it."""
        rows: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        if self._file is not None:
            rows = np.memmap(self._file, np.uint8, "r", shape=(self._end * _LAYOUT.itemsize,))
        return {"rows": rows, "words": list(self._words), "columns": list(fl.COLUMNS)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, with nothing written yet.

        Raises:
            ResumeError: another release wrote other columns.
            FedstaleError: the disk is full, or the folder is not writable.
        """
        if state.get("columns") != list(fl.COLUMNS):
            raise ResumeError(
                "the checkpoint holds events with other columns: resume with the release of "
                "fedstale that wrote it"
            )
        self._words = {word: number for number, word in enumerate(state["words"])}
        if len(state["rows"]):
            self._put(state["rows"].view(_LAYOUT), 0)

    def _number(self, word: str) -> int:
        return self._words.setdefault(word, len(self._words))

    def _put(self, rows: Rows, first: int) -> None:
        rest, at = rows.view(np.uint8).data, first * _LAYOUT.itemsize
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see finalize
                weakref.finalize(self, self._file.close)
            while rest:
                done = os.pwrite(self._file.fileno(), rest, at)
                rest, at = rest[done:], at + done
        except OSError as problem:
            raise FedstaleError(
                f"the events of the run cannot be written to {tempfile.gettempdir()!r}: "
                f"{problem.strerror}; make room there, or set TMPDIR to another folder"
            ) from None
        self._end = max(self._end, first + len(rows))
