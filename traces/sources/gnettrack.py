"""Reader of G-NetTrack Pro logs: what a phone's link carried, about once a second.

Only a session that downloads as fast as it can shows what the link would have carried; a video
player pauses when its buffer is full. In the published archive those are the sessions below a
folder named Download, and only they are read unless all are asked for. The uplink of a download
carries acknowledgements, so it is no capacity, and is left out unless asked for.

Reference:
    Raca, Leahy, Sreenan, Quinlan. Beyond Throughput, the Next Generation: a 5G Dataset with Channel
    and Context Metrics. ACM MMSys 2020.
"""

import io
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from fedstale.errors import TraceError, first_line
from fedstale.traces import OWN_LOG, Array, Index, Series, TraceSet
from fedstale.traces.sources.archives import members, read_file

_COLUMNS = ["Timestamp", "DL_bitrate", "UL_bitrate"]
_CLOCK = "%Y.%m.%d_%H.%M.%S"
# The logger skips a second or two when it is late; a longer silence is a pause of the recording.
_HOLD_S = 10
_MOST_KBIT_PER_S = 1e9


def read(
    path: str | Path, *, sessions: Literal["download", "all"] = "download", uplink: bool = False
) -> TraceSet:
    """Return the links of one CSV, or of the CSVs in a folder or a zip; a session is a device.

    Each session becomes a grid of one second from its first reading. Readings of the same second
    are averaged; a second without one, after which the log goes on within 10 s, repeats the last.
    Longer silences and jumps of the clock are cut out, since what the link did is not known. Lines
    in reverse order are turned round, and a last line that does not end is dropped: cut inside a
    number, 2512 kbit/s would be 2.

    Args:
        path: CSV file, folder or zip.
        sessions: "download" reads only what lies below a folder named Download, where there is
            one; "all" reads every CSV.
        uplink: whether to offer the logged uplink too, for sessions that loaded it.

    Returns:
        A set that knows the downlink in bit/s, and the uplink if asked for.

    Raises:
        TraceError: nothing usable is there, or a CSV lacks the columns.
    """
    if sessions not in ("download", "all"):
        raise TraceError(f"sessions = {sessions!r}: expected 'download' or 'all'")
    path = Path(path)
    counts: Counter[str] = Counter()
    files = _files(path, sessions, counts)
    rates = {name: _rates(f"{path}: {name}", files[name], counts, uplink) for name in sorted(files)}
    usable = {name: pair for name, pair in rates.items() if pair is not None}
    if not usable:
        raise TraceError(f"{path}: no session with a readable rate: expected G-NetTrack CSVs")
    return TraceSet(
        device_ids=pd.Index([name.removesuffix(".csv") for name in usable], dtype="str"),
        downlink=Series.regular([pair[0] for pair in usable.values()], step_s=1.0),
        uplink=Series.regular([p[1] for p in usable.values()], step_s=1.0) if uplink else None,
        repairs=counts,
    )


def _files(path: Path, sessions: str, counts: Counter[str]) -> dict[str, bytes]:
    if path.is_file() and path.suffix.lower() == ".csv":
        return {path.name: read_file(path)}
    files = {
        name: data
        for name, data in members(path, lambda n: n.lower().endswith(".csv"))
        if data is not None
    }
    # The one top folder of an archive says nothing about a session.
    tops = {name.split("/")[0] for name in files}
    if len(tops) == 1 and all("/" in name for name in files):
        files = {name.split("/", 1)[1]: data for name, data in files.items()}
    if sessions == "download":
        loading = {name: data for name, data in files.items() if "Download" in name.split("/")[:-1]}
        if loading:
            counts["left out: session that does not load the link"] = len(files) - len(loading)
            return loading
    return files


def _rates(
    where: str, data: bytes, counts: Counter[str], uplink: bool
) -> tuple[Array, Array] | None:
    """Return downlink and uplink in bit/s on a grid of 1 s, or None if there are no readings."""
    if not data.endswith((b"\n", b"\r")):
        counts["dropped: last line, which was cut short"] += 1
        data = data[: data.rfind(b"\n") + 1]
    try:
        table = pd.read_csv(
            io.BytesIO(data), usecols=_COLUMNS, dtype="str", keep_default_na=False, index_col=False
        )
    except (ValueError, pd.errors.ParserError) as e:
        raise TraceError(
            f"{where}: not a G-NetTrack CSV ({first_line(e)}): expected columns "
            f"{', '.join(_COLUMNS)}; {OWN_LOG}"
        ) from None
    clock = pd.to_datetime(table["Timestamp"], format=_CLOCK, errors="coerce")
    rates = (
        table[_COLUMNS[1:]].apply(pd.to_numeric, errors="coerce").replace([np.inf, -np.inf], np.nan)
    )
    down = rates["DL_bitrate"]
    good = clock.notna()
    counts["dropped: row without a readable time"] += int((~good).sum())
    for bad, kind in (
        (down.isna(), "is not a number"),
        ((down < 0) | (down > _MOST_KBIT_PER_S), "is negative or above 1 Tbit/s"),
    ):
        counts[f"dropped: row whose rate {kind}"] += int((good & bad).sum())
        good &= ~bad
    if not good.any():
        counts["dropped: session without a readable rate"] += 1
        return None
    rates = rates[good]
    lost = ~rates["UL_bitrate"].between(0, _MOST_KBIT_PER_S)
    if uplink:
        kind = "filled: uplink that is not a number from 0 to 1 Tbit/s, taken as 0"
        counts[kind] += int(lost.sum())
    rates.loc[lost, "UL_bitrate"] = 0.0
    clock = clock[good]
    steps = clock.diff().dropna() / pd.Timedelta(seconds=1)
    if (steps < 0).sum() > (steps > 0).sum():
        counts["sorted: session whose lines were in reverse order"] += 1
        clock, rates = clock[::-1], rates[::-1]
    seconds = _seconds(clock, counts)
    readings = rates.groupby(seconds)
    counts["averaged: further reading of the same second"] += len(rates) - readings.ngroups
    counts["filled: second without a reading"] += int(seconds[-1]) + 1 - readings.ngroups
    bit_per_s = readings.mean().reindex(np.arange(seconds[-1] + 1)).ffill() * 1e3
    return bit_per_s["DL_bitrate"].to_numpy(), bit_per_s["UL_bitrate"].to_numpy()


def _seconds(clock: "pd.Series[pd.Timestamp]", counts: Counter[str]) -> Index:
    """Return the second of each row from the first on, with pauses and clock jumps closed up."""
    steps = np.diff(clock.to_numpy().astype("datetime64[s]").astype(np.int64))
    back, pause = steps < 0, steps > _HOLD_S
    counts["closed up: clock went back"] += int(back.sum())
    counts[f"closed up: silence above {_HOLD_S} s"] += int(pause.sum())
    steps = np.where(back | pause, 1, steps)
    return np.concatenate([[0], np.cumsum(steps)])
