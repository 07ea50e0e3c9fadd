"""Reader of FLASH's ready_strict.json: when phones were idle, charging and on Wi-Fi.

The file is {phone: [[start, end], ...]} in seconds since a local midnight: the authors' own reader
counts from 2018-03-06 00:00:00, and the phones' clocks show local time, so instant 0 is midnight
wherever the phone was. The recording agrees: availability peaks between 24 h and 30 h, at night.

The clocks have a resolution of one second and log a phone that stays ready as a chain of slivers
(start, start), (start + 1, start + 1) and so on. Two windows at most one second apart are therefore
one; what remains without length was a single instant, and is dropped.

Reference:
    Yang, Wang, Xu, Chen, Bian, Liu, Liu. Characterizing Impacts of Heterogeneity in Federated
    Learning upon Large-Scale Smartphone Data. The Web Conference 2021.
"""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces.arrays import DAY_S
from fedstale.traces.availability import Availability
from fedstale.traces.sources.archives import number, read_json
from fedstale.traces.trace_set import TraceSet

EPOCH = "2018-03-06T00:00:00"


def read(path: str | Path, *, days: int = 2) -> TraceSet:
    """Return the availability of the phones in a ready_strict.json.

    The record of every phone is a whole number of days, so that the hours of the day stay where
    they are when it repeats. Two days hold 99.3 % of the available time of the published file; a
    third would hold the rest and be empty otherwise, and repeating it would make the phones rarer
    than they were. Phones without any window are kept, as phones that never come: one in six
    phones of the study never was idle, charging and on Wi-Fi, and to leave them out would flatter.

    Args:
        path: the file, gzipped or not.
        days: length of the record in days, >= 1; what comes later is dropped and counted.

    Returns:
        A set that knows availability only; instant 0 is a local midnight.

    Raises:
        TraceError: the file is missing or damaged, or is not of this format.
    """
    if days < 1:
        raise TraceError(f"days = {days}: expected an integer >= 1")
    path = Path(path)
    data = read_json(path)
    if not isinstance(data, dict) or not data:
        raise TraceError(f"{path}: expected a JSON object {{phone: [[start_s, end_s], ...]}}")
    counts: Counter[str] = Counter()
    pairs: list[list[tuple[float, float]]] = []
    for name, windows in data.items():
        if not isinstance(windows, list):
            raise TraceError(
                f"{path}: phone {name!r} has {type(windows).__name__}, expected a list of "
                "[start_s, end_s]"
            )
        read_pairs = [_pair(window) for window in windows]
        pairs.append([pair for pair in read_pairs if pair is not None])
        counts["dropped: not a pair of numbers"] += read_pairs.count(None)
    phones, repairs = Availability.repaired(pairs, days * DAY_S, join_s=1.0)
    counts += repairs
    counts["kept: phone that is never online"] = int(np.sum(np.diff(phones.offsets) == 0))
    return TraceSet(
        device_ids=pd.Index(list(data), dtype="str"),
        availability=phones,
        epoch=EPOCH,
        repairs=counts,
    )


def _pair(window: object) -> tuple[float, float] | None:
    if not (isinstance(window, list) and len(window) == 2):
        return None
    start, end = number(window[0]), number(window[1])
    return (start, end) if math.isfinite(start) and math.isfinite(end) else None
