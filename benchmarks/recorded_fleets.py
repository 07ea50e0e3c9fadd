"""Fleets of complete devices made of published recordings, with nothing in common between them.

Phones, hosts and links are divided first and joined afterwards. What repeats would be known after
one turn, so nothing does: a load is two different days of one host, a link is whole sessions in a
random order.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.traces import Series, TraceSet

DAY_S = 86_400.0
LENGTH_S = 2 * DAY_S
LINKS = 48
SHARES = {"learn": 0.5, "stop": 0.75, "test": 1.0}
UPLINK_SHARE = 0.2
WORK_UNIT = "seconds of the median phone of the ranking, all of its processor"


def fleets(recordings: Path, seed: int) -> dict[str, TraceSet]:
    """Return devices to learn from, to stop early on and to test on, out of disjoint recordings.

    Args:
        recordings: folder of the published files.
        seed: of the draw.
    """
    rng = np.random.default_rng(seed)
    phones = TraceSet.read(recordings / "flash-ready-strict.json")
    models = TraceSet.read(recordings / "ai-benchmark-devices.json")
    loads = TraceSet.read(recordings / "planetlab-cpu.tar.gz")
    links = TraceSet.read(recordings / "uccmisl-5g.zip")
    names = loads.device_ids.str.split("/", expand=True)
    host, day = names.get_level_values(1), names.get_level_values(0)
    hosts, days = rng.permutation(np.unique(host)), np.unique(day)
    users = rng.permutation(phones.n_devices)
    made, before = {}, 0.0
    for name, upto in SHARES.items():
        # Early stopping may see the same days as learning, testing may not.
        usable = np.isin(host, _part(hosts, before, upto))
        usable &= np.isin(day, days[4:] if name == "test" else days[:4])
        made[name] = _fleet(
            phones.take(np.sort(_part(users, before, upto))),
            models,
            loads.take(np.flatnonzero(usable)),
            links.take(sessions_of(name, links, seed)),
            rng,
        )
        before = upto
    return made


def sessions_of(name: str, links: TraceSet, seed: int) -> np.ndarray:
    """Return the positions of the links of a fleet."""
    order = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,))).permutation(
        links.n_devices
    )
    start = dict(zip(SHARES, (0.0, *SHARES.values()), strict=False))[name]
    return _part(order, start, SHARES[name])


def _part(x: np.ndarray, start: float, end: float) -> np.ndarray:
    return x[round(start * len(x)) : round(end * len(x))]


def _fleet(
    phones: TraceSet, models: TraceSet, loads: TraceSet, links: TraceSet, rng: np.random.Generator
) -> TraceSet:
    n = phones.n_devices
    speed = models.compute.value_at(rng.integers(models.n_devices, size=n), 0.0)
    load = _two_days(loads, rng)
    compute = load.take(rng.integers(load.n_devices, size=n)).scaled(speed)
    joined = _stitched(links, rng)
    which = rng.integers(joined.n_devices, size=n)
    downlink = joined.take(which).shifted(rng.random(n) * LENGTH_S)
    return TraceSet(
        device_ids=phones.device_ids,
        availability=phones.availability,
        compute=compute,
        downlink=downlink,
        uplink=downlink.scaled(UPLINK_SHARE),
        compute_unit=WORK_UNIT,
        epoch=phones.epoch,
    )


def _two_days(loads: TraceSet, rng: np.random.Generator) -> Series:
    """Return every host that was recorded on two days or more, two of its days in a row.

    One day repeated would be known in full after 24 hours.
    """
    hosts = pd.Series(range(loads.n_devices)).groupby(loads.device_ids.str.split("/").str[1])
    rows = []
    for _, which in hosts:
        if len(which) >= 2:
            pair = rng.permutation(which.to_numpy())[:2]
            rows.append(np.concatenate([loads.compute.segments(int(i))[1] for i in pair]))
    return Series.regular(rows, step_s=300.0)


def _stitched(links: TraceSet, rng: np.random.Generator) -> Series:
    """Return links of two days, sessions in a random order: none repeats in a fixed time."""
    seconds = [links.downlink.segments(i)[1] for i in range(links.n_devices)]
    rows = []
    for _ in range(LINKS):
        parts, length = [], 0
        while length < LENGTH_S:
            part = seconds[rng.integers(len(seconds))]
            parts.append(part)
            length += part.size
        rows.append(np.concatenate(parts)[: int(LENGTH_S)])
    return Series.regular(rows, step_s=1.0)
