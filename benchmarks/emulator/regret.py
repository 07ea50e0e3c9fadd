"""What a search saves that begins with what an emulator ranks first.

The settings of digits that were run on a fleet are a table: two schedules, jobs in flight, updates
of a step and learning rate. Optuna's TPE searches it as `fedstale tune` does, with a seed for each
order; what a setting comes to is looked up. The regret after some runs is the hours of the best
setting so far over those of the best of all, in logarithms.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna

from emulator.models import PLAYED, Predict
from emulator.rows import Table

RUNS, FIRST, SEEDS = 12, 3, 10
KEYS = ("keeps", "jobs", "share", "rate")


def settings_of(table: Table) -> list[dict[str, Any]]:
    """Return the searched settings of each row."""
    return [
        {
            "keeps": case.keeps,
            "jobs": case.concurrency,
            "share": round(case.buffer_size / case.concurrency, 3) if case.buffer_size > 1 else 0.0,
            "rate": float(case.app.split(":")[2]),
        }
        for case in table.case
    ]


def searched(
    settings: Sequence[dict[str, Any]], hours: Any, first: Sequence[int], seed: int
) -> list[float]:
    """Return the regret after each run of a search that begins with some of the settings."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    domains = {
        key: optuna.distributions.CategoricalDistribution(sorted({row[key] for row in settings}))
        for key in KEYS
    }
    places = {tuple(row[key] for key in KEYS): i for i, row in enumerate(settings)}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    for i in first:
        study.enqueue_trial(settings[i])
    best, found = np.inf, list[float]()
    while len(found) < RUNS:
        trial = study.ask(dict(domains))
        at = places.get(tuple(trial.params[key] for key in KEYS))
        # A schedule of one update that cancels the others was not run, and costs no run.
        study.tell(trial, 99.0 if at is None else float(hours[at]))
        if at is not None:
            best = min(best, float(hours[at]))
            found.append(best - float(np.min(hours)))
    return found


def regrets(predict: Predict, test: Table, targets: Sequence[int] = (1, 2)) -> dict[str, Any]:
    """Return regrets by run, with and without the first settings of an emulator; paired."""
    found: dict[str, list[Any]] = {"without": [], "with": []}
    base = test.x[:, PLAYED][:, 0]
    guess, truth = predict(test.x)[:, 0] + base, test.y[:, 0] + base
    for group in np.unique(test.group[test.app == "digits"]):
        own = np.flatnonzero(test.group == group)
        if int(group.split()[-1]) not in targets or own.size < 20:
            continue
        settings = settings_of(test.take(own))
        # What never came there counts with the whole time, and twice.
        hours = truth[own] + np.where(test.reached[own], 0.0, np.log(2.0))
        first = np.argsort(guess[own], kind="stable")[:FIRST].tolist()
        for name, begin in (("without", []), ("with", first)):
            found[name].append([searched(settings, hours, begin, s) for s in range(SEEDS)])
    return {name: np.array(each) for name, each in found.items()}
