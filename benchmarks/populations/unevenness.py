"""Print how uneven the devices of recordings are, as docs/contrib/formats.md has it.

Run it with: python benchmarks/populations/unevenness.py PATH...
"""

import sys
from pathlib import Path

from fedstale.contrib.formats import unevenness
from fedstale.traces import TraceSet

COLUMNS = {
    "Gini of time online": "Gini, online",
    "top 30 % of time online": "top 30 %, online",
    "Gini of speeds": "Gini, speeds",
    "StatMC-R": "StatMC-R",
    "StatMC-T": "StatMC-T",
    "DevMC-R": "DevMC-R",
    "DevMC-T": "DevMC-T",
    "top 30 % of jobs in time": "top 30 %, jobs",
}


def row(path: Path) -> str:
    """Return the row of a recording; a dash where nothing is known or nothing came in time."""
    traces = TraceSet.read(path)
    found = unevenness(traces)
    known = {name: found.get(name, float("nan")) for name in COLUMNS}
    cells = ["-" if value != value else f"{value:.2f}" for value in known.values()]  # noqa: PLR0124
    return f"| {path.name} | {traces.n_devices:,} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print(f"| recording | devices | {' | '.join(COLUMNS.values())} |")
    print("|---|---:|" + "---:|" * len(COLUMNS))
    for each in sys.argv[1:]:
        print(row(Path(each)), flush=True)
