"""Published results of three papers, measured again by fedstale.

What counts as reproduced was stated in the parts (`CLAIMS` and the like) before they were run at
length: the mean over seeds lies between two numbers. What does not is as much a result.

Run it with: python benchmarks/reproduce/run.py RECORDINGS [--keep FILE] [--only ..] [--quick]
Rows of papers that are not named stay as they are. RECORDINGS is the folder of flash-days.json; the
images are those of `lab.apps`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

sys.path.append(str(Path(__file__).parents[1]))
from lab.curves import difference, final
from lab.kept import Kept
from lab.results import RESULTS, read_result, write_result
from reproduce import flash, power_of_choice, ringmaster

Row = dict[str, Any]
PAPERS = ("ringmaster", "power of choice", "flash")


def judged(paper: str, claim: str, by_seed: Sequence[float], accepted: Sequence[float]) -> Row:
    """Return a row that says whether a claim is reproduced.

    Args:
        paper: its name here.
        claim: in a word.
        by_seed: what was measured.
        accepted: between what the mean must be.
    """
    mean = float(np.mean(by_seed))
    return {
        "paper": paper,
        "claim": claim,
        "ours": mean,
        # Of fewer seeds there is none; JSON has no NaN.
        "interval": difference([0.0] * len(by_seed), by_seed) if len(by_seed) > 2 else None,
        "by_seed": list(by_seed),
        "accepted": list(accepted),
        "is_reproduced": accepted[0] <= mean <= accepted[1],
    }


def of_ringmaster(kept: Kept, *, quick: bool) -> list[Row]:
    """Return how far Ringmaster ASGD and the others come in a thousand seconds."""
    n, horizon_s = (600, 100.0) if quick else (ringmaster.N_WORKERS, ringmaster.HORIZON_S)
    seeds, f = ringmaster.SEEDS[: 1 if quick else None], ringmaster.Quadratic()
    of = {"part": "ringmaster", "n": n, "horizon_s": horizon_s}

    def tuned() -> Row:
        return {name: asdict(m) for name, m in ringmaster.tuned(f, n, horizon_s).items()}

    def gap(settings: Row, seed: int) -> float:
        workers = ringmaster.Workers(n, f.b.size, seed)
        run = partial(ringmaster.simulated, f, ringmaster.Method(**settings), workers, horizon_s)
        return float(kept.get(of | settings | {"seed": seed}, run))

    gaps: dict[str, list[float]] = {}
    rows: list[Row] = []
    for name, settings in kept.get(of | {"tuned": True}, tuned).items():
        gaps[name] = [gap(settings, seed) for seed in seeds]
        about = {key: value for key, value in settings.items() if np.isfinite(value)}
        rows.append({"paper": "ringmaster", "method": name, "gaps": gaps[name], **about})
    for other, most in ringmaster.CLAIMS.items():
        ratios = np.divide(gaps[ringmaster.OURS], gaps[other]).tolist()
        rows.append(judged("ringmaster", other, ratios, (0.0, most)))
    return rows


def of_power_of_choice(kept: Kept, *, quick: bool) -> list[Row]:
    """Return what choosing by losses brings, in each deal and in the better of both."""
    part = power_of_choice
    rounds, seeds = (30, part.SEEDS[:1]) if quick else (part.ROUNDS, part.SEEDS)

    def curve(arm: str, alpha: float, seed: int) -> np.ndarray:
        of = {"part": "power of choice", "arm": arm, "alpha": alpha, "seed": seed, "rounds": rounds}
        return np.array(kept.get(of, lambda: part.curve(arm, alpha, seed, rounds).tolist()))

    rows: list[Row] = []
    for arm in (part.ASKED, part.STALE):
        by_deal = []
        for alpha in part.ALPHAS:
            pairs = [(curve(part.RANDOM, alpha, s), curve(arm, alpha, s)) for s in seeds]
            found = np.array([part.compared(*pair) for pair in pairs]).T.tolist()
            by_deal.append(found)
            ends = np.mean([[each[-1] for each in pair] for pair in pairs], axis=0).tolist()
            about = {"arm": arm, "alpha": alpha, "random_accuracy": ends[0], "accuracy": ends[1]}
            means = {"times_faster": float(np.mean(found[0])), "lead": float(np.mean(found[1]))}
            rows.append({"paper": "power of choice", **about, **means})
        for k, (claim, accepted) in enumerate((("faster", part.FASTER), ("better", part.BETTER))):
            best = max((found[k] for found in by_deal), key=np.mean)
            rows.append(judged("power of choice", f"{arm}: {claim}", best, accepted))
    return rows


def of_flash(recordings: Path, kept: Kept, *, quick: bool) -> list[Row]:
    """Return what phones that differ and leave cost."""
    rounds, seeds = (30, flash.SEEDS[:1]) if quick else (flash.ROUNDS, flash.SEEDS)

    def figures(seed: int) -> Row:
        aware, unaware = (
            flash.run(recordings, seed, aware=aware, rounds=rounds) for aware in (True, False)
        )
        ends = {"aware": final(aware.accuracy), "unaware": final(unaware.accuracy)}
        hours = {"hours": aware.at_s[-1] / 3600.0, "unaware_hours": unaware.at_s[-1] / 3600.0}
        return flash.figures(aware, unaware) | ends | hours

    of = {"part": "flash", "rounds": rounds}
    found = [kept.get(of | {"seed": s}, partial(figures, s)) for s in seeds]
    rows: list[Row] = [
        judged("flash", claim, [each[claim] for each in found], accepted)
        for claim, accepted in flash.CLAIMS.items()
    ]
    keys = ("aware", "unaware", "hours", "unaware_hours")
    means = {key: float(np.mean([each[key] for each in found])) for key in keys}
    return [*rows, {"paper": "flash", "rounds": rounds, **means}]


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path, help="folder of flash-days.json")
    parser.add_argument("--keep", type=Path, help="file of runs that are not made again")
    parser.add_argument("--only", nargs="+", choices=PAPERS, default=PAPERS, help="papers")
    parser.add_argument(
        "--quick", action="store_true", help="a seed of each, a tenth of the length"
    )
    options = parser.parse_args()
    kept, quick = Kept(options.keep), options.quick
    parts: dict[str, Callable[[], list[Row]]] = {
        "ringmaster": lambda: of_ringmaster(kept, quick=quick),
        "power of choice": lambda: of_power_of_choice(kept, quick=quick),
        "flash": lambda: of_flash(options.recordings, kept, quick=quick),
    }
    rows: list[Row] = []
    with threadpool_limits(1):
        for paper in PAPERS:
            if paper in options.only:
                rows += parts[paper]()
            elif (RESULTS / "reproduce.json").is_file():
                rows += [row for row in read_result("reproduce")["rows"] if row["paper"] == paper]
    for row in rows:
        print(row, flush=True)
    command = "python benchmarks/reproduce/run.py RECORDINGS --keep FILE"
    write_result("reproduce", rows, command=command, quick=quick)


if __name__ == "__main__":
    main()
