"""Reader of plug-in sessions of electric cars at home, as edge computers that come with power.

Each row of Dataset1_charging_reports.csv is a session of a user, in local time, with semicolons
between its columns and decimal commas. A car can compute while it is plugged in.

The file does not say when a user was observed. A log is taken to reach from a first session to a
last one without a month in between; it begins and ends plugged in, for no other reason than that,
so its last week is cut. What is left becomes a record of whole weeks, or of whole days where it is
shorter than one. Years and seasons are lost: each log is moved by whole weeks to the beginning of
the record.

Reference:
    Data in Brief 2024, doi 10.1016/j.dib.2024.110883: charging of electric cars in Norway.
"""

import io
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import TraceError, first_line
from fedstale.traces import DAY_S, OWN_LOG, TraceSet
from fedstale.traces.sources.archives import read_file
from fedstale.traces.sources.logs import longest_log, of_logs

COLUMNS = ("user_id", "plugin_time", "plugout_time")
EPOCH = "2018-01-01T00:00:00"
"""A Monday, from which instants count."""
_LOCAL_TIME = "%Y-%m-%d %H:%M:%S"
_WEEK_S = 7 * DAY_S
_GAP_S = 30 * DAY_S


def read(path: str | Path) -> TraceSet:
    """Return when cars were plugged in at home.

    Args:
        path: the file, gzipped, xz or not.

    Returns:
        A set that knows availability only; instant 0 is a midnight that begins a Monday.

    Raises:
        TraceError: the file is missing or damaged, is not of this format, or has no car with a log
            of more than a week.
    """
    path = Path(path)
    table = _table(path)
    counts: Counter[str] = Counter()
    starts, ends = (
        (pd.to_datetime(table[name], format=_LOCAL_TIME, errors="coerce") - pd.Timestamp(EPOCH))
        / pd.Timedelta(seconds=1)
        for name in COLUMNS[1:]
    )
    known = (table["user_id"].notna() & starts.notna() & ends.notna()).to_numpy()
    counts["dropped: no user, plug-in or plug-out time"] = int(np.sum(~known))
    owner, users = pd.factorize(table["user_id"][known], sort=True)
    start, end = (np.asarray(x[known], dtype=np.float64) for x in (starts, ends))
    forwards = end >= start
    counts["dropped: end before start"] = int(np.sum(~forwards))
    owner, start, end = owner[forwards], start[forwards], end[forwards]
    kept, began, ended = longest_log(owner, start, end, users.size, gap_s=_GAP_S)
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
        epoch=EPOCH,
        repairs=counts + repairs,
    )


def _table(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_csv(io.BytesIO(read_file(path)), sep=";", dtype="str", usecols=COLUMNS)
    except ValueError as problem:
        raise TraceError(
            f"{path}: expected columns {', '.join(COLUMNS)} with semicolons between them "
            f"({first_line(problem)}); {OWN_LOG}"
        ) from None
    return table
