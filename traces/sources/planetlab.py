"""Reader of PlanetLab's CPU records: how much of a busy host is left for a job.

A file is one host on one day: its processor's utilisation in percent, one whole number every five
minutes. What is left is 1 - percent / 100. The hosts are servers, so this is a background load that
really happened and not the load of phones; the clock of the record is not stated.

Reference:
    Park, Pai. CoMon: A Mostly-Scalable Monitoring System for PlanetLab. ACM SIGOPS Operating
    Systems Review 40(1), 2006. The files come with CloudSim.
"""

import re
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array
from fedstale.traces.series import Series
from fedstale.traces.sources.archives import is_tar, members, read_file
from fedstale.traces.trace_set import TraceSet

STEP_S = 300.0
_SAMPLES = 288
COMPUTE_UNIT = "seconds of the host's whole processor"
HOST = re.compile(r"(?:^|/)(\d{8}/[^/]+)$")


def read(path: str | Path) -> TraceSet:
    """Return what is left of the processors of an archive, a folder, or one host file.

    Devices are named DAY/HOST. A sample that is not a number from 0 to 100 repeats the one before
    (at the start of a record, the first that is); a host without any is dropped.

    Args:
        path: tar.gz or zip with files .../DAY/HOST, a folder of them, or one file.

    Returns:
        A set that knows compute only, as a share of the processor on a grid of 300 s.

    Raises:
        TraceError: nothing usable is there.
    """
    path = Path(path)
    counts: Counter[str] = Counter()
    hosts = _hosts(path, counts)
    busy = {name: _percent(hosts[name], counts) for name in sorted(hosts)}
    left = {name: 1.0 - percent / 100.0 for name, percent in busy.items() if percent is not None}
    counts["dropped: host without a readable sample"] += len(busy) - len(left)
    if not left:
        raise TraceError(f"{path}: no readable host: expected files DAY/HOST of percentages")
    return TraceSet(
        device_ids=pd.Index(list(left), dtype="str"),
        compute=Series.regular(list(left.values()), step_s=STEP_S),
        compute_unit=COMPUTE_UNIT,
        repairs=counts,
    )


def _hosts(path: Path, counts: Counter[str]) -> dict[str, bytes]:
    where = path.absolute()
    if path.is_file() and not (zipfile.is_zipfile(path) or is_tar(path)):
        return {f"{where.parent.name}/{where.name}": read_file(path)}
    # A folder may itself be a day.
    above = f"{where.name}/" if path.is_dir() else ""
    hosts: dict[str, bytes] = {}
    for name, data in members(path, lambda n: HOST.search(above + n) is not None):
        found = HOST.search(above + name)
        if found is None or data is None:
            counts["left out: not below a folder of a day"] += 1
        elif found.group(1) in hosts:
            counts["dropped: host and day that occur twice"] += 1
        else:
            hosts[found.group(1)] = data
    return hosts


def _percent(data: bytes, counts: Counter[str]) -> Array | None:
    """Return the samples of one host in percent; None if not one can be read."""
    words = [word.decode("latin-1") for word in data.split()]
    busy = pd.to_numeric(pd.Series(words, dtype="object"), errors="coerce")
    known = busy.between(0, 100)
    if not known.any():
        return None
    counts["kept: record that is not a day of 288 samples"] += int(busy.size != _SAMPLES)
    counts["filled: sample that is not from 0 to 100"] += int((~known).sum())
    return busy.where(known).ffill().bfill().to_numpy(np.float64)
