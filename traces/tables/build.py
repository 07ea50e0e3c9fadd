"""Traces out of a log in a table: windows, samples, battery, rates, pings, or a list of nodes.

A reading holds until the next one, for a time that is stated or plain from the log; longer silences
are unknown, neither online nor offline, as gaps of the device's log. Those of a link, whose hours
matter less, are closed up. What is dropped or merged is counted in the repairs of the set.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedstale.errors import TraceError, nearest
from fedstale.traces import (
    DAY_S,
    Array,
    Availability,
    Index,
    Mask,
    Series,
    TraceSet,
    offsets_of,
    running_sums,
    stretches_of,
)
from fedstale.traces.tables.instants import instants
from fedstale.traces.tables.kinds import understand
from fedstale.traces.tables.reading import Reading, TableOptions, fault, seen, where
from fedstale.traces.tables.values import (
    check_units,
    lengths_s,
    not_negative,
    numbers,
    plain,
    rates,
    states,
)
from fedstale.traces.tables.words import COUNTED, IN_ALL, PER_INTERVAL, RATES, STATES

logger = logging.getLogger(__name__)

# Steps of a log that samples regularly differ less; longer ones need a word of the user.
_REGULAR = 10.0
_MOST_AT_ONCE = 0.05
"""Share of the readings that may be further ones of one instant; more are of several things."""
_LATER = "windows samples battery rates pings"
_OF_KINDS = {
    "time_zone": _LATER,
    "time_format": _LATER,
    "max_gap_s": _LATER,
    "online_values": "windows samples battery",
    "min_level": "battery",
    "compute_unit": "nodes",
}
"""Kinds of log that an option is for; the others are for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTraces:
    """Traces of a table, and how it was understood."""

    traces: TraceSet
    """Of the devices in it."""
    interpretation: Mapping[str, str]
    """What was given and what was guessed, in words, by what it is of."""


def read_table(frame: pd.DataFrame, options: TableOptions) -> TableTraces:
    """Return the traces of a log in a table; see `TraceSet.from_frame`.

    Args:
        frame: the log; its index names its rows in errors, under the name of the index.
        options: what is stated of it.

    Raises:
        UnclearLogError: cells, columns or units are wrong, missing or have more than one reading;
            all that is found is said at once, with the options that would answer it.
        TraceError: an option is wrong by itself.

    Example:
        >>> log = pd.DataFrame({"phone": ["a", "a"], "from_s": [10, 60], "to_s": [30, 90]})
        >>> read = read_table(log, TableOptions())
        >>> read.traces.availability.windows(0)[0].tolist(), read.interpretation["start"]
        ([[10.0, 30.0], [60.0, 90.0]], "column 'from_s', by its name")
    """
    attrs = frame.attrs
    log = Reading(frame=_only_rows(frame.rename(columns=str), options), options=options)
    log.frame.attrs = attrs
    if log.frame.empty:
        raise fault("rows_none")
    try:
        kind = understand(log)
        for name, kinds in _OF_KINDS.items():
            if getattr(options, name) not in (None, ()) and kind not in kinds.split():
                about = {"name": name, "value": getattr(options, name), "kind": kind}
                raise fault("option_of_other_kind", kinds=" and ".join(kinds.split()), **about)
        check_units(log)
        traces = _READERS[kind](log)
    except TraceError as problem:
        log.settle(problem)
        raise
    log.settle()
    repairs = Counter(traces.repairs) + Counter(attrs.get("repairs", {}))
    traces = replace(traces, repairs=log.counts + repairs)
    log.interpretation["rows"] = f"{len(frame):,}"
    log.interpretation["devices"] = f"{traces.n_devices:,}"
    logger.info(
        "table: %s", "; ".join(f"{what}: {how}" for what, how in log.interpretation.items())
    )
    told = attrs.get("told", {}) | log.interpretation
    return TableTraces(traces=traces, interpretation=told)


def _only_rows(frame: pd.DataFrame, options: TableOptions) -> pd.DataFrame:
    """Return the rows that are asked for."""
    for text in options.only:
        column, _, value = text.partition("=")
        if column not in frame:
            near = nearest(column, map(str, frame.columns))
            raise fault("only_unknown", text=text, near=near)
        cells = frame[column].astype("str").str.strip()
        if not (cells == value).any():
            raise fault("only_no_row", text=text, seen=seen(cells))
        frame = frame[cells == value]
    return frame.copy()


def _windows(log: Reading) -> TraceSet:
    by_length = "end" not in log.of
    times = instants(log, *(["start"] if by_length else ["start", "end"]))
    start = times.of["start"]
    lasts = lengths_s(log, "duration").to_numpy() if by_length else np.zeros(start.size)
    end = start + lasts if by_length else times.of["end"]
    log.drop(~(np.isfinite(start) & np.isfinite(end)), "no start or no end")
    if not by_length and (backwards := end < start).any():
        told = f"before its start {str(log.cells('start').to_numpy()[backwards][0])!r}: "
        log.drop(backwards, "end before start", log.cells("end"), f"{told}expected an end after it")
    online = np.ones(start.size)
    stated = [role for role in STATES if role in log.of]
    for role in stated:
        online *= states(log, role).to_numpy()
    log.drop(~np.isfinite(online), "no state")
    rows, owner, ids = _devices(log)
    start, end, on = start[rows], end[rows], online[rows] == 1.0
    gap_s = log.options.max_gap_s
    if stated:
        gap_s = 0.0 if gap_s is None else gap_s
        log.interpretation["logged"] = (
            "the rows of each device, online or offline; time of no row is unknown"
        )
    else:
        gap_s = np.inf if gap_s is None else gap_s
        log.interpretation["logged"] = "each device from its first window to its last" + (
            "" if np.isinf(gap_s) else f"; without a window for more than {gap_s:g} s it is unknown"
        )
    known = stretches_of(owner, start, end, gap_s=gap_s)[1:]
    return _available(log, ids, (owner[on], start[on], end[on]), known, times.midnight)


def _samples(log: Reading) -> TraceSet:
    times = instants(log, "time")
    online = np.full(len(log.frame), 1.0)
    for role in STATES:
        if role in log.of:
            online *= states(log, role).to_numpy()
    least = log.options.min_level
    if least is not None and "level" not in log.of:
        raise fault("level_none")
    if "level" in log.of:
        alone = not any(role in log.of for role in STATES)
        if least is None and alone:
            log.ask("level", "50", column=log.of["level"])
            least = 50.0
        if least is not None:
            level = numbers(log, log.cells("level"), "level").to_numpy()
            online *= np.where(np.isfinite(level), level >= least, np.nan)
        else:
            log.interpretation["level"] += ", not used without a least level (--min-level)"
    log.drop(~np.isfinite(times.of["time"]), "no time")
    log.drop(~np.isfinite(online), "no state")
    rows, owner, ids = _devices(log)
    owner, at, on = _ordered(log, rows, owner, times.of["time"][rows], online[rows], "replaced")
    following, is_last = _following(owner, at)
    gap_s = _max_gap_s(log, (following - at)[~is_last])
    # Until the next reading, unless that comes too late: then nothing is known from this one on.
    holds = ~is_last & (following - at <= gap_s)
    until = np.where(holds, following, at)
    known = stretches_of(owner, at, until, gap_s=0.0)[1:]
    on = (on == 1.0) & holds
    windows = stretches_of(owner[on], at[on], until[on], gap_s=0.0)[1:]
    return _available(log, ids, windows, known, times.midnight)


def _pings(log: Reading) -> TraceSet:
    times = instants(log, "time")
    log.drop(~np.isfinite(times.of["time"]), "no time")
    rows, owner, ids = _devices(log)
    at = times.of["time"][rows]
    order = np.lexsort((at, owner))
    owner, at = owner[order], at[order]
    following, is_last = _following(owner, at)
    steps = (following - at)[~is_last]
    gap_s = log.options.max_gap_s
    if gap_s is None:
        usual = round(float(np.median(steps[steps > 0])), 3) if (steps > 0).any() else 60.0
        gap_s = 3.0 * usual
        longest = float(steps.max(initial=0.0))
        log.ask("silence_of_pings", _amount(gap_s), usual=usual, longest=longest)
    log.interpretation["online"] = f"while pings come, with at most {gap_s:g} s between two, given"
    log.interpretation["logged"] = "each device from its first ping to its last"
    on = ~is_last & (following - at <= gap_s)
    until = np.where(on, following, at)
    known = stretches_of(owner, at, until, gap_s=np.inf)[1:]
    return _available(log, ids, (owner[on], at[on], until[on]), known, times.midnight)


def _available(
    log: Reading,
    ids: pd.Index,
    windows: tuple[Index, Array, Array],
    known: tuple[Index, Array, Array],
    midnight: str | None,
) -> TraceSet:
    """Return devices that are online in windows and are known in stretches.

    Instant 0 is the first that is known. By the calendar all records last the same whole days; else
    they end with the last log.
    """
    lasts = known[2] > known[1]
    of, begins, ends = known[0][lasts], known[1][lasts], known[2][lasts]
    began = np.full(ids.size, np.inf)
    ended = np.full(ids.size, -np.inf)
    np.minimum.at(began, of, begins)
    np.maximum.at(ended, of, ends)
    logged = np.isfinite(began)
    log.counts["dropped: device of which no time is known"] += int((~logged).sum())
    if not logged.any():
        raise fault("nothing_known")
    origin, epoch = _origin(log, float(began.min()), float(ended[logged].max()), midnight)
    place = np.cumsum(logged) - 1
    began, ended = began[logged] - origin, ended[logged] - origin
    used = logged[windows[0]]
    owner, start, end = windows[0][used], windows[1][used], windows[2][used]
    length = float(ended.max())
    length = length if epoch is None else np.ceil(length / DAY_S) * DAY_S
    online, repairs = Availability.repaired(
        place[owner], start - origin, end - origin, np.full(began.size, length), join_s=0.0
    )
    online = replace(online, log_starts=began, logs_s=ended - began)
    # Between two stretches of a device lies a gap.
    of, begins, ends = place[of], begins - origin, ends - origin
    inner = np.flatnonzero(np.diff(of) == 0)
    counts = np.bincount(of[inner], minlength=began.size)
    online = online.with_gaps(
        ends[inner] - began[of[inner]], begins[inner + 1] - began[of[inner]], counts
    )
    if inner.size:
        gaps_s = begins[inner + 1] - ends[inner]
        log.interpretation["gaps"] = (
            f"{inner.size:,} in which a device is unknown, {gaps_s.sum() / 3600:,.1f} h of "
            f"{(ended - began).sum() / 3600:,.1f} h in all"
        )
    log.interpretation["repeats"] = (
        f"after {length / DAY_S:g} d" if epoch else f"after {length:g} s"
    )
    return TraceSet(device_ids=ids[logged], availability=online, epoch=epoch, repairs=repairs)


def _origin(
    log: Reading, began: float, ended: float, midnight: str | None
) -> tuple[float, str | None]:
    """Return the instant that becomes 0, the first one known, and its calendar time."""
    if midnight is None:
        # A clock that had run for long says when it was started, not when the log was.
        origin = began if began > ended - began else 0.0
        log.interpretation["begins"] = f"at {began:g} s of its own clock" + (
            ", which becomes instant 0" if origin else ""
        )
        return origin, None
    origin = float(np.floor(began))
    epoch = (pd.Timestamp(midnight) + pd.Timedelta(seconds=origin)).isoformat()
    log.interpretation["begins"] = f"{epoch}, with the first reading"
    return origin, epoch


def _rates(log: Reading) -> TraceSet:
    times = instants(log, "time")
    roles = [role for role in RATES if role in log.of]
    read = {role: rates(log, role) for role in roles}
    counted = {unit for _, unit in read.values() if unit in COUNTED}
    if counted and any(unit not in counted or len(counted) > 1 for _, unit in read.values()):
        units = ", ".join(unit for _, unit in read.values())
        raise fault("units_of_two_kinds", units=units)
    values: Array = np.stack([read[role][0].to_numpy() for role in roles], axis=1)
    by_interval = counted == {PER_INTERVAL} and "interval" in log.of
    interval = np.zeros(len(log.frame))
    if by_interval:
        interval = np.asarray(lengths_s(log, "interval"), dtype=np.float64)
    elif "interval" in log.of:
        log.interpretation["interval"] += ", not used: rates are not counted in intervals"
    log.drop(~np.isfinite(times.of["time"]), "no time")
    has_rate = np.isfinite(values).all(axis=1) & np.isfinite(interval)
    log.drop(~has_rate, "no rate or no interval")
    if by_interval:
        log.drop(interval == 0, "interval of no length")
    rows, owner, ids = _devices(log)
    readings = np.column_stack([values, interval])[rows]
    how = {PER_INTERVAL: "added", IN_ALL: "replaced"}.get(next(iter(counted), ""), "averaged")
    owner, at, readings = _ordered(log, rows, owner, times.of["time"][rows], readings, how)
    values, interval = readings[:, :-1], readings[:, -1]
    following, is_last = _following(owner, at)
    if by_interval:
        begins, ends, gap_s, slack_s = at - interval, at, np.inf, float(np.median(interval))
    else:
        gap_s, slack_s = _max_gap_s(log, (following - at)[~is_last]), 0.0
        before = np.where(np.append(True, is_last[:-1]), -np.inf, np.append(0.0, at[:-1]))
        begins, ends = (before, at) if counted else (at, following)
    if counted == {IN_ALL}:
        values = np.concatenate([values[:1], np.diff(values, axis=0)])
    # A reading of no known time only ends what is known before it, or begins what is after it.
    lasts = ends - begins
    used = (lasts > 0) & (lasts <= gap_s) & np.isfinite(lasts)
    again = used & (values < 0).any(axis=1)
    log.counts["dropped: counter that began again"] += int(again.sum())
    used &= ~again
    n_of = np.bincount(owner[used], minlength=ids.size)
    log.counts["dropped: device of which no time is known"] += int((n_of == 0).sum())
    if not used.any():
        raise fault("nothing_known")
    bits = np.asarray(values[used] / (lasts[used, None] if counted else 1.0), dtype=np.float64)
    links, epoch = _links(
        log, owner[used], begins[used], ends[used], bits, slack_s=slack_s, midnight=times.midnight
    )
    channels: dict[str, Any] = dict(zip(roles, links, strict=True))
    return TraceSet(device_ids=ids[n_of > 0], **channels, epoch=epoch)


def _links(
    log: Reading,
    owner: Index,
    begins: Array,
    ends: Array,
    bits: Array,
    *,
    slack_s: float,
    midnight: str | None,
) -> tuple[list[Series], str | None]:
    """Return links from segments by device and time, and the calendar time of instant 0.

    Silences longer than the slack are closed up; hours of the day are then lost.
    """
    silent = (np.diff(owner) == 0) & (begins[1:] - ends[:-1] > slack_s)
    log.counts["closed up: silence in which no rate is known"] = int(silent.sum())
    counts = np.unique(owner, return_counts=True)[1]
    starts, lengths = running_sums(ends - begins, offsets_of(counts))
    first = begins[np.append(True, np.diff(owner) > 0)]
    origin, epoch = _origin(log, float(first.min()), float(ends.max()), midnight)
    if silent.any() and epoch is not None:
        epoch = None
        log.interpretation["epoch"] = "none: silences were closed up, so hours of the day are lost"
    later = np.mod(origin - first, lengths)
    links = [Series.packed(each, counts, lengths, starts=starts).shifted(later) for each in bits.T]
    return links, epoch


def _nodes(log: Reading) -> TraceSet:
    roles = [role for role in ("speed", *RATES) if role in log.of]
    unit = log.options.compute_unit
    if ("speed" in roles) != (unit is not None):
        if roles == ["speed"] or "speed" in log.options.columns or "speed" not in roles:
            if "speed" not in roles:
                raise fault("compute_unit", unit=unit)
            log.ask("compute_unit", "one unit of the column", unit=unit)
        else:
            roles.remove("speed")
            log.interpretation["speed"] += (
                ", not used without what one work unit is (--compute-unit)"
            )
    columns = {}
    for role in roles:
        if role == "speed":
            columns[role] = not_negative(log, log.cells(role), role)
            continue
        columns[role], rate_unit = rates(log, role)
        if rate_unit in COUNTED:
            raise fault("unit_of_nodes", unit=rate_unit)
    table = pd.DataFrame(columns)
    log.drop(~table.notna().all(axis=1).to_numpy(), "no speed or no rate")
    rows, owner, ids = _devices(log)
    table = table[rows]
    first = pd.Series(owner).drop_duplicates().index
    own = table.iloc[first].iloc[np.argsort(owner[first])]
    other = (table.to_numpy() != own.to_numpy()[owner]).any(axis=1)
    if other.any():
        cells = pd.Series(ids[owner], index=table.index, name="device", dtype="str")
        raise fault("other_numbers", where=where(cells, other))
    log.counts["merged: row that repeats a device"] = int(owner.size - ids.size)
    names = {"speed": "compute"}
    channels: dict[str, Any] = {
        names.get(role, role): Series.constant(own[role].to_numpy()) for role in roles
    }
    return TraceSet(device_ids=ids, **channels, compute_unit=unit if "speed" in roles else None)


_READERS = {
    "windows": _windows,
    "samples": _samples,
    "battery": _samples,
    "rates": _rates,
    "pings": _pings,
    "nodes": _nodes,
}


def _devices(log: Reading) -> tuple[Mask, Index, pd.Index]:
    """Return which rows are read, the device of each of these, and the ids of all devices."""
    if "device" not in log.of:
        names = pd.Series(log.options.device or "device", index=log.frame.index, dtype="str")
    else:
        cells = log.cells("device")
        # One empty cell makes floats of a frame's whole numbers.
        if pd.api.types.is_float_dtype(cells.dtype) and not (cells % 1).any():
            names = cells.astype("Int64").astype("str").where(cells.notna())
        else:
            names = plain(cells)
        log.drop(names.isna().to_numpy(), "no device")
    rows = ~log.gone
    if not rows.any():
        raise fault("rows_none_whole")
    owner, ids = pd.factorize(names.to_numpy()[rows], sort=True)
    return rows, owner.astype(np.int64), pd.Index(ids, dtype="str", name=None)


def _ordered(  # noqa: PLR0917 - the readings
    log: Reading, rows: Mask, owner: Index, at: Array, values: Array, how: str
) -> tuple[Index, Array, Array]:
    """Return readings by device and time, those of one instant as one."""
    back = pd.Series(at).groupby(owner).diff() < 0
    readings = pd.DataFrame(values.reshape(at.size, -1))
    one = readings.groupby([owner, at], sort=True)
    at_once = at.size - one.ngroups
    if at_once > _MOST_AT_ONCE * at.size:
        _ask_which(log, rows, owner, at, readings)
    log.counts["sorted: out of order"] = int(back.sum())
    merged = one.sum() if how == "added" else one.mean() if how == "averaged" else one.last()
    log.counts[f"{how}: further reading of one instant"] = int(at_once)
    keys = merged.index
    return (
        keys.get_level_values(0).to_numpy(np.int64),
        keys.get_level_values(1).to_numpy(np.float64),
        merged.to_numpy(np.float64).reshape((len(merged), *values.shape[1:])),
    )


def _ask_which(log: Reading, rows: Mask, owner: Index, at: Array, readings: pd.DataFrame) -> None:
    """Ask which rows of an instant are meant, if a column tells them apart."""
    frame = log.frame[rows]
    for column in frame.columns.difference([*log.of.values()], sort=False):
        values = frame[column].astype("str").to_numpy()
        n_values = len(set(values))
        keys = pd.DataFrame({"owner": owner, "at": at, "value": values})
        if n_values < 2 or n_values > len(frame) / 2 or keys.duplicated().mean() > _MOST_AT_ONCE:
            continue
        likely = readings[0].groupby(values).sum().idxmax()
        about = {"column": column, "seen": seen(frame[column])}
        log.ask("several_at_once", f"{column}={likely}", **about)
        return
    times = log.frame.loc[rows, log.of["time"]].astype("str")
    if (rounded := times.str.contains(r"^\d.*[eE]\+?\d", regex=True).to_numpy(bool)).any():
        log.ask("time_rounded", where=where(times, rounded))


def _following(owner: Index, at: Array) -> tuple[Array, Mask]:
    """Return the instant of each device's next reading, inf after its last, and the lasts."""
    is_last = np.append(np.diff(owner) > 0, True)
    return np.where(is_last, np.inf, np.append(at[1:], np.inf)), is_last


def _max_gap_s(log: Reading, steps: Array) -> float:
    """Return for how long a reading holds at most, in s; asks if the log does not make it plain."""
    if log.options.max_gap_s is not None:
        log.interpretation["longest gap"] = (
            "none, given: a reading holds until the next one"
            if np.isinf(log.options.max_gap_s)
            else f"{log.options.max_gap_s:g} s, given; longer ones are unknown"
        )
        return log.options.max_gap_s
    if steps.size == 0:
        return np.inf
    usual, longest = round(float(np.median(steps)), 3), float(steps.max())
    if longest > _REGULAR * usual:
        # A log of events has no step, and says what holds until the next one.
        is_regular = np.mean((steps > usual / 2) & (steps < 3 * usual)) > 0.8
        likely = _amount(3 * usual)
        answer = likely if is_regular else "none"
        log.ask("gap", answer, usual=usual, longest=longest, likely=likely)
        return 3 * usual if is_regular else np.inf
    log.interpretation["longest gap"] = f"{longest:g} s, the longest step of the log"
    return np.inf


def _amount(seconds: float) -> str:
    """Return a time as options have it.

    Example:
        >>> _amount(180.0), _amount(90.0), _amount(7200.0), _amount(0.3)
        ('3m', '90s', '2h', '0.3s')
    """
    for size, unit in ((3600, "h"), (60, "m")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s" if seconds < 10 else f"{np.ceil(seconds):.0f}s"
