"""Readers of when devices were free to compute: idle phones, charging cars, public desktops.

All count seconds of a local clock. The log of a phone or a car becomes a record of whole days, most
often one, at the hours and in the week where it was.

FLASH's clocks have a resolution of one second and log a phone that stays ready as a chain of
slivers (start, start), (start + 1, start + 1) and so on. Two windows at most one second apart are
therefore one; what remains without length was a single instant, and is dropped.

Reference:
    Yang, Wang, Xu, Chen, Bian, Liu, Liu. Characterizing Impacts of Heterogeneity in Federated
    Learning upon Large-Scale Smartphone Data. The Web Conference 2021.
    Zhang, Zeng, Zhang, Chen, Zhou, Lyu, Yang. FLHetBench: Benchmarking Device and State
    Heterogeneity in Federated Learning. CVPR 2024.
    Data in Brief 2024, doi 10.1016/j.dib.2024.110883: charging of electric cars in Norway.
    UNCG-CSE, Library-Computer-Usage-Analysis: public desktops of the library of the University of
    North Carolina at Greensboro.
"""

import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import pandas as pd

from fedstale.errors import TraceError, first_line
from fedstale.traces import DAY_S, OWN_LOG, Array, Availability, Index, Mask, TraceSet, stretches_of
from fedstale.traces.sources.archives import members, number, read_file, read_json

_PHONES_EPOCH, _DAYS_EPOCH = "2018-03-06T00:00:00", "2020-01-02T00:00:00"
"""Instant 0 of ready_strict.json, and of FLHetBench's phones over days."""
_RESOLUTION_S = 1.0
_WEEK_S, _MONTH_S = 7 * DAY_S, 30 * DAY_S

_CARS_EPOCH = "2018-01-01T00:00:00"
"""A Monday, from which instants count."""
_SESSION = ("user_id", "plugin_time", "plugout_time")
_LOCAL_TIME = "%Y-%m-%d %H:%M:%S"

DESKTOPS = re.compile(r"FullLogonData-\d+\.csv(\.gz|\.xz)?")
_FREE = ("available", "restarted")
_STATES = (*_FREE, "in-use", "offline")
_NO_TIME = pd.Timedelta(0)


def read_phones(path: str | Path) -> TraceSet:
    """Return the availability of the phones in FLASH's {phone: [[start, end], ...]}.

    Most phones have windows on one day of the study alone, each on its own. The file does not say
    when a phone was logged, so its log is taken to reach from its first window to its last; before
    and after it the phone is unknown.

    Where a phone has no window for more than a day, only the part of its windows with the most time
    online is its log. Phones without any window are kept, as phones that never come: one in six
    phones of the study never was idle, charging and on Wi-Fi, and to leave them out would flatter.

    Args:
        path: the file, gzipped or not.

    Returns:
        A set that knows availability only; instant 0 is a local midnight.

    Raises:
        TraceError: the file is missing or damaged, or is not of this format.
    """
    data = _phones(Path(path), "[[start_s, end_s], ...]")
    counts: Counter[str] = Counter()
    windows = {}
    for name, record in data.items():
        if not isinstance(record, list):
            raise TraceError(
                f"{path}: phone {name!r} has {type(record).__name__}, expected a list of "
                "[start_s, end_s]"
            )
        windows[name] = record
    owner, starts, ends = _flat(windows.values(), counts)
    backwards, long = ends < starts, ends - starts > DAY_S
    counts["dropped: end before start"] = int(np.count_nonzero(backwards))
    counts["dropped: longer than a day, so the clock was set"] = int(np.count_nonzero(long))
    sound = ~(backwards | long)
    owner, starts, ends = owner[sound], starts[sound], ends[sound]
    kept, began, ended = longest_log(owner, starts, ends, len(windows), gap_s=DAY_S)
    counts["dropped: apart from the log by more than a day"] = int(np.count_nonzero(~kept))
    # A window of one instant was seen for a second.
    logs_s = np.where(ended >= began, np.maximum(ended - began, _RESOLUTION_S), 0.0)
    return _on_the_clock(
        list(windows), (owner[kept], starts[kept], ends[kept]), began, logs_s, _PHONES_EPOCH, counts
    )


def read_phones_over_days(path: str | Path) -> TraceSet:
    """Return the availability of the phones in FLHetBench's cached_timers.json.

    The file is {phone: {"isSuccess", "trace_start", "trace_end", "ready_time": [[start, end],
    ...]}}: it states each phone's log, 1 to 10 whole days in the weeks of Chinese New Year and of
    the first lockdown. Phones without a usable log (`isSuccess` is false) are left out and counted:
    nothing is known of them.

    Args:
        path: the file, gzipped or not.

    Returns:
        A set that knows availability only; instant 0 is a local midnight.

    Raises:
        TraceError: the file is missing or damaged, is not of this format, or no phone has a log.
    """
    counts: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    windows: dict[str, list[object]] = {}
    for name, record in _phones(Path(path), "{trace_start, trace_end, ready_time}").items():
        known = record if isinstance(record, dict) else {}
        ready = known.get("ready_time")
        span = number(known.get("trace_start")), number(known.get("trace_end"))
        if known.get("isSuccess") is False:
            counts["dropped: phone without a usable log"] += 1
        elif not isinstance(ready, list) or not -math.inf < span[0] < span[1] < math.inf:
            counts["dropped: phone whose log has no span or no list of windows"] += 1
        else:
            spans.append(span)
            windows[name] = ready
    if not windows:
        raise TraceError(f"{path}: no phone with a log: expected FLHetBench's cached_timers.json")
    began, ended = np.array(spans).T
    flat = _flat(windows.values(), counts)
    return _on_the_clock(list(windows), flat, began, ended - began, _DAYS_EPOCH, counts)


def _phones(path: Path, content: str) -> dict[str, object]:
    data = read_json(path)
    if not isinstance(data, dict) or not data:
        raise TraceError(f"{path}: expected a JSON object {{phone: {content}}}")
    return data


def _flat(windows: Iterable[list[object]], counts: Counter[str]) -> tuple[Index, Array, Array]:
    """Return the phone, the start and the end of each window; counts what is no window."""
    pairs = (
        (phone, *(window if isinstance(window, list) and len(window) == 2 else (None, None)))
        for phone, record in enumerate(windows)
        for window in record
    )
    rows = [(phone, number(start), number(end)) for phone, start, end in pairs]
    owner, starts, ends = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    known = np.isfinite(starts) & np.isfinite(ends)
    counts["dropped: not a pair of numbers"] = int(np.sum(~known))
    return owner[known].astype(np.int64), starts[known], ends[known]


def _on_the_clock(  # noqa: PLR0917 - one file's phones
    phones: list[str],
    windows: tuple[Index, Array, Array],
    began: Array,
    logs_s: Array,
    epoch: str,
    counts: Counter[str],
) -> TraceSet:
    """Return phones with records of whole days; instants count from the file's instant 0."""
    online, repairs = of_logs(*windows, began, logs_s, join_s=_RESOLUTION_S)
    counts += repairs
    counts["kept: phone that is never online"] = int(np.sum(np.diff(online.offsets) == 0))
    return TraceSet(
        device_ids=pd.Index(phones, dtype="str"),
        availability=online,
        epoch=epoch,
        repairs=counts,
    )


def read_cars(path: str | Path) -> TraceSet:
    """Return when electric cars were plugged in at home, and could compute with power.

    Each row of Dataset1_charging_reports.csv is a session of a user, in local time, with semicolons
    between its columns and decimal commas. The file does not say when a user was observed. A log is
    taken to reach from a first session to a last one without a month in between; it begins and ends
    plugged in, for no other reason than that, so its last week is cut. What is left becomes a
    record of whole weeks, or of whole days where it is shorter than one. Years and seasons are
    lost: each log is moved by whole weeks to the beginning of the record.

    Args:
        path: the file, gzipped, xz or not.

    Returns:
        A set that knows availability only; instant 0 is a midnight that begins a Monday.

    Raises:
        TraceError: the file is missing or damaged, is not of this format, or has no car with a log
            of more than a week.
    """
    path = Path(path)
    table = _sessions(path)
    counts: Counter[str] = Counter()
    starts, ends = (
        (
            pd.to_datetime(table[name], format=_LOCAL_TIME, errors="coerce")
            - pd.Timestamp(_CARS_EPOCH)
        )
        / pd.Timedelta(seconds=1)
        for name in _SESSION[1:]
    )
    known = (table["user_id"].notna() & starts.notna() & ends.notna()).to_numpy()
    counts["dropped: no user, plug-in or plug-out time"] = int(np.sum(~known))
    owner, users = pd.factorize(table["user_id"][known], sort=True)
    start, end = (np.asarray(x[known], dtype=np.float64) for x in (starts, ends))
    forwards = end >= start
    counts["dropped: end before start"] = int(np.sum(~forwards))
    owner, start, end = owner[forwards], start[forwards], end[forwards]
    kept, began, ended = longest_log(owner, start, end, users.size, gap_s=_MONTH_S)
    counts["dropped: apart from the log by more than 30 days"] = int(np.sum(~kept))
    logs_s = np.maximum(ended - began - _WEEK_S, 0.0)
    unit = np.where(logs_s < _WEEK_S, DAY_S, _WEEK_S)
    logs_s = np.floor(logs_s / unit) * unit
    cars = np.flatnonzero(logs_s)
    counts["dropped: car with a log of less than a week and a day"] = users.size - cars.size
    if cars.size == 0:
        raise TraceError(f"{path}: no car with sessions over more than a week")
    place = np.full(users.size, -1)
    place[cars] = np.arange(cars.size)
    kept &= place[owner] >= 0
    owner, start, end = place[owner[kept]], start[kept], end[kept]
    began, logs_s = began[cars], logs_s[cars]
    online, repairs = of_logs(owner, start, end, began, logs_s, join_s=0.0)
    return TraceSet(
        device_ids=pd.Index(users[cars], dtype="str"),
        availability=online,
        epoch=_CARS_EPOCH,
        repairs=counts + repairs,
    )


def _sessions(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_csv(io.BytesIO(read_file(path)), sep=";", dtype="str", usecols=_SESSION)
    except ValueError as problem:
        raise TraceError(
            f"{path}: expected columns {', '.join(_SESSION)} with semicolons between them "
            f"({first_line(problem)}); {OWN_LOG}"
        ) from None
    return table


def read_desktops(path: str | Path) -> TraceSet:
    """Return when a library's public desktops were on and without a user.

    Each row of FullLogonData-NNN.csv is an event: a machine, the state it enters and the local
    time; the files have no header, and follow one another. A desktop can compute for others from
    "available" or "restarted" on, until "in-use" or "offline". All machines keep the calendar of
    the log, since they share opening hours, terms and nightly shutdowns. A machine is known from
    its first event to its last. Instants are those of the local clock, so the hour of day is right
    at any of them; a state that holds while clocks go forward or back is an hour too long or too
    short.

    Args:
        path: a FullLogonData-NNN.csv, gzipped, xz or not, or a folder or archive of them.

    Returns:
        A set that knows availability only, on the calendar of the log: instant 0 is the midnight
        that begins the Monday before its first event, and all of it repeats after whole weeks.

    Raises:
        TraceError: nothing can be read as this format.
    """
    path = Path(path)
    counts: Counter[str] = Counter()
    files = [_events(text, counts) for text in _texts(path)]
    events = pd.concat(files, ignore_index=True) if files else pd.DataFrame()
    if events.empty:
        raise TraceError(f"{path}: no row of machine, state and local time: expected desktops' log")
    machine, ids = pd.factorize(events["machine"], sort=True)
    counts["sorted: out of order"] = int((events.groupby(machine)["at"].diff() < _NO_TIME).sum())
    order = np.lexsort((events["at"], machine))
    events, machine = events.iloc[order], machine[order]
    state, epoch = events["state"].to_numpy(), events["at"].min().to_period("W-SUN").start_time
    at = ((events["at"] - epoch) / pd.Timedelta(seconds=1)).to_numpy(dtype=np.float64)
    is_first = np.diff(machine, prepend=-1) != 0
    is_last = np.append(is_first[1:], True)
    began, ended = at[is_first], at[is_last]
    counts["dropped: state repeated"] = int(np.sum((state[1:] == state[:-1]) & ~is_first[1:]))
    # A window lasts from an event that frees a machine to one that does not, or to its last one.
    free = np.isin(state, _FREE) & ~is_last
    opens = free & (is_first | ~np.roll(free, 1))
    closes = ~free & ~is_first & np.roll(free, 1)
    weeks = np.floor(at.max() / (_WEEK_S)) + 1
    desktops, repairs = Availability.repaired(
        machine[opens], at[opens], at[closes], np.full(ids.size, weeks * _WEEK_S), join_s=0.0
    )
    counts += repairs
    counts["kept: desktop with one event, of which nothing is known"] = int(np.sum(began == ended))
    return TraceSet(
        device_ids=pd.Index(ids, dtype="str"),
        availability=replace(desktops, log_starts=began, logs_s=ended - began),
        epoch=epoch.isoformat(),
        repairs=counts,
    )


def is_log(name: str) -> bool:
    """Return whether a file is one of the log, by its name."""
    return DESKTOPS.fullmatch(PurePosixPath(name).name) is not None


def _texts(path: Path) -> Iterator[bytes]:
    if path.is_file() and is_log(path.name):
        yield read_file(path)
        return
    for _, data in members(path, is_log):
        if data is not None:
            yield data


def _events(data: bytes, counts: Counter[str]) -> pd.DataFrame:
    """Return machine, state and instant of the rows that say so; counts the others."""
    text = data.decode("utf-8-sig", errors="replace")
    rows = pd.Series(text.splitlines(), dtype="str").str.extract(
        rf"^(?P<machine>[^,]+),(?P<state>{'|'.join(_STATES)}),(?P<at>[^,]+)$"
    )
    rows["at"] = pd.to_datetime(rows["at"], format="%Y-%m-%d %H:%M:%S.%f", errors="coerce")
    good = rows.notna().all(axis=1)
    counts["dropped: not a machine, a state and a local time"] += int(np.sum(~good))
    return rows[good]


def longest_log(
    owner: Index, starts: Array, ends: Array, n: int, *, gap_s: float
) -> tuple[Mask, Array, Array]:
    """Estimate the span in which each device was logged from its windows alone.

    A log reaches from a first window to a last one, without any time longer than a gap in which
    nothing was seen. Of several logs of a device, the one with the most time online counts.

    Args:
        owner: device of each window, 0 to n - 1; shape (windows,).
        starts: in s; shape (windows,).
        ends: in s, none before its start; shape (windows,).
        n: number of devices.
        gap_s: the longest time without a window within a log, in s.

    Returns:
        Which windows are of the logs, shape (windows,), and start and end of each log in s, of
        shape (n,); for a device without windows the end, -inf, precedes the start, 0.

    Example:
        >>> owner, starts, ends = np.zeros(3, dtype=int), np.array([0, 5, 99]), np.array([1, 9, 99])
        >>> longest_log(owner, starts.astype(float), ends.astype(float), 1, gap_s=10.0)
        (array([ True,  True, False]), array([0.]), array([9.]))
    """
    began, ended = np.zeros(n), np.full(n, -np.inf)
    kept = np.zeros(owner.size, dtype=bool)
    if owner.size == 0:
        return kept, began, ended
    log, of, first, last = stretches_of(owner, starts, ends, gap_s=gap_s)
    online = np.bincount(log, ends - starts)
    # The last of a device's logs in this order has the most time online, the earlier on a tie.
    best = np.lexsort((-first, online, of))
    chosen = best[np.append(np.diff(of[best]) > 0, True)]
    began[of[chosen]], ended[of[chosen]] = first[chosen], last[chosen]
    return np.isin(log, chosen), began, ended


def of_logs(
    owner: Index,
    starts: Array,
    ends: Array,
    began: Array,
    logs_s: Array,
    *,
    join_s: float,
) -> tuple[Availability, Counter[str]]:
    """Build the availability of devices from windows of logs, which become whole days.

    Args:
        owner: device of each window, 0 to devices - 1; shape (windows,).
        starts: in s since a midnight; shape (windows,).
        ends: in s; shape (windows,).
        began: start of each device's log in s; shape (devices,).
        logs_s: for how long each device was logged, in s, >= 0; shape (devices,).
        join_s: longest gap that is not a gap, in s, >= 0.

    Returns:
        The devices, and counts of repairs by kind; see `Availability.folded` and `repaired`.
    """
    # A log without length holds no window, but a record has a length.
    lengths = np.where(logs_s > 0, logs_s, 1.0)
    logged, counts = Availability.repaired(
        owner, starts - began[owner], ends - began[owner], lengths, join_s=join_s
    )
    return logged.folded(began, logs_s), counts
