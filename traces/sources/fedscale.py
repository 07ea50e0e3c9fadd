"""Reader of FedScale's client_behave_trace: when clients were there.

A pickle of {client: {"active": [s], "inactive": [s], "finish_time": s, ...}}: the client is there
from active[i] to inactive[i], and all of it repeats after finish_time. It is read as plain data,
see `plain_pickle`. The file does not state the local time of instant 0.

Reference:
    Lai, Dai, Singapuram, Liu, Zhu, Madhyastha, Chowdhury. FedScale: Benchmarking Model and System
    Performance of Federated Learning at Scale. ICML 2022.
"""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array
from fedstale.traces.availability import Availability
from fedstale.traces.sources.plain_pickle import load
from fedstale.traces.sources.repairs import frozen, repaired
from fedstale.traces.trace_set import TraceSet


def read(path: str | Path) -> TraceSet:
    """Return the availability of the clients in a client_behave_trace.

    Args:
        path: the pickle, gzipped or not.

    Returns:
        A set that knows availability only; each client repeats after its own finish_time.

    Raises:
        TraceError: the file is missing, damaged, holds more than plain data, or has no usable
            client.
    """
    path = Path(path)
    data = load(path)
    if not isinstance(data, dict) or not data:
        raise TraceError(f"{path}: expected a pickled dictionary of clients")
    counts: Counter[str] = Counter()
    ids: list[str] = []
    lengths: list[float] = []
    windows: list[Array] = []
    for client, record in data.items():
        length = _float(record.get("finish_time")) if isinstance(record, dict) else math.nan
        if not 0 < length < math.inf:
            counts["dropped: client without a finish_time above 0"] += 1
            continue
        ids.append(str(client))
        lengths.append(length)
        windows.append(_pairs(record, counts))
    if not ids:
        raise TraceError(f"{path}: no client with a finish_time: expected a client_behave_trace")
    owner = np.repeat(np.arange(len(ids)), [len(w) for w in windows])
    flat, ends_of_records = np.concatenate(windows), np.array(lengths)
    starts, ends, per_client, repairs = repaired(
        owner, flat[:, 0], flat[:, 1], ends_of_records, join_s=0.0
    )
    counts += repairs
    counts["kept: client that is never there"] = int(np.count_nonzero(per_client == 0))
    return TraceSet(
        device_ids=pd.Index(ids, dtype="str"),
        availability=Availability.packed(starts, ends, per_client, ends_of_records),
        repairs=frozen(counts),
    )


def _pairs(record: dict[str, object], counts: Counter[str]) -> Array:
    """Return the windows of one client, shape (windows, 2); NaN where one is not a number."""
    active, inactive = record.get("active"), record.get("inactive")
    if not isinstance(active, (list, tuple)) or not isinstance(inactive, (list, tuple)):
        counts["dropped: client's windows that are not lists"] += 1
        return np.zeros((0, 2))
    n = min(len(active), len(inactive))
    counts["dropped: start without an end, or end without a start"] += (
        max(len(active), len(inactive)) - n
    )
    values = [[_float(x), _float(y)] for x, y in zip(active[:n], inactive[:n], strict=True)]
    return np.array(values, dtype=np.float64).reshape(-1, 2)


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
