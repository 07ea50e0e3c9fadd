"""Traces out of a log in a table: windows, samples, battery, rates, or a list of nodes.

A reading holds until the next one, for a time that is stated or plain from the log; longer silences
are unknown, neither online nor offline. Of several stretches of a device's readings the longest is
its log, since a trace has one; those of a link, whose hours matter less, are joined. What is
dropped or merged is counted in the repairs of the set.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces import (
    DAY_S,
    Array,
    Availability,
    Index,
    Mask,
    Series,
    TraceSet,
    longest_log,
    offsets_of,
    running_sums,
)
from fedstale.traces.tables.columns import RATES, Columns, TableOptions, understand
from fedstale.traces.tables.values import (
    PER_INTERVAL,
    RATE_UNITS,
    TIME_UNITS,
    Instants,
    check_units,
    instants,
    numbers,
    states,
    unit_of,
    where,
)

logger = logging.getLogger(__name__)

# Steps of a log that samples regularly differ less; longer ones need a word of the user.
_REGULAR = 10.0
_MOST_BIT_PER_S = 1e15
_STATES = ("online", "charging", "plugged")
_OF_KINDS = {
    "time_zone": "windows samples battery rates",
    "time_format": "windows samples battery rates",
    "max_gap_s": "windows samples battery rates",
    "online_values": "samples battery",
    "min_level": "battery",
    "compute_unit": "nodes",
}
"""Kinds of log that an option is for; the others are for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTraces:
    """Traces of a table, and how it was understood."""

    traces: TraceSet
    """Of the devices in it."""
    told: Mapping[str, str]
    """What was given and what was guessed, in words, by what it is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """A table whose columns are known."""

    frame: pd.DataFrame
    columns: Columns
    options: TableOptions
    counts: Counter[str]
    told: dict[str, str]

    def has(self, role: str) -> bool:
        return role in self.columns.of

    def cells(self, role: str) -> "pd.Series[str]":
        cells: pd.Series[str] = self.frame[self.columns.of[role]]
        return cells

    def instants(self, *roles: str) -> Instants:
        columns = {role: self.columns.of[role] for role in roles}
        found = instants(self.frame, columns, self.options, self.counts)
        self.told.update(found.told)
        return found

    def kept(self, good: Mask, why: str) -> Mask:
        self.counts[f"dropped: {why}"] += int(good.size - np.count_nonzero(good))
        return good


def read_table(frame: pd.DataFrame, options: TableOptions) -> TableTraces:
    """Return the traces of a log in a table; see `TraceSet.from_frame`.

    Args:
        frame: the log; its index names its rows in errors, under the name of the index.
        options: what is stated of it.

    Raises:
        TraceError: a cell, a column or a unit is wrong, missing or has more than one reading.

    Example:
        >>> log = pd.DataFrame({"phone": ["a", "a"], "from_s": [10, 60], "to_s": [30, 90]})
        >>> read = read_table(log, TableOptions())
        >>> read.traces.availability.windows(0)[0].tolist(), read.told["start"]
        ([[10.0, 30.0], [60.0, 90.0]], "column 'from_s', by its name")
    """
    frame = frame.rename(columns=str)
    columns = understand(frame, options)
    for name, kinds in _OF_KINDS.items():
        if getattr(options, name) not in (None, ()) and columns.kind not in kinds.split():
            raise TraceError(
                f"{name} = {getattr(options, name)!r}: expected none for {columns.kind}, since it "
                f"is for {' and '.join(kinds.split())}"
            )
    check_units(columns.of, options)
    log = _Log(
        frame=frame, columns=columns, options=options, counts=Counter(), told={**columns.told}
    )
    traces = _READERS[columns.kind](log)
    traces = replace(traces, repairs=log.counts + Counter(traces.repairs))
    log.told["rows"] = f"{len(frame):,}"
    log.told["devices"] = f"{traces.n_devices:,}"
    logger.info("table: %s", "; ".join(f"{what}: {how}" for what, how in log.told.items()))
    return TableTraces(traces=traces, told=log.told)


def _windows(log: _Log) -> TraceSet:
    times = log.instants("start", "end")
    start, end = times.of["start"], times.of["end"]
    backwards = end < start
    if backwards.any():
        raise TraceError(
            f"{where(log.cells('end').astype('str'), backwards)} is before its start "
            f"{str(log.cells('start').to_numpy()[backwards][0])!r}: expected an end after it"
        )
    known = log.kept(np.isfinite(start) & np.isfinite(end), "no start or no end")
    rows, owner, ids = _devices(log, known)
    start, end = start[rows], end[rows]
    gap_s = np.inf if log.options.max_gap_s is None else log.options.max_gap_s
    kept, began, ended = longest_log(owner, start, end, ids.size, gap_s=gap_s)
    kept = log.kept(kept, f"apart from the log of its device by more than {gap_s:g} s")
    log.told["logged"] = "each device from its first window to its last" + (
        "" if np.isinf(gap_s) else f", without a gap of more than {gap_s:g} s"
    )
    windows = owner[kept], start[kept], end[kept]
    return _available(log, ids, windows, (began, ended), times.epoch)


def _samples(log: _Log) -> TraceSet:
    times = log.instants("time")
    online = np.full(len(log.frame), 1.0)
    for role in _STATES:
        if log.has(role):
            online *= states(log.cells(role), role, log.options).to_numpy()
    if log.options.min_level is not None and not log.has("level"):
        raise TraceError(
            "min_level: expected a column of the battery's level (--columns level=NAME)"
        )
    if log.has("level"):
        if log.options.min_level is not None:
            level = numbers(log.cells("level"), log.options, log.told).to_numpy()
            enough = np.where(np.isfinite(level), level >= log.options.min_level, np.nan)
            online *= enough
        elif not any(log.has(role) for role in _STATES):
            raise TraceError(
                f"column {log.columns.of['level']!r}: a level does not say when a device can take "
                "a job: expected the least one (--min-level), or a column charging= or plugged="
            )
        else:
            log.told["level"] += ", not used without a least level (--min-level)"
    known = log.kept(np.isfinite(times.of["time"]), "no time")
    known &= log.kept(np.isfinite(online) | ~known, "no state")
    rows, owner, ids = _devices(log, known)
    owner, at, online = _ordered(log, owner, times.of["time"][rows], online[rows], "replaced")
    following, is_last = _following(owner, at)
    gap_s = _max_gap_s(log, (following - at)[~is_last])
    # Until the next reading, unless that comes too late: then nothing is known from this one on.
    holds = ~is_last & (following - at <= gap_s)
    until = np.where(holds, following, at)
    kept, began, ended = longest_log(owner, at, until, ids.size, gap_s=0.0)
    log.kept(kept, "apart from its device's longest stretch without a gap")
    on = kept & (online == 1.0) & holds
    goes_on = on[:-1] & on[1:] & ~is_last[:-1]
    opens, closes = on & ~np.append(False, goes_on), on & ~np.append(goes_on, False)
    windows = owner[opens], at[opens], until[closes]
    return _available(log, ids, windows, (began, ended), times.epoch)


def _available(
    log: _Log,
    ids: pd.Index,
    windows: tuple[Index, Array, Array],
    logs: tuple[Array, Array],
    epoch: str | None,
) -> TraceSet:
    """Return devices that are online in windows and were logged from when to when.

    By the calendar all records last the same whole days; else they end with the last log.
    """
    (owner, start, end), (began, ended) = windows, logs
    logged = log.kept(ended > began, "device of which no time is known")
    if not logged.any():
        raise _nothing_known()
    place = np.cumsum(logged) - 1
    used = logged[owner]
    length = float(ended.max())
    length = length if epoch is None else np.ceil(length / DAY_S) * DAY_S
    online, repairs = Availability.repaired(
        place[owner[used]], start[used], end[used], np.full(int(logged.sum()), length), join_s=0.0
    )
    log.told["repeats"] = f"after {length / DAY_S:g} d" if epoch else f"after {length:g} s"
    return TraceSet(
        device_ids=ids[logged],
        availability=replace(online, log_starts=began[logged], logs_s=(ended - began)[logged]),
        epoch=epoch,
        repairs=repairs,
    )


def _rates(log: _Log) -> TraceSet:
    times = log.instants("time")
    roles = [role for role in RATES if log.has(role)]
    units = {role: _rate_unit(log, role) for role in roles}
    counted = PER_INTERVAL in units.values()
    if counted and set(units.values()) != {PER_INTERVAL}:
        raise TraceError(f"units {', '.join(units.values())}: expected both of one kind")
    values = np.stack([_rate(log, role, units[role]).to_numpy() for role in roles], axis=1)
    interval = np.zeros(len(log.frame))
    if counted and log.has("interval"):
        interval = _interval_s(log)
    elif log.has("interval"):
        log.told["interval"] += ", not used: rates are not counted in intervals"
    known = log.kept(np.isfinite(times.of["time"]), "no time")
    has_rate = np.isfinite(values).all(axis=1) & np.isfinite(interval)
    known &= log.kept(has_rate | ~known, "no rate or no interval")
    rows, owner, ids = _devices(log, known)
    readings = np.column_stack([values, interval])[rows]
    owner, at, readings = _ordered(
        log, owner, times.of["time"][rows], readings, "added" if counted else "averaged"
    )
    values, interval = readings[:, :-1], readings[:, -1]
    following, is_last = _following(owner, at)
    if counted and log.has("interval"):
        begins, ends, gap_s, slack_s = at - interval, at, np.inf, float(np.median(interval))
        log.kept(interval > 0, "interval of no length")
    else:
        gap_s, slack_s = _max_gap_s(log, (following - at)[~is_last]), 0.0
        before = np.where(np.append(True, is_last[:-1]), -np.inf, np.append(0.0, at[:-1]))
        begins, ends = (before, at) if counted else (at, following)
    # A reading of no known time only ends what is known before it, or begins what is after it.
    lasts = ends - begins
    used = (lasts > 0) & (lasts <= gap_s) & np.isfinite(lasts)
    n_of = np.bincount(owner[used], minlength=ids.size)
    known_devices = log.kept(n_of > 0, "device of which no time is known")
    if not known_devices.any():
        raise _nothing_known()
    owner = owner[used]
    begins, ends, lasts, values = (x[used] for x in (begins, ends, lasts, values))
    silent = (np.diff(owner) == 0) & (begins[1:] - ends[:-1] > slack_s)
    log.counts["closed up: silence in which no rate is known"] = int(silent.sum())
    bits = values / lasts[:, None] if counted else values
    counts = n_of[known_devices]
    starts, lengths = running_sums(lasts, offsets_of(counts))
    first = begins[np.append(True, np.diff(owner) > 0)]
    epoch = times.epoch
    if silent.any() and epoch is not None:
        epoch = None
        log.told["epoch"] = "none: silences were closed up, so hours of the day are lost"
    links: dict[str, Any] = {
        role: Series.packed(bits[:, k], counts, lengths, starts=starts).shifted(
            np.mod(-first, lengths)
        )
        for k, role in enumerate(roles)
    }
    return TraceSet(device_ids=ids[known_devices], **links, epoch=epoch)


def _nodes(log: _Log) -> TraceSet:
    roles = [role for role in ("speed", *RATES) if log.has(role)]
    if log.has("speed") != (log.options.compute_unit is not None):
        if roles == ["speed"] or "speed" in log.options.columns or not log.has("speed"):
            raise TraceError(
                f"compute_unit = {log.options.compute_unit!r}: expected what one work unit of a "
                "column of speeds is, in words (--compute-unit), with such a column"
            )
        roles.remove("speed")
        log.told["speed"] += ", not used without what one work unit is (--compute-unit)"
    units = {role: _rate_unit(log, role) for role in roles if role in RATES}
    if PER_INTERVAL in units.values():
        raise TraceError(
            f"unit = {PER_INTERVAL}: a list of nodes has no intervals: expected a rate"
        )
    table = pd.DataFrame(
        {
            role: _rate(log, role, units[role]) if role in units else _not_negative(log, role)
            for role in roles
        }
    )
    known = log.kept(table.notna().all(axis=1).to_numpy(), "no speed or no rate")
    rows, owner, ids = _devices(log, known)
    table = table[rows]
    first = pd.Series(owner).drop_duplicates().index
    own = table.iloc[first].iloc[np.argsort(owner[first])]
    other = (table.to_numpy() != own.to_numpy()[owner]).any(axis=1)
    if other.any():
        cells = pd.Series(ids[owner], index=table.index, name="device", dtype="str")
        cells.index.name = log.frame.index.name
        raise TraceError(f"{where(cells, other)}: came with other numbers before: expected one row")
    log.counts["merged: row that repeats a device"] = int(owner.size - ids.size)
    names = {"speed": "compute"}
    channels: dict[str, Any] = {
        names.get(role, role): Series.constant(own[role].to_numpy()) for role in roles
    }
    return TraceSet(device_ids=ids, **channels, compute_unit=log.options.compute_unit)


_READERS = {
    "windows": _windows,
    "samples": _samples,
    "battery": _samples,
    "rates": _rates,
    "nodes": _nodes,
}


def _nothing_known() -> TraceError:
    return TraceError("no device is known for any time: expected two instants of one device")


def _devices(log: _Log, known: Mask) -> tuple[Mask, Index, pd.Index]:
    """Return which rows are read, the device of each of these, and the ids of all devices."""
    if log.options.device is not None:
        rows = known
        names = pd.Series(log.options.device, index=range(len(log.frame)), dtype="str")
    else:
        cells = log.cells("device")
        rows = known & log.kept(cells.notna().to_numpy() | ~known, "no device")
        # One empty cell makes floats of a frame's whole numbers.
        if pd.api.types.is_float_dtype(cells.dtype) and not (cells % 1).any():
            names = cells.astype("Int64").astype("str")
        else:
            names = cells.astype("str").str.strip()
    if not rows.any():
        raise TraceError("no row has all that is needed: expected some")
    owner, ids = pd.factorize(names.to_numpy()[rows], sort=True)
    return rows, owner.astype(np.int64), pd.Index(ids, dtype="str", name=None)


def _ordered(
    log: _Log, owner: Index, at: Array, values: Array, how: str
) -> tuple[Index, Array, Array]:
    """Return readings by device and time, those of one instant as one."""
    back = pd.Series(at).groupby(owner).diff() < 0
    log.counts["sorted: out of order"] = int(back.sum())
    readings = pd.DataFrame(values.reshape(at.size, -1))
    one = readings.groupby([owner, at], sort=True)
    merged = one.sum() if how == "added" else one.mean() if how == "averaged" else one.last()
    log.counts[f"{how}: further reading of one instant"] = int(at.size - len(merged))
    keys = merged.index
    return (
        keys.get_level_values(0).to_numpy(np.int64),
        keys.get_level_values(1).to_numpy(np.float64),
        merged.to_numpy(np.float64).reshape((len(merged), *values.shape[1:])),
    )


def _following(owner: Index, at: Array) -> tuple[Array, Mask]:
    """Return the instant of each device's next reading, inf after its last, and the lasts."""
    is_last = np.append(np.diff(owner) > 0, True)
    return np.where(is_last, np.inf, np.append(at[1:], np.inf)), is_last


def _max_gap_s(log: _Log, steps: Array) -> float:
    """Return for how long a reading holds at most, in s.

    Raises:
        TraceError: it is not stated, and the log does not make it plain.
    """
    if log.options.max_gap_s is not None:
        log.told["longest gap"] = (
            "none, given: a reading holds until the next one"
            if np.isinf(log.options.max_gap_s)
            else f"{log.options.max_gap_s:g} s, given; longer ones are unknown"
        )
        return log.options.max_gap_s
    if steps.size == 0:
        return np.inf
    usual, longest = float(np.median(steps)), float(steps.max())
    if longest > _REGULAR * usual:
        raise TraceError(
            f"readings come every {usual:g} s, and once after {longest:g} s: expected the longest "
            "time for which a reading holds (--max-gap), or none if it holds until the next one"
        )
    log.told["longest gap"] = f"{longest:g} s, the longest step of the log"
    return np.inf


def _rate_unit(log: _Log, role: str) -> str:
    column = log.columns.of[role]
    unit, how = unit_of(column, role, log.options, RATE_UNITS)
    if unit is None:
        raise TraceError(
            f"column {column!r}: a rate without its unit: expected one (--unit) of "
            f"{', '.join(RATE_UNITS)}"
        )
    log.told[role] += f", in {unit}, {how}"
    return unit


def _rate(log: _Log, role: str, unit: str) -> "pd.Series[float]":
    values = _not_negative(log, role)
    above = (values > _MOST_BIT_PER_S / RATE_UNITS[unit]).to_numpy()
    if above.any():
        raise TraceError(f"{where(log.cells(role), above)} {unit}: expected at most 1 Pbit/s")
    return values * RATE_UNITS[unit]


def _interval_s(log: _Log) -> Array:
    """Return the intervals in which bytes were counted, in s."""
    column = log.columns.of["interval"]
    unit, how = unit_of(column, "interval", log.options, TIME_UNITS)
    if unit is None:
        raise TraceError(
            f"column {column!r}: an interval without its unit: expected one (--unit interval=ms)"
        )
    log.told["interval"] += f", in {unit}, {how}"
    seconds = _not_negative(log, "interval") * TIME_UNITS[unit] / 1e6
    return np.asarray(seconds, dtype=np.float64)


def _not_negative(log: _Log, role: str) -> "pd.Series[float]":
    values = numbers(log.cells(role), log.options, log.told)
    wrong = (values < 0).to_numpy()
    if wrong.any():
        raise TraceError(f"{where(log.cells(role), wrong)}: expected a number >= 0")
    return values
