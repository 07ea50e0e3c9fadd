"""Run the plans in benchmarks/compare and write their tables where pages have a place for them.

A plan NAME.toml is run by `fedstale compare` into comparisons/NAME; runs that are done are kept.
The numbers go to results/compare_NAME.json. The table goes to benchmarks/README.md and the pages of
docs/ that have a place for it: what stands between the lines `<!-- compare NAME: begin -->` and
`<!-- compare NAME: end -->` is replaced.

Run it with: python benchmarks/comparisons.py [NAME ...] [--workers N]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from pages import filled, has_place
from results_file import write_result

HERE = Path(__file__).parent
PLANS = HERE / "compare"
RUNS = HERE.parent / "comparisons"
PAGES = (HERE / "README.md", *sorted((HERE.parent / "docs").rglob("*.md")))


def keep(name: str) -> None:
    """Write the numbers of a comparison that has been run, and its table into the pages."""
    found = json.loads((RUNS / name / "comparison.json").read_text(encoding="utf-8"))
    write_result(f"compare_{name}", [found], command=f"python benchmarks/comparisons.py {name}")
    table = (RUNS / name / "comparison.md").read_text(encoding="utf-8").rstrip("\n")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if has_place(text, f"compare {name}"):
            page.write_text(filled(text, f"compare {name}", table), encoding="utf-8")


def main() -> None:
    """Run plans, all if none is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="plans; all if none is named")
    parser.add_argument("--workers", type=int, help="runs at a time; one for each core if not set")
    asked = parser.parse_args()
    for name in asked.names or sorted(path.stem for path in PLANS.glob("*.toml")):
        command = [
            sys.executable,
            "-m",
            "fedstale",
            "compare",
            str(PLANS / f"{name}.toml"),
        ]
        command += ["--out", str(RUNS / name)]
        command += [] if asked.workers is None else ["--workers", str(asked.workers)]
        subprocess.run(command, check=True, cwd=HERE.parent)
        keep(name)


if __name__ == "__main__":
    main()
