"""Generated devices, for runs without a recording.

Every number of the embedded population is fitted to published recordings (synthetic.toml says to
which). Availability is each device's own. Links and loads are shared: a device takes one of a pool
of realisations, a place in it to start from and a scale, so a million devices fit in memory.
Devices are drawn in blocks with streams of their own (`SeedSequence(seed, spawn_key=(purpose,
block))`), so device i is the same whatever n is; only the zeros in its name follow n.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array
from fedstale.traces.availability import Availability
from fedstale.traces.series import Series
from fedstale.traces.synthetic import links as regimes
from fedstale.traces.synthetic import load as background
from fedstale.traces.synthetic import presence as diurnal
from fedstale.traces.synthetic.population import Links, Population, load
from fedstale.traces.trace_set import TraceSet, numbered

EPOCH = "2024-01-01T00:00:00"
"""Instant 0 of generated traces: a midnight. It was a Monday, but the generator knows no weeks."""
BLOCK = 4096
_LINKS = 128
_LINK_S = 7200
_LOADS = 512
_LOAD_STEPS = 288
_AVAILABILITY, _PLACES, _DOWNLINK, _UPLINK, _LOAD = range(5)


def generate(
    n: int,
    days: int,
    seed: int,
    *,
    time_zones: Literal["same", "spread"] = "same",
    population: Population | None = None,
) -> TraceSet:
    """Return n generated devices with all channels; see `TraceSet.synthetic`."""
    for name, value, least in (("n", n, 1), ("days", days, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or int(value) != value or value < least:
            raise TraceError(f"{name} = {value!r}: expected an integer >= {least}")
    if time_zones not in ("same", "spread"):
        raise TraceError(f"time_zones = {time_zones!r}: expected 'same' or 'spread'")
    population = population or load()
    u, normal = _places(n, seed)
    availability = _availability(population, n, days, seed)
    if time_zones == "spread":
        availability = availability.shifted(np.floor(u[0] * 24) * 3600)
    downlink, uplink = _links(population.links, u[1], u[2], normal, seed)
    speed = np.array(population.speed)[(u[3] * len(population.speed)).astype(np.int64)]
    return TraceSet(
        device_ids=numbered("device", n),
        availability=availability,
        compute=_compute(population.background, u[4], u[5], seed).scaled(speed),
        downlink=downlink,
        uplink=uplink,
        compute_unit=population.compute_unit,
        epoch=EPOCH if time_zones == "same" else None,
    )


def _stream(seed: int, purpose: int, block: int = 0) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, block)))


def _places(n: int, seed: int) -> tuple[Array, Array]:
    """Return six uniform and two normal numbers of each device."""
    uniform, normal = [], []
    for block in range(-(-n // BLOCK)):
        rng = _stream(seed, _PLACES, block)
        uniform.append(rng.random((6, BLOCK)))
        normal.append(rng.standard_normal((2, BLOCK)))
    return np.concatenate(uniform, axis=1)[:, :n], np.concatenate(normal, axis=1)[:, :n]


def _availability(population: Population, n: int, days: int, seed: int) -> Availability:
    parts = []
    for block in range(-(-n // BLOCK)):
        rng = _stream(seed, _AVAILABILITY, block)
        starts, ends, counts = diurnal.draw(population.availability, BLOCK, days, rng)
        # The whole block is drawn, whatever is kept of it: that is what makes device i the same.
        counts = counts[: n - block * BLOCK]
        kept = int(counts.sum())
        parts.append((starts[:kept], ends[:kept], counts))
    starts, ends, counts = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Availability.packed(starts, ends, counts, days * diurnal.DAY_S)


def _links(
    model: Links, which: Array, phase: Array, normal: Array, seed: int
) -> tuple[Series, Series]:
    """Return downlinks and uplinks; both of a device are from one place of one realisation."""
    middle = np.exp(model.median_log + model.median_log_sd * normal[0])
    share = np.exp(model.uplink_share_log + model.uplink_share_log_sd * normal[1])
    place = _place(which, phase, _LINKS, _LINK_S)
    rows = {
        purpose: regimes.draw(one, _LINKS, _LINK_S, _stream(seed, purpose))
        for purpose, one in ((_DOWNLINK, model.downlink), (_UPLINK, model.uplink))
    }
    down, up = (replace(Series.regular(list(r), step_s=1.0), **place) for r in rows.values())
    return replace(down, scales=middle), replace(up, scales=middle * share)


def _compute(model: background.Background, which: Array, phase: Array, seed: int) -> Series:
    """Return what the background leaves of each device's processor, as a share."""
    load_ = background.draw(model, _LOADS, _LOAD_STEPS, _stream(seed, _LOAD))
    left = Series.regular(list(1.0 - load_), step_s=model.step_s)
    place = _place(which, phase, _LOADS, _LOAD_STEPS * model.step_s)
    return replace(left, scales=np.ones(which.size), **place)


def _place(which: Array, phase: Array, rows: int, length_s: float) -> dict[str, Any]:
    return {"rows": (which * rows).astype(np.int32), "shifts": phase * length_s}
