"""Reader of the event log of a university library's public desktops.

Each row of FullLogonData-NNN.csv is an event: a machine, the state it enters and the local time;
the files have no header, and follow one another. A desktop can compute for others while it is on
and no one is logged on: from "available" or "restarted" on, until "in-use" or "offline".

All machines keep the calendar of the log, since they share opening hours, terms and nightly
shutdowns. A machine is known from its first event to its last. Instants are those of the local
clock, so the hour of day is right at any of them; a state that holds while clocks go forward or
back is an hour too long or too short.

Reference:
    UNCG-CSE, Library-Computer-Usage-Analysis: public desktops of the library of the University of
    North Carolina at Greensboro.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces import DAY_S, Availability, TraceSet
from fedstale.traces.sources.archives import members, read_file

FILE = re.compile(r"FullLogonData-\d+\.csv(\.gz|\.xz)?")
FREE = ("available", "restarted")
STATES = (*FREE, "in-use", "offline")
_NO_TIME = pd.Timedelta(0)


def read(path: str | Path) -> TraceSet:
    """Return when desktops were on and without a user.

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
    free = np.isin(state, FREE) & ~is_last
    opens = free & (is_first | ~np.roll(free, 1))
    closes = ~free & ~is_first & np.roll(free, 1)
    weeks = np.floor(at.max() / (7 * DAY_S)) + 1
    desktops, repairs = Availability.repaired(
        machine[opens], at[opens], at[closes], np.full(ids.size, weeks * 7 * DAY_S), join_s=0.0
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
    return FILE.fullmatch(PurePosixPath(name).name) is not None


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
        rf"^(?P<machine>[^,]+),(?P<state>{'|'.join(STATES)}),(?P<at>[^,]+)$"
    )
    rows["at"] = pd.to_datetime(rows["at"], format="%Y-%m-%d %H:%M:%S.%f", errors="coerce")
    good = rows.notna().all(axis=1)
    counts["dropped: not a machine, a state and a local time"] += int(np.sum(~good))
    return rows[good]
