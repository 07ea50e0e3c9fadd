"""What selectors need in proportion to another, from the runs of `agent.training`.

A run is judged at two accuracies, which follow from what random selection reached in the end on
other devices: at 0.9 times their mean, and at all of it.

A pair is a run of a reference, such as the agent, and one of another selector in the same window,
on the same data and schedule. Ratios are taken within pairs and averaged over the pairs of a
window; the interval is Student's over the windows, of the mean logarithm.

A run that never reaches its target is censored: it counts with all of its hours, and pairs of which
neither arrives are left out. If only the other selector's runs are censored in what is left, the
ratio is a lower bound ("at least"); if only the reference's are, an upper one ("at most"); if both
are, in different pairs, it is none ("unknown").
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np

from fedstale.comparison.statistics import LEAST, estimate
from lab.training import judged

AGENT, RULE, RANDOM = "agent", "balanced", "random"
REFERENCES = (AGENT, RULE)
"""What others are measured by: the agent, and a rule that needs no training."""
SHARES = (0.9, 1.0)
"""Accuracies to reach, of what random selection reaches on other devices."""
ALL = "all"
Row = dict[str, Any]
MEANS = (
    *("hours", "device_hours", "wasted_hours", "waste_share", "valid_ratio", "accuracy"),
    *("worst_third", "gini", "ever_merged"),
)
RATIOS = ("hours", "device_hours")
AHEAD = ("accuracy", "worst_third")
AT_TARGET = ("target", "reached", "hours", "device_hours", "wasted_hours")
"""What a run has once for each target."""
SETTING = ("regime", "app", "fleet", "schedule", "alpha")

Pair = tuple[Row, Row]


def judge(runs: Sequence[Row]) -> list[Row]:
    """Return what each run needed, at each of its targets.

    Args:
        runs: as `agent.training` keeps them, with their curves; those of the part "learn" say what
            to reach, and runs of a setting without any are left out.

    Returns:
        Runs of the part "test" without their curves, once for each of `SHARES`, with `of_random`,
        `target`, and what `lab.training.judged` says.
    """
    reached: dict[tuple[Any, ...], list[float]] = {}
    for run in runs:
        if run["part"] == "learn":
            reached.setdefault(_place(run, SETTING), []).append(run["accuracy"])
    found = []
    for share, run in product(SHARES, runs):
        if run["part"] == "test" and _place(run, SETTING) in reached:
            target = round(share * float(np.mean(reached[_place(run, SETTING)])), 4)
            about = {name: value for name, value in run.items() if name != "curves"}
            found.append(
                {"of_random": share, "target": target, **about, **judged(run["curves"], target)}
            )
    return found


def tables(runs: Sequence[Row], references: Sequence[str] = REFERENCES) -> list[Row]:
    """Return rows of three kinds, told by `about`, for each target.

    "selectors": what each selector needs, by itself and in proportion to each reference. Settings
    are pooled over skews; then over schedules; then over fleets, too; "all" stands for what is
    pooled. "forecasts": what a selector needs without forecasts, in proportion to itself with them.
    "lies": what it needs among liars, in proportion to itself without them.

    Args:
        runs: by `judge`.
        references: names of selectors.
    """
    rows = []
    for share in _values(runs, "of_random"):
        at_target = _matching(runs, {"of_random": share})
        for where, of_setting in _settings(_matching(at_target, {"lies": ""})):
            about = {"of_random": share, **where}
            told = _matching(of_setting, {"forecasts": True})
            rows += [{"about": "selectors", **about, **row} for row in _compared(told, references)]
            rows += [{"about": "forecasts", **about, **row} for row in forecasts_worth(of_setting)]
        for regime in _values(at_target, "regime"):
            where = {"of_random": share, "regime": regime}
            told = _matching(at_target, {"regime": regime, "forecasts": True})
            rows += [{"about": "lies", **where, **row} for row in lies_cost(told)]
    return rows


def forecasts_worth(runs: Sequence[Row]) -> list[Row]:
    """Return what selectors need without forecasts in proportion to themselves with them."""
    rows = []
    for selector in _values(_matching(runs, {"forecasts": False}), "selector"):
        without, own = (
            _matching(runs, {"selector": selector, "forecasts": said}) for said in (False, True)
        )
        found = pairs(own, without)
        if found:
            row = {"selector": selector, **means(without)}
            rows.append(row | {f"{name}_ratio": ratio(found, name) for name in RATIOS})
    return rows


def lies_cost(runs: Sequence[Row]) -> list[Row]:
    """Return for each selector and lie what its runs need in proportion to those without lies."""
    rows = []
    for lies in _values(runs, "lies"):
        lied_to = [run for run in runs if lies and run["lies"] == lies]
        for selector in _values(lied_to, "selector"):
            other = [run for run in lied_to if run["selector"] == selector]
            own = [run for run in runs if run["selector"] == selector and not run["lies"]]
            found = pairs(own, other)
            if found:
                row = {"selector": selector, "lied_about": lies, **means([o for _, o in found])}
                rows.append(row | {f"{name}_ratio": ratio(found, name) for name in RATIOS})
    return rows


def means(runs: Sequence[Row]) -> Row:
    """Return means over some runs of one selector."""
    return {
        "runs": len(runs),
        "reached": sum(run["reached"] for run in runs),
        **{name: round(float(np.mean([run[name] for run in runs])), 4) for name in MEANS},
    }


def pairs(own: Iterable[Row], other: Iterable[Row]) -> list[Pair]:
    """Return the runs of two selectors that have all else in common, lies and forecasts aside."""
    names = (*SETTING, "seed")
    by_place = {_place(run, names): run for run in own}
    places = ((_place(run, names), run) for run in other)
    return [(by_place[place], run) for place, run in places if place in by_place]


def ratio(found: Sequence[Pair], what: str) -> Row | None:
    """Return by how much more the second of each pair needs than the first; see the module.

    Returns:
        `mean`, `low` and `high`, the number of `pairs` and `windows` that count, and the `bound`:
        "exact", "at least", "at most" or "unknown". None of fewer than three windows.
    """
    counted = [(one, two) for one, two in found if one["reached"] or two["reached"]]
    logs: dict[tuple[str, int], list[float]] = {}
    for one, two in counted:
        # Whoever has more than is asked for from the first minute on has spent nothing.
        spent = [max(run[what], _LEAST_H) for run in (one, two)]
        more = float(np.log(spent[1] / spent[0]))
        logs.setdefault((one["fleet"], one["seed"]), []).append(more)
    known = estimate([float(np.mean(each)) for each in logs.values()])
    if known.n < LEAST:
        return None
    censored = tuple(any(not pair[i]["reached"] for pair in counted) for i in range(2))
    bounds = {
        (False, False): "exact",
        (False, True): "at least",
        (True, False): "at most",
        (True, True): "unknown",
    }
    mean, low, high = (round(float(np.exp(x)), 3) for x in (known.mean, known.low, known.high))
    return {
        "mean": mean,
        "low": low,
        "high": high,
        "pairs": len(counted),
        "windows": known.n,
        "bound": bounds[censored],
    }


_LEAST_H = 1.0 / 60.0
"""A minute, the step in which accuracy is read."""


def ahead(found: Sequence[Pair], what: str) -> list[float] | None:
    """Return by how much the first of each pair is ahead, with its 95 % interval over windows."""
    each: dict[tuple[str, int], list[float]] = {}
    for one, two in found:
        each.setdefault((one["fleet"], one["seed"]), []).append(one[what] - two[what])
    known = estimate([float(np.mean(values)) for values in each.values()])
    if known.n < LEAST:
        return None
    return [round(float(x), 4) for x in (known.mean, known.low, known.high)]


def _settings(runs: Sequence[Row]) -> Iterable[tuple[Row, list[Row]]]:
    """Yield what runs have in common, and these: of one schedule, of all, and of all fleets."""
    for regime, app in dict.fromkeys((run["regime"], run["app"]) for run in runs):
        of_app = _matching(runs, {"regime": regime, "app": app})
        places = [
            (fleet, schedule)
            for fleet in _values(of_app, "fleet")
            for schedule in (*_values(of_app, "schedule"), ALL)
        ]
        for fleet, schedule in (*places, (ALL, ALL)):
            where = {"regime": regime, "app": app, "fleet": fleet, "schedule": schedule}
            known = {name: value for name, value in where.items() if value != ALL}
            yield where, _matching(of_app, known)


def _compared(runs: Sequence[Row], references: Sequence[str]) -> list[Row]:
    rows = []
    for selector in _values(runs, "selector"):
        own = _matching(runs, {"selector": selector})
        row = {"selector": selector, "agent": own[0]["agent"], **means(own)}
        for reference in references:
            found = pairs(_matching(runs, {"selector": reference}), own)
            if selector != reference and found:
                of = {f"{name}_ratio": ratio(found, name) for name in RATIOS}
                row[f"to {reference}"] = of | {f"{x}_ahead": ahead(found, x) for x in AHEAD}
        rows.append(row)
    return rows


def _place(run: Row, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(run[name] for name in names)


def _matching(runs: Sequence[Row], where: Row) -> list[Row]:
    return [run for run in runs if all(run[name] == value for name, value in where.items())]


def _values(runs: Sequence[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(run[name] for run in runs))
