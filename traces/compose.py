"""Complete devices out of independent sources: a phone's hours, a model's speed, a link.

Published recordings each know a part of what a device does. Here each device takes one row of every
part at random; rows stay shared, so a million devices cost little more than the recordings. What
no source knows stays unknown. The parts are taken as independent, which real ones are not quite: a
phone that charges at home also has the link of its home. Sources of the same devices can be kept
together: each device then has its own link and speed, at its own hours where both know theirs.

Loads and links are shorter than what they are joined to, and what repeats is known after one turn.
Over a number of days they need not repeat: a load is then different days of one processor, a link
whole sessions in a random order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces.arrays import DAY_S, Array, Index, stream
from fedstale.traces.availability import Availability
from fedstale.traces.series import Series
from fedstale.traces.trace_set import TraceSet

_WEEK_S = 7 * DAY_S
_AVAILABILITY, _COMPUTE, _BACKGROUND, _NETWORK, _DAYS, _SESSIONS = range(6)
# A link of three days, once a second, takes a megabyte: devices share these, each from elsewhere.
_STRUNG_LINKS = 48


def compose(
    sources: Mapping[str, TraceSet | None],
    n: int,
    seed: int,
    *,
    uplink_share: float | None,
    days: int | None,
    keep_together: bool,
) -> TraceSet:
    """Return n devices with all channels; see `TraceSet.compose`, whose sources are by name."""
    if isinstance(n, bool) or int(n) != n or n < 1:
        raise TraceError(f"n = {n!r}: expected an integer >= 1")
    if isinstance(seed, bool) or int(seed) != seed or seed < 0:
        raise TraceError(f"seed = {seed!r}: expected an integer >= 0")
    if days is not None and (isinstance(days, bool) or int(days) != days or days < 1):
        raise TraceError(f"days = {days!r}: expected an integer >= 1, or None")
    length_s = 0.0 if days is None else days * DAY_S
    if keep_together:
        sources = _together(sources)
    hours = _part(sources, "availability")
    speeds = _part(sources, "compute")
    links = _part(sources, "network", "downlink")
    ids, online, drawn = _online(hours, n, seed)
    own_speed, own_link = (
        drawn if keep_together and hours.device_ids.equals(source.device_ids) else None
        for source in (speeds, links)
    )
    downlink, uplink = _linked(links, n, seed, uplink_share, length_s, own=own_link)
    return TraceSet(
        device_ids=ids,
        availability=online,
        compute=_computing(speeds, sources, n, seed, length_s, own=own_speed),
        downlink=downlink,
        uplink=uplink,
        compute_unit=speeds.compute_unit,
        epoch=hours.epoch,
        repairs={
            f"{name}: {kind}": count
            for name, source in sources.items()
            if source is not None
            for kind, count in source.repairs.items()
        },
    )


def _part(sources: Mapping[str, TraceSet | None], name: str, channel: str = "") -> TraceSet:
    source, channel = sources[name], channel or name
    if source is None:
        raise TraceError(f"{name} is missing: expected a set of traces that knows {channel}")
    if channel not in source.known:
        raise TraceError(
            f"{name} knows {', '.join(source.known) or 'nothing'}: expected a source of {channel}"
        )
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """Which records of availability the devices have, and since when."""

    which: Index
    """Position in the source; shape (devices,)."""
    later_s: Array
    """How much later in its record each device begins, in s; shape (devices,)."""
    epoch: str | None
    """Local time of instant 0 of the source."""

    def place(self, own: Series, source: TraceSet, phase: Array) -> Array:
        """Return where in its own record each device begins, in s: at its hours if they are known.

        Args:
            own: the records, one for each device.
            source: what they are of.
            phase: where else to begin, as a share of each record; shape (devices,).
        """
        if self.epoch is None or source.epoch is None:
            return phase * own.record_s()
        ahead = pd.Timestamp(self.epoch) - pd.Timestamp(source.epoch)
        return np.mod(ahead.total_seconds() + self.later_s, own.record_s())


def _together(sources: Mapping[str, TraceSet | None]) -> Mapping[str, TraceSet | None]:
    """Return availability, and the sources that share devices with it, as the same devices.

    Raises:
        TraceError: no source shares a device with availability.
    """
    hours = _part(sources, "availability")
    others = {name: sources[name] for name in ("compute", "network")}
    same = {
        name: source
        for name, source in others.items()
        if source is not None and hours.device_ids.isin(source.device_ids).any()
    }
    ids = hours.device_ids
    for source in same.values():
        ids = ids[ids.isin(source.device_ids)]
    if not same or ids.empty:
        example = {name: one.device_ids[0] for name, one in others.items() if one is not None}
        raise TraceError(
            f"keep_together: no device of availability, such as {hours.device_ids[0]!r}, is in all "
            f"of {', '.join(f'{name} ({id_!r})' for name, id_ in example.items()) or 'nothing'}: "
            "expected compute or network of the same device ids"
        )
    kept = {
        name: source.take(source.device_ids.get_indexer(ids))
        for name, source in {"availability": hours, **same}.items()
    }
    left_out = {"left out: device that another source does not know": hours.n_devices - ids.size}
    kept["availability"] = replace(
        kept["availability"], repairs={**kept["availability"].repairs, **left_out}
    )
    return {**sources, **kept}


def _online(source: TraceSet, n: int, seed: int) -> tuple[pd.Index, Availability, _Drawn]:
    rng = stream(seed, _AVAILABILITY)
    which = _drawn(source.n_devices, n, rng)
    turn = np.arange(n) // source.n_devices
    taken, later_s = source.channel("availability").take(which), np.zeros(n)
    if taken.repeat:
        length_s = taken.record_s()
        weekly = (np.mod(length_s, _WEEK_S) == 0) & (length_s >= 2 * _WEEK_S)
        unit_s = np.where(weekly, _WEEK_S, DAY_S)
        units = np.maximum(np.floor(length_s / unit_s), 1)
        # A record that is no whole number of days would come at other hours if it were moved.
        whole = np.mod(length_s, DAY_S) == 0
        later_s = np.where(whole & (turn > 0), np.floor(rng.random(n) * units), 0) * unit_s
        taken = taken.shifted(later_s)
    ids = pd.Series(source.device_ids[which], dtype="str")
    again = turn > 0
    ids[again] = ids[again] + "#" + pd.Series(turn + 1, dtype="str")[again]
    drawn = _Drawn(which=which, later_s=later_s, epoch=source.epoch)
    return pd.Index(ids, dtype="str", name=None), taken, drawn


def _computing(
    speeds: TraceSet,
    sources: Mapping[str, TraceSet | None],
    n: int,
    seed: int,
    length_s: float,
    *,
    own: _Drawn | None,
) -> Series:
    rng = stream(seed, _COMPUTE)
    which = _drawn(speeds.n_devices, n, rng)
    speed = speeds.channel("compute").take(which if own is None else own.which)
    if sources["background"] is None:
        phase = rng.random(n)
        start = phase * speed.record_s() if own is None else own.place(speed, speeds, phase)
        return replace(speed, repeat=True).shifted(start)
    background = _part(sources, "background", "compute")
    left = _days_in_a_row(background, length_s, stream(seed, _DAYS))
    if not _is_constant(speed):
        raise TraceError(
            "compute changes with time and background is given too: expected constant speeds, or "
            "no background"
        )
    rng = stream(seed, _BACKGROUND)
    rows = left.take(_drawn(left.n_devices, n, rng))
    if left.values.max() * rows.scales.max() > 1 + 1e-6:
        raise TraceError("background: expected the share of a processor that is left, at most 1")
    rows = replace(rows, repeat=True).shifted(rng.random(n) * rows.record_s())
    return rows.scaled(speed.value_at(np.arange(n), 0.0))


def _days_in_a_row(source: TraceSet, length_s: float, rng: np.random.Generator) -> Series:
    """Return the loads of processors that were recorded for long enough, all their days in a row.

    Records DAY/HOST of one host are its days, which follow each other in a random order.

    Raises:
        TraceError: no processor was recorded for so long.
    """
    left = source.channel("compute")
    if length_s == 0.0 or _is_constant(left):
        return left
    hosts = pd.Series(np.arange(source.n_devices)).groupby(
        source.device_ids.str.rsplit("/", n=1).str[-1].to_numpy()
    )
    order = [rng.permutation(days.to_numpy()) for _, days in hosts]
    rows = [days for days in order if left.record_s()[days].sum() >= length_s]
    if not rows:
        raise TraceError(
            f"background: no processor was recorded for {length_s / DAY_S:g} days: expected one, "
            "or fewer days"
        )
    return _strung(left, rows, left.record_s())


def _sessions_in_a_row(
    links: Sequence[Series], n: int, length_s: float, rng: np.random.Generator
) -> list[Series]:
    """Return links that do not repeat within a time: whole sessions, in one order both ways."""
    lasts_s = links[0].record_s()
    if lasts_s.size == 1:
        raise TraceError(
            f"network: one link of {lasts_s[0]:g} s, which would repeat within "
            f"{length_s / DAY_S:g} days: expected several, or no number of days"
        )
    rows = []
    for _ in range(min(_STRUNG_LINKS, n)):
        drawn = rng.integers(lasts_s.size, size=int(length_s // lasts_s.min()) + 1)
        rows.append(drawn[: int(np.searchsorted(np.cumsum(lasts_s[drawn]), length_s)) + 1])
    return [_strung(link, rows, lasts_s) for link in links]


def _repeats_within(links: Sequence[Series], length_s: float) -> bool:
    lasts_s = links[0].record_s()
    return not (length_s == 0.0 or all(map(_is_constant, links)) or lasts_s.min() >= length_s)


def _strung(series: Series, rows: Sequence[Index], lasts_s: Array) -> Series:
    """Return rows that are some devices' records, one after the other.

    Args:
        series: the records.
        rows: positions of devices for each row.
        lasts_s: how long each device's record is played, in s; a record that is shorter holds its
            last rate.
    """
    used = np.unique(np.concatenate(rows))
    pieces = {int(device): series.segments(int(device))[:2] for device in used}
    if series.step_s is not None and np.array_equal(series.record_s(), lasts_s):
        values = [np.concatenate([pieces[int(d)][1] for d in row]) for row in rows]
        return Series.regular(values, step_s=series.step_s)
    cut = {d: (s[s < lasts_s[d]], v[s < lasts_s[d]]) for d, (s, v) in pieces.items()}
    strung = []
    for row in rows:
        begins = np.cumsum(lasts_s[row]) - lasts_s[row]
        starts = [cut[int(d)][0] + begin for d, begin in zip(row, begins, strict=True)]
        strung.append((np.concatenate(starts), np.concatenate([cut[int(d)][1] for d in row])))
    return Series.irregular(strung, [lasts_s[row].sum() for row in rows])


def _linked(
    source: TraceSet,
    n: int,
    seed: int,
    uplink_share: float | None,
    length_s: float,
    *,
    own: _Drawn | None,
) -> tuple[Series, Series]:
    links = [source.channel("downlink"), *([] if source.uplink is None else [source.uplink])]
    if _repeats_within(links, length_s):
        if own is not None:
            raise TraceError(
                f"network: a link of {links[0].record_s().min():g} s would repeat within "
                f"{length_s / DAY_S:g} days, and a device keeps its own (keep_together): expected "
                "no number of days"
            )
        links = _sessions_in_a_row(links, n, length_s, stream(seed, _SESSIONS))
    rng = stream(seed, _NETWORK)
    which, phase = _drawn(links[0].n_devices, n, rng), rng.random(n)
    which = which if own is None else own.which
    downlink = links[0].take(which)
    if source.uplink is not None:
        if uplink_share is not None:
            raise TraceError(
                f"uplink_share = {uplink_share}: expected none, since network knows the uplink"
            )
        uplink = links[1].take(which)
    elif uplink_share is None:
        raise TraceError(
            "network knows no uplink: expected a source that does, or uplink_share, the rate of "
            "the uplink divided by that of the downlink"
        )
    elif not (np.isfinite(uplink_share) and uplink_share > 0):
        raise TraceError(f"uplink_share = {uplink_share}: expected a number > 0")
    else:
        uplink = downlink.scaled(uplink_share)
    # Both directions start at one moment of the recording: they were recorded together.
    start = phase * downlink.record_s() if own is None else own.place(downlink, source, phase)
    downlink, uplink = (replace(link, repeat=True).shifted(start) for link in (downlink, uplink))
    return downlink, uplink


def _is_constant(series: Series) -> bool:
    rows = np.unique(series.rows)
    blocks = np.diff(series.first_block)[rows]
    if not series.repeat or np.isfinite(series.until) or np.any(blocks != 1):
        return False
    return all(np.ptp(series.row_segments(int(row))[1]) == 0 for row in rows)


def _drawn(available: int, n: int, rng: np.random.Generator) -> Index:
    """Return n positions at random; each one is taken once before one is taken again."""
    rounds = np.tile(np.arange(available), (-(-n // available), 1))
    return rng.permuted(rounds, axis=1).ravel()[:n]
