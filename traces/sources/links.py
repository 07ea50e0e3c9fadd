"""Readers of links: what a phone's link carried, or every moment at which a packet could leave.

Reference:
    Raca, Leahy, Sreenan, Quinlan. Beyond Throughput, the Next Generation: a 5G Dataset with Channel
    and Context Metrics. ACM MMSys 2020 (logs of G-NetTrack Pro).
    Winstein, Sivaraman, Balakrishnan. Stochastic Forecasts Achieve High Throughput and Low Delay
    over Cellular Networks. USENIX NSDI 2013 (traces of mahimahi).
"""

import io
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import TraceError, first_line
from fedstale.traces import OWN_LOG, Array, Index, Series, TraceSet
from fedstale.traces.sources.archives import members, read_file

_COLUMNS = ["Timestamp", "DL_bitrate"]
_CLOCK = "%Y.%m.%d_%H.%M.%S"
# The logger skips a second or two when it is late; a longer silence is a pause of the recording.
_HOLD_S = 10
_MOST_KBIT_PER_S = 1e9

DIRECTIONS = {".up": "uplink", ".down": "downlink"}
_PACKET_BIT = 1500 * 8
_BIN_MS = 1000
_LONGEST_MS = 31 * 86_400_000
_MOST_BYTES = 64 << 20
_LONGEST_WORD = 18


def read_sessions(path: str | Path) -> TraceSet:
    """Return the links of one G-NetTrack CSV, or of those in a folder or a zip; by sessions.

    Only a session that downloads as fast as it can shows what the link would have carried; a video
    player pauses when its buffer is full. Where there is a folder named Download, only what lies
    below it is read. The uplink of a download carries acknowledgements, so it is no capacity.

    Each session becomes a grid of one second from its first reading. Readings of the same second
    are averaged; a second without one, after which the log goes on within 10 s, repeats the last.
    Longer silences and jumps of the clock are cut out, since what the link did is not known. Lines
    in reverse order are turned round, and a last line that does not end is dropped: cut inside a
    number, 2512 kbit/s would be 2.

    Args:
        path: CSV file, folder or zip.

    Returns:
        A set that knows the downlink in bit/s.

    Raises:
        TraceError: nothing usable is there, or a CSV lacks the columns.
    """
    path = Path(path)
    counts: Counter[str] = Counter()
    files = _files(path, counts)
    rates = {name: _rates(f"{path}: {name}", files[name], counts) for name in sorted(files)}
    usable = {name: each for name, each in rates.items() if each is not None}
    if not usable:
        raise TraceError(
            f"{path}: no session with a readable rate: expected G-NetTrack CSVs; {OWN_LOG}"
        )
    return TraceSet(
        device_ids=pd.Index([name.removesuffix(".csv") for name in usable], dtype="str"),
        downlink=Series.regular(list(usable.values()), step_s=1.0),
        repairs=counts,
    )


def _files(path: Path, counts: Counter[str]) -> dict[str, bytes]:
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
    loading = {name: data for name, data in files.items() if "Download" in name.split("/")[:-1]}
    if loading:
        counts["left out: session that does not load the link"] = len(files) - len(loading)
    return loading or files


def _rates(where: str, data: bytes, counts: Counter[str]) -> Array | None:
    """Return the downlink in bit/s on a grid of 1 s, or None if there are no readings."""
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
    down = pd.to_numeric(table["DL_bitrate"], errors="coerce").replace([np.inf, -np.inf], np.nan)
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
    clock, down = clock[good], down[good]
    steps = clock.diff().dropna() / pd.Timedelta(seconds=1)
    if (steps < 0).sum() > (steps > 0).sum():
        counts["sorted: session whose lines were in reverse order"] += 1
        clock, down = clock[::-1], down[::-1]
    seconds = _seconds(clock, counts)
    readings = down.groupby(seconds)
    counts["averaged: further reading of the same second"] += len(down) - readings.ngroups
    counts["filled: second without a reading"] += int(seconds[-1]) + 1 - readings.ngroups
    bit_per_s: Array = readings.mean().reindex(np.arange(seconds[-1] + 1)).ffill().to_numpy() * 1e3
    return bit_per_s


def _seconds(clock: "pd.Series[pd.Timestamp]", counts: Counter[str]) -> Index:
    """Return the second of each row from the first on, with pauses and clock jumps closed up."""
    steps = np.diff(clock.to_numpy().astype("datetime64[s]").astype(np.int64))
    back, pause = steps < 0, steps > _HOLD_S
    counts["closed up: clock went back"] += int(back.sum())
    counts[f"closed up: silence above {_HOLD_S} s"] += int(pause.sum())
    steps = np.where(back | pause, 1, steps)
    return np.concatenate([[0], np.cumsum(steps)])


def read_opportunities(path: str | Path) -> TraceSet:
    """Return the links of mahimahi's NAME.up and NAME.down, or of all such pairs in a folder.

    A line is a time in milliseconds at which a packet of 1500 bytes could leave, and the trace
    repeats after its last line, as mm-link does. Opportunities are counted in bins of one second:
    within a second they follow from how the base station schedules its users, which a transfer of a
    model averages out, and every bin keeps its bytes exactly, so a transfer ends within a second of
    where the packets would have ended it.

    A file given alone brings its other half along if that lies beside it. In a folder, a link of
    which one direction is missing is dropped where others are whole.

    Args:
        path: one file, gzipped or not, or a folder of them.

    Returns:
        A set that knows downlink and uplink in bit/s, or the one direction that there is.

    Raises:
        TraceError: nothing usable is there, or a line is not a time that follows the one before.
    """
    path = Path(path)
    counts: Counter[str] = Counter()
    links = _links(path)
    whole = {name: files for name, files in links.items() if len(files) == len(DIRECTIONS)}
    if whole:
        counts["dropped: link with one direction missing"] = len(links) - len(whole)
        links = whole
    known = sorted(set.intersection(*(set(files) for files in links.values())) if links else [])
    if not known:
        raise TraceError(f"{path}: expected files NAME.up and NAME.down, plain or gzipped")
    channels: dict[str, Series] = {}
    for channel in known:
        rows = [_row(links[name][channel], counts) for name in sorted(links)]
        channels[channel] = Series.irregular([r[:2] for r in rows], [r[2] for r in rows])
    return TraceSet(
        device_ids=pd.Index(sorted(links), dtype="str"),
        downlink=channels.get("downlink"),
        uplink=channels.get("uplink"),
        repairs=counts,
    )


def parts(path: Path) -> tuple[str, str] | None:
    """Return the link and the channel that a file name tells, or None.

    Example:
        >>> parts(Path("ATT-LTE.up.gz"))
        ('ATT-LTE', 'uplink')
    """
    plain = Path(path.name.removesuffix(".gz"))
    channel = DIRECTIONS.get(plain.suffix)
    return None if channel is None or not plain.stem else (plain.stem, channel)


def _links(path: Path) -> dict[str, dict[str, Path]]:
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    asked = None if path.is_dir() else parts(path)
    if asked is None and path.is_file():
        raise TraceError(f"{path}: expected a name that ends in .up, .down, .up.gz or .down.gz")
    links: dict[str, dict[str, Path]] = {}
    for file in sorted((path if path.is_dir() else path.parent).iterdir()):
        told = parts(file)
        if told and file.is_file() and (asked is None or told[0] == asked[0]):
            links.setdefault(told[0], {})[told[1]] = file
    if asked is not None:
        # Of NAME.up and NAME.up.gz in one folder, the one that was asked for.
        links[asked[0]][asked[1]] = path
    return links


def _row(path: Path, counts: Counter[str]) -> tuple[Array, Array, float]:
    """Return (starts in s, rates in bit/s, length in s) of one direction."""
    ms = _milliseconds(path)
    last = int(ms[-1])
    # The opportunity that closes the trace belongs to its last bin, not to the next round.
    packets = np.bincount((ms - 1).clip(0) // _BIN_MS)
    edges = np.append(np.arange(packets.size) * _BIN_MS, last) / 1e3
    counts["cut: last bin shorter than the others"] += int(last % _BIN_MS > 0)
    return edges[:-1], packets * _PACKET_BIT / np.diff(edges), last / 1e3


def _milliseconds(path: Path) -> Index:
    lines = read_file(path, _MOST_BYTES).split()
    try:
        if max(map(len, lines)) > _LONGEST_WORD:
            raise ValueError
        ms = np.array(lines).astype(np.int64)
    except (ValueError, OverflowError):
        bad = next((x for x in lines if not x.isdigit() or len(x) > _LONGEST_WORD), lines[0])
        raise TraceError(
            f"{path}: line {lines.index(bad) + 1} is {bad[:40].decode('latin-1')!r}: expected a "
            "time in whole milliseconds"
        ) from None
    back = np.flatnonzero(np.diff(ms, prepend=0) < 0)
    if back.size:
        raise TraceError(
            f"{path}: line {back[0] + 1} is {ms[back[0]]}, before the one above or before 0: "
            "expected times that do not go back, as mahimahi does"
        )
    if not 0 < ms[-1] <= _LONGEST_MS:
        raise TraceError(
            f"{path}: ends at {ms[-1]} ms: expected more than 0 and at most {_LONGEST_MS} (31 days)"
        )
    return ms
