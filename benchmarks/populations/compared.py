"""Print generated devices beside the recorded ones, as the page on synthetic devices shows them.

A population is drawn once (seed 0), as many devices and days as below, from its embedded numbers.
How devices come and go is compared with recordings, as far as their logs reach; links, loads and
speeds of phones with what their file states of the recordings.

Run it with: python benchmarks/populations/compared.py RECORDINGS|--channels
"""

import sys
import tomllib
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces import TraceSet
from fedstale.traces.arrays import DAY_S
from fedstale.traces.synthetic.marginals import LEVELS, availability_marginal

sys.path.insert(0, str(Path(__file__).parents[1]))
from populations.marginals import (
    link_marginal,
    load_marginal,
    persistence,
    speed_marginal,
)

LAGS_S = (1800.0, 7200.0, DAY_S, 3 * DAY_S, 7 * DAY_S)
WEEK_S = 7 * DAY_S
RECORDED = {
    "phones": "flash-days.json",
    "desktops": "library-desktops",
    "cars": "ev-norway-charging-reports.csv.xz",
}
GENERATED = {"phones": (3000, 5), "desktops": (1000, 56)}
"""Devices and days drawn of each population: phones for as long as most were logged."""
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_PART_H = 3


def tables(recordings: Path) -> str:
    """Return the three tables in Markdown.

    Args:
        recordings: folder of the published files.

    Raises:
        TraceError: one of them cannot be read.
    """
    sets = {}
    for name, file in RECORDED.items():
        sets[f"{name}, recorded"] = TraceSet.read(recordings / file)
        if name in GENERATED:
            n, days = GENERATED[name]
            sets[f"{name}, generated"] = TraceSet.synthetic(n, days=days, seed=0, population=name)
    found = {n: _about(traces) for n, traces in sets.items() if n.split(",")[0] in GENERATED}
    quantiles = " | ".join(f"{level:.0%}" for level in LEVELS)
    return "\n".join(
        [
            "| | 30 min | 2 h | 24 h | 72 h | 168 h |\n|---|---:|---:|---:|---:|---:|",
            *(f"| {name} | {' | '.join(_lagged(traces))} |" for name, traces in sets.items()),
            f"\n| | {quantiles} |\n|---|---:|---:|---:|---:|---:|",
            *(
                f"| {name}, {what} | {' | '.join(_text(key, x) for x in about[key])} |"
                for key, what in (
                    ("share", "share of time online of a device"),
                    ("session_s", "session"),
                    ("gap_s", "gap"),
                )
                for name, about in found.items()
            ),
            "\n| | " + " | ".join(f"{h:02d} h" for h in range(0, 24, _PART_H)) + " |",
            "|---|" + "---:|" * (24 // _PART_H),
            *_week(found["desktops, recorded"]["hourly"], found["desktops, generated"]["hourly"]),
        ]
    )


def channels() -> str:
    """Return two tables in Markdown of the links, loads and speeds of phones."""
    file = resources.files("fedstale.traces.synthetic") / "synthetic.toml"
    recorded = tomllib.loads(file.read_text(encoding="utf-8"))["targets"]
    n, days = GENERATED["phones"]
    traces = TraceSet.synthetic(n, days=days, seed=0)
    generated = {
        "downlink": link_marginal(traces.channel("downlink")),
        "uplink": link_marginal(traces.channel("uplink")),
        "background": load_marginal(traces.channel("compute")),
        "speed": speed_marginal(traces.channel("compute").scales),
    }
    kinds = {"recorded": recorded, "generated": generated}
    quantiles = " | ".join(f"{level:.0%}" for level in LEVELS)
    lines = [f"| | {quantiles} |", "|---|---:|---:|---:|---:|---:|"]
    for channel, key, unit, per in (
        ("downlink", "bit_per_s", "Mbit/s", 1e6),
        ("uplink", "bit_per_s", "Mbit/s", 1e6),
        ("background", "load", "share of the processor", 1.0),
        ("speed", "work_per_s", "work units a second", 1.0),
    ):
        for kind, found in kinds.items():
            cells = " | ".join(f"{x / per:.2f}" for x in found[channel][key])
            lines.append(f"| {channel}, {kind}, {unit} | {cells} |")
    lines += ["", "| | out | after 1 s | after 10 s | after 60 s |", "|---|---:|---:|---:|---:|"]
    for channel in ("downlink", "uplink"):
        for kind, found in kinds.items():
            cells = " | ".join(f"{x:.2f}" for x in found[channel]["autocorrelation"])
            lines.append(f"| {channel}, {kind} | {found[channel]['out']:.2f} | {cells} |")
    return "\n".join(lines)


def _about(traces: TraceSet) -> dict[str, list[float]]:
    epoch = pd.Timestamp(traces.epoch or "nat")
    epoch_s = epoch.weekday() * DAY_S + (traces.midnight_s or 0.0)
    return availability_marginal(traces.channel("availability"), epoch_s=epoch_s, cycle_s=WEEK_S)


def _lagged(traces: TraceSet) -> list[str]:
    online = traces.channel("availability")
    end = float(online.lengths.max())
    found = persistence(online, np.arange(traces.n_devices), end, LAGS_S)
    # Few phones were logged for a week, and a record that repeats is another log.
    logged = np.minimum(online.logs_s, online.lengths)[online.rows]
    texts = [
        f"{x:.2f}" if np.mean(logged > lag) > 0.5 else "-"
        for x, lag in zip(found, LAGS_S, strict=False)
    ]
    return texts + ["-"] * (len(LAGS_S) - len(texts))


def _text(key: str, value: float) -> str:
    if key == "share":
        return f"{value:.2f}"
    for size, unit in ((DAY_S, "d"), (3600.0, "h"), (60.0, "min")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} s"


def _week(recorded: list[float], generated: list[float]) -> list[str]:
    both = [np.reshape(x, (7, -1, _PART_H)).mean(axis=2) for x in (recorded, generated)]
    cells = [
        [f"{a:.2f} / {b:.2f}" for a, b in zip(*rows, strict=True)]
        for rows in zip(*both, strict=True)
    ]
    return [f"| {day} | {' | '.join(row)} |" for day, row in zip(_DAYS, cells, strict=True)]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/populations/compared.py RECORDINGS|--channels")
    try:
        print(channels() if sys.argv[1] == "--channels" else tables(Path(sys.argv[1])))
    except TraceError as error:
        sys.exit(f"error: {error}")
