"""What selectors need in proportion to the agent, from the runs of `agent.training`.

A pair is a run of the agent and one of another selector in the same window, on the same data and
schedule. Ratios are taken within pairs and averaged over the pairs of a window; the interval is
Student's over the windows, of the mean logarithm.

A run that never reaches its target is censored: it counts with all of its hours, and pairs of which
neither arrives are left out. If only the other selector's runs are censored in what is left, the
ratio is a lower bound ("at least"); if only the agent's are, an upper one ("at most"); if both are,
in different pairs, it is none ("unknown").
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedstale.comparison.statistics import estimate

AGENT = "agent"
Row = dict[str, Any]
MEANS = (
    *("hours", "device_hours", "wasted_hours", "waste_share", "valid_ratio", "accuracy"),
    *("gini", "ever_merged"),
)
RATIOS = ("hours", "device_hours", "wasted_hours")
AHEAD = ("accuracy", "waste_share", "valid_ratio")
_FREE_H = 0.01
"""Added to wasted hours, of which there may be none."""

Pair = tuple[Row, Row]


def tables(runs: Sequence[Row]) -> list[Row]:
    """Return a row for each setting and selector; "all" where a row pools over something.

    Settings are an app, a fleet, a schedule and what devices lie about, over all skews; then apps
    over all fleets and schedules.
    """
    rows = []
    honest = [run for run in runs if not run["lies"]]
    for app in _values(runs, "app"):
        of_app = [run for run in runs if run["app"] == app]
        for fleet in _values(of_app, "fleet"):
            for schedule in _values(of_app, "schedule"):
                for lies in _values(of_app, "lies"):
                    where = {"app": app, "fleet": fleet, "schedule": schedule, "lies": lies}
                    rows += _rows(where, _matching(of_app, where))
        where = {"app": app, "fleet": "all", "schedule": "all", "lies": ""}
        rows += _rows(where, _matching(honest, {"app": app}))
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
                rows.append(row | {f"{name}_ratio": ratio(found, name) for name in RATIOS[:2]})
    return rows


def means(runs: Sequence[Row]) -> Row:
    """Return means over some runs of one selector."""
    return {
        "runs": len(runs),
        "reached": sum(run["reached"] for run in runs),
        **{name: round(float(np.mean([run[name] for run in runs])), 4) for name in MEANS},
    }


def pairs(own: Iterable[Row], other: Iterable[Row]) -> list[Pair]:
    """Return the runs of two selectors that have all else in common, lies aside."""
    names = ("app", "fleet", "schedule", "alpha", "seed")
    by_place = {tuple(run[name] for name in names): run for run in own}
    places = ((tuple(run[name] for name in names), run) for run in other)
    return [(by_place[place], run) for place, run in places if place in by_place]


def ratio(found: Sequence[Pair], what: str) -> Row | None:
    """Return by how much more the second of each pair needs than the first; see the module.

    Returns:
        `mean`, `low` and `high`, the number of `pairs` and `windows` that count, and the `bound`:
        "exact", "at least", "at most" or "unknown". None of fewer than two windows.
    """
    counted = [(one, two) for one, two in found if one["reached"] or two["reached"]]
    free = _FREE_H if what == "wasted_hours" else 0.0
    logs: dict[tuple[str, int], list[float]] = {}
    for one, two in counted:
        more = np.log((two[what] + free) / (one[what] + free))
        logs.setdefault((one["fleet"], one["seed"]), []).append(float(more))
    known = estimate([float(np.mean(each)) for each in logs.values()])
    if known.n < 2:
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


def ahead(found: Sequence[Pair], what: str) -> list[float] | None:
    """Return by how much the first of each pair is ahead, with its 95 % interval over windows."""
    each: dict[tuple[str, int], list[float]] = {}
    for one, two in found:
        each.setdefault((one["fleet"], one["seed"]), []).append(one[what] - two[what])
    known = estimate([float(np.mean(values)) for values in each.values()])
    if known.n < 2:
        return None
    return [round(float(x), 4) for x in (known.mean, known.low, known.high)]


def _rows(where: Row, runs: Sequence[Row]) -> list[Row]:
    agent = [run for run in runs if run["selector"] == AGENT]
    rows = []
    for selector in _values(runs, "selector"):
        own = [run for run in runs if run["selector"] == selector]
        row = {**where, "selector": selector, **means(own)}
        found = pairs(agent, own)
        if selector != AGENT and found:
            row |= {f"{name}_ratio": ratio(found, name) for name in RATIOS}
            row |= {f"{name}_ahead": ahead(found, name) for name in AHEAD}
        rows.append(row)
    return rows


def _matching(runs: Sequence[Row], where: Row) -> list[Row]:
    return [run for run in runs if all(run[name] == value for name, value in where.items())]


def _values(runs: Sequence[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(run[name] for run in runs))
