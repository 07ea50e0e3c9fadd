"""Reader of mahimahi link traces: every moment at which a packet of 1500 bytes could leave.

A line is a time in milliseconds and one opportunity. The trace repeats after its last line, as
mm-link does. Opportunities are counted in bins of one second: within a second they follow from how
the base station schedules its users, which a transfer of a model averages out, and every bin keeps
its bytes exactly, so a transfer ends within a second of where the packets would have ended it.

Reference:
    Winstein, Sivaraman, Balakrishnan. Stochastic Forecasts Achieve High Throughput and Low Delay
    over Cellular Networks. USENIX NSDI 2013.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces import Array, Index, Series, TraceSet
from fedstale.traces.sources.archives import read_file

_PACKET_BIT = 1500 * 8
_LONGEST_MS = 31 * 86_400_000
_MOST_BINS = 10_000_000
_MOST_BYTES = 64 << 20
_LONGEST_WORD = 18
DIRECTIONS = {".up": "uplink", ".down": "downlink"}


def read(path: str | Path, *, bin_s: float = 1.0) -> TraceSet:
    """Return the links of NAME.up and NAME.down, or of all such pairs in a folder.

    A file given alone brings its other half along if that lies beside it. In a folder, a link of
    which one direction is missing is dropped where others are whole.

    Args:
        path: one file, gzipped or not, or a folder of them.
        bin_s: width of a bin in s, whole milliseconds.

    Returns:
        A set that knows downlink and uplink in bit/s, or the one direction that there is.

    Raises:
        TraceError: nothing usable is there, or a line is not a time that follows the one before.
    """
    if not 0.001 <= bin_s <= _LONGEST_MS / 1e3 or round(bin_s * 1e6) % 1000:
        raise TraceError(f"bin_s = {bin_s}: expected whole milliseconds, at least 0.001")
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
        rows = [_row(links[name][channel], bin_s, counts) for name in sorted(links)]
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


def _row(path: Path, bin_s: float, counts: Counter[str]) -> tuple[Array, Array, float]:
    """Return (starts in s, rates in bit/s, length in s) of one direction."""
    ms = _milliseconds(path)
    last, width = int(ms[-1]), round(bin_s * 1e3)
    if last // width >= _MOST_BINS:
        raise TraceError(
            f"{path}: {last / 1e3} s in bins of {bin_s} s: expected fewer than {_MOST_BINS} bins"
        )
    # The opportunity that closes the trace belongs to its last bin, not to the next round.
    packets = np.bincount((ms - 1).clip(0) // width)
    edges = np.append(np.arange(packets.size) * width, last) / 1e3
    counts["cut: last bin shorter than the others"] += int(last % width > 0)
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
