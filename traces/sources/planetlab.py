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
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces import Series, TraceSet
from fedstale.traces.sources.archives import is_tar, members, read_file

STEP_S = 300.0
_SAMPLES = 288
COMPUTE_UNIT = "seconds of the host's whole processor"
HOST = re.compile(r"(?:^|/)(\d{8}/[^/]+)$")


def read(path: str | Path) -> TraceSet:
    """Read the shares of processors left free, from an archive, a folder or one host file.

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
    names = sorted(hosts)
    samples = _samples([hosts[name] for name in names])
    of_host = samples["is_known"].groupby(samples["host"]).agg(["size", "sum"])
    of_host = of_host.reindex(range(len(names)), fill_value=0)
    readable = of_host[of_host["sum"] > 0]
    counts["dropped: host without a readable sample"] += len(names) - len(readable)
    if readable.empty:
        raise TraceError(f"{path}: no readable host: expected files DAY/HOST of percentages")
    counts["kept: record that is not a day of 288 samples"] += int(
        (readable["size"] != _SAMPLES).sum()
    )
    counts["filled: sample that is not from 0 to 100"] += int(
        (readable["size"] - readable["sum"]).sum()
    )
    left = 1.0 - samples["percent"][samples["host"].isin(readable.index)].to_numpy() / 100.0
    return TraceSet(
        device_ids=pd.Index([names[i] for i in readable.index], dtype="str"),
        compute=Series.regular(
            np.split(left, readable["size"].to_numpy().cumsum()[:-1]), step_s=STEP_S
        ),
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


def _samples(files: list[bytes]) -> pd.DataFrame:
    """Return the samples of all hosts: host, percent, and whether that could be read.

    What could not be read has the percent of its host before, or else after.
    """
    words = [data.split() for data in files]
    host = np.repeat(np.arange(len(files)), [len(each) for each in words])
    texts = b"\n".join(chain(*words)).decode("latin-1").split("\n") if host.size else []
    percent = pd.to_numeric(pd.Series(texts, dtype="object"), errors="coerce").astype(np.float64)
    is_known = percent.between(0, 100)
    percent = percent.where(is_known).groupby(host).ffill().groupby(host).bfill()
    return pd.DataFrame({"host": host, "percent": percent, "is_known": is_known})
