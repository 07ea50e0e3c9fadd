"""Run the plans beside this file, and keep their numbers and tables.

A plan NAME.toml is run by `fedstale compare` into comparisons/NAME; runs that are done are kept.
The numbers go to results/compare_NAME.json and the table to NAME.md, from where `pages.py` takes it
to the pages that have a place for it.

Run it with: python benchmarks/compare/run.py [NAME ...] [--workers N]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import write_result

PLANS, ROOT = Path(__file__).parent, Path(__file__).parents[2]


def main() -> None:
    """Run plans, all if none is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="plans; all if none is named")
    parser.add_argument("--workers", type=int, help="runs at a time; one for each core if not set")
    asked = parser.parse_args()
    for name in asked.names or sorted(path.stem for path in PLANS.glob("*.toml")):
        out = ROOT / "comparisons" / name
        command = [sys.executable, "-m", "fedstale", "compare", str(PLANS / f"{name}.toml")]
        command += ["--out", str(out)]
        command += [] if asked.workers is None else ["--workers", str(asked.workers)]
        subprocess.run(command, check=True, cwd=ROOT)
        found = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
        again = f"python benchmarks/compare/run.py {name}"
        write_result(f"compare_{name}", [found], command=again)
        table = (out / "comparison.md").read_text(encoding="utf-8").rstrip("\n")
        (PLANS / f"{name}.md").write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
