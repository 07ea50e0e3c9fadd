"""Devices as files that FedScale, FLASH and FLHetBench, APPFL and FLGo read.

FedScale reads pickles alone, so plain data are pickled for it; no pickle is read here.
"""

import json
import pickle
from pathlib import Path

import numpy as np

from fedstale.contrib.formats.measures import logs_of, mean_rates, windows_between
from fedstale.contrib.formats.validation import FORMAT
from fedstale.errors import TraceError
from fedstale.traces import DAY_S, Array, TraceSet
from fedstale.traces.io import replacing

TARGETS = FORMAT["targets"]


def export(traces: TraceSet, to: str, path: Path) -> tuple[str, str]:
    """Write devices as another platform reads them; return what the file keeps, and what is lost.

    Args:
        traces: of devices.
        to: one of `TARGETS`.
        path: file to make or replace.

    Raises:
        TraceError: `to` is none of these, a channel is unknown, or a mean rate is 0 or infinite.
    """
    if to not in TARGETS:
        raise TraceError(f"to = {to!r}: expected one of {', '.join(TARGETS)}")
    names: list[str] = traces.device_ids.tolist()
    if to in ("appfl", "fedscale-capacity"):
        rates = _mean_rates(traces)
        both_bit_per_s, slower = 2 / (1 / rates[:, 1:]).sum(axis=1), 1 / rates[:, 0]
    if to == "appfl":
        slower, both = slower / np.median(slower), both_bit_per_s / 1e6
        pairs = zip(slower.tolist(), both.tolist(), strict=True)
        told = [{"compute_factor": factor, "bandwidth": mbit_per_s} for factor, mbit_per_s in pairs]
        data = json.dumps(dict(zip(names, told, strict=True))).encode()
    elif to == "fedscale-capacity":
        pairs = zip((1e3 * slower).tolist(), (both_bit_per_s / 1e3).tolist(), strict=True)
        clients = [{"computation": ms, "communication": kbit_per_s} for ms, kbit_per_s in pairs]
        data = pickle.dumps(dict(enumerate(clients)), protocol=4)
    else:
        data = _with_windows(traces, to, names)
    with replacing(path) as file:
        file.write(data)
    return TARGETS[to]["kept"], TARGETS[to]["lost"]


def _mean_rates(traces: TraceSet) -> Array:
    """Return the mean speed, downlink and uplink of each device; shape (devices, 3)."""
    up = traces.uplink or traces.channel("downlink")
    rates = np.stack(
        [mean_rates(x) for x in (traces.channel("compute"), traces.channel("downlink"), up)], axis=1
    )
    for k in np.flatnonzero(~((rates > 0) & np.isfinite(rates)).all(axis=1)):
        raise TraceError(
            f"{traces.device_ids[int(k)]}: mean rates {rates[k]}: expected them above 0, finite"
        )
    return rates


def _with_windows(traces: TraceSet, to: str, names: list[str]) -> bytes:
    online = traces.channel("availability")
    begin, end, _ = logs_of(online)
    if to == "flash":
        # Its instant 0 is a Thursday's midnight.
        at = 0.0 if traces.monday_s is None else (traces.monday_s - 3 * DAY_S) % (7 * DAY_S)
        logs = zip(windows_between(online, begin, end), begin + at, end + at, strict=True)
        keys = "ready_time", "trace_start", "trace_end", "isSuccess"
        told = [
            zip(keys, ((w + at).tolist(), float(a), float(b), True), strict=True)
            for w, a, b in logs
        ]
        return json.dumps(dict(zip(names, map(dict, told), strict=True))).encode()
    end = np.minimum(online.record_s() - (0 if online.repeat else online.shifts), online.until)
    windows = windows_between(online, np.zeros(end.size), np.maximum(end, 1.0))
    devices = zip(names, np.maximum(end, 1.0).tolist(), windows, strict=True)
    if to == "flgo":
        costs = (1 / _mean_rates(traces)).tolist()
        rows = [
            json.dumps([name, s, *cost, w.tolist()], ensure_ascii=False)
            for (name, s, w), cost in zip(devices, costs, strict=True)
        ]
        text = Path(__file__).with_name("flgo.txt").read_text(encoding="utf-8")
        return text.replace("DEVICES = []", f"DEVICES = [{', '.join(rows)}]").encode()
    clients = []
    for name, end_s, w in devices:
        # FedScale looks at the first window of each: of one that never comes, an instant.
        active, inactive = (w if w.size else np.array([[end_s, end_s]])).T.tolist()
        ends = {"finish_time": end_s, "duration": end_s, "model": name}
        clients.append({"active": active, "inactive": inactive, **ends})
    return pickle.dumps(dict(enumerate(clients)), protocol=4)
