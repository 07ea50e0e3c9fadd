"""Fit the numbers of a generated population to recordings, and write them with their provenance.

Availability is fitted by groups of devices, links by regimes, loads by frequencies and memory, and
speeds by classes; nothing is tuned by hand. The file holds the marginals of the recordings too, for
comparison.

Run it with: python benchmarks/populations/fit.py --availability phones.json --network 5g.zip
    --network mahimahi --background planetlab.tar.gz --compute models.json --out population.toml
"""

import argparse
import hashlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import tomli_w

from fedstale import __version__
from fedstale.cli.record import link_rates, stated_speed
from fedstale.errors import FedstaleError, TraceError
from fedstale.traces import DAY_S, Array, Availability, Series, TraceSet, rounded
from fedstale.traces.io import replacing
from fedstale.traces.synthetic.diurnal import PARTS, WEEK_S, Diurnal, Group, offsets_of_hours
from fedstale.traces.synthetic.marginals import Marginal, spread
from fedstale.traces.synthetic.population import Links, Population
from fedstale.traces.synthetic.rates import (
    LINK_LEVELS,
    LOAD_LEVELS,
    SCORES,
    Background,
    Regimes,
    draw_links,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from populations.marginals import (
    OUTAGE,
    autocorrelation,
    availability_marginal,
    link_marginal,
    load_marginal,
    speed_marginal,
)

MOST_PROCESSORS = 4000
_CLASSES = 10
_LEAST_LINK_S = 100
_PART_S = DAY_S / PARTS
# Where a few long lengths make up most of the time, the levels are close to 1.
_LEVELS = {
    DAY_S: (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0),
    WEEK_S: (0, 0.1, 0.25, 0.5, 0.7, 0.85, 0.93, 0.97, 0.985, 0.993, 0.997, 0.999, 1.0),
}
_PAUSE_S = 1800.0
_SHARE_GROUPS = 8
_HOUR_GROUPS = 2
# No hour is closed: the flow of operational time must be invertible.
_LEAST_INTENSITY = 0.02
_WIDTHS_S = (5, 9, 15, 25, 41, 61, 91)
_LINK_LAGS_S = (1, 3, 10, 30, 60)
_LOAD_LAGS = (1, 2, 3, 6, 12, 24, 48)
_PHIS_SLOW = (0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
_PHIS_FAST = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8)


STEADY = Regimes(
    move=((1.0,) + (0.0,) * (2 * LINK_LEVELS - 1),) * (2 * LINK_LEVELS),
    share=(1.0,) + (0.0,) * (2 * LINK_LEVELS - 1),
    mean_log=(0.0,) * LINK_LEVELS,
    sd_log=(0.0,) * LINK_LEVELS,
    phi=(0.0,) * LINK_LEVELS,
)
"""A link that always carries its median."""


def fit(
    *,
    availability: TraceSet,
    network: Sequence[TraceSet],
    background: TraceSet,
    compute: TraceSet,
    cycle: Literal["day", "week"] = "day",
) -> tuple[Population, dict[str, Marginal]]:
    """Return the population that recordings come from, and the marginals that it should have.

    Args:
        availability: devices that come and go, in records of whole days.
        network: sets of links; all their downlinks count, and at least one set must know the
            uplinks too. Links that are constant are drawn constant.
        background: processors, with the share that is left of them, on a regular grid.
        compute: constant speeds of devices.
        cycle: whether devices keep hours of the day, or of the week.

    Returns:
        Parameters for `TraceSet.synthetic`, and the recordings' marginals by part: availability,
        downlink, uplink, background and speed.

    Raises:
        TraceError: a recording does not know what it is asked for, or holds too little.
    """
    online, left = availability.channel("availability"), background.channel("compute")
    speeds = compute.channel("compute").value_at(np.arange(compute.n_devices), 0.0)
    if speeds.min() <= 0:
        raise TraceError("compute to fit: a device has speed 0; leave it out")
    if compute.compute_unit is None:
        raise TraceError(
            "compute to fit: compute_unit is missing: expected what one unit of work is"
        )
    if left.step_s is None:
        raise TraceError("background to fit: expected loads on a regular grid")
    cycle_s = {"day": DAY_S, "week": WEEK_S}.get(cycle)
    if cycle_s is None:
        raise TraceError(f"cycle = {cycle!r}: expected 'day' or 'week'")
    if cycle_s == WEEK_S and availability.epoch is None:
        raise TraceError("availability to fit: knows no calendar time, so no weekdays")
    weekday = 0 if availability.epoch is None else pd.Timestamp(availability.epoch).weekday()
    links, epoch_s = _grids(network), availability.midnight_s or 0.0
    epoch_s += weekday * DAY_S * (cycle_s == WEEK_S)
    classes = np.array_split(np.sort(speeds), min(_CLASSES, speeds.size))
    some = spread(left.n_devices, MOST_PROCESSORS)
    loads = [1.0 - left.segments(int(device))[1] for device in some]
    population = Population(
        availability=fit_availability(online, epoch_s, cycle_s=cycle_s),
        links=_fit_links(links),
        background=fit_loads(loads, left.step_s),
        # The geometric mean of a class: speeds differ by factors.
        speed=rounded(np.array([np.exp(np.log(c).mean()) for c in classes]), 5),
        compute_unit=compute.compute_unit,
    )
    uplinks = [up for _, up in links if up is not None]
    return population, {
        "availability": availability_marginal(online, epoch_s=epoch_s, cycle_s=cycle_s),
        "downlink": link_marginal(Series.regular([down for down, _ in links], step_s=1.0)),
        "uplink": link_marginal(Series.regular(uplinks, step_s=1.0)),
        "background": load_marginal(left),
        "speed": speed_marginal(speeds),
    }


def _fit_links(links: Sequence[tuple[Array, Array | None]]) -> Links:
    middle = np.log([_median_of(down) for down, _ in links])
    both = [(down, up) for down, up in links if up is not None]
    if len(both) < 2 or len(links) < 2:
        raise TraceError("network to fit: expected at least 2 links that know their uplink too")
    share = np.log([_median_of(up) / _median_of(down) for down, up in both])
    of_both = [moment for x in (middle, share) for moment in (x.mean(), x.std(ddof=1))]
    mean, sd, share_mean, share_sd = rounded(np.array(of_both), 6)
    return Links(
        median_log=mean,
        median_log_sd=sd,
        uplink_share_log=share_mean,
        uplink_share_log_sd=share_sd,
        downlink=fit_regimes([down for down, _ in links]),
        uplink=fit_regimes([up for _, up in both]),
    )


def _grids(network: Sequence[TraceSet]) -> list[tuple[Array, Array | None]]:
    """Return downlink and, where it is known, uplink of each link, one rate a second."""
    links: list[tuple[Array, Array | None]] = []
    for traces in network:
        downlink = traces.channel("downlink")
        for device in range(traces.n_devices):
            up = None if traces.uplink is None else _grid(traces.uplink, device)
            links.append((_grid(downlink, device), up))
    if not links:
        raise TraceError("network to fit: expected at least one set of links")
    return links


def _grid(series: Series, device: int) -> Array:
    # What is constant has a row of one second that repeats.
    seconds = np.arange(max(np.floor(series.lengths[series.rows[device]]), _LEAST_LINK_S))
    return series.value_at(np.full(seconds.size, device), seconds + 0.5)


def fit_availability(
    availability: Availability, epoch_s: float = 0.0, *, cycle_s: float = DAY_S
) -> Diurnal:
    """Return the population whose replay would look like a recording's replay.

    With a cycle of a day, a record is taken as a circle, as it is replayed: the gap from a device's
    last window leads to its first. With one of a week, what lies outside of a device's log is
    neither a gap nor a time online, and a member of a group is not a device but one of its weeks:
    the sessions that start in it, each with the gap that follows. Members are grouped by the share
    of time they are online, then by their hours: those that are online when most are, and the
    others.

    Args:
        availability: the recording; each record a whole number of days.
        epoch_s: time of the cycle at instant 0, in s.
        cycle_s: `DAY_S` or `WEEK_S`.

    Raises:
        TraceError: fewer than 16 members ever come, or records are not whole days.
    """
    length = availability.record_s()
    if np.any(np.mod(length, DAY_S) != 0):
        raise TraceError("availability to fit: expected records of whole days, cut or pad them")
    n = availability.n_devices
    device, starts, ends = availability.sessions(np.arange(n))
    following = np.concatenate([starts[1:], [0.0]])
    is_last = np.diff(device, append=-1) != 0
    is_first = np.diff(device, prepend=-1) != 0
    if cycle_s == DAY_S:
        following[is_last] = starts[is_first] + length[device[is_first]]
        member, size, stands_for_s = device, np.full(n, 1.0), length
    else:
        following[is_last] = np.nan
        week = ((starts + epoch_s) // cycle_s).astype(np.int64)
        _, found = np.unique(np.stack([device, week]), axis=1, return_inverse=True)
        member = found.astype(np.int64)
        until = np.where(is_last, ends, following)
        stands_for_s = np.bincount(member, weights=until - starts).astype(np.float64)
        # All that come have the weight of the devices that do.
        size = stands_for_s / stands_for_s.sum() * np.unique(device).size
    counts = np.bincount(member, minlength=size.size)
    hour_s = np.array(
        [
            np.bincount(
                member,
                weights=_time_in_hour(starts + epoch_s, ends + epoch_s, hour),
                minlength=size.size,
            )
            for hour in range(24)
        ]
    )
    share = hour_s.sum(axis=0) / stands_for_s
    # The mean hour online of each member, as an angle, against that of all.
    mean_hour = np.exp(2j * np.pi / 24 * np.arange(24)) @ hour_s
    likeness = np.cos(np.angle(mean_hour) - np.angle(mean_hour.sum()))
    present = np.flatnonzero((counts > 0) & ((share < 1) | (cycle_s != DAY_S)))
    if present.size < _SHARE_GROUPS * _HOUR_GROUPS:
        raise TraceError(
            f"availability to fit: {present.size} devices come and go, expected >= "
            f"{_SHARE_GROUPS * _HOUR_GROUPS}"
        )
    groups = []
    for members in np.array_split(
        present[np.argsort(share[present], kind="stable")], _SHARE_GROUPS
    ):
        order = members[np.argsort(likeness[members], kind="stable")]
        halves = np.array_split(order, _HOUR_GROUPS)
        for half in halves:
            ours = np.isin(member, half)
            groups.append(
                _fit_group(
                    float(size[half].sum() / n),
                    starts[ours] + epoch_s,
                    ends[ours] + epoch_s,
                    following[ours] + epoch_s,
                    cycle_s,
                )
            )
    return Diurnal(levels=_LEVELS[cycle_s], groups=tuple(groups))


def _fit_group(
    weight: float, starts: Array, ends: Array, following: Array, cycle_s: float
) -> Group:
    """Return a group's numbers; `following` is NaN where the log ends before another session."""
    levels = np.array(_LEVELS[cycle_s])
    lengths = ends - starts
    session_s = _by_part(starts, lengths, cycle_s, levels)
    if cycle_s != DAY_S:
        known = np.isfinite(following)
        ends, gaps = ends[known], (following - ends)[known]
        return Group(
            weight=weight,
            another=0.0,
            hourly=(1.0,) * 24,
            gap_s=_by_part(ends, gaps, cycle_s, levels),
            pause_s=_quantiles(np.array([_PAUSE_S]), levels),
            session_s=session_s,
        )
    gaps = following - ends
    long = gaps > _PAUSE_S
    arrivals = np.bincount((following[long] % DAY_S // 3600).astype(np.int64), minlength=24).astype(
        np.float64
    )
    # How long, in hours, such devices were waiting in each hour of the day.
    waiting = np.array(
        [_time_in_hour(ends[long], following[long], hour).sum() / 3600 for hour in range(24)]
    )
    hourly = arrivals / np.maximum(waiting, 1e-9)
    hourly = np.maximum(hourly / hourly.mean(), _LEAST_INTENSITY)
    hourly /= hourly.mean()
    cumulated = offsets_of_hours(hourly[None])[0]
    operational = _operational(cumulated, following[long]) - _operational(cumulated, ends[long])
    return Group(
        weight=weight,
        another=float(1 - long.mean()),
        hourly=rounded(hourly, 5),
        gap_s=(_quantiles(operational, levels),),
        pause_s=_quantiles(gaps[~long] if (~long).any() else np.array([_PAUSE_S]), levels),
        session_s=session_s,
    )


def _by_part(
    starts: Array, lengths: Array, cycle_s: float, levels: Array
) -> tuple[tuple[float, ...], ...]:
    """Return quantiles of lengths for each part of the cycle.

    Where none starts in a part, they are of all lengths; in a week, of what is left, in the middle
    of the part, of those that go on then, so that who comes at an odd hour goes with the others.
    """
    part = (np.mod(starts, cycle_s) // _PART_S).astype(np.int64)
    tables = []
    for p in range(round(cycle_s / _PART_S)):
        own = lengths[part == p]
        if own.size == 0 and cycle_s != DAY_S:
            left = lengths - np.mod((p + 0.5) * _PART_S - starts, cycle_s)
            own = left[left > 0]
        tables.append(_quantiles(own if own.size else lengths, levels))
    return tuple(tables)


def _operational(cumulated: Array, t: Array) -> Array:
    day, second = np.divmod(t, DAY_S)
    return day * DAY_S + np.interp(second, np.arange(25) * 3600.0, cumulated)


def _time_in_hour(start: Array, end: Array, hour: int) -> Array:
    def upto(t: Array) -> Array:
        day, second = np.divmod(t, DAY_S)
        return day * 3600 + np.clip(second - hour * 3600, 0, 3600)

    return upto(end) - upto(start)


def _quantiles(x: Array, levels: Array) -> tuple[float, ...]:
    return rounded(np.maximum(np.quantile(x, levels), 1.0), 5)


def fit_regimes(links: Sequence[Array]) -> Regimes:
    """Return the regimes of recorded links.

    A second below 1 % of its link's median is an outage. Levels are the quarters of the relative
    rate, smoothed over the seconds without outage; transitions are counted. The width of the
    smoothing says how long a level lasts: the one is taken whose links have, drawn with a fixed
    seed, the autocorrelation nearest to the recorded one.

    Args:
        links: rates of each link, one a second; each of shape (seconds,).

    Raises:
        TraceError: there are fewer than 100 s in all, or a link carries nothing.
    """
    if sum(map(len, links)) < 100:
        raise TraceError("network to fit: expected at least 100 s of links")
    if all(np.ptp(rates) == 0 for rates in links):
        return STEADY
    logs = [np.log(np.maximum(rates / _median_of(rates), OUTAGE)) for rates in links]
    long = [x for x in logs if x.size >= 10 * max(_LINK_LAGS_S)] or logs
    wanted = np.mean([autocorrelation(x, _LINK_LAGS_S) for x in long], axis=0)

    def error(model: Regimes) -> float:
        drawn = draw_links(model, 64, 3600, np.random.default_rng(0))
        logs = (np.log(np.maximum(x, OUTAGE)) for x in drawn)
        got = np.mean([autocorrelation(x, _LINK_LAGS_S) for x in logs], axis=0)
        return float(((got - wanted) ** 2).sum())

    return min((_fit_width(logs, width) for width in _WIDTHS_S), key=error)


def _fit_width(logs: Sequence[Array], width: int) -> Regimes:
    out = [x <= np.log(OUTAGE) for x in logs]
    smooth = [_smoothed(x, ~o, width) for x, o in zip(logs, out, strict=True)]
    every = np.concatenate(logs)
    alive = ~np.concatenate(out)
    cuts = np.quantile(np.concatenate(smooth)[alive], np.arange(1, LINK_LEVELS) / LINK_LEVELS)
    levels = [np.searchsorted(cuts, s) for s in smooth]
    states = [x + LINK_LEVELS * o for x, o in zip(levels, out, strict=True)]
    k = 2 * LINK_LEVELS
    # A little of each transition, so that every state can be reached and left.
    moves = np.full((k, k), 0.1 / k)
    for s in states:
        np.add.at(moves, (s[:-1], s[1:]), 1)
    joined = np.concatenate(states)
    mean, sd, phi = np.zeros(LINK_LEVELS), np.zeros(LINK_LEVELS), np.zeros(LINK_LEVELS)
    for level in range(LINK_LEVELS):
        here = every[joined == level]
        mean[level], sd[level] = here.mean(), here.std()
        pairs = [_pairs(x, s, level) for x, s in zip(logs, states, strict=True)]
        a, b = (np.concatenate(p) - mean[level] for p in zip(*pairs, strict=True))
        phi[level] = np.clip((a * b).sum() / max((a * a).sum(), 1e-12), 0.0, 0.999)
    return Regimes(
        move=tuple(rounded(row, 6) for row in moves / moves.sum(axis=1, keepdims=True)),
        share=rounded(np.bincount(joined, minlength=k) / joined.size, 6),
        mean_log=rounded(mean, 6),
        sd_log=rounded(sd, 6),
        phi=rounded(phi, 6),
    )


def _median_of(rates: Array) -> float:
    """Return the median of the rates that are not 0.

    Raises:
        TraceError: all of them are 0.
    """
    carried = rates[rates > 0]
    if carried.size == 0:
        raise TraceError("network to fit: a link carries nothing at all; leave it out")
    return float(np.median(carried))


def _smoothed(x: Array, alive: npt.NDArray[np.bool_], width: int) -> Array:
    """Return the mean over the seconds around each that are no outage; the last known elsewhere."""
    kernel = np.ones(min(width, x.size))
    n = np.convolve(alive, kernel, "same")
    sums = np.convolve(np.where(alive, x, 0.0), kernel, "same")
    known = np.flatnonzero(n > 0.5)
    held = known[(np.searchsorted(known, np.arange(x.size), side="right") - 1).clip(0)]
    return sums[held] / n[held]


def _pairs(x: Array, states: Array, regime: int) -> tuple[Array, Array]:
    both = (states[:-1] == regime) & (states[1:] == regime)
    return x[:-1][both], x[1:][both]


def fit_loads(loads: Sequence[Array], step_s: float) -> Background:
    """Return the background load of recorded processors.

    The shares and autocorrelations are those that come nearest, in least squares, to the recorded
    autocorrelations of the load at lags up to 48 steps, on a grid of autocorrelations.

    Args:
        loads: in [0, 1], one a step; arrays of equal shape (steps,).
        step_s: length of a step in s.

    Raises:
        TraceError: records are shorter than 49 steps or of different lengths.
    """
    if len({len(x) for x in loads}) != 1 or len(loads[0]) <= max(_LOAD_LAGS):
        raise TraceError("background to fit: expected records of one length, at least 49 steps")
    table = np.array(loads)
    load = rounded(np.quantile(table, LOAD_LEVELS), 5)
    # Where nothing varies, there is nothing to remember.
    (own, slow, fast), phi_slow, phi_fast = (1.0, 0.0, 0.0), 0.0, 0.0
    if np.ptp(table) > 0:
        centred = table - table.mean()
        recorded = [
            (centred[:, :-lag] * centred[:, lag:]).mean() / table.var() for lag in _LOAD_LAGS
        ]
        target = _correlation_before(load, np.array(recorded))
        _, (own, slow, fast), phi_slow, phi_fast = min(
            (_variances(target, a, b) for a, b in product(_PHIS_SLOW, _PHIS_FAST)),
            key=lambda found: found[0],
        )
    return Background(
        load=load,
        own=own,
        slow=slow,
        fast=fast,
        phi_slow=phi_slow,
        phi_fast=phi_fast,
        step_s=float(step_s),
    )


def _variances(
    target: Array, phi_slow: float, phi_fast: float
) -> tuple[float, tuple[float, float, float], float, float]:
    """Return the squared error of the best shares of variance, the shares, and the two phis."""
    lags = np.array(_LOAD_LAGS)
    slow, fast = phi_slow**lags, phi_fast**lags
    # Shares sum to 1, so the fast one is what the other two leave.
    matrix = np.stack([1 - fast, slow - fast], axis=1)
    solution = np.linalg.lstsq(matrix, target - fast, rcond=None)[0]
    own = float(np.clip(solution[0], 0, 1))
    share = float(np.clip(solution[1], 0, 1 - own))
    rest = 1 - own - share
    error = float(((own + share * slow + rest * fast - target) ** 2).sum())
    return error, (round(own, 5), round(share, 5), round(rest, 5)), phi_slow, phi_fast


def _correlation_before(load: tuple[float, ...], after: Array) -> Array:
    """Return the correlations that Gaussians must have for the loads to have those given."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    x, y = nodes[:, None], nodes[None, :]
    mass = weights[:, None] * weights[None, :]

    def value(z: Array) -> Array:
        return np.interp(z, SCORES, load)

    mean = (weights * value(nodes)).sum()
    variance = (weights * value(nodes) ** 2).sum() - mean**2
    grid = np.linspace(0.0, 1.0, 101)
    made = [(mass * value(x) * value(r * x + np.sqrt(1 - r * r) * y)).sum() - mean**2 for r in grid]
    return np.interp(after, np.array(made) / variance, grid)


def save(
    population: Population,
    path: Path,
    *,
    provenance: Mapping[str, Any],
    targets: Mapping[str, Any],
) -> None:
    """Write a population with its provenance and the marginals it should have."""
    document = {
        "provenance": dict(provenance),
        "population": asdict(population),
        "targets": dict(targets),
    }
    with replacing(path) as file:
        tomli_w.dump(document, file)


def provenance_of(options: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the provenance of a fit, as TOML has it.

    Args:
        options: their names and values; folders are listed file by file, without what they are in.
    """
    files = {text: Path(text) for _, text in options if Path(text).exists()}
    given = [
        f"--{part} {shlex.quote(files[text].name if text in files else text)}"
        for part, text in options
    ]
    return {
        "command": " ".join(["python benchmarks/populations/fit.py", *given]),
        "date": datetime.now(UTC).date().isoformat(),
        "version": __version__,
        "files": [
            {
                "part": part,
                "name": file.relative_to(path.parent).as_posix(),
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
            for part, text in options
            if (path := files.get(text)) is not None
            for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
            if file.is_file()
        ],
    }


def _computing(text: str) -> TraceSet:
    """Return a recording of speeds, or the one speed that an option states."""
    stated = stated_speed(text)
    if stated is None:
        return TraceSet.read(text)
    same = TraceSet.constant(1, compute=stated[0], downlink_bit_per_s=0, uplink_bit_per_s=0)
    return replace(same, compute_unit=stated[1])


def _linked(text: str) -> TraceSet:
    """Return a recording of links, or links of the one capacity that an option states."""
    if Path(text).exists() or "," not in text:
        return TraceSet.read(text)
    down, up = link_rates(text)
    return TraceSet.constant(2, compute=0, downlink_bit_per_s=down, uplink_bit_per_s=up)


def main() -> None:
    """Write the file that the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--availability", required=True, help="when devices are online")
    parser.add_argument("--background", required=True, help="what is left of processors")
    parser.add_argument("--compute", required=True, help="how fast devices are; or 'N UNIT'")
    parser.add_argument("--network", required=True, action="append", help="links; or DOWN,UP")
    parser.add_argument("--cycle", choices=["day", "week"], default="day", help="hours kept")
    parser.add_argument("--out", required=True, type=Path, help="TOML file to write")
    given = parser.parse_args()
    options = [(name, getattr(given, name)) for name in ("availability", "background", "compute")]
    options += [("network", text) for text in given.network]
    options += [] if given.cycle == "day" else [("cycle", given.cycle)]
    fitted, targets = fit(
        availability=TraceSet.read(given.availability),
        network=[_linked(text) for text in given.network],
        background=TraceSet.read(given.background),
        compute=_computing(given.compute),
        cycle=given.cycle,
    )
    save(fitted, given.out, provenance=provenance_of(options), targets=targets)


if __name__ == "__main__":
    try:
        main()
    except FedstaleError as problem:
        sys.exit(f"error: {problem}")
