"""Fleets of complete devices made of published recordings, with nothing in common between them.

A fleet of a kind (phones, desktops, cars, or all of them mixed) comes in three parts: to learn
from, to stop early on and to test on. Devices, hosts of loads and sessions of links are divided
among the parts first, and joined afterwards. Testing is later, too: loads are of other days, and
the logs of desktops and cars are cut at an instant; a car's session across it is left out. All
phones were logged in the same ten days, five in the median, and a cut would leave logs too short
to forecast a day: they are divided by device alone.

What no record says is said by the caller (`Assumed`); `ASSUMED` is what the benchmarks say, and
why.

A part has few devices: 128 phones are tested, of which some thirty appear in an afternoon. Where
more are needed, a device is in the fleet several times, each time on other days of its log.
"""

import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedstale.errors import TraceError
from fedstale.traces import TraceSet
from fedstale.traces.arrays import DAY_S, Index, Mask, stream
from fedstale.traces.forecast import record_s
from fedstale.traces.merge import merged

KINDS = ("phones", "desktops", "cars", "mixed")
PARTS = ("learn", "stop", "test")
SHARES = {"learn": 0.5, "stop": 0.75, "test": 1.0}
"""Up to which share of devices, hosts and sessions each part goes."""
TURN_SHARE = 0.6
"""Share of the events of desktops and cars before the instant between learning and testing."""
DAYS = 3
"""For how many days no load and no link repeats."""
UPLINK_SHARE = 0.2
"""Uplink divided by downlink of the recorded 5G links, whose uplinks carry acknowledgements."""
WEEK_S = 7 * DAY_S
_DEVICES, _HOSTS, _SESSIONS = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What no record says of desktops: none of those known here has their speed or their links."""

    desktop_speed: float
    """Speed of an idle desktop, times that of the median phone of the ranking; > 0."""
    wired_bit_per_s: tuple[float, float]
    """What the wired link of a desktop carries, down and up, in bit/s, constant; > 0."""


ASSUMED = Assumed(desktop_speed=3.0, wired_bit_per_s=(100e6, 100e6))
"""What the benchmarks assume.

A desktop processor of 2015 with four cores at 3.2 GHz and 32 float32 operations a cycle peaks at
4 x 3.2e9 x 32 = 410e9 a second; that of a phone in the middle of the ranking, with four large cores
at 2.2 GHz and 16 operations a cycle, at 141e9: three times is a round number for their ratio.
100 Mbit/s each way is the slower of the two usual ports of a wired desktop of those years, and a
tenth of the other: what lies behind the port is shared, nobody recorded how.
"""


def fleets(
    recordings: Path,
    seed: int,
    kind: str = "phones",
    *,
    assumed: Assumed | None = None,
    times: int = 1,
) -> dict[str, TraceSet]:
    """Return complete devices to learn from, to stop early on and to test on.

    | kind | online | compute | links |
    |---|---|---|---|
    | phones | idle, charging, on Wi-Fi | AI Benchmark models x PlanetLab loads | 5G sessions |
    | desktops | on, without a user | `desktop_speed` x PlanetLab loads | `wired_bit_per_s` |
    | cars | plugged in at home | as phones | as phones |
    | mixed | all of these | | |

    A car's computer is taken for that of a phone, with the load of one, and its link for a
    cellular one, since cars bring a modem; neither was recorded, and a parked car's link moves less
    than those of the sessions, most of which were recorded while driving.

    Args:
        recordings: folder of the published files, or of others in their formats: flash-days.json,
            library-desktops, ev-norway-charging-reports.csv.xz, ai-benchmark-devices.json,
            planetlab-cpu.tar.gz and uccmisl-5g.zip. A kind needs those it is made of.
        seed: of the division and of the draw, >= 0.
        kind: one of `KINDS`.
        assumed: what no record says; needed for desktops and for mixed.
        times: how often a device is in its part, >= 1: the second time some whole days later in
            its log, or whole weeks where that holds whole weeks, and with a processor, a load and a
            link of its own. A device with fewer days than that is there once for each of them.

    Returns:
        Sets "learn", "stop" and "test" that know all channels, with devices named as in their
        files. They share no device, no host of a load and no session of a link; "test" shares no
        day of a load with the others either, nor any day of desktops and of cars. Records are as
        long as they were logged, from days to months, and then repeat in whole days;
        `TraceSet.log_at` says which time was logged, and that a repetition is another log. Instant
        0 is a midnight: of a Thursday for phones, of a Monday for the others.

    Raises:
        ValueError: there is no such kind, or assumptions are missing.
        TraceError: a file is missing or damaged.
    """
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r}: expected one of {', '.join(KINDS)}")
    if kind in ("desktops", "mixed") and assumed is None:
        raise ValueError(f"assumed is missing: expected what no record says of {kind}")
    if times < 1:
        raise ValueError(f"times = {times}: expected a number >= 1")
    kinds = KINDS[:3] if kind == "mixed" else (kind,)
    made = {
        name: {each: _fleet(recordings, seed, each, name, assumed, times) for each in kinds}
        for name in PARTS
    }
    return {
        name: merged(parts, align="time-of-week") if kind == "mixed" else parts[kind]
        for name, parts in made.items()
    }


def span(traces: TraceSet) -> float:
    """Return for how long half of the devices were recorded, in s."""
    return float(np.median(record_s(traces)))


def sessions_of(name: str, links: TraceSet, seed: int) -> Index:
    """Return the positions of the links of a part."""
    return _part(stream(seed, _SESSIONS).permutation(links.n_devices), name)


def loads_of(name: str, loads: TraceSet, seed: int) -> Index:
    """Return the positions of the loads of a part: DAY/HOST, of its hosts and on its days.

    Early stopping may see the same days as learning, testing may not.
    """
    parts = loads.device_ids.str.split("/", expand=True)
    day, host = parts.get_level_values(0), parts.get_level_values(1)
    days = np.unique(day)
    later = np.isin(day, days[days.size // 2 :])
    hosts = _part(stream(seed, _HOSTS).permutation(np.unique(host)), name)
    return np.flatnonzero(np.isin(host, hosts) & (later == (name == "test")))


def _part(x: NDArray[Any], name: str) -> NDArray[Any]:
    start = dict(zip(PARTS, (0.0, *SHARES.values()), strict=False))[name]
    return np.sort(x[round(start * len(x)) : round(SHARES[name] * len(x))])


def _fleet(  # noqa: PLR0917 - one fleet
    recordings: Path, seed: int, kind: str, name: str, assumed: Assumed | None, times: int
) -> TraceSet:
    """Return a part of the fleet of one kind."""
    loads, links = _read(recordings / "planetlab-cpu.tar.gz"), _read(recordings / "uccmisl-5g.zip")
    compute = _read(recordings / "ai-benchmark-devices.json")
    network, uplink_share = links.take(sessions_of(name, links, seed)), UPLINK_SHARE
    if kind == "desktops" and assumed is not None:
        down, up = assumed.wired_bit_per_s
        network = TraceSet.constant(
            1, compute=assumed.desktop_speed, downlink_bit_per_s=down, uplink_bit_per_s=up
        )
        compute, uplink_share = replace(network, compute_unit=compute.compute_unit), None
    online = _on_other_days(_READERS[kind](recordings, seed, name), times)
    return TraceSet.compose(
        availability=online,
        compute=compute,
        background=loads.take(loads_of(name, loads, seed)),
        network=network,
        n=online.n_devices,
        # Of no other part and kind: a phone and a car of one mixed fleet would have one link.
        seed=(seed * len(PARTS) + PARTS.index(name)) * len(KINDS) + KINDS.index(kind),
        uplink_share=uplink_share,
        days=DAYS,
    )


def _on_other_days(online: TraceSet, times: int) -> TraceSet:
    """Return devices several times, each time as far from the others in its log as can be.

    Args:
        online: when devices are online, in records that repeat.
        times: how often, at most: no device is there twice on the same days.
    """
    record_s = online.channel("availability").record_s()
    weekly = (np.mod(record_s, WEEK_S) == 0) & (record_s >= 2 * WEEK_S)
    unit_s = np.where(weekly, WEEK_S, DAY_S)
    units = np.maximum(np.floor(record_s / unit_s), 1)
    again = [np.flatnonzero(k < np.minimum(units, times)) for k in range(times)]
    later = [
        np.floor(k * units[who] / np.minimum(units[who], times)) * unit_s[who]
        for k, who in enumerate(again)
    ]
    names = [
        online.device_ids[who] + ("" if k == 0 else f"#{k + 1}") for k, who in enumerate(again)
    ]
    taken = online.channel("availability").take(np.concatenate(again))
    return replace(
        online,
        device_ids=pd.Index(np.concatenate(names), dtype="str"),
        availability=taken.shifted(np.concatenate(later)),
    )


@cache
def _read(path: Path) -> TraceSet:
    return TraceSet.read(path)


def _phones(recordings: Path, seed: int, name: str) -> TraceSet:
    phones = _read(recordings / "flash-days.json")
    return phones.take(_part(stream(seed, _DEVICES).permutation(phones.n_devices), name))


def _desktops(recordings: Path, seed: int, name: str) -> TraceSet:
    columns = ["machine", "state", "at"]
    events = pd.concat(
        pd.read_csv(file, header=None, names=columns, dtype="str", encoding="utf-8-sig")
        for file in _files(recordings, "library-desktops/FullLogonData-*")
    )
    at = pd.to_datetime(events["at"], errors="coerce")
    kept = _of_part(events["machine"], at, at, seed, name)
    with tempfile.TemporaryDirectory() as folder:
        events[kept].to_csv(Path(folder) / "FullLogonData-000.csv", header=False, index=False)
        return TraceSet.read(folder)


def _cars(recordings: Path, seed: int, name: str) -> TraceSet:
    file = _files(recordings, "ev-norway-charging-reports.csv*")[0]
    sessions = pd.read_csv(file, sep=";", dtype="str")
    starts, ends = (
        pd.to_datetime(sessions[column], errors="coerce")
        for column in ("plugin_time", "plugout_time")
    )
    kept = _of_part(sessions["user_id"], starts, ends, seed, name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "Dataset1_charging_reports.csv"
        sessions[kept].to_csv(path, sep=";", index=False)
        return TraceSet.read(path)


def _files(recordings: Path, pattern: str) -> list[Path]:
    found = sorted(recordings.glob(pattern))
    if not found:
        raise TraceError(f"{recordings / pattern}: no such file")
    return found


_READERS = {"phones": _phones, "desktops": _desktops, "cars": _cars}


def _of_part(devices: pd.Series, starts: pd.Series, ends: pd.Series, seed: int, name: str) -> Mask:
    """Return which rows of a file are of a part: of its devices, and before or after the turn."""
    known = np.unique(devices.dropna().to_numpy(dtype=str))
    own = devices.isin(_part(stream(seed, _DEVICES).permutation(known), name))
    turn = starts.quantile(TURN_SHARE).to_period("W-SUN").start_time
    in_time = starts >= turn if name == "test" else ends < turn
    return (own & in_time).to_numpy()
