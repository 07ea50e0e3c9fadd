"""How well an emulator, learnt from short runs, tells what other runs come to.

Models learn from runs of quadratics on fleets, get their intervals on others, and are judged on
fleets of a third kind: generated ones of other numbers, and recordings of other devices, hosts,
sessions and days. Besides fleets, three more things are held out: the app, `digits`; all of it, or
in other fleets alone ("mixed"); and schedules whose step takes some half of the jobs in flight.

The rank correlation is Spearman's, within a fleet, app, job and target, over schedules (and, of
digits, learning rates). What a search saves that begins with the first settings of a model is in
`regret.py`. Sixteen schedules of result "agent_worlds" have what the agents' learning proxy makes
of them.

Run it with: python benchmarks/emulator/run.py RECORDINGS --keep RUNS [--quick] [--ship]
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

sys.path.append(str(Path(__file__).parents[1]))
from emulator.cases import Case, drawn, key, of_digits, play
from emulator.models import MODELS, PLAYED, Predict, arrays_of, judged, margins, networks
from emulator.regret import FIRST, RUNS, regrets
from emulator.rows import Table, rows_of
from fedstale.contrib.emulator import emulator
from fedstale.contrib.emulator.measures import Sample, Setting
from fedstale.traces.arrays import DAY_S
from lab.curves import difference
from lab.fleets import ASSUMED, fleets
from lab.kept import Kept
from lab.results import commit, read_result, write_result
from lab.training import TTL_S, windows

PARTS = ("learn", "check", "test")
GENERATED = {
    "learn": {"phones": (0, 12), "desktops": (0, 9), "sites": (0, 6), "constant": (0, 9)},
    "check": {"phones": (50, 54), "desktops": (50, 53), "sites": (50, 52), "constant": (50, 53)},
    "test": {"phones": (80, 83), "desktops": (80, 82), "sites": (80, 82), "constant": (80, 81)},
}
"""First number of each kind, and that after the last."""
RECORDED = {"learn": ("learn", 4), "check": ("stop", 2), "test": ("test", 2)}
"""Part of the recordings, and fleets of each kind."""
KINDS = ("phones", "desktops", "cars")
Row = dict[str, Any]


def names(part: str) -> list[str]:
    """Return the fleets of a part, those of each kind in turn."""
    own = [[f"{kind}:{i}" for i in range(*ends)] for kind, ends in GENERATED[part].items()]
    theirs, n = RECORDED[part]
    own += [[f"recorded-{kind}:{theirs}:{i}" for i in range(n)] for kind in KINDS]
    return [name for turn in zip_longest(*own) for name in turn if name]


def cases(digits: bool, part: str, n: int, recordings: Path) -> Iterator[Case]:
    """Yield the cases of the first n fleets of a part."""
    make: Callable[..., list[Case]] = of_digits if digits else drawn
    for name in names(part)[:n]:
        yield from make(name, part, recordings)


FLEETS = {
    False: {"learn": 36, "check": 12, "test": 7},
    True: {"learn": 16, "check": 6, "test": 3},
}
"""Fleets that are played, of quadratics and of digits."""


def evaluated(
    tables: dict[tuple[bool, str], Table], models: Sequence[str]
) -> tuple[list[Row], dict[str, Predict]]:
    """Return how well each model tells what is held out, and those that know some digits."""
    plain = {part: tables[False, part] for part in PARTS}
    mixed = {part: plain[part].with_rows(tables[True, part]) for part in PARTS}
    halves = {part: plain[part].take(~plain[part].half) for part in PARTS}
    questions = {
        "schedules": (halves, plain["test"].take(plain["test"].half)),
        "fleets": (plain, plain["test"]),
        "app": (plain, tables[True, "test"]),
        "mixed": (mixed, tables[True, "test"]),
    }
    rows, last = list[Row](), dict[str, Predict]()
    for what, (own, test) in questions.items():
        for name in models:
            # Other fleets and another app are told by the same model.
            is_new = what != "app" or name not in last
            predict = last[name] = MODELS[name](own["learn"]) if is_new else last[name]
            found = judged(predict, margins(predict, own["check"]), test)
            rows.append({"about": "held out", "what": what, "model": name} | found)
            print(rows[-1], flush=True)
    return rows, last


def saved(test: Table, predicts: dict[str, Predict], models: Sequence[str]) -> list[Row]:
    """Return the regret of searches after some runs, without and with what a model ranks first."""
    rows = []
    for name in models:
        found = regrets(predicts[name], test)
        # One number a fleet and target: seeds are no other fleets.
        without, with_it = (found[k].mean(axis=1) for k in ("without", "with"))
        for n in (FIRST, 8, RUNS):
            rows.append(
                {
                    "about": "search",
                    "model": name,
                    "runs": n,
                    "cases": len(without),
                    "without": round(float(without[:, n - 1].mean()), 4),
                    "with": round(float(with_it[:, n - 1].mean()), 4),
                    "difference": [
                        round(x, 4) for x in difference(without[:, n - 1], with_it[:, n - 1])
                    ],
                }
            )
            print(rows[-1], flush=True)
    return rows


def sixteen(predicts: dict[str, Predict], recordings: Path) -> list[Row]:
    """Return how models rank the sixteen schedules that the learning proxy was judged by."""
    known = [row for row in read_result("agent_worlds")["rows"] if row["part"] == "schedules"]
    known = [row for row in known if "concurrency" in row]
    traces = fleets(recordings, 0, "phones", assumed=ASSUMED)["learn"]
    told: list[list[Any]] = []
    for window in windows(traces, "phones", range(221, 224)):
        here = traces.between(window.start, window.start + 2 * DAY_S).take(window.devices)
        own: list[Any] = []
        for row in known:
            name, jobs = row["schedule"], row["concurrency"]
            size = {"all": jobs, "three quarters": max(1, 3 * jobs // 4), "buffer of one": 1}
            setting = Setting(
                work=window.work,
                message_bytes=5e6,
                timeout_s=TTL_S,
                rounds=10.0,
                skew=0.3,
                rate=1.0,
                concurrency=jobs,
                buffer_size=size.get(name, jobs // 2),
                keeps=name.startswith("buffer"),
                balanced=False,
            )
            own.append(list(Sample(here, setting).measures(setting).values()))
        told.append(own)
    real = [row["real_progress"] for row in known]
    rows: list[Row] = [
        {
            "about": "sixteen",
            "model": "learning proxy",
            "rank": round(float(spearmanr([row["proxy_progress"] for row in known], real)[0]), 3),
        }
    ]
    for name, predict in predicts.items():
        x = np.array(told)
        hours = [predict(each)[:, 0] + each[:, PLAYED][:, 0] for each in x]
        rank = float(spearmanr(-np.mean(hours, axis=0), real)[0])
        rows.append({"about": "sixteen", "model": name, "rank": round(rank, 3)})
    print(rows, flush=True)
    return rows


def ship(learn: Table, check: Table, folder: Path, command: str) -> None:
    """Write the networks that come with fedstale."""
    members = networks(learn)
    arrays = arrays_of(members, learn, check)
    about = {
        "measures": learn.names,
        "command": command,
        "commit": str(commit()),
        "date": datetime.now(UTC).date().isoformat(),
        "fleets": sorted(set(learn.fleet.tolist())),
        "fleets_of_intervals": sorted(set(check.fleet.tolist())),
        "rows": len(learn.fleet),
    }
    emulator.FILES.write(folder, arrays, about)


def main() -> None:
    """Play, learn, judge, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--quick", action="store_true", help="few runs and models")
    parser.add_argument("--ship", action="store_true", help="write the networks into fedstale")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    kept, models = Kept(options.keep), list(MODELS)
    tables = {}
    for digits, part in product((False, True), PARTS):
        n = 1 if options.quick else FLEETS[digits][part]
        some = list(cases(digits, part, n, options.recordings))[: 4 if options.quick else None]
        played = (
            (case, kept.get(key(case), lambda case=case: play(case, options.recordings)))
            for case in some
        )
        tables[digits, part] = rows_of(played, options.recordings)
        print(digits, part, len(some), len(tables[digits, part].fleet), flush=True)
    command = "python benchmarks/emulator/run.py RECORDINGS --keep RUNS"
    if options.quick:
        rows, _ = evaluated(tables, ["played", "nearest", "ridge"])
        write_result("emulator", rows, command=command, quick=True)
        return
    rows, predicts = evaluated(tables, models)
    rows += saved(tables[True, "test"], predicts, ["played", "5 nearest", "networks"])
    rows += sixteen(predicts, options.recordings)
    counts = {
        f"{'digits' if d else 'quadratics'}, {p}": len({str(key(c)) for c in t.case})
        for (d, p), t in tables.items()
    }
    rows.append({"about": "runs"} | counts)
    print(write_result("emulator", rows, command=command))
    if options.ship:
        learn, check = (tables[False, p].with_rows(tables[True, p]) for p in ("learn", "check"))
        ship(learn, check, Path(emulator.__file__).parent, command + " --ship")


if __name__ == "__main__":
    main()
