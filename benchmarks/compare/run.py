"""Run the plans beside this file, and keep their numbers and tables.

A plan NAME.toml is run into comparisons/NAME-COMMIT; runs that are done are kept. The numbers go to
results/compare_NAME.json and the table to NAME.md, from where `pages.py` takes it to the pages that
have a place for it.

Run it with: python benchmarks/compare/run.py [NAME ...] [--workers N] [--quick]
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path

import fedstale

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import commit, write_result

PLANS, ROOT = Path(__file__).parent, Path(__file__).parents[2]


def main() -> None:
    """Run plans, all if none is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="plans; all if none is named")
    parser.add_argument("--workers", type=int, help="runs at a time; one for each core if not set")
    parser.add_argument("--quick", action="store_true", help="two seeds, an hour")
    asked = parser.parse_args()
    for name in asked.names or sorted(path.stem for path in PLANS.glob("*.toml")):
        plan = tomllib.loads((PLANS / f"{name}.toml").read_text(encoding="utf-8"))
        out = ROOT / "comparisons" / f"{name}-{(commit() or 'unknown')[:10]}"
        if asked.quick:
            plan |= {"seeds": plan["seeds"][:2], "until": "1h"}
            out = out.with_name(f"{out.name}-quick")
        fedstale.compare(plan, out=out, workers=asked.workers, overwrite=asked.quick)
        found = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
        again = f"python benchmarks/compare/run.py {name}"
        rows = found["table"] if asked.quick else [found]
        write_result(f"compare_{name}", rows, command=again, quick=asked.quick)
        if not asked.quick:
            table = (out / "comparison.md").read_text(encoding="utf-8").rstrip("\n")
            (PLANS / f"{name}.md").write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
