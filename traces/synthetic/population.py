"""Generated devices, for runs without a recording: a population, its TOML file, and its devices.

Every number of the embedded populations is fitted to published recordings or stated beside them
(their files say to which, and record their marginals, for comparison). Availability is each
device's own. Links and loads are shared: a device takes one of a pool of realisations, a place in
it to start from and a scale, so a million devices fit in memory. Devices are drawn in blocks with
streams of their own
(`SeedSequence(seed, spawn_key=(purpose, block))`), so device i is the same whatever n is; only the
zeros in its name follow n.
"""

import tomllib
from dataclasses import dataclass, is_dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from fedstale.errors import TraceError
from fedstale.traces import DAY_S, Array, Availability, Series, TraceSet, numbered, stream
from fedstale.traces.synthetic import diurnal
from fedstale.traces.synthetic.diurnal import PARTS, Diurnal
from fedstale.traces.synthetic.rates import (
    LINK_LEVELS,
    LOAD_LEVELS,
    Background,
    Regimes,
    draw_links,
    draw_loads,
)

EPOCH = "2024-01-01T00:00:00"
"""Instant 0 of generated traces: a midnight, of a Monday for populations that know weekdays."""
PRESETS = {"phones": "synthetic.toml", "desktops": "desktops.toml", "sites": "sites.toml"}
"""File of each embedded population; the first is drawn from where none is named."""
BLOCK = 4096
_LINKS = 128
_LINK_S = 7200
_LOADS = 512
_LOAD_STEPS = 288
_LOAD_DAYS = 7
"""Length of a load that keeps hours: another place in it is another day."""
_AVAILABILITY, _PLACES, _DOWNLINK, _UPLINK, _LOAD = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links of a population."""

    median_log: float
    """Mean, over links, of the logarithm of a downlink's median rate in bit/s."""
    median_log_sd: float
    """Its standard deviation."""
    uplink_share_log: float
    """Mean logarithm of the median uplink, divided by the median downlink of the same link."""
    uplink_share_log_sd: float
    """Its standard deviation."""
    downlink: Regimes
    """How downlinks move around their median."""
    uplink: Regimes
    """How uplinks do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """All numbers of a generator of devices."""

    availability: Diurnal
    """When devices come and go."""
    links: Links
    """How fast they send and receive."""
    background: Background
    """What else their processors do."""
    speed: tuple[float, ...]
    """Work units/s of idle devices, one number for each of equally large classes."""
    compute_unit: str
    """What one work unit is, in words."""


def generate(
    n: int,
    days: int,
    seed: int,
    *,
    time_zones: Literal["same", "spread"] = "same",
    population: Population | str | Path | None = None,
) -> TraceSet:
    """Return n generated devices with all channels; see `TraceSet.synthetic`."""
    for name, value, least in (("n", n, 1), ("days", days, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or int(value) != value or value < least:
            raise TraceError(f"{name} = {value!r}: expected an integer >= {least}")
    if time_zones not in ("same", "spread"):
        raise TraceError(f"time_zones = {time_zones!r}: expected 'same' or 'spread'")
    if not isinstance(population, Population):
        population = load(population)
    if population.availability.cycle_s > DAY_S and days % 7:
        raise TraceError(
            f"days = {days}: expected whole weeks, since these devices keep weekdays and their "
            "record repeats"
        )
    u, normal = _places(n, seed)
    availability = _availability(population, n, days, seed)
    zones_s = np.floor(u[0] * 24) * 3600 if time_zones == "spread" else np.zeros(n)
    if time_zones == "spread":
        availability = availability.shifted(zones_s)
    downlink, uplink = _links(population.links, u[1], u[2], normal, seed)
    speed = np.array(population.speed)[(u[3] * len(population.speed)).astype(np.int64)]
    return TraceSet(
        device_ids=numbered("device", n),
        availability=availability,
        compute=_compute(population.background, u[4], u[5], zones_s, seed).scaled(speed),
        downlink=downlink,
        uplink=uplink,
        compute_unit=population.compute_unit,
        epoch=EPOCH if time_zones == "same" else None,
    )


def _places(n: int, seed: int) -> tuple[Array, Array]:
    """Return six uniform and two normal numbers of each device."""
    uniform, normal = [], []
    for block in range(-(-n // BLOCK)):
        rng = stream(seed, _PLACES, block)
        uniform.append(rng.random((6, BLOCK)))
        normal.append(rng.standard_normal((2, BLOCK)))
    return np.concatenate(uniform, axis=1)[:, :n], np.concatenate(normal, axis=1)[:, :n]


def _availability(population: Population, n: int, days: int, seed: int) -> Availability:
    parts = []
    for block in range(-(-n // BLOCK)):
        rng = stream(seed, _AVAILABILITY, block)
        starts, ends, counts = diurnal.draw(population.availability, BLOCK, days, rng)
        # The whole block is drawn, whatever is kept of it: that is what makes device i the same.
        counts = counts[: n - block * BLOCK]
        kept = int(counts.sum())
        parts.append((starts[:kept], ends[:kept], counts))
    starts, ends, counts = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Availability.packed(starts, ends, counts, days * DAY_S)


def _links(
    model: Links, which: Array, phase: Array, normal: Array, seed: int
) -> tuple[Series, Series]:
    """Return downlinks and uplinks; both of a device are from one place of one realisation."""
    middle = np.exp(model.median_log + model.median_log_sd * normal[0])
    share = np.exp(model.uplink_share_log + model.uplink_share_log_sd * normal[1])
    pools = [
        Series.regular(draw_links(one, _LINKS, _LINK_S, stream(seed, purpose, 0)), step_s=1.0)
        for purpose, one in ((_DOWNLINK, model.downlink), (_UPLINK, model.uplink))
    ]
    down, up = (_placed(pool, which, phase) for pool in pools)
    return down.scaled(middle), up.scaled(middle * share)


def _compute(model: Background, which: Array, phase: Array, zones_s: Array, seed: int) -> Series:
    """Draw the share of each device's processor that the background leaves."""
    steps = round(_LOAD_DAYS * DAY_S / model.step_s) if model.hourly else _LOAD_STEPS
    loads = draw_loads(model, _LOADS, steps, stream(seed, _LOAD, 0))
    if model.hourly:
        phase = (np.floor(phase * _LOAD_DAYS) + zones_s / DAY_S) / _LOAD_DAYS
    return _placed(Series.regular(1.0 - loads, step_s=model.step_s), which, phase)


def _placed(pool: Series, which: Array, phase: Array) -> Series:
    taken = pool.take((which * pool.n_devices).astype(np.int64))
    return taken.shifted(phase * taken.record_s())


def load(path: str | Path | None = None) -> Population:
    """Return an embedded population, or the one in a TOML file.

    Args:
        path: one of `PRESETS`, or else a file; None is the first of `PRESETS`.

    Raises:
        TraceError: the file is missing, not TOML, or a number is missing or out of range.
    """
    name = next(iter(PRESETS)) if path is None else str(path)
    file: Traversable = Path(name)
    if name in PRESETS:
        file = resources.files("fedstale.traces.synthetic") / PRESETS[name]
    where = f"the embedded population of {name}" if name in PRESETS else name
    try:
        table = tomllib.loads(file.read_text("utf-8"))
    except OSError as problem:
        raise TraceError(f"{where}: cannot be read ({problem.strerror})") from None
    except (ValueError, RecursionError) as problem:
        raise TraceError(f"{where}: not a TOML file ({problem})") from None
    if "population" not in table:
        raise TraceError(
            f"{where}: expected a table [population], as benchmarks/populations/fit.py writes"
        )
    try:
        population: Population = _of(Population, table["population"])
        _check(population)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise TraceError(
            f"{where}: not the numbers of a population ({problem}): "
            "expected a file that benchmarks/populations/fit.py wrote"
        ) from None
    return population


def _of(kind: Any, value: Any) -> Any:
    """Return a value of TOML as what an annotation says: a dataclass, a tuple or a plain one."""
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = get_type_hints(kind)
        unknown = set(value) - set(kinds)
        if unknown:
            raise ValueError(f"unknown {min(unknown)!r}")
        return kind(**{name: _of(kinds[name], each) for name, each in value.items()})
    if get_origin(kind) is tuple:
        return tuple(_of(get_args(kind)[0], each) for each in value)
    return value


def _check(population: Population) -> None:
    """Raise a ValueError that names the first number that cannot be."""
    groups, levels = population.availability.groups, population.availability.levels
    _expect(bool(groups), "availability has no groups")
    _expect(
        all(a < b for a, b in pairwise(levels)) and (levels[0], levels[-1]) == (0, 1),
        "levels do not rise from 0 to 1",
    )
    parts = len(groups[0].session_s)
    _expect(parts in {PARTS, 7 * PARTS}, f"session_s has not {PARTS} parts of a day, or of seven")
    _expect(sum(g.weight for g in groups) <= 1 + 1e-9, "the weights of groups exceed 1")
    for group in groups:
        _expect(0 <= group.another < 1, "another is not in [0, 1)")
        _expect(len(group.hourly) == 24 and min(group.hourly) > 0, "hourly is not 24 numbers > 0")
        _expect(len(group.session_s) == parts, "session_s has parts that differ")
        _expect(len(group.gap_s) in {1, parts}, "gap_s has neither one part nor those of session_s")
        for quantiles in (*group.gap_s, group.pause_s, *group.session_s):
            _expect(_rising(quantiles, len(levels)) and quantiles[0] > 0, "quantiles do not rise")
    for link in (population.links.downlink, population.links.uplink):
        k = len(link.share)
        _expect(k == 2 * LINK_LEVELS, f"share is not {2 * LINK_LEVELS} states")
        _expect(
            len(link.move) == k and all(abs(sum(row) - 1) < 1e-3 for row in link.move),
            "move is not a matrix whose rows sum to 1",
        )
        _expect(all(0 <= phi < 1 for phi in link.phi), "phi is not in [0, 1)")
    load = population.background.load
    _expect(_rising(load, LOAD_LEVELS.size) and load[0] >= 0 and load[-1] <= 1, "load")
    _expect(len(population.background.hourly) in {0, 24}, "the load's hourly is not 24 numbers")
    _expect(bool(population.speed) and min(population.speed) > 0, "speed is not > 0")


def _rising(numbers: tuple[float, ...], count: int) -> bool:
    return len(numbers) == count and all(a <= b for a, b in pairwise(numbers))


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
