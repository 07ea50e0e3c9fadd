"""What a server honestly knows of nodes when it selects: what they reported and did before.

Nothing here comes from a device's future or its true state: forecasts are the device's own, with
their age; durations, losses and failures are those that the server has seen. `History` keeps what
is known of every node, `Candidates` are those that may be selected: arrays, so that a hundred
thousand are ranked without a Python object for each.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite, isnan, nan
from statistics import median
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from fedstale.strategies.server.node_set import Index, NodeIds, NodeSet

Forecast = Mapping[str, float | list[float]]
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

DURATIONS_KEPT = 8
"""Durations of the last jobs that are kept of a node; memory is bounded by the number of nodes."""

# Outcomes that a reported forecast weighs as much as: few, so that an over-reporting device is
# found out after a handful of jobs, and enough for one bad day to be forgiven.
_TRUST = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One node as the server knows it; what it does not know is NaN, or empty."""

    node_id: int
    """Flower's id of the node."""
    forecast: Forecast = field(default_factory=dict)
    """Last forecast that the device sent of itself, as it sent it."""
    forecast_at: float = nan
    """Instant in s when that arrived."""
    durations_s: tuple[float, ...] = ()
    """Time from sending to reply of its last finished jobs in s, oldest first."""
    loss: float = nan
    """Mean training loss of its last reply."""
    square_loss: float = nan
    """Mean of squared per-example losses over its last round."""
    examples: float = nan
    """Training examples of its last reply."""
    staleness: float = nan
    """Versions that its last aggregated reply was behind."""
    last_version: float = nan
    """Model version at its last good reply."""
    times_picked: int = 0
    """Jobs sent to it."""
    times_finished: int = 0
    """Good replies from it."""
    times_failed: int = 0
    """Error replies, rejected replies and timeouts."""
    picked_at: float = nan
    """Instant in s of the last job that was sent to it."""
    expected_finishes: float = 0.0
    """Sum over its jobs that have ended of the chance to finish that it stated before."""

    @property
    def duration_s(self) -> float:
        """Median of the known durations in s, or NaN."""
        return median(self.durations_s) if self.durations_s else nan

    @property
    def p_finish(self) -> float:
        """Probability that a job sent now comes back in time; see `Candidates.p_finish`."""
        return float(Candidates.listed([self]).p_finish[0])

    @property
    def utility(self) -> float:
        """Oort's statistical utility, or NaN; see `Candidates.utility`."""
        return float(Candidates.listed([self]).utility[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Where the run stands when nodes are chosen."""

    n_in_flight: int = 0
    """Training jobs that are out already."""
    version: int = 0
    """Version of the model that is sent now."""
    deadline_s: float = inf
    """Time in s in which a reply to a job sent now counts."""


_UNKNOWN = Situation()


class Table:
    """What is known of nodes, one row each, as arrays that grow; see `Candidate` for the fields."""

    FLOATS = (
        "forecast_p_finish",
        "forecast_p_available",
        "forecast_duration_s",
        "forecast_at",
        "duration_s",
        "loss",
        "square_loss",
        "examples",
        "staleness",
        "last_version",
        "picked_at",
        "expected_finishes",
    )
    COUNTS = ("times_picked", "times_finished", "times_failed")

    def __init__(self, n: int) -> None:
        """Make n rows of nodes of which nothing is known."""
        self.columns: dict[str, npt.NDArray[Any]] = {
            **{name: np.full(n, nan) for name in self.FLOATS},
            **{name: np.zeros(n, dtype=np.int64) for name in self.COUNTS},
            "durations_s": np.full((n, DURATIONS_KEPT), nan),
        }
        self.columns["expected_finishes"][:] = 0.0
        self.forecasts: dict[int, Forecast] = {}
        """The last forecast that a row's node reported, as it sent it."""

    def note_forecast(self, row: int, forecast: Forecast, now: float) -> None:
        """Note what a node expects of itself."""
        self.forecasts[row] = dict(forecast)
        columns = self.columns
        columns["forecast_p_finish"][row] = _chance(forecast.get("p_finish"))
        columns["forecast_p_available"][row] = _chance(forecast.get("p_available"))
        columns["forecast_duration_s"][row] = _number(forecast.get("duration_s"))
        columns["forecast_at"][row] = now


class Candidates(Sequence[Candidate]):
    """Nodes that may be chosen, as arrays of shape (n,) in one order; unknown is NaN, or 0 times.

    As a sequence it gives one `Candidate` at a time, for people and for rules that need no speed.
    What it shows is up to date until the selection that it was made for has ended.

    Example:
        >>> nodes = Candidates.of([7, 8], examples=[10.0, 20.0], loss=[2.0, 3.0])
        >>> nodes.utility
        array([20., 60.])
        >>> nodes[1].node_id
        8
    """

    def __init__(
        self,
        nodes: npt.ArrayLike | NodeSet,
        table: Table,
        rows: Index | Callable[[NodeIds], Index],
        situation: Situation = _UNKNOWN,
    ) -> None:
        """Show some rows of a table.

        Args:
            nodes: who they are: Flower's ids, shape (n,), or a set of n nodes.
            table: what is known.
            rows: of these nodes, shape (n,), or what finds them once more than ids is asked for.
            situation: where the run stands.
        """
        self.situation = situation
        self._nodes: NodeIds | NodeSet = (
            nodes if isinstance(nodes, NodeSet) else np.asarray(nodes, dtype=np.uint64)
        )
        self._table, self._where = table, rows

    @cached_property
    def node_ids(self) -> NodeIds:
        """Flower's ids of the nodes."""
        return self._nodes.ids if isinstance(self._nodes, NodeSet) else self._nodes

    @cached_property
    def _rows(self) -> Index:
        return self._where(self.node_ids) if callable(self._where) else self._where

    @classmethod
    def of(
        cls,
        node_ids: npt.ArrayLike,
        situation: Situation = _UNKNOWN,
        **columns: npt.ArrayLike,
    ) -> "Candidates":
        """Return candidates made of arrays; a column that is not given is unknown.

        Args:
            node_ids: distinct ids, shape (n,).
            situation: where the run stands.
            columns: fields of this class, each of shape (n,), or (n, 8) for `durations_s`.

        Raises:
            KeyError: there is no such column.
        """
        ids = np.asarray(node_ids, dtype=np.uint64)
        table = Table(ids.size)
        for name, values in columns.items():
            table.columns[name][...] = values
        return cls(ids, table, np.arange(ids.size), situation)

    @classmethod
    def listed(cls, nodes: Iterable[Candidate]) -> "Candidates":
        """Return candidates made of single ones."""
        nodes = list(nodes)
        table = Table(len(nodes))
        columns = table.columns
        for row, node in enumerate(nodes):
            table.note_forecast(row, node.forecast, node.forecast_at)
            for name in ("loss", "square_loss", "examples", "staleness", "last_version"):
                columns[name][row] = getattr(node, name)
            for name in (*Table.COUNTS, "picked_at", "expected_finishes", "duration_s"):
                columns[name][row] = getattr(node, name)
            for k, seconds in enumerate(node.durations_s[-DURATIONS_KEPT:]):
                columns["durations_s"][row, k] = seconds
        return cls([node.node_id for node in nodes], table, np.arange(len(nodes)))

    def take(self, which: npt.NDArray[Any] | slice) -> "Candidates":
        """Return some of them, by position or by a mask."""
        nodes = self._nodes
        ids = nodes.at(which) if isinstance(nodes, NodeSet) else nodes[which]
        # Of a few of many nodes, no more than their own rows are looked for.
        is_found = not callable(self._where) or "_rows" in vars(self)
        rows = self._rows[which] if is_found else self._where
        return Candidates(ids, self._table, rows, self.situation)

    def __len__(self) -> int:
        return len(self._nodes)

    @overload
    def __getitem__(self, i: int) -> Candidate: ...
    @overload
    def __getitem__(self, i: slice) -> "Candidates": ...
    def __getitem__(self, i: int | slice) -> "Candidate | Candidates":
        """Return one candidate, or some."""
        if isinstance(i, slice):
            return self.take(i)
        row = int(self._rows[i])
        known = {name: column[row].item() for name, column in self._single()}
        durations = self._table.columns["durations_s"][row]
        return Candidate(
            node_id=int(self.node_ids[i]),
            forecast=self._table.forecasts.get(row, {}),
            durations_s=tuple(durations[~np.isnan(durations)].tolist()),
            **known,
        )

    def _single(self) -> list[tuple[str, npt.NDArray[Any]]]:
        derived = {"duration_s", "durations_s"}
        return [
            (name, column)
            for name, column in self._table.columns.items()
            if name not in derived and (name == "forecast_at" or not name.startswith("forecast_"))
        ]

    def _gathered(self, name: str) -> npt.NDArray[Any]:
        return self._table.columns[name][self._rows]

    @cached_property
    def forecast_p_finish(self) -> Floats:
        """Chance to finish in time that a device last stated, in [0, 1]."""
        return self._gathered("forecast_p_finish")

    @cached_property
    def forecast_p_available(self) -> Floats:
        """Chance to be online later that a device last stated, in [0, 1]."""
        return self._gathered("forecast_p_available")

    @cached_property
    def forecast_duration_s(self) -> Floats:
        """Duration of a job that a device last stated, in s."""
        return self._gathered("forecast_duration_s")

    @cached_property
    def forecast_at(self) -> Floats:
        """Instant in s when the last forecast arrived."""
        return self._gathered("forecast_at")

    @cached_property
    def duration_s(self) -> Floats:
        """Median of the last durations from sending to reply, in s."""
        return self._gathered("duration_s")

    @cached_property
    def loss(self) -> Floats:
        """Mean training loss of the last reply."""
        return self._gathered("loss")

    @cached_property
    def square_loss(self) -> Floats:
        """Mean of squared per-example losses over the last round."""
        return self._gathered("square_loss")

    @cached_property
    def examples(self) -> Floats:
        """Training examples of the last reply."""
        return self._gathered("examples")

    @cached_property
    def staleness(self) -> Floats:
        """Versions that the last aggregated reply was behind."""
        return self._gathered("staleness")

    @cached_property
    def last_version(self) -> Floats:
        """Model version at the last good reply."""
        return self._gathered("last_version")

    @cached_property
    def picked_at(self) -> Floats:
        """Instant in s of the last job that was sent."""
        return self._gathered("picked_at")

    @cached_property
    def expected_finishes(self) -> Floats:
        """Sum over the jobs that have ended of the chances to finish stated before."""
        return self._gathered("expected_finishes")

    @cached_property
    def times_picked(self) -> Counts:
        """Jobs sent."""
        return self._gathered("times_picked")

    @cached_property
    def times_finished(self) -> Counts:
        """Good replies."""
        return self._gathered("times_finished")

    @cached_property
    def times_failed(self) -> Counts:
        """Error replies, rejected replies and timeouts."""
        return self._gathered("times_failed")

    @cached_property
    def p_finish(self) -> Floats:
        """Probability that a job sent now comes back in time.

        It is what the device states of itself, p, times (f + 4) / (e + 4) and at most 1, with f the
        jobs that it finished and e the number that it had led the server to expect: a device that
        claims certainty and fails is soon believed no more. Where a device states nothing it is the
        share of finished jobs, with one success and one failure added, so that an unknown node has
        1/2.
        """
        finished, failed = self.times_finished, self.times_failed
        seen = (finished + 1.0) / (finished + failed + 2.0)
        forecast_reliability = (finished + _TRUST) / (self.expected_finishes + _TRUST)
        stated = np.minimum(self.forecast_p_finish * forecast_reliability, 1.0)
        return np.where(np.isnan(stated), seen, stated)

    @cached_property
    def utility(self) -> Floats:
        """Oort's statistical utility |B| sqrt(mean of squared losses), or NaN.

        Where a device reports only its mean loss, that takes the root's place; it is never larger.
        """
        root = np.sqrt(np.where(self.square_loss >= 0.0, self.square_loss, nan))
        return np.asarray(self.examples * np.where(np.isnan(root), self.loss, root))


def _number(value: object) -> float:
    known = isinstance(value, int | float) and isfinite(value)
    return float(value) if known else nan  # type: ignore[arg-type]


def _chance(value: object) -> float:
    number = _number(value)
    return number if isnan(number) else min(max(number, 0.0), 1.0)


# The row of all nodes of which nothing is known: a node takes memory once it has been sent a job.
_UNKNOWN_ROW = 0


class History:
    """What the server has learnt of nodes; see `Candidate`.

    Example:
        >>> history = History()
        >>> history.picked(7, 0.0)
        >>> history.candidates([7, 8]).times_picked
        array([1, 0])
    """

    def __init__(self) -> None:
        """Start empty."""
        self._table = Table(64)
        self._rows: dict[int, int] = {}
        self._reported: dict[int, float] = {}
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
        self._add_expected(node_id, row, finished=True)

    def _add_expected(self, node_id: int, row: int, *, finished: bool) -> None:
        """Add the chance that the node reported before the job; without one, what came of it."""
        self._table.columns["expected_finishes"][row] += self._reported.pop(
            node_id, float(finished)
        )

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
            "reported": {str(node): p for node, p in self._reported.items()},
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
        self._reported = {int(node): float(p) for node, p in state["reported"].items()}
