"""Traces of a device's own readings: times online, processor and links left, gaps.

A recording is passive. It sees the processor that other programs leave, so compute is that share
times a speed which the user states or measures. It sees traffic, which only bounds the capacity of
a link from below, so links are stated or stay unknown. A device's clock may be set, or stop: the
trace follows the steady clock within a run, and the wall clock from one run to the next.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, get_args

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces import DAY_S, Array, Availability, Mask, Series, TraceSet
from fedstale.traces.recording.monitor import Reading

AvailableWhen = Literal["online", "charging", "recording"]

_NEEDED: dict[AvailableWhen, tuple[str, ...]] = {
    "recording": (),
    "online": ("online",),
    "charging": ("online", "charging"),
}

# A reading that is this many intervals late was not late: the device slept, or was off.
_GAP_INTERVALS = 3.0
# Clocks that are disciplined by a time server drift by less than this between two readings.
_STEP_S = 2.0
# Between runs only the wall clock counts, and one that starts in 1970 must not add half a century.
_LONGEST_SILENCE_S = 31 * DAY_S
# A device that records whenever it is on is hardly off for longer: then nobody recorded.
_LONGEST_OFFLINE_S = DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRules:
    """What the readings of a device are taken to mean."""

    available: AvailableWhen = "online"
    """The device can take a job: while online; while online and on mains; while it records."""
    speed: float | None = None
    """Work units/s of the whole processor, idle, > 0; None leaves compute unknown."""
    compute_unit: str | None = None
    """What one work unit is, in words."""
    link_bit_per_s: tuple[float, float] | None = None
    """Stated capacity of downlink and uplink in bit/s, > 0; None leaves the links unknown."""

    def __post_init__(self) -> None:
        if self.available not in get_args(AvailableWhen):
            raise TraceError(
                f"available = {self.available!r}: expected 'online', 'charging' or 'recording'"
            )
        rates = {"speed": self.speed} if self.speed is not None else {}
        if self.link_bit_per_s is not None:
            rates |= dict(zip(("downlink", "uplink"), self.link_bit_per_s, strict=True))
        for name, rate in rates.items():
            if not (np.isfinite(rate) and rate > 0):
                raise TraceError(f"{name} = {rate}: expected a finite number > 0")


def traces_of(
    readings: pd.DataFrame, rules: RecordingRules, dropped: dict[str, int] | None = None
) -> TraceSet:
    """Return the trace of one device from its journal.

    Instant 0 is the first reading; calendar time follows the clock of the last one. A share of the
    processor holds for the time before its reading, everything else for the time after it. Nothing
    is known of the time after the last reading, so the trace ends there.

    Args:
        readings: of the journal, as `journal.read` returns them; at least two.
        rules: what the readings mean.
        dropped: what reading the journal dropped, by kind, to be counted among the repairs.

    Returns:
        A set of one device with availability, and compute and links where they are known.

    Raises:
        TraceError: there are fewer than two readings, or the rule needs what was never read.
    """
    if len(readings) < 2:
        raise TraceError(
            f"{len(readings)} reading in the journal: expected at least 2; record for longer"
        )
    t, gap, repairs = _timeline(readings)
    online = _available(readings, rules.available)[:-1] & ~gap
    edges = np.diff(np.concatenate([[0], online.astype(np.int8), [0]]))
    windows, length = np.stack([t[edges == 1], t[edges == -1]], axis=1), float(t[-1])
    channels: dict[str, Series] = {}
    share = readings["processor_left"].to_numpy(np.float64)[1:]
    if rules.speed is not None and np.isfinite(share).any():
        left, filled = _held(share, gap)
        repairs["filled: share of the processor not read"] = filled
        rates = left * rules.speed
        new = np.concatenate([[True], np.diff(rates) != 0])
        channels["compute"] = Series.irregular([(t[:-1][new], rates[new])], [length])
    for name, rate in zip(("downlink", "uplink"), rules.link_bit_per_s or (), strict=False):
        channels[name] = Series.irregular([([0.0], [rate])], [length])
    last = readings.iloc[-1]
    began = timedelta(seconds=float(last["instant"]) - length + float(last["utc_offset_s"]))
    epoch = datetime(1970, 1, 1, tzinfo=UTC) + began
    return TraceSet(
        device_ids=pd.Index([last["device_id"]], dtype="str"),
        availability=Availability.of([windows], length),
        **channels,
        compute_unit=rules.compute_unit if "compute" in channels else None,
        epoch=epoch.replace(tzinfo=None).isoformat(),
        repairs={**(dropped or {}), **repairs},
    )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class WorkingDevice:
    """What its journal shows of a device that works on a job at an instant."""

    traces: TraceSet
    """The one device, up to a short time after the instant, without a repetition."""
    now: float
    """The instant, in s of the trace."""
    log_began: float
    """When its log begins, in s of the trace, at most `now`."""
    last_reading: float
    """Instant of the last reading that counts, in s since 1970, UTC."""


def working_at(readings: pd.DataFrame, rules: RecordingRules, instant: float) -> WorkingDevice:
    """Compute the history that a device, working at an instant, can know from its journal.

    Readings later than the instant do not count; where the clock was set, the last reading that is
    not later is the newest. From then on the last reading holds, or there is a gap, as in
    `traces_of`; at the instant the device is available, since it works. Its log begins after the
    last silence of over a day between two runs of the recorder: the device may have been online all
    that time. Shorter silences, and all within a run, are gaps: a device that records whenever it
    is on was off or asleep.

    Args:
        readings: of the journal, as `journal.read` returns them.
        rules: what the readings mean.
        instant: in s since 1970, UTC.

    Raises:
        TraceError: fewer than two readings count, the last of them is over a day old, or the rule
            needs what was never read.
    """
    earlier = np.flatnonzero(readings["instant"].to_numpy() <= instant)
    if earlier.size < 2:
        raise TraceError(
            f"{earlier.size} of {len(readings)} readings in the journal are not later than now: "
            "expected at least 2; record for longer, or see that the clock is right"
        )
    known = readings.iloc[: earlier[-1] + 1]
    _available(known, rules.available)
    last = known.iloc[[-1]]
    since = instant - float(last["instant"].iloc[0])
    if since > _LONGEST_OFFLINE_S:
        raise TraceError(
            f"the newest reading in the journal is {since / 3600.0:,.0f} h old: expected one of "
            "the last day; see that the recorder runs"
        )
    shown = last.assign(online=1.0, charging=1.0)
    if since > 0:
        shown = shown.assign(instant=instant, steady=shown["steady"] + since, processor_left=np.nan)
    else:
        known = known.iloc[:-1]
    # The trace goes on for an interval, since at its end nothing holds.
    ahead = shown["interval_s"]
    end = shown.assign(
        instant=shown["instant"] + ahead, steady=shown["steady"] + ahead, processor_left=np.nan
    )
    rows = pd.concat([known, shown, end], ignore_index=True)
    t = _timeline(rows)[0]
    is_silent = (np.diff(rows["run"]) != 0) & (np.diff(t) > _LONGEST_OFFLINE_S)
    return WorkingDevice(
        traces=traces_of(rows, rules).repeating(repeat=False),
        now=float(t[-2]),
        log_began=float(t[1:][is_silent].max(initial=0.0)),
        last_reading=float(last["instant"].iloc[0]),
    )


def check_readable(reading: Reading, rule: AvailableWhen) -> None:
    """Raise a TraceError if a device cannot read what a rule of availability needs."""
    for name in _NEEDED[rule]:
        if getattr(reading, name) is None:
            raise _unreadable(rule, name)


def highest_rates(readings: pd.DataFrame) -> tuple[float, float]:
    """Return the highest rates received and sent, in bit/s: the links carry at least that.

    NaN where no traffic was read.
    """
    return float(readings["received_bit_per_s"].max()), float(readings["sent_bit_per_s"].max())


def _timeline(readings: pd.DataFrame) -> tuple[Array, Mask, dict[str, int]]:
    """Return the instant of each reading, whether a gap follows it (n - 1), and the repairs."""
    interval = readings["interval_s"].to_numpy(np.float64)[:-1]
    same = np.diff(readings["run"]) == 0
    by_wall, by_steady = np.diff(readings["instant"]), np.diff(readings["steady"])
    elapsed = np.where(same, by_steady, by_wall)
    step = np.where(same, by_wall - by_steady, 0.0)
    back = (elapsed <= 0) | (step < -_STEP_S)
    forward = step > _STEP_S
    endless = elapsed > _LONGEST_SILENCE_S
    elapsed = np.where(elapsed <= 0, interval, np.minimum(elapsed, _LONGEST_SILENCE_S))
    gap = back | forward | (elapsed > _GAP_INTERVALS * interval)
    t = np.concatenate([[0.0], np.cumsum(elapsed)])
    repairs = {
        "gap: clock was set back": int(back.sum()),
        "gap: clock was set forward": int(forward.sum()),
        "gap: no reading": int((gap & ~back & ~forward).sum()),
        "shortened: silence of over 31 days": int(endless.sum()),
    }
    return t, gap, repairs


def _available(readings: pd.DataFrame, rule: AvailableWhen) -> Mask:
    needed = _NEEDED[rule]
    for name in needed:
        if readings[name].isna().all():
            raise _unreadable(rule, name)
    return (readings[list(needed)] == 1.0).all(axis=1).to_numpy()


def _unreadable(rule: AvailableWhen, name: str) -> TraceError:
    other = "'online' or 'recording'" if name == "charging" else "'recording'"
    return TraceError(
        f"available = {rule!r}: this device cannot read whether it is {name}; expected {other}"
    )


def _held(share: Array, gap: Mask) -> tuple[Array, int]:
    """Return shares with gaps and missing ones filled by the last known, and how many were."""
    known = np.isfinite(share) & ~gap
    if not known.any():
        known = np.isfinite(share)
    held = pd.Series(share).where(known).ffill().bfill().to_numpy(np.float64)
    return np.clip(held, 0.0, 1.0), int((~known).sum())
