"""The rows of standing methods: each file of methods/, judged as anybody's is.

The rows go to results/suite.json, where those of other scenarios stay, and from there to the room
of the suite. Runs that are kept are not run again.

Run it with:
python benchmarks/suite/table.py --keep FOLDER [--scenario NAME] [--methods NAME] [--quick]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fedstale.contrib.suite import Setting, judge
from fedstale.contrib.suite.judging import REFERENCE, TABLE, Row, by_seed, cell

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import RESULTS, read_result, write_result

HERE = Path(__file__).parent
COMMAND = "python benchmarks/suite/table.py --keep FOLDER"


def main() -> None:
    """Judge methods, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep", type=Path, default=Path("runs/suite"), help="folder of the runs")
    parser.add_argument("--scenario", nargs="+", default=["phones-v1"])
    parser.add_argument("--methods", nargs="+", default=[], help="names of files; all if none")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one method, as `suite run --quick`")
    given = parser.parse_args()
    if given.quick:
        with TemporaryDirectory() as folder:
            file, scenario = str(HERE / "methods" / "fedbuff.py"), given.scenario[0]
            row = judge(file, scenario, Path(folder), quick=True, workers=given.workers)
        write_result("suite", [row], command=COMMAND, quick=True)
        return
    files = sorted((HERE / "methods").glob("*.py"))
    chosen = [file for file in files if not given.methods or file.stem in given.methods]
    known = read_result("suite")["rows"] if (RESULTS / "suite.json").is_file() else []
    rows: dict[tuple[str, str, str], Row] = {_key(row): row for row in known}
    for scenario in given.scenario:
        for file in chosen:
            out = given.keep / scenario / file.stem
            row = judge(str(file), scenario, out, workers=given.workers)
            rows[_key(row)] = row
            print(row["method"], row["rate"], flush=True)
    ordered = [rows[key] for key in sorted(rows)]
    print(write_result("suite", ordered, command=COMMAND))
    ship(ordered)


def _key(row: Row) -> tuple[str, str, str]:
    return row["scenario"], row["task"], row["method"]


def across(rows: Sequence[Row]) -> str:
    """Return a table in Markdown of device-hours on each scenario, the fewest on all first."""
    of = {name: {r["method"]: r for r in rows if r["scenario"] == name} for name in Setting.all()}
    of = {name: own for name, own in of.items() if REFERENCE in own}

    def cost(method: str) -> float:
        both = [
            [by_seed(own[row], "device_hours") for row in (method, REFERENCE)]
            for own in of.values()
            if method in own
        ]
        return float(np.mean([np.log(x[seed] / y[seed]) for x, y in both for seed in x]))

    lines = [f"| method | {' | '.join(of)} |", f"|---|{'---:|' * len(of)}"]
    for method in sorted({row["method"] for row in rows}, key=cost):
        found = [(own.get(method), own[REFERENCE]) for own in of.values()]
        cells = [cell(row, base, "device_hours") if row else "-" for row, base in found]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ship(rows: list[Row]) -> None:
    """Write the table that comes with fedstale, without the runs that a rate was chosen by."""
    kept = [{name: value for name, value in row.items() if name != "tuned"} for row in rows]
    lines = ",\n".join(json.dumps(row) for row in kept)
    TABLE.write_text(f'{{"rows": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
