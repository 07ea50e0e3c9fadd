"""What a device remembers of its own messages: one row each, the newest few hundred.

Rows live in the node's Context, which stays on the device and survives a restart of the ClientApp.
A state that cannot be read is forgotten, since a device that has lost its past still has to work.
"""

import logging
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedstale.traces.arrays import Array

logger = logging.getLogger(__name__)

STATE_RECORD = "fedstale.history"
"""Name of the record in the Context's state."""
VERSION = 1
KEPT = 256
"""Messages that are remembered: 26 KB."""
COLUMNS = (
    "arrived",
    "ready",
    "training_s",
    "travel_s",
    "download_bytes",
    "upload_bytes",
    "work",
    "deadline_s",
    "processor_left",
    "battery",
    "charging",
    "online",
)
"""What a row holds: instants in s, durations in s, bytes, work units, and the reading at arrival;
NaN where unknown or, from training_s on, where the message did not ask for training."""
_POSITION = {name: i for i, name in enumerate(COLUMNS)}


def _none() -> Array:
    return np.empty((0, len(COLUMNS)))


@dataclass(eq=False, slots=True)
class History:
    """The rows of one device, in the order of its messages."""

    rows: Array = field(default_factory=_none)
    """Shape (messages, columns)."""

    def __getitem__(self, column: str) -> Array:
        """Return a column; shape (messages,)."""
        return self.rows[:, _POSITION[column]]

    def add(self, **values: float) -> None:
        """Append a row, and forget the oldest if there are too many."""
        row = [values.get(name, np.nan) for name in COLUMNS]
        self.rows = np.concatenate([self.rows, [row]])[-KEPT:]

    @property
    def trainings(self) -> "History":
        """The rows of trainings."""
        return History(self.rows[self["training_s"] >= 0])

    def scaled(self, fleet_rate: float) -> "History":
        """Return the history with a work for the jobs whose work nobody stated.

        Such jobs are taken to be alike, and the device to be as fast as the fleet: what counts for
        them is how a job's time differs from those before, and that needs no unit.

        Args:
            fleet_rate: median work units/s of the forecaster's fleet.
        """
        rows = self.rows.copy()
        stateless = (rows[:, _POSITION["training_s"]] >= 0) & np.isnan(rows[:, _POSITION["work"]])
        if stateless.any():
            usual = float(np.median(rows[stateless, _POSITION["training_s"]]))
            rows[stateless, _POSITION["work"]] = fleet_rate * usual
        return History(rows)

    @classmethod
    def read(cls, state: RecordDict) -> "History":
        """Return the history in a node's state; an empty one if there is none to be read."""
        record = state.config_records.get(STATE_RECORD)
        if record is None:
            return cls()
        data = record.get("rows")
        if record.get("version") != VERSION or not isinstance(data, bytes):
            logger.warning("this device's history is of another version: it begins anew")
            return cls()
        if len(data) % (8 * len(COLUMNS)):
            logger.warning("this device's history is cut short: it begins anew")
            return cls()
        return cls(np.frombuffer(data, "<f8").reshape(-1, len(COLUMNS))[-KEPT:].copy())

    def write(self, state: RecordDict) -> None:
        """Put the history into a node's state."""
        data = np.ascontiguousarray(self.rows, "<f8").tobytes()
        state[STATE_RECORD] = ConfigRecord({"version": VERSION, "rows": data})
