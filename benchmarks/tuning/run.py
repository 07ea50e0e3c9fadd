"""What stopping at instants of virtual time saves, and what the tuned configuration is worth.

Thirty recorded phones train the built-in apps for four hours (`tuning.runs`). In each repetition a
search of its own draws 24 configurations, as `fedstale tune --search random` draws them, and all
are run to the end on three seeds. On these runs the following are played, by the scheduler and the
scores of `fedstale tune` with one worker: ASHA with rungs in virtual time, the same by the last
evaluation alone, and with rungs in server steps; and random search that ends after the processor
time that ASHA took. Accuracy is the mean over the last eighth of the time, as `fedstale tune` has
it. Regret is how much less accurate the chosen configuration is at the end than the best of all 24,
in the mean of the seeds; and the rank correlation is that of accuracy at the first rung and at the
end.

What was chosen then runs on other phones, other days and ten other seeds, beside the defaults of
every strategy. A repetition divides the phones in another way, draws other configurations, and
plays each search in twenty orders, of which the mean counts.

Run it with: python benchmarks/tuning/run.py RECORDINGS [--keep FILE] [--jobs N] [--only APP ...]
    [--draws N ...]
Runs that are in the file of --keep are not run again. Rows of apps that are not in --only, and of
repetitions that are not in --draws, stay as they are in the result.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from optuna.distributions import CategoricalDistribution, IntDistribution
from scipy import stats
from threadpoolctl import threadpool_limits

from fedstale.comparison.statistics import estimate
from fedstale.contrib.tuning.engine import result_of, scheduler_of
from fedstale.contrib.tuning.search import Proposals, Report, SearchJob
from fedstale.contrib.tuning.space import Domain, Space
from fedstale.traces.arrays import Array

sys.path.append(str(Path(__file__).parents[1]))
from lab.kept import Kept, play_missing
from lab.results import read_result, write_result
from tuning.runs import Curve, Place, Settings, run

HOURS = 4.0
UNTIL_S = HOURS * 3600.0
N_CONFIGURATIONS = 24
TUNING_SEEDS, HELD_OUT_SEEDS = (1, 2, 3), tuple(range(11, 21))
APPS, DRAWS = ("digits", "fashion", "shakespeare"), (1, 2, 3, 4, 5)
"""Draws of configurations, each with a division of the phones of its own."""
ORDERS = 20
"""In which the configurations of a draw are tried: which comes first is chance."""
SHUFFLES = 200
"""Of the configurations, for the mean of random search."""
RATES = {"digits": (0.01, 1.0), "fashion": (0.01, 1.0), "shakespeare": (0.1, 10.0)}
STRATEGIES = ("fedavg", "fedbuff", "gap-aware", "direction-aware", "refl", "fedasync")
UNTUNED = "flower-fedavg"
"""What the app runs if nobody says anything."""

Row = dict[str, object]
Curves = Sequence[Sequence[Curve]]
"""Of each configuration, one a seed."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: what it is known by in the file of kept runs."""

    app: str
    place: Place
    settings: tuple[tuple[str, bool | int | float | str], ...]
    seed: int

    @classmethod
    def of(cls, app: str, place: Place, settings: Settings, seed: int) -> "Run":
        """Return the run of a configuration."""
        return cls(app, place, tuple(sorted(settings.items())), seed)

    @property
    def key(self) -> str:
        """All that sets the result."""
        place = self.place
        hours = [place.division, place.part, place.day, place.hour, place.until_s]
        return json.dumps([self.app, hours, self.settings, self.seed])


def space_of(app: str) -> Space:
    """Return the space that is searched; its devices are not those that it is played on."""
    low, high = RATES[app]
    rate = {"from": low, "to": high, "log": True}
    search: dict[str, object] = {"learning-rate": rate}
    search["local-epochs"] = [1, 2, 5, 10] if app == "digits" else [1, 2, 4]
    table: dict[str, Any] = {
        "app": app,
        "traces": "synthetic:5",
        "until": f"{HOURS:g}h",
        "seeds": list(TUNING_SEEDS),
        "objective": "accuracy",
        "trials": N_CONFIGURATIONS,
        "held-out": {"seeds": list(HELD_OUT_SEEDS)},
        "search": search,
    }
    space = Space.read(table)
    # What `runs.described` makes a strategy of; not each has both sizes.
    sizes: dict[str, Domain] = {
        "strategy": CategoricalDistribution(STRATEGIES),
        "learning-rate": space.domains["learning-rate"],
        "concurrency": IntDistribution(2, 16, step=2),
        "buffer-size": IntDistribution(2, 10),
    }
    return replace(space, domains={**sizes, "local-epochs": space.domains["local-epochs"]})


def drawn(space: Space, repetition: int) -> list[Settings]:
    """Return the configurations that a random search proposes with a seed."""
    with tempfile.TemporaryDirectory() as folder:
        task = SearchJob(space=space, folder=Path(folder), search="random", seed=repetition)
        with Proposals(task) as proposals:
            found = [proposals.next() for _ in range(N_CONFIGURATIONS)]
    return [dict(trial.parameters) for trial in found if trial is not None]


def places(repetition: int) -> tuple[Place, Place]:
    """Return where a repetition tunes, and where it is judged: other phones, another day."""
    day = repetition % 5
    both = {"division": repetition, "hour": 15, "until_s": UNTIL_S}
    tuning = Place(part="learn", day=day, **both)  # type: ignore[arg-type]  # of mixed values
    return tuning, Place(part="test", day=(day + 2) % 5, **both)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a search chose, and what it took."""

    chosen: int
    complete: tuple[int, ...]
    """Configurations that came to the end, in the order in which they were tried."""
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Readings:
    """What configurations come to at the rungs and at the end; shape (configurations, rungs + 1).

    Values are means over seeds, and processor seconds sums.
    """

    values: Array
    cpu_s: Array

    @classmethod
    def of(
        cls,
        curves: Curves,
        marks: Sequence[float],
        value: Callable[[Curve, float], float] = Curve.by,
        cost: Callable[[Curve, float], float] = Curve.cost_by,
    ) -> "Readings":
        """Read curves, one a seed of each configuration, at some marks."""

        def read(reading: Callable[[Curve, float], float]) -> Array:
            rows = [[[reading(curve, mark) for curve in some] for mark in marks] for some in curves]
            return np.array(rows)

        return cls(read(value).mean(2), read(cost).sum(2))


def by_steps(space: Space, curves: Curves) -> Readings:
    """Read curves at eighths, quarters and halves of the steps of the median run, and there."""
    whole = float(np.median([curve.version[-1] for some in curves for curve in some]))
    marks = [whole * instant / space.until_s for instant in space.instants_s]
    return Readings.of(curves, marks, Curve.by_version, Curve.cost_by_version)


def asha(space: Space, readings: Readings, order: Sequence[int]) -> Search:
    """Try configurations one after the other, and stop as `fedstale tune` does.

    Args:
        space: with the share that goes on.
        readings: of the configurations.
        order: in which configurations are tried.
    """
    scheduler, last = scheduler_of(space, "asha"), len(space.rungs_s)
    # ASHA asks it nothing.
    controller: Any = None
    cpu_s, ends = 0.0, {}
    for number in order:
        trial: Any = SimpleNamespace(trial_id=str(number))
        scheduler.on_trial_add(controller, trial)
        for rung, value in enumerate(readings.values[number].tolist()):
            if rung == last:
                ends[number] = value
                break
            report = Report(rung=rung, value=value)
            decision = scheduler.on_trial_result(controller, trial, result_of(space, report))
            if decision == "STOP":
                break
        cpu_s += float(readings.cpu_s[number, rung])
    chosen = max(ends, key=lambda number: (ends[number], -number))
    return Search(chosen=chosen, complete=tuple(ends), cpu_s=cpu_s)


def random_regret(values: Sequence[float], costs: Sequence[float], budget_s: float) -> float:
    """Return the mean regret of running whole configurations in random order within a budget."""
    rng, found = np.random.default_rng(0), []
    for _ in range(SHUFFLES):
        order = rng.permutation(len(values))
        within = np.cumsum(np.asarray(costs)[order]) <= budget_s
        # One is run, whatever it takes.
        within[0] = True
        found.append(max(values) - np.asarray(values)[order][within].max())
    return float(np.mean(found))


def searches(app: str, repetition: int, curves: Curves) -> list[Row]:
    """Play the searches of one draw, in its own order and in others, and return their means."""
    space = space_of(app)
    by_time = Readings.of(curves, space.instants_s)
    ends: list[float] = by_time.values[:, -1].tolist()
    costs = [sum(c.total_cpu_s for c in some) for some in curves]
    rng, own = np.random.default_rng(repetition), np.arange(len(curves))
    orders = [own, *(rng.permutation(own) for _ in range(ORDERS - 1))]
    rows: list[Row] = []
    later = replace(space, rungs_s=space.rungs_s[1:])
    by_one = Readings.of(curves, space.instants_s, Curve.last_by)
    for name, (searched, readings) in {
        "virtual time": (space, by_time),
        "virtual time, a third goes on": (replace(space, keep=1 / 3), by_time),
        "virtual time, from an hour on": (later, Readings.of(curves, later.instants_s)),
        "virtual time, by one evaluation": (space, by_one),
        "server steps": (space, by_steps(space, curves)),
    }.items():
        found = [asha(searched, readings, order.tolist()) for order in orders]
        regrets = [max(ends) - ends[each.chosen] for each in found]
        at_random = [random_regret(ends, costs, each.cpu_s) for each in found]
        rows.append(
            {
                "what": "search",
                "app": app,
                "repetition": repetition,
                "orders": ORDERS,
                "rungs in": name,
                "chosen": found[0].chosen,
                "rank correlation": round(
                    float(stats.spearmanr(readings.values[:, 0], ends).statistic), 3
                ),
                "regret": round(float(np.mean(regrets)), 4),
                "worst regret": round(max(regrets), 4),
                "saved": round(1 - float(np.mean([each.cpu_s for each in found])) / sum(costs), 3),
                "regret of random search": round(float(np.mean(at_random)), 4),
                "exhaustive cpu_s": round(sum(costs), 1),
            }
        )
    return rows


def choices(curves: Curves) -> dict[str, int]:
    """Return the best configuration of all by each seed alone, and by the mean of all."""
    ends = np.array([[curve.by(UNTIL_S) for curve in some] for some in curves])
    by_one = {f"seed {seed}": int(ends[:, i].argmax()) for i, seed in enumerate(TUNING_SEEDS)}
    return {"three seeds": int(ends.mean(1).argmax()), **by_one}


def interval(values: Sequence[float]) -> dict[str, float]:
    """Return a mean with its 95 % interval by Student's t; without one if there are only two."""
    found = estimate(list(values))
    parts = {"mean": found.mean, "low": found.low, "high": found.high}
    return {name: round(x, 4) for name, x in parts.items() if found.n > 2 or name == "mean"}


def judged(
    app: str, repetition: int, chosen: Mapping[str, Settings], ends: Mapping[Run, float]
) -> list[Row]:
    """Compare what was chosen with the defaults on held-out seeds and phones, in pairs."""
    _, place = places(repetition)

    def values(settings: Settings) -> Any:
        return np.array([ends[Run.of(app, place, settings, seed)] for seed in HELD_OUT_SEEDS])

    defaults = {name: values({"strategy": name}) for name in (UNTUNED, *STRATEGIES)}
    rows: list[Row] = []
    for by, settings in chosen.items():
        tuned = values(settings)
        for name, others in defaults.items():
            rows.append(
                {
                    "what": "held out",
                    "app": app,
                    "repetition": repetition,
                    "chosen by": by,
                    "against": name,
                    "tuned": round(float(tuned.mean()), 4),
                    "tuned, worst seed": round(float(tuned.min()), 4),
                    "default": round(float(others.mean()), 4),
                    **{f"gain {key}": x for key, x in interval(tuned - others).items()},
                }
            )
    return rows


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return what all repetitions say together."""
    found: list[Row] = []
    for app in dict.fromkeys(str(row["app"]) for row in rows):
        own = [row for row in rows if row["app"] == app]
        for name in dict.fromkeys(str(row["rungs in"]) for row in own if row["what"] == "search"):
            some = [row for row in own if row.get("rungs in") == name]
            row: Row = {"what": "searches", "app": app, "rungs in": name, "n": len(some)}
            for key in ("rank correlation", "regret", "regret of random search", "saved"):
                parts = interval([float(str(one[key])) for one in some])
                row |= {f"{key} {part}": x for part, x in parts.items()}
            found.append(row)
        held_out = [row for row in own if row["what"] == "held out"]
        for against in dict.fromkeys(str(row["against"]) for row in held_out):
            some = [r for r in held_out if (r["against"], r["chosen by"]) == (against, "ASHA")]
            gains = interval([float(str(row["gain mean"])) for row in some])
            signs = [(float(str(r["gain low"])), float(str(r["gain high"]))) for r in some]
            found.append(
                {
                    "what": "tuned against a default",
                    "app": app,
                    "against": against,
                    "repetitions": len(some),
                    "better": sum(low > 0 for low, _ in signs),
                    "interval holds 0": sum(low <= 0 <= high for low, high in signs),
                    "worse": sum(high < 0 for _, high in signs),
                    **{f"gain {key}": x for key, x in gains.items()},
                }
            )
        found += _by_seeds(app, held_out)
    return found


def _by_seeds(app: str, rows: Sequence[Row]) -> list[Row]:
    """Return how often a choice by one seed, and by three, is worse than what is untuned."""
    found: list[Row] = []
    for name, is_own in (("one seed", lambda by: by.startswith("seed")), ("three seeds", None)):
        some = [
            row
            for row in rows
            if (is_own(str(row["chosen by"])) if is_own else row["chosen by"] == name)
        ]
        untuned = [row for row in some if row["against"] == UNTUNED]
        best: dict[tuple[object, object], Row] = {}
        for row in some:
            key = row["repetition"], row["chosen by"]
            if key not in best or float(str(row["default"])) > float(str(best[key]["default"])):
                best[key] = row
        found.append(
            {
                "what": "chosen by",
                "app": app,
                "seeds": name,
                "choices": len(untuned),
                "tuned": round(float(np.mean([float(str(r["tuned"])) for r in untuned])), 4),
                "worse than the app's default": sum(_is_worse(row) for row in untuned),
                "worse than the best default": sum(_is_worse(row) for row in best.values()),
            }
        )
    return found


def _is_worse(row: Row) -> bool:
    return float(str(row["gain mean"])) < 0


def made(runs: Iterable[Run], kept: Kept, recordings: Path, jobs: int) -> dict[Run, Curve]:
    """Return the curves of runs, made where they are not kept."""
    wanted = list(dict.fromkeys(runs))
    play_missing(kept, ((one.key, partial(_made, one, recordings)) for one in wanted), jobs)
    return {one: Curve(**kept[one.key]) for one in wanted}


def _made(one: Run, recordings: Path) -> dict[str, object]:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with threadpool_limits(1):
        return asdict(run(one.app, one.place, dict(one.settings), one.seed, recordings))


def measured(
    app: str, repetition: int, make: Callable[[Iterable[Run]], dict[Run, Curve]]
) -> list[Row]:
    """Return all rows of one repetition."""
    space, (tuning, held_out) = space_of(app), places(repetition)
    settings = drawn(space, repetition)
    grid = [[Run.of(app, tuning, each, seed) for seed in TUNING_SEEDS] for each in settings]
    curve_of = make(each for some in grid for each in some)
    curves = [[curve_of[each] for each in some] for some in grid]
    rows = searches(app, repetition, curves)
    by = {**choices(curves), "ASHA": next(int(str(row["chosen"])) for row in rows)}
    chosen = {name: settings[number] for name, number in by.items()}
    defaults: list[Settings] = [{"strategy": name} for name in (UNTUNED, *STRATEGIES)]
    ends = make(
        Run.of(app, held_out, each, seed)
        for each in [*chosen.values(), *defaults]
        for seed in HELD_OUT_SEEDS
    )
    return rows + judged(app, repetition, chosen, {of: c.by(UNTIL_S) for of, c in ends.items()})


def untuned_runs(make: Callable[[Iterable[Run]], dict[Run, Curve]]) -> list[Row]:
    """Return what two settings of the first draw reach on two seeds: the quick form."""
    app, repetition = APPS[0], DRAWS[0]
    (tuning, _), settings = places(repetition), drawn(space_of(app), repetition)[:2]
    found = make(Run.of(app, tuning, each, s) for each in settings for s in TUNING_SEEDS[:2])
    return [
        {"what": "run", "app": app, "seed": one.seed, **dict(one.settings)}
        | {"accuracy": curve.by(UNTIL_S)}
        for one, curve in found.items()
    ]


def with_draw(rows: Iterable[Row], found: Sequence[Row]) -> list[Row]:
    """Return the rows of draws with those of one of them anew, by app and repetition."""
    place = found[0]["app"], found[0]["repetition"]
    others = [row for row in rows if (row["app"], row["repetition"]) != place]
    return sorted([*others, *found], key=lambda row: (str(row["app"]), int(str(row["repetition"]))))


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", nargs="+", choices=APPS, default=APPS, help="apps")
    parser.add_argument("--draws", nargs="+", type=int, default=DRAWS, help="their repetitions")
    parser.add_argument("--quick", action="store_true", help="two settings of digits, two seeds")
    options = parser.parse_args()
    command = "python benchmarks/tuning/run.py RECORDINGS"
    make = partial(made, kept=Kept(options.keep), recordings=options.recordings, jobs=options.jobs)
    if options.quick:
        write_result("tuning", untuned_runs(make), command=command, quick=True)
        return
    published = read_result("tuning")["rows"]
    rows = [row for row in published if row["what"] in {"search", "held out"}]
    for app in options.only:
        for repetition in options.draws:
            found = measured(app, repetition, make)
            print(json.dumps(summary(found), indent=1), flush=True)
            rows = with_draw(rows, found)
            # Each draw takes long, and the next may never come.
            write_result("tuning", [*summary(rows), *rows], command=command)


if __name__ == "__main__":
    main()
