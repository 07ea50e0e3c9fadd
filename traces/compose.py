"""Complete devices out of independent sources: a phone's hours, a model's speed, a link.

Published recordings each know a part of what a device does. Here each device takes one row of every
part at random; rows stay shared, so a million devices cost little more than the recordings. What
no source knows is not made up. The parts are taken as independent, which real ones are not quite: a
phone that charges at home also has the link of its home.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array, Index
from fedstale.traces.availability import Availability
from fedstale.traces.series import Series
from fedstale.traces.trace_set import TraceSet

DAY_S = 86_400.0
_AVAILABILITY, _COMPUTE, _BACKGROUND, _NETWORK = range(4)


def compose(
    *,
    availability: TraceSet | None = None,
    compute: TraceSet | None = None,
    background: TraceSet | None = None,
    network: TraceSet | None = None,
    n: int,
    seed: int,
    after_end: str = "repeat",
    uplink_share: float | None = None,
) -> TraceSet:
    """Return n devices with all channels.

    Every record of a source is used before one is used again. A device keeps the id of its record
    of availability; the second device with it is called ID#2, and comes some whole days later in
    the record, so that hours of the day stay where they are. Links and background loads, which are
    short and know no hours, start anywhere and repeat.

    Args:
        availability: when devices are there.
        compute: speed of idle devices in work units/s, or of devices whose load is counted already.
        background: share of the processor that is left; None if `compute` counts it already.
        network: links; a downlink, and an uplink or else `uplink_share`.
        n: number of devices, >= 1.
        seed: of the draw, >= 0.
        after_end: whether a record of availability repeats ("repeat") or ends ("stop").
        uplink_share: rate of the uplink divided by that of the downlink, > 0, for links of which
            only the downlink was recorded.

    Returns:
        Devices that share the rows of their sources.

    Raises:
        TraceError: a source is missing or does not know its part, or an argument is out of range.

    Example:
        >>> parts = TraceSet.constant(2, compute=1, downlink_bit_per_s=8, uplink_bit_per_s=4)
        >>> made = compose(availability=parts, compute=parts, network=parts, n=3, seed=0)
        >>> sorted(made.device_ids)
        ['device-0', 'device-0#2', 'device-1']
    """
    if isinstance(n, bool) or int(n) != n or n < 1:
        raise TraceError(f"n = {n!r}: expected an integer >= 1")
    if isinstance(seed, bool) or int(seed) != seed or seed < 0:
        raise TraceError(f"seed = {seed!r}: expected an integer >= 0")
    if after_end not in ("repeat", "stop"):
        raise TraceError(f"after_end = {after_end!r}: expected 'repeat' or 'stop'")
    hours = _part("availability", availability, "availability")
    speeds = _part("compute", compute, "compute")
    links = _part("network", network, "downlink")
    ids, there = _present(hours, n, seed, repeat=after_end == "repeat")
    downlink, uplink = _connected(links, n, seed, uplink_share)
    return TraceSet(
        device_ids=ids,
        availability=there,
        compute=_computing(speeds, background, n, seed),
        downlink=downlink,
        uplink=uplink,
        compute_unit=speeds.compute_unit,
        epoch=hours.epoch,
        repairs=_repairs(availability=hours, compute=speeds, background=background, network=links),
    )


def _part(name: str, source: TraceSet | None, channel: str) -> TraceSet:
    if source is None:
        raise TraceError(f"{name} is missing: expected a set of traces that knows {channel}")
    if channel not in source.known:
        raise TraceError(
            f"{name} knows {', '.join(source.known) or 'nothing'}: expected a source of {channel}"
        )
    return source


def _present(source: TraceSet, n: int, seed: int, *, repeat: bool) -> tuple[pd.Index, Availability]:
    channel = source.availability
    assert channel is not None
    rng = _stream(seed, _AVAILABILITY)
    which = _drawn(source.n_devices, n, rng)
    turn = np.arange(n) // source.n_devices
    taken = replace(channel, repeat=repeat).take(which)
    if repeat:
        days = np.maximum(np.floor(taken.lengths[taken.rows] / DAY_S), 1)
        # A record that is no whole number of days would come at other hours if it were moved.
        whole = np.mod(taken.lengths[taken.rows], DAY_S) == 0
        taken = taken.shifted(
            np.where(whole & (turn > 0), np.floor(rng.random(n) * days), 0) * DAY_S
        )
    ids = pd.Series(source.device_ids[which], dtype="str")
    again = turn > 0
    ids[again] = ids[again] + "#" + pd.Series(turn + 1, dtype="str")[again]
    return pd.Index(ids, dtype="str", name=None), taken


def _computing(speeds: TraceSet, background: TraceSet | None, n: int, seed: int) -> Series:
    assert speeds.compute is not None
    rng = _stream(seed, _COMPUTE)
    speed = speeds.compute.take(_drawn(speeds.n_devices, n, rng))
    if background is None:
        return _anywhere(speed, rng.random(n))
    left = _part("background", background, "compute").compute
    assert left is not None
    if not _is_constant(speed):
        raise TraceError(
            "compute changes with time and background is given too: expected constant speeds, or "
            "no background"
        )
    rng = _stream(seed, _BACKGROUND)
    rows = left.take(_drawn(left.n_devices, n, rng))
    if left.stored.values.max() * rows.scales.max() > 1 + 1e-6:
        raise TraceError("background: expected the share of a processor that is left, at most 1")
    return _anywhere(rows, rng.random(n)).scaled(speed.value_at(np.arange(n), 0.0))


def _connected(
    source: TraceSet, n: int, seed: int, uplink_share: float | None
) -> tuple[Series, Series]:
    assert source.downlink is not None
    if source.uplink is None and uplink_share is None:
        raise TraceError(
            "network knows no uplink: expected a source that does, or uplink_share, the rate of "
            "the uplink divided by that of the downlink"
        )
    if source.uplink is not None and uplink_share is not None:
        raise TraceError(
            f"uplink_share = {uplink_share}: expected none, since network knows the uplink"
        )
    rng = _stream(seed, _NETWORK)
    which, phase = _drawn(source.n_devices, n, rng), rng.random(n)
    downlink = source.downlink.take(which)
    start = phase * downlink.lengths[downlink.rows]
    if source.uplink is None:
        assert uplink_share is not None
        if not (np.isfinite(uplink_share) and uplink_share > 0):
            raise TraceError(f"uplink_share = {uplink_share}: expected a number > 0")
        uplink = downlink.scaled(uplink_share)
    else:
        uplink = source.uplink.take(which)
    # Both directions start at one moment of the recording: they were recorded together.
    return tuple(replace(c, repeat=True).shifted(start) for c in (downlink, uplink))  # type: ignore[return-value]


def _anywhere(series: Series, phase: Array) -> Series:
    return replace(series, repeat=True).shifted(phase * series.lengths[series.rows])


def _is_constant(series: Series) -> bool:
    rows = np.unique(series.rows)
    first = np.diff(series.stored.first_block)[rows]
    if not series.repeat or np.isfinite(series.until) or np.any(first != 1):
        return False
    blocks = series.stored.values[series.stored.first_block[rows]]
    used = (
        np.rint(series.lengths[rows] / series.stored.step_s)
        if series.stored.step_s is not None
        else np.isfinite(series.stored.starts[series.stored.first_block[rows]]).sum(axis=1)  # type: ignore[index]
    )
    inside = np.arange(blocks.shape[1]) < used[:, None]
    return bool(np.all((blocks == blocks[:, :1]) | ~inside))


def _drawn(available: int, n: int, rng: np.random.Generator) -> Index:
    """Return n positions at random; each one is taken once before one is taken again."""
    rounds = np.tile(np.arange(available), (-(-n // available), 1))
    return rng.permuted(rounds, axis=1).ravel()[:n]


def _repairs(**sources: TraceSet | None) -> dict[str, int]:
    return {
        f"{name}: {kind}": count
        for name, source in sources.items()
        if source is not None
        for kind, count in source.repairs.items()
    }


def _stream(seed: int, part: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(part,)))
