"""Write the population of sites: machines of organisations, mostly on, behind a wire.

Recorded are the load of the processors (PlanetLab) and in which hours of the day such machines are
in use (a library's desktops). No recording of sites was at hand for the rest, which is stated here
and on the page of data: outages, links and speeds.

Run it with: python benchmarks/populations/sites.py RECORDINGS
"""

import datetime
import hashlib
import sys
from dataclasses import replace
from math import exp, log, log1p, sqrt
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pandas as pd

from fedstale import __version__
from fedstale.traces import TraceSet
from fedstale.traces.synthetic import diurnal, population

sys.path.insert(0, str(Path(__file__).parents[1]))
from populations.fit import STEADY, fit_loads, save

OUT = Path(__file__).parents[2] / "traces" / "synthetic" / "sites.toml"
LEVELS = (0.0, 0.01, 0.02, 0.05, *np.arange(0.1, 0.95, 0.1).round(1), 0.95, 0.98, 0.99, 0.999, 1.0)
BETWEEN_S = 14 * 86_400.0
"""Mean time from the end of an outage to the next, maintenance included; it has no memory."""
REPAIR_S, REPAIR_MEAN_S = 3600.0, 6 * 3600.0
"""Median and mean of an outage: log-normal, as repairs are (Schroeder and Gibson, DSN 2006)."""
LONGEST_S = 3 * 86_400.0
AT_WORK = range(8, 18)
"""Hours in which a machine that is down comes back three times as fast as in the others."""
LINK_BIT_PER_S, LINK_SD, UPLINK_SHARE = 100e6, 0.7, 0.5
SPEEDS = (3.0, 6.0, 9.0, 12.0)
"""Work units/s of four classes of equal size, the slowest a desktop's."""
UNIT = "seconds of the median phone of the ranking, all of its processor"
_LOADS, _STEP_S = "planetlab-cpu.tar.gz", 300.0
_USE = "library-desktops"


def sites(recordings: Path) -> population.Population:
    """Return the population.

    Args:
        recordings: folder of the published files.
    """
    servers = TraceSet.read(recordings / _LOADS).channel("compute")
    some = np.linspace(0, servers.n_devices - 1, 4000).astype(int)
    loads = fit_loads([1.0 - servers.segments(int(i))[1] for i in some], _STEP_S)
    use = hourly_use(recordings / _USE)
    shift = tuple(round(NormalDist().inv_cdf(share), 4) for share in use)
    normal, spread = NormalDist(), sqrt(2 * log(REPAIR_MEAN_S / REPAIR_S))
    on = tuple(round(max(-BETWEEN_S * log1p(-min(p, 0.9999)), 60.0), 1) for p in LEVELS)
    off = tuple(
        round(min(REPAIR_S * exp(spread * normal.inv_cdf(min(max(p, 1e-3), 1 - 1e-3))), LONGEST_S))
        for p in LEVELS
    )
    hours = np.array([3.0 if hour in AT_WORK else 1.0 for hour in range(24)])
    group = diurnal.Group(
        weight=1.0,
        another=0.0,
        hourly=tuple((hours / hours.mean()).round(5).tolist()),
        gap_s=(off,),
        pause_s=off,
        session_s=(on,) * diurnal.PARTS,
    )
    return population.Population(
        availability=diurnal.Diurnal(levels=tuple(map(float, LEVELS)), groups=(group,)),
        links=population.Links(
            median_log=round(log(LINK_BIT_PER_S), 5),
            median_log_sd=LINK_SD,
            uplink_share_log=round(log(UPLINK_SHARE), 5),
            uplink_share_log_sd=0.0,
            downlink=STEADY,
            uplink=STEADY,
        ),
        background=replace(loads, hourly=shift),
        speed=SPEEDS,
        compute_unit=UNIT,
    )


def hourly_use(folder: Path) -> list[float]:
    """Return, for each hour of the day, the share of the machines that are on that someone uses.

    Args:
        folder: the library's log: machine, state and local time, without a head.
    """
    files = sorted(folder.glob("FullLogonData-*"))
    names = ["machine", "state", "at"]
    log = pd.concat(
        pd.read_csv(file, names=names, parse_dates=["at"], encoding="utf-8-sig") for file in files
    )
    counts = np.zeros((2, 24))
    for _, own in log.sort_values("at").groupby("machine"):
        grid = pd.date_range(own["at"].iloc[0].ceil("h"), own["at"].iloc[-1], freq="h")
        grid += pd.Timedelta(minutes=30)
        states = own["state"].to_numpy()[np.searchsorted(own["at"], grid, side="right") - 1]
        counts[0] += np.bincount(grid.hour[states == "in-use"], minlength=24)
        counts[1] += np.bincount(grid.hour[states != "offline"], minlength=24)
    return (counts[0] / counts[1]).tolist()


def main(recordings: Path) -> None:
    """Write the file."""
    found = sites(recordings)
    files = [recordings / _LOADS, *sorted((recordings / _USE).glob("FullLogonData-*"))]
    provenance = {
        "command": "python benchmarks/populations/sites.py RECORDINGS",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "version": __version__,
        "files": [
            {
                "part": "background",
                "name": file.relative_to(recordings).as_posix(),
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
            for file in files
        ],
    }
    save(found, OUT, provenance=provenance, targets={})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
