"""Readers of FLASH's phones: when they were idle, charging and on Wi-Fi.

Both files hold windows in seconds since a local midnight, since the phones' clocks show local time.
`read` takes ready_strict.json, {phone: [[start, end], ...]}, whose instant 0 is 2018-03-06: most
phones have windows on one day of the study alone, each on its own. The file does not say when a
phone was logged, so its log is taken to reach from its first window to its last; before and after
it the phone is unknown. `read_days` takes the file that FLHetBench made of FLASH's logs, whose
instant 0 is 2020-01-02: it states each phone's log, 1 to 10 whole days in the weeks of Chinese New
Year and of the first lockdown.

A log becomes a record of whole days, most often one, at the hours and in the week where it was.

The clocks have a resolution of one second and log a phone that stays ready as a chain of slivers
(start, start), (start + 1, start + 1) and so on. Two windows at most one second apart are therefore
one; what remains without length was a single instant, and is dropped.

Reference:
    Yang, Wang, Xu, Chen, Bian, Liu, Liu. Characterizing Impacts of Heterogeneity in Federated
    Learning upon Large-Scale Smartphone Data. The Web Conference 2021.
    Zhang, Zeng, Zhang, Chen, Zhou, Lyu, Yang. FLHetBench: Benchmarking Device and State
    Heterogeneity in Federated Learning. CVPR 2024.
"""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces import DAY_S, Array, Index, TraceSet
from fedstale.traces.sources.archives import number, read_json
from fedstale.traces.sources.logs import longest_log, of_logs

EPOCH = "2018-03-06T00:00:00"
"""Instant 0 of ready_strict.json."""
DAYS_EPOCH = "2020-01-02T00:00:00"
"""Instant 0 of the phones over days."""
_RESOLUTION_S = 1.0


def read(path: str | Path) -> TraceSet:
    """Return the availability of the phones in a ready_strict.json.

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
        list(windows), (owner[kept], starts[kept], ends[kept]), began, logs_s, EPOCH, counts
    )


def read_days(path: str | Path) -> TraceSet:
    """Return the availability of the phones in FLHetBench's cached_timers.json.

    The file is {phone: {"isSuccess", "trace_start", "trace_end", "ready_time": [[start, end],
    ...]}}. Phones without a usable log (`isSuccess` is false) are left out and counted: nothing is
    known of them.

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
    return _on_the_clock(list(windows), flat, began, ended - began, DAYS_EPOCH, counts)


def _phones(path: Path, content: str) -> dict[str, object]:
    data = read_json(path)
    if not isinstance(data, dict) or not data:
        raise TraceError(f"{path}: expected a JSON object {{phone: {content}}}")
    return data


def _flat(windows: Iterable[list[object]], counts: Counter[str]) -> tuple[Index, Array, Array]:
    """Return the phone, the start and the end of each window; counts what is no window."""
    owner: list[int] = []
    pairs: list[tuple[float, float]] = []
    for phone, record in enumerate(windows):
        for window in record:
            pair = _pair(window)
            if pair is None:
                counts["dropped: not a pair of numbers"] += 1
            else:
                owner.append(phone)
                pairs.append(pair)
    starts, ends = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return np.array(owner, dtype=np.int64), starts, ends


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


def _pair(window: object) -> tuple[float, float] | None:
    if not (isinstance(window, list) and len(window) == 2):
        return None
    start, end = number(window[0]), number(window[1])
    return (start, end) if math.isfinite(start) and math.isfinite(end) else None
