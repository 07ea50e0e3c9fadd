"""The nodes of a run: sets of them as bits, and a server's honest knowledge of each.

A server that sends one job after each reply needs to know how many nodes it may choose from, and
the ids of the few that it drew. Words of 64 bits tell both in some hundredths of a millisecond,
where an array of the ids of all who are free takes several, and a list of them a hundred.

Of what is known of a node nothing comes from a device's future or its true state: forecasts are the
device's own, with their age; durations, losses and failures are those that the server has seen.
`History` keeps what is known of every node, `Candidates` are those that may be selected: arrays, so
that a hundred thousand are ranked without a Python object for each.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from math import exp, isnan, log, nan
from statistics import NormalDist, median
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from fedstale.strategies.types.job import (
    Forecast,
    OutcomeLine,
    Properties,
    SelectionContext,
    chance_of,
    forecast_bias,
    whole_duration_s,
)
from fedstale.strategies.types.parts import Stateful
from fedstale.traces import Index, Mask

Floats = npt.NDArray[np.float64]
NodeIds = npt.NDArray[np.uint64]
Bits = npt.NDArray[np.uint64]
"""A mask of shape (m,) as ceil(m / 64) words: bit i % 64 of word i // 64, the lowest first."""

_WORD = 64
_FEW = 4
"""Places for which Python is faster than NumPy: after a reply, one node or two have changed."""
_BIT = np.uint64(1) << np.arange(_WORD, dtype=np.uint64)


def packed(mask: Mask) -> Bits:
    """Return a mask as words; bits beyond its end are 0.

    Example:
        >>> packed(np.array([True, False, True]))
        array([5], dtype=uint64)
    """
    found = np.packbits(mask, bitorder="little")
    words = np.zeros(-(-found.size // 8), dtype=np.uint64)
    words.view(np.uint8)[: found.size] = found
    return words


def unpacked(words: Bits, n: int) -> Mask:
    """Return the first n bits of words as a mask."""
    bits = np.unpackbits(words.view(np.uint8), count=n, bitorder="little")
    mask: Mask = bits.view(np.bool_)
    return mask


def bits_at(words: Bits, places: Index) -> Mask:
    """Return the bits at some places."""
    return (words[places // _WORD] & _BIT[places % _WORD]) != 0


def set_bits(words: Bits, places: Index) -> None:
    """Write 1 at some places.

    Example:
        >>> words = packed(np.array([True, False, False]))
        >>> set_bits(words, np.array([2]))
        >>> words
        array([5], dtype=uint64)
    """
    if places.size > _FEW:
        # Several places may be in one word, of which an assignment would keep the last.
        np.bitwise_or.at(words, places // _WORD, _BIT[places % _WORD])
        return
    for place in places.tolist():
        words[place // _WORD] |= _BIT[place % _WORD]


def clear_bits(words: Bits, places: Index) -> None:
    """Write 0 at some places."""
    if places.size > _FEW:
        np.bitwise_and.at(words, places // _WORD, ~_BIT[places % _WORD])
        return
    for place in places.tolist():
        words[place // _WORD] &= ~_BIT[place % _WORD]


class NodeIndex:
    """Where nodes are in an array of distinct ids, found for few at a time.

    Example:
        >>> NodeIndex(np.array([9, 5], dtype=np.uint64)).of([5, 7])
        array([1])
    """

    def __init__(self, ids: NodeIds) -> None:
        """Index ids, shape (m,)."""
        self.ids = ids
        # Grids mostly answer in ascending order, which makes sorting superfluous.
        self.is_ascending = bool((ids[1:] > ids[:-1]).all())
        """Whether the ids stand in ascending order."""
        self._order: Index | None = None if self.is_ascending else np.argsort(ids)

    def of(self, nodes: Collection[int]) -> Index:
        """Return the places of those nodes that are among the ids."""
        wanted = np.fromiter(nodes, dtype=np.uint64, count=len(nodes))
        found = self.ids.searchsorted(wanted, sorter=self._order)
        if found.size == 1 and self._order is None:
            place = found.item()
            is_here = place < self.ids.size and self.ids[place] == wanted[0]
            return found if is_here else found[:0]
        inside = found < self.ids.size
        found, wanted = found[inside], wanted[inside]
        found = found if self._order is None else self._order[found]
        return found[self.ids[found] == wanted]


class NodeSet:
    """Some of the nodes that have a place, in the order of their places; it never changes.

    Example:
        >>> everyone = NodeIndex(np.array([3, 5, 9], dtype=np.uint64))
        >>> online = NodeSet(everyone, packed(np.array([True, False, True])))
        >>> len(online), online.at(np.array([1]))
        (2, array([9], dtype=uint64))
    """

    def __init__(self, everyone: NodeIndex, words: Bits) -> None:
        """Hold the nodes of a mask in words, which must not be written to any more."""
        self.everyone, self.words = everyone, words
        self._n_until: Index = np.bitwise_count(words).cumsum(dtype=np.int64)
        """How many nodes there are up to the end of each word."""

    @classmethod
    def of(cls, node_ids: NodeIds) -> "NodeSet":
        """Return a set of all of some distinct nodes."""
        return cls(NodeIndex(node_ids), packed(np.ones(node_ids.size, dtype=np.bool_)))

    @cached_property
    def ids(self) -> NodeIds:
        """Ids of the nodes, shape (n,)."""
        return self.everyone.ids[np.flatnonzero(unpacked(self.words, self.everyone.ids.size))]

    def __len__(self) -> int:
        return int(self._n_until[-1]) if self.words.size else 0

    def at(self, which: npt.NDArray[Any] | slice) -> NodeIds:
        """Return `ids[which]`; of few positions, without looking for the ids of all others."""
        if not isinstance(which, np.ndarray) or which.dtype.kind != "i":
            return self.ids[which]
        words, n_until = self.words, self._n_until
        if _WORD * which.size > self.everyone.ids.size or (which < 0).any():
            return self.ids[which]
        if which.size == 1:
            return self.everyone.ids[[self._place(which.item())]]
        word = n_until.searchsorted(which, side="right")
        bits = np.unpackbits(words[word].view(np.uint8), bitorder="little").reshape(-1, _WORD)
        counted = bits.cumsum(axis=1, dtype=np.int64)
        n_before = n_until[word] - counted[:, -1]
        bit = (counted > (which - n_before)[:, None]).argmax(axis=1)
        return self.everyone.ids[word * _WORD + bit]

    def _place(self, position: int) -> int:
        """Find the place of the node at a position among these."""
        word = int(self._n_until.searchsorted(position, side="right"))
        bits = int(self.words[word])
        for _ in range(position - int(self._n_until[word]) + bits.bit_count()):
            bits &= bits - 1
        return _WORD * word + (bits & -bits).bit_length() - 1

    def n_of(self, nodes: Collection[int]) -> int:
        """Count those of some nodes that are among these."""
        return int(np.count_nonzero(bits_at(self.words, self.everyone.of(nodes))))


T = TypeVar("T", Floats, Index)

_NEVER_S = 1e300
"""A duration that is stated as this or more is none."""
DURATIONS_KEPT = 8
"""Durations of the last jobs that are kept of a node; memory is bounded by the number of nodes."""


_UNKNOWN = SelectionContext()
_NOBODY = np.zeros(0, dtype=np.uint64)


class _Column(Generic[T]):
    """A column of a table of nodes, as candidates show it: gathered when it is first read."""

    def __init__(self, unknown: float) -> None:
        """Set the default for nodes without data; an int for a column of counts."""
        self.unknown = unknown

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        UNKNOWN[name] = self.unknown

    def __get__(self, candidates: "Candidates", owner: type) -> T:
        """Return the values of some nodes, which stay as they are from now on."""
        found: T = cast(Any, candidates._table.columns[self.name][candidates._rows])
        vars(candidates)[self.name] = found
        return found


# Names with "before" are of what was stated before the job that is out.
UNKNOWN: dict[str, float] = dict.fromkeys(
    ("durations_s", "forecast_duration_s", "forecast_before_s", "forecast_before_p"), nan
)
"""Columns of a table, and what is in them of a node of which nothing is known."""


class Table:
    """What is known of nodes, one row each, as arrays that grow; see `Candidates` for columns."""

    def __init__(self, n: int) -> None:
        """Make n rows of nodes of which nothing is known."""
        self.columns: dict[str, npt.NDArray[Any]] = {
            name: np.full((n, DURATIONS_KEPT) if name == "durations_s" else n, unknown)
            for name, unknown in UNKNOWN.items()
        }
        self.forecasts: dict[int, Forecast] = {}
        """The last forecast that a row's node reported, as it sent it."""
        self.properties: dict[int, Properties] = {}
        """What a row's node last said that it is."""
        self.held = {"p": OutcomeLine(4.0, 0.25), "log_s": OutcomeLine(1.0, 0.5)}
        """How chances and durations that were stated have come out in the fleet."""

    def note_forecast(self, row: int, forecast: Forecast, now: float) -> None:
        """Note what a node expects of itself."""
        self.forecasts[row] = dict(forecast)
        columns = self.columns
        columns["forecast_p_finish"][row] = chance_of(forecast.get("p_finish"))
        columns["forecast_p_available"][row] = chance_of(forecast.get("p_available"))
        columns["forecast_duration_s"][row] = whole_duration_s(forecast)
        columns["forecast_at"][row] = now


class Candidates:
    """Nodes that may be chosen, as arrays of shape (n,) in one order; unknown is NaN, or 0 times.

    What it shows is up to date until the selection that it was made for has ended.

    Example:
        >>> nodes = Candidates.of([7, 8], examples=[10.0, 20.0], loss=[2.0, 3.0])
        >>> nodes.utility
        array([20., 60.])
    """

    forecast_p_finish = _Column[Floats](nan)
    """Chance to finish in time that a device last stated, in [0, 1]."""
    forecast_p_available = _Column[Floats](nan)
    """Chance to be online later that a device last stated, in [0, 1]."""
    forecast_error = _Column[Floats](0.0)
    """Sum of squared errors of the logarithms of stated durations; each counts 7/8 at the next."""
    forecast_at = _Column[Floats](nan)
    """Instant in s when the last forecast arrived."""
    duration_s = _Column[Floats](nan)
    """Median of the last durations from sending to reply, in s. Where a job was a share of the work
    it is what a whole one would have taken, by the device's forecast: less work is no speed."""
    loss = _Column[Floats](nan)
    """Mean training loss of the last reply; or the norm of its update, by `Validation`."""
    square_loss = _Column[Floats](nan)
    """Mean of squared per-example losses over the last round; unknown where norms are taken."""
    examples = _Column[Floats](nan)
    """Training examples of the last reply."""
    staleness = _Column[Floats](nan)
    """Versions that the last aggregated reply was behind."""
    last_version = _Column[Floats](nan)
    """Model version at the last good reply."""
    picked_at = _Column[Floats](nan)
    """Instant in s of the last job that was sent."""
    expected_finishes = _Column[Floats](0.0)
    """Sum over the jobs that have ended of the chances to finish stated before."""
    times_picked = _Column[Index](0)
    """Jobs sent."""
    times_finished = _Column[Index](0)
    """Good replies."""
    times_failed = _Column[Index](0)
    """Error replies, rejected replies and timeouts."""

    def __init__(
        self,
        nodes: npt.ArrayLike | NodeSet,
        table: Table,
        rows: Index | Callable[[NodeIds], Index],
        context: SelectionContext = _UNKNOWN,
        in_flight: "Callable[[], Candidates] | None" = None,
    ) -> None:
        """Show some rows of a table.

        Args:
            nodes: who they are: Flower's ids, shape (n,), or a set of n nodes.
            table: what is known.
            rows: of these nodes, shape (n,), or what finds them once more than ids is asked for.
            context: where the run stands.
            in_flight: returns the nodes that train now; nobody does if None.
        """
        self.context, self._find_in_flight = context, in_flight
        self._nodes: NodeIds | NodeSet = (
            nodes if isinstance(nodes, NodeSet) else np.asarray(nodes, dtype=np.uint64)
        )
        self._table, self._where = table, rows

    @cached_property
    def node_ids(self) -> NodeIds:
        """Flower's ids of the nodes."""
        return self._nodes.ids if isinstance(self._nodes, NodeSet) else self._nodes

    @cached_property
    def in_flight(self) -> "Candidates":
        """The nodes that have a training job now, in ascending order: who may still reply."""
        if self._find_in_flight is None:
            return Candidates(_NOBODY, self._table, np.zeros(0, dtype=np.int64), self.context)
        return self._find_in_flight()

    @cached_property
    def _rows(self) -> Index:
        return self._where(self.node_ids) if callable(self._where) else self._where

    @classmethod
    def of(
        cls,
        node_ids: npt.ArrayLike,
        context: SelectionContext = _UNKNOWN,
        properties: Sequence[Properties] = (),
        **columns: npt.ArrayLike,
    ) -> "Candidates":
        """Return candidates made of arrays; a column that is not given is unknown.

        Args:
            node_ids: distinct ids, shape (n,).
            context: where the run stands.
            properties: what each says it is; nobody says anything if empty.
            columns: fields of this class, each of shape (n,), or (n, 8) for `durations_s`.

        Raises:
            KeyError: there is no such column.
        """
        ids = np.asarray(node_ids, dtype=np.uint64)
        table = Table(ids.size)
        for name, values in columns.items():
            table.columns[name][...] = values
        table.properties.update(enumerate(properties))
        return cls(ids, table, np.arange(ids.size), context)

    def take(self, which: npt.NDArray[Any] | slice) -> "Candidates":
        """Return some of them, by position or by a mask."""
        nodes = self._nodes
        ids = nodes.at(which) if isinstance(nodes, NodeSet) else nodes[which]
        # Of a few of many nodes, no more than their own rows are looked for.
        is_found = not callable(self._where) or "_rows" in vars(self)
        rows = self._rows[which] if is_found else self._where
        return Candidates(ids, self._table, rows, self.context, self._find_in_flight)

    def __len__(self) -> int:
        return len(self._nodes)

    @cached_property
    def p_finish(self) -> Floats:
        """Probability that a job sent now comes back in time.

        It is what the device states of itself, corrected by `forecast_bias` and within [0, 1]: a
        device that claims certainty and fails is soon believed no more, and one that states 0 and
        finishes is. It is `share_finished`, which is 1/2 of an unknown node, where a device states
        nothing, and nearer to that the less statements hold in the fleet.
        """
        line, seen = self._table.held["p"], self.share_finished
        finished, failed = self.times_finished, self.times_failed
        expected = self.expected_finishes + line.more * (finished + failed)
        bias = forecast_bias(finished, failed, expected)
        stated = self.forecast_p_finish + line.more + bias
        stated = np.minimum(np.maximum(stated, 0.0), 1.0)
        return np.where(np.isnan(stated), seen, seen + line.slope * (stated - seen))

    @cached_property
    def forecast_duration_s(self) -> Floats:
        """Duration of a job that a device states, in s; of a whole one, as `duration_s`.

        It is the weighted geometric mean of what it last stated, as such statements come out in
        the fleet, and of `duration_s`, the less of the former the more the device's were off: all
        of it at first, half of it at `forecast_error` 1, which is one error by a factor of e. NaN
        where a device states no duration > 0.
        """
        stated, observed = self._table.columns["forecast_duration_s"][self._rows], self.duration_s
        line = self._table.held["log_s"]
        stated = np.where((stated > 0.0) & (stated < _NEVER_S), stated, nan)
        stated = stated**line.slope * exp(line.shift)
        share = np.where(observed > 0.0, line.slope / (1.0 + self.forecast_error), 1.0)
        return np.asarray(stated**share * observed ** (1.0 - share))

    def p_within(self, times: float) -> float:
        """Return the chance that a job takes at most so many times as long as is stated."""
        error = self._table.held["log_s"].error
        return NormalDist().cdf(log(times) / error) if error else 1.0

    @cached_property
    def properties(self) -> Mapping[str, npt.NDArray[np.object_]]:
        """What nodes say they are, such as their region: texts and numbers, None where they do not.

        By name, of all that one of the run's nodes has stated; each of shape (n,).
        """
        stated, rows = self._table.properties, self._rows.tolist()
        names = {name: None for said in stated.values() for name in said}
        each = [stated.get(row, {}) for row in rows] if names else []
        return {name: np.array([said.get(name) for said in each], np.object_) for name in names}

    @cached_property
    def share_finished(self) -> Floats:
        """Share of the ended jobs that were finished, with one success and one failure added."""
        return (self.times_finished + 1.0) / (self.times_finished + self.times_failed + 2.0)

    @cached_property
    def utility(self) -> Floats:
        """Oort's statistical utility |B| sqrt(mean of squared losses), or NaN.

        Where a device reports only its mean loss, that takes the root's place; it is never larger.
        """
        root = np.sqrt(np.where(self.square_loss >= 0.0, self.square_loss, nan))
        return np.asarray(self.examples * np.where(np.isnan(root), self.loss, root))


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

    def __init__(self) -> None:
        """Start empty."""
        self._table = Table(64)
        self._rows: dict[int, int] = {}
        self._indexed: NodeIds = np.zeros(0, dtype=np.uint64)
        self._row_of = np.zeros(0, dtype=np.int64)

    def candidates(
        self,
        nodes: npt.ArrayLike | NodeSet,
        context: SelectionContext = _UNKNOWN,
        out: Callable[[], NodeIds] | None = None,
    ) -> Candidates:
        """Return the candidates of some nodes, in their order.

        Args:
            nodes: Flower's ids, shape (n,), or a set of n nodes.
            context: where the run stands.
            out: returns the ids of the nodes that train now, ascending; nobody does if None.
        """
        table, rows = self._table, self._rows_of
        found = None if out is None else lambda: Candidates(out(), table, rows, context)
        return Candidates(nodes, table, rows, context, found)

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
        self._table.forecasts, self._table.held = old.forecasts, old.held
        self._table.properties = old.properties

    def picked(self, node_id: int, now: float) -> None:
        """Note that a job was sent."""
        row, columns = self._row(node_id), self._table.columns
        columns["times_picked"][row] += 1
        columns["picked_at"][row] = now
        columns["forecast_before_p"][row] = columns["forecast_p_finish"][row]
        columns["forecast_before_s"][row] = columns["forecast_duration_s"][row]

    def failed(self, node_id: int) -> None:
        """Note that a job ended without a good reply."""
        self._end(self._row(node_id), "times_failed", 0.0)

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
        stated = columns["forecast_before_s"][row]
        if stated > 0.0 and duration_s > 0.0:
            before, took, held = log(stated), log(duration_s), self._table.held["log_s"]
            columns["forecast_error"][row] *= 1.0 - 1.0 / DURATIONS_KEPT
            columns["forecast_error"][row] += (took - held.slope * before - held.shift) ** 2
            held.add(before, took, columns["times_finished"][row])
        self._end(row, "times_finished", 1.0)

    def _end(self, row: int, how: str, outcome: float) -> None:
        """Add the chance that the node stated before the job; without one, what came of it."""
        columns = self._table.columns
        stated = columns["forecast_before_p"][row]
        columns["expected_finishes"][row] += outcome if isnan(stated) else stated
        if not isnan(stated):
            n_before = columns["times_finished"][row] + columns["times_failed"][row]
            self._table.held["p"].add(stated, outcome, n_before)
        columns[how][row] += 1

    def forecast(self, node_id: int, forecast: Forecast, now: float) -> None:
        """Note what a device expects of itself."""
        # A new node's row may make the table a larger one.
        row = self._row(node_id)
        self._table.note_forecast(row, forecast, now)

    def stated(self, node_id: int, properties: Properties) -> None:
        """Note what a device says it is, in place of what it said before."""
        self._table.properties[self._row(node_id)] = properties

    def forecast_of(self, node_id: int) -> Forecast:
        """Return the last forecast of a node; empty if it sent none."""
        return self._table.forecasts.get(self._rows.get(node_id, _UNKNOWN_ROW), {})

    def state_dict(self) -> dict[str, Any]:
        """Return everything known."""
        n = len(self._rows) + 1
        return {
            "node_ids": np.fromiter(self._rows, dtype=np.uint64, count=n - 1),
            "columns": {name: column[:n].copy() for name, column in self._table.columns.items()},
            "forecasts": self._table.forecasts,
            "properties": self._table.properties,
            "held": {name: dict(vars(each)) for name, each in self._table.held.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._rows = {node: i for i, node in enumerate(state["node_ids"].tolist(), start=1)}
        n = len(self._rows) + 1
        self._indexed, self._row_of = self._indexed[:0], self._row_of[:0]
        self._table = Table(max(64, 2 * n))
        for name, column in state["columns"].items():
            self._table.columns[name][:n] = column
        self._table.forecasts = deepcopy(state["forecasts"])
        self._table.properties = deepcopy(state.get("properties", {}))
        for name, learnt in state.get("held", {}).items():
            vars(self._table.held[name]).update(learnt)
