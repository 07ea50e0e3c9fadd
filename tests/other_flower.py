"""Runs what stands on Flower with the Flower of this environment, and notes how that went.

    make test-flower                     # with each that is tested, in environments of their own
    make test-flower FLOWER=1.41.0       # with one
    python -P tests/other_flower.py      # in the one of this Python

Each group of tests is a column of the table in docs/flower-apps.md, whose row of this release is
written anew. What deployments stand on is left out where the Flower is too old for them.
"""

import re
import subprocess
import sys
from pathlib import Path

import flwr

from fedstale.flower.features import FEATURES, REAL_DEVICES, release

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "flower-apps.md"
HEADING = "| Flower | "
PASSED = "passed"

DEPLOYED = "tests/system/deployment/test_local_deployment.py"
STRATEGIES, SIMULATION = "tests/strategies", "tests/fedstale/simulation"
GROUPS = {
    "names and contracts": ("tests/fedstale/flower", "tests/project/test_flower_inside.py"),
    "golden runs": ("tests/project/test_golden.py",),
    "strategies": (
        f"{STRATEGIES}/test_strategy.py",
        *(f"{STRATEGIES}/server/test_{name}.py" for name in ("packing", "wrapped_strategies")),
        f"{STRATEGIES}/stages/test_older_clients.py",
    ),
    "simulation": (
        "tests/fedstale/compat",
        *(
            f"{SIMULATION}/test_{name}.py"
            for name in (
                *("against_flower", "executors", "message_costs", "resume", "run"),
                *("server_fn", "trace_grid"),
            )
        ),
    ),
    "apps": ("tests/fedstale/flower_apps",),
    "parts of a deployment": ("tests/fedstale/deployment", f"{STRATEGIES}/test_pulling.py"),
    "a node killed, one joining late": (DEPLOYED, "-k", "survives_a_node_killed"),
}
"""What pytest is told for each group, whose outcome is a column."""
OF_DEVICES = {"parts of a deployment", "a node killed, one joining late"}


def outcome(arguments):
    """Run some tests; return their cell: passed, or how many did what."""
    jobs = ("-n", "0" if DEPLOYED in arguments else "auto")
    command = [sys.executable, "-m", "pytest", "-q", *jobs, *arguments]
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if run.returncode == 0:
        return PASSED
    counts = re.findall(r"(\d+) (failed|passed|skipped|errors?)", lines[-1] if lines else "")
    return ", ".join(f"{n} {how}" for n, how in counts) or "none ran"


def shown(off):
    """Name features that are off in one cell, those of real devices by one word."""
    real = {feature.name for feature in FEATURES if feature.since == REAL_DEVICES}
    if real <= off:
        off = {"real devices", *(off - real)}
    return ", ".join(sorted(off)) or "nothing"


def written(page, row):
    """Return a page whose table has a row, in the place of the one of the same release if any."""
    lines = page.splitlines(keepends=True)
    heading = next(i for i, line in enumerate(lines) if line.startswith(HEADING))
    after = (i for i in range(heading, len(lines)) if not lines[i].startswith("|"))
    end = next(after, len(lines))
    rows = {line.split("|")[1]: line for line in lines[heading + 2 : end]}
    rows[row.split("|")[1]] = row
    return "".join([*lines[: heading + 2], *(rows[key] for key in sorted(rows)), *lines[end:]])


def main():
    """Run all groups, write the row, and fail if a test does."""
    left_out = OF_DEVICES if release() < REAL_DEVICES else set()
    found = ["-" if name in left_out else outcome(tests) for name, tests in GROUPS.items()]
    off = {feature.name for feature in FEATURES if feature.fault()}
    cells = [flwr.__version__, *found, shown(off)]
    row = f"| {' | '.join(cells)} |\n"
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), row), encoding="utf-8")
    print(row, end="")
    sys.exit(not {*found} <= {PASSED, "-"})


if __name__ == "__main__":
    main()
