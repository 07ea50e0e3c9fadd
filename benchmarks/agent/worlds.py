"""In how many worlds of learning constants is the agent ahead of rules of one line?

The same 200 worlds are played on windows of each recorded fleet that no model has seen, with the
spread that comes with fedstale. Whether the band of the worlds is an honest one was asked of real
training once, and how wide the spread is: by `benchmarks/agent_worlds.py` of commit 7cededf, whose
rows stay in the result.

Run it with: python benchmarks/agent/worlds.py RECORDINGS
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from fedstale.agents import load
from fedstale.agents.policy.scorer import embedded

sys.path.append(str(Path(__file__).parents[1]))
from agent.many_worlds import evaluate_worlds
from lab.results import read_result, write_result
from lab.scenarios import tested

WORLDS = 200
PARTS = ("seconds", "rules")
"""What is measured here."""
Row = dict[str, Any]


def measured(recordings: Path, worlds: int) -> list[Row]:
    """Return how the agent does in worlds on each recorded fleet, and what that takes."""
    rows: list[Row] = []
    for kind in ("phones", "desktops", "cars"):
        scenario = tested(recordings, kind)
        began = time.process_time()
        with threadpool_limits(1):
            found = evaluate_worlds(scenario, [load(embedded())], worlds=worlds)
        took = round(time.process_time() - began, 1)
        row = {"part": "seconds", "fleet": kind, "worlds": worlds, "windows": 50}
        rows.append(row | {"processor_s": took, "prefer": found.prefer})
        for rule in found.table.to_dict("records"):
            values = {k: round(v, 4) if isinstance(v, float) else v for k, v in rule.items()}
            rows.append({"part": "rules", "fleet": kind, **values})
        print(*rows[-7:], sep="\n", flush=True)
    return rows


def main() -> None:
    """Play, and write the result with what was measured once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--quick", action="store_true", help="twenty worlds")
    options = parser.parse_args()
    rows = measured(options.recordings, 20 if options.quick else WORLDS)
    others = [r for r in read_result("agent_worlds")["rows"] if r["part"] not in PARTS]
    rows += [] if options.quick else others
    command = "python benchmarks/agent/worlds.py RECORDINGS"
    print(write_result("agent_worlds", rows, command=command, quick=options.quick))


if __name__ == "__main__":
    main()
