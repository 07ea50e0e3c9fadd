"""Remembers every node that has been seen, and shows those that may be chosen."""

from collections.abc import Mapping
from math import isnan
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.strategies.candidate import (
    DURATIONS_KEPT,
    Candidate,
    Candidates,
    Forecast,
    Situation,
    Table,
)
from fedstale.strategies.node_set import Index, NodeIds, NodeSet

# The row of all nodes of which nothing is known: a node takes memory once it has been sent a job.
_UNKNOWN = 0


class History:
    """What the server has learnt of nodes; see `Candidate`.

    Example:
        >>> history = History()
        >>> history.picked(7, 0.0)
        >>> history.candidates([7, 8]).times_picked
        array([1, 0])
    """

    def __init__(self) -> None:
        """Know nobody."""
        self._table = Table(64)
        self._rows: dict[int, int] = {}
        self._said: dict[int, float] = {}
        self._indexed: NodeIds = np.zeros(0, dtype=np.uint64)
        self._row_of = np.zeros(0, dtype=np.int64)

    def __getitem__(self, node_id: int) -> Candidate:
        """Return what is known of a node."""
        return self.candidates([node_id])[0]

    def candidates(
        self, nodes: npt.ArrayLike | NodeSet, situation: Situation | None = None
    ) -> Candidates:
        """Return what is known of some nodes, in their order, and where the run stands."""
        return Candidates(nodes, self._table, self._rows_of, situation or Situation())

    def _rows_of(self, ids: NodeIds) -> Index:
        self._index_new()
        if not self._indexed.size:
            return np.full(ids.size, _UNKNOWN)
        place = np.searchsorted(self._indexed, ids)
        place = np.minimum(place, self._indexed.size - 1)
        return np.where(self._indexed[place] == ids, self._row_of[place], _UNKNOWN)

    def _index_new(self) -> None:
        """Keep known ids in order; new ones are put in when somebody looks, many at a time."""
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
            self._said[node_id] = stated

    def failed(self, node_id: int) -> None:
        """Note that a job ended without a good reply."""
        row = self._row(node_id)
        self._table.columns["times_failed"][row] += 1
        self._hold_to_word(node_id, row, finished=False)

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
        """Note a good reply; arguments as in `Candidate`."""
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
        self._hold_to_word(node_id, row, finished=True)

    def _hold_to_word(self, node_id: int, row: int, *, finished: bool) -> None:
        """Add what the node had stated of the job that has ended; with no word, what came of it."""
        self._table.columns["expected_finishes"][row] += self._said.pop(node_id, float(finished))

    def forecast(self, node_id: int, forecast: Forecast, now: float) -> None:
        """Note what a device expects of itself."""
        self._table.note_forecast(self._row(node_id), forecast, now)

    def state_dict(self) -> dict[str, Any]:
        """Return everything known, as arrays and as what JSON can hold."""
        n = len(self._rows) + 1
        return {
            "node_ids": np.fromiter(self._rows, dtype=np.uint64, count=n - 1),
            "columns": {name: column[:n].copy() for name, column in self._table.columns.items()},
            "forecasts": {str(row): dict(said) for row, said in self._table.forecasts.items()},
            "said": {str(node): p for node, p in self._said.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], shift_s: float = 0.0) -> None:
        """Continue from what `state_dict` returned.

        Args:
            state: the state.
            shift_s: how much later every instant is by the clock of today.
        """
        ids: npt.NDArray[np.uint64] = state["node_ids"]
        self._rows = {node: i + 1 for i, node in enumerate(ids.tolist())}
        self._indexed, self._row_of = ids[:0], self._row_of[:0]
        self._table = Table(max(64, 2 * (ids.size + 1)))
        for name, column in state["columns"].items():
            self._table.columns[name][: ids.size + 1] = column
        for name in ("forecast_at", "picked_at"):
            self._table.columns[name] += shift_s
        self._table.forecasts = {int(row): said for row, said in state["forecasts"].items()}
        self._said = {int(node): float(p) for node, p in state["said"].items()}
