"""Readers of how fast processors are, and how much of them is left for a job.

Reference:
    Ignatov et al. AI Benchmark: All About Deep Learning on Smartphones in 2019. ICCV Workshops
    2019.
    Park, Pai. CoMon: A Mostly-Scalable Monitoring System for PlanetLab. ACM SIGOPS Operating
    Systems Review 40(1), 2006. The files come with CloudSim.
"""

import math
import re
import zipfile
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces import Series, TraceSet
from fedstale.traces.sources.archives import is_tar, members, number, read_file, read_json

PHONES_UNIT = "seconds of the median phone of the ranking, all of its processor"
_SCORE = "CPU_F_AI_Score"

HOSTS_UNIT = "seconds of the host's whole processor"
HOST = re.compile(r"(?:^|/)(\d{8}/[^/]+)$")
_STEP_S = 300.0
_SAMPLES = 288


def read_phones(path: str | Path) -> TraceSet:
    """Return the constant speed of each phone model of AI Benchmark, the median one being 1.

    The column is CPU_F_AI_Score: floating-point networks run on the processor alone. On-device
    training computes in floating point, and mobile training libraries run it on the processor.
    FP32_Score and AI_Score also count what graphics and neural accelerators reach in inference,
    which sets flagship models apart by factors that training does not see. A score is taken as
    proportional to speed.

    A model that is listed more than once differs in its chip, its Android or its memory; each is a
    device of its own, named with what tells it apart.

    Args:
        path: the JSON list of models, gzipped or not.

    Returns:
        A set that knows compute only.

    Raises:
        TraceError: the file is missing or damaged, or no model has a score.
    """
    path = Path(path)
    rows = read_json(path)
    if not isinstance(rows, list):
        raise TraceError(f"{path}: expected a JSON list of phone models")
    counts: Counter[str] = Counter()
    phones: list[dict[str, object]] = []
    scores: list[float] = []
    for row in rows:
        value = _score(row.get(_SCORE)) if isinstance(row, dict) else None
        if value is None:
            counts[f"dropped: {_SCORE} is not a number above 0"] += 1
        elif not _text(row, "Model"):
            counts["dropped: model without a name"] += 1
        else:
            phones.append(row)
            scores.append(value)
    if not phones:
        raise TraceError(
            f"{path}: no model with a {_SCORE}: expected AI Benchmark's list of phones"
        )
    ids = pd.Index(_names(phones, counts), dtype="str", name=None)
    first = ~ids.duplicated()
    counts["dropped: the same phone again"] = int((~first).sum())
    speeds = np.array(scores)[first]
    return TraceSet(
        device_ids=ids[first],
        compute=Series.constant(speeds / np.median(speeds)),
        compute_unit=PHONES_UNIT,
        repairs=counts,
    )


def _names(phones: list[dict[str, object]], counts: Counter[str]) -> "pd.Series[str]":
    """Return the model of each phone, with chip, Android and memory where it occurs again."""
    names = pd.Series([_text(phone, "Model") for phone in phones], dtype="str")
    counts["renamed: model that is listed more than once"] = int(names.duplicated(keep=False).sum())
    for extra, prefix in (("CPU", ""), ("Android", "Android "), ("RAM", "")):
        longer = names + [f", {prefix}{_text(phone, extra)}" for phone in phones]
        names = names.mask(names.duplicated(keep=False), longer)
    return names


def _text(row: dict[str, object], key: str) -> str:
    value = row.get(key)
    return " ".join(value.split()) if isinstance(value, str) else ""


def _score(value: object) -> float | None:
    try:
        score = float(value) if isinstance(value, str) else number(value)
    except ValueError:
        return None
    return score if math.isfinite(score) and score > 0 else None


def read_hosts(path: str | Path) -> TraceSet:
    """Read the shares of PlanetLab's processors left free: an archive, a folder or one host file.

    A file is one host on one day: its processor's utilisation in percent, one whole number every
    five minutes. What is left is 1 - percent / 100. The hosts are servers, so this is a background
    load that really happened and not the load of phones; the clock of the record is not stated.

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
            np.split(left, readable["size"].to_numpy().cumsum()[:-1]), step_s=_STEP_S
        ),
        compute_unit=HOSTS_UNIT,
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
