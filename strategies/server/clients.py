"""What the server has learnt of every node: `History` keeps it, `Candidates` shows it."""

from collections.abc import Mapping
from copy import deepcopy
from math import isnan
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.strategies.types import (
    DURATIONS_KEPT,
    Candidates,
    Forecast,
    Index,
    NodeIds,
    NodeSet,
    Situation,
    Stateful,
    Table,
)

# The row of all nodes of which nothing is known: a node takes memory once it has been sent a job.
_UNKNOWN_ROW = 0


class History(Stateful):
    """What the server has learnt of nodes; see `Candidates`.

    Example:
        >>> history = History()
        >>> history.picked(7, 0.0)
        >>> history.candidates([7, 8]).times_picked
        array([1, 0])
    """

    saved = ("_reported",)

    def __init__(self) -> None:
        """Start empty."""
        self._table = Table(64)
        self._rows: dict[int, int] = {}
        self._reported: dict[int, float] = {}
        self._indexed: NodeIds = np.zeros(0, dtype=np.uint64)
        self._row_of = np.zeros(0, dtype=np.int64)

    def candidates(
        self, nodes: npt.ArrayLike | NodeSet, situation: Situation | None = None
    ) -> Candidates:
        """Return what is known of some nodes, in their order, and where the run stands."""
        return Candidates(nodes, self._table, self._rows_of, situation or Situation())

    def _rows_of(self, ids: NodeIds) -> Index:
        self._index_new()
        if not self._indexed.size:
            return np.full(ids.size, _UNKNOWN_ROW)
        place = np.searchsorted(self._indexed, ids)
        place = np.minimum(place, self._indexed.size - 1)
        return np.where(self._indexed[place] == ids, self._row_of[place], _UNKNOWN_ROW)

    def _index_new(self) -> None:
        """Keep known ids in order; new ones are put in at the next look, many at a time."""
        n = self._indexed.size
        if n == len(self._rows):
            return
        new = np.fromiter(self._rows, dtype=np.uint64, count=len(self._rows))[n:]
        rows = np.arange(n + 1, n + 1 + new.size)
        order = np.argsort(new)
        place = np.searchsorted(self._indexed, new[order])
        self._indexed = np.insert(self._indexed, place, new[order])
        self._row_of = np.insert(self._row_of, place, rows[order])

    def _row(self, node_id: int) -> int:
        row = self._rows.get(node_id)
        if row is None:
            row = self._rows[node_id] = len(self._rows) + 1
            if row >= self._table.columns["loss"].size:
                self._grow()
        return row

    def _grow(self) -> None:
        old = self._table
        n = old.columns["loss"].size
        self._table = Table(2 * n)
        for name, column in old.columns.items():
            self._table.columns[name][:n] = column
        self._table.forecasts = old.forecasts

    def picked(self, node_id: int, now: float) -> None:
        """Note that a job was sent."""
        row, columns = self._row(node_id), self._table.columns
        columns["times_picked"][row] += 1
        columns["picked_at"][row] = now
        stated = float(columns["forecast_p_finish"][row])
        if not isnan(stated):
            self._reported[node_id] = stated

    def failed(self, node_id: int) -> None:
        """Note that a job ended without a good reply."""
        row = self._row(node_id)
        self._table.columns["times_failed"][row] += 1
        self._add_expected(node_id, row, finished=False)

    def finished(
        self,
        node_id: int,
        *,
        duration_s: float,
        examples: float,
        loss: float,
        square_loss: float,
        staleness: int,
        version: int,
    ) -> None:
        """Note a good reply; arguments as in `Candidates`."""
        row, columns = self._row(node_id), self._table.columns
        durations = columns["durations_s"][row]
        n = int(columns["times_finished"][row])
        if n >= DURATIONS_KEPT:
            durations[:-1] = durations[1:]
            n = DURATIONS_KEPT - 1
        durations[n] = duration_s
        columns["duration_s"][row] = median(durations[: n + 1].tolist())
        columns["examples"][row], columns["loss"][row] = examples, loss
        columns["square_loss"][row] = square_loss
        columns["staleness"][row], columns["last_version"][row] = staleness, version
        columns["times_finished"][row] += 1
        self._add_expected(node_id, row, finished=True)

    def _add_expected(self, node_id: int, row: int, *, finished: bool) -> None:
        """Add the chance that the node reported before the job; without one, what came of it."""
        self._table.columns["expected_finishes"][row] += self._reported.pop(
            node_id, float(finished)
        )

    def forecast(self, node_id: int, forecast: Forecast, now: float) -> None:
        """Note what a device expects of itself."""
        # A new node's row may make the table a larger one.
        row = self._row(node_id)
        self._table.note_forecast(row, forecast, now)

    def forecast_of(self, node_id: int) -> Forecast:
        """Return the last forecast of a node; empty if it sent none."""
        return self._table.forecasts.get(self._rows.get(node_id, _UNKNOWN_ROW), {})

    def state_dict(self) -> dict[str, Any]:
        """Return everything known."""
        n = len(self._rows) + 1
        return super().state_dict() | {
            "node_ids": np.fromiter(self._rows, dtype=np.uint64, count=n - 1),
            "columns": {name: column[:n].copy() for name, column in self._table.columns.items()},
            "forecasts": self._table.forecasts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        super().load_state_dict(state)
        self._rows = {node: i for i, node in enumerate(state["node_ids"].tolist(), start=1)}
        n = len(self._rows) + 1
        self._indexed, self._row_of = self._indexed[:0], self._row_of[:0]
        self._table = Table(max(64, 2 * n))
        for name, column in state["columns"].items():
            self._table.columns[name][:n] = column
        self._table.forecasts = deepcopy(state["forecasts"])
