"""Reader of FedScale's client_device_capacity: how fast clients compute and communicate.

A pickle of {client: {"computation": ms per sample, "communication": kbit/s}}. It is read as plain
data, see `plain_pickle`. The time per sample is that of inference; speeds are only compared with
each other here, so what training costs more cancels out. There is one bandwidth for both ways:
downlink and uplink are therefore equal, which real links are not. A kbit is taken as 1000 bit.

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
from fedstale.traces.series import Series
from fedstale.traces.sources.plain_pickle import load
from fedstale.traces.sources.repairs import frozen
from fedstale.traces.trace_set import TraceSet

COMPUTE_UNIT = "seconds of the median client of the file"
_MOST_KBIT_PER_S = 1e9


def read(path: str | Path) -> TraceSet:
    """Return the constant speeds of the clients, the median one being 1, and their links.

    Args:
        path: the pickle, gzipped or not.

    Returns:
        A set that knows compute, downlink and uplink.

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
    rows: list[tuple[float, float]] = []
    for client, record in data.items():
        ms = _positive(record, "computation", math.inf)
        kbit = _positive(record, "communication", _MOST_KBIT_PER_S)
        if ms is None:
            counts["dropped: client whose computation is not a number above 0"] += 1
        elif kbit is None:
            counts["dropped: client whose communication is not a number above 0"] += 1
        else:
            ids.append(str(client))
            rows.append((ms, kbit))
    if not rows:
        raise TraceError(
            f"{path}: no client with computation and communication: expected a "
            "client_device_capacity"
        )
    ms_per_sample, kbit_per_s = np.array(rows).T
    speeds = 1.0 / ms_per_sample
    return TraceSet(
        device_ids=pd.Index(ids, dtype="str"),
        compute=Series.constant(speeds / np.median(speeds)),
        downlink=Series.constant(kbit_per_s * 1e3),
        uplink=Series.constant(kbit_per_s * 1e3),
        compute_unit=COMPUTE_UNIT,
        repairs=frozen(counts),
    )


def _positive(record: object, key: str, most: float) -> float | None:
    value = record.get(key) if isinstance(record, dict) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    # A speed must be finite both ways: 1 / 1e-320 is not.
    return number if 1e-9 < number < most else None
