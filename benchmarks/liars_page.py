"""Write the tables of docs/results/liars.md and liars-evidence.md from the results of `liars`.

What stands between the markers is replaced; the words around them are kept.

Run it with: python benchmarks/liars_page.py
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from evidence import EVIDENCE
from liars import (
    BELIEVERS,
    CLIPPED,
    FEWER,
    HONEST,
    LIES,
    LOSSES,
    NAME,
    NORM,
    SCALED,
    SELECTORS,
    SHARES,
    WAYS,
    WHEN,
)
from pages import refilled, rewrite, table
from results_file import read_result
from update_norms import BY_RANKS, SKEWS

from fedstale.comparison.statistics import estimate

FOLDER = Path(__file__).parent.parent / "docs" / "results"
PAGES = [FOLDER / "liars.md", FOLDER / "liars-evidence.md"]
Row = dict[str, Any]


class Rows:
    """The rows of a part of the result."""

    def __init__(self, rows: Sequence[Row], part: str) -> None:
        """Keep those of the part."""
        self.rows = [row for row in rows if row["part"] == part]

    def of(self, **about: object) -> list[Row]:
        """Return the runs that are so."""
        return [row for row in self.rows if all(row[k] == v for k, v in about.items())]

    def mean(self, column: str, **about: object) -> float:
        """Return the mean of a column over the runs that are so; NaN without any."""
        found = [row[column] for row in self.of(**about)]
        return float(np.mean(found)) if found else float("nan")

    def change(self, column: str, **about: object) -> str:
        """Return a mean before and after as the text of a cell."""
        before, after = (f"{self.mean(column, **about, when=when):.2f}" for when in WHEN)
        return f"{before} → {after}"

    def change_of_hours(self, **about: object) -> str:
        """Return device hours to the target before and after; "> " where a run did not arrive."""
        cells = []
        for when in WHEN:
            found = self.of(**about, when=when)
            is_whole = all(row["reached"] for row in found)
            cells.append(
                "> " * (not is_whole) + f"{np.mean([r['device_hours'] for r in found]):.1f}"
            )
        return " → ".join(cells)


def shares(
    rows: Rows,
    lies: Collection[str] = LIES,
    names: Collection[str] = SELECTORS,
    of: Sequence[float] = SHARES,
) -> str:
    """Return the shares of jobs that liars get, and those of the same devices if honest."""
    cells = [
        [
            name,
            f"{share:.0%}",
            *(rows.change("got", selector=name, share=share, lie=lie) for lie in (HONEST, *lies)),
        ]
        for name in names
        for share in of
    ]
    return table(["selector", "liars", "honest", *lies], cells, words=2)


def finished(rows: Rows) -> str:
    """Return the shares of jobs that were finished, with three liars in ten."""
    cells = [
        [name, *(rows.change("finished", selector=name, share=0.3, lie=x) for x in (HONEST, *LIES))]
        for name in SELECTORS
    ]
    return table(["selector", "honest", *LIES], cells)


def hours(rows: Rows) -> str:
    """Return device hours to the target, with three liars in ten."""
    cells = [
        [name, *(rows.change_of_hours(selector=name, share=0.3, lie=x) for x in (HONEST, *LIES))]
        for name in SELECTORS
    ]
    return table(["selector", "honest", *LIES], cells)


def hours_by_share(rows: Rows) -> str:
    """Return device hours to the target with three times the loss, by the share of liars."""
    cells = [
        [
            name,
            rows.change_of_hours(selector=name, share=0.3, lie=HONEST),
            *(rows.change_of_hours(selector=name, share=x, lie="3 x loss") for x in SHARES),
        ]
        for name in BELIEVERS
    ]
    return table(["selector", "nobody", *(f"{share:.0%}" for share in SHARES)], cells)


def ways(alike: Rows, windows: Rows) -> str:
    """Return what each way to take a stated loss does to shares and to honest fleets."""
    parts = [
        _by_way(f"alike, {share:.0%} lie", alike, lie="3 x loss", share=share) for share in FEWER
    ]
    parts.append(_by_way("windows, 30% lie", windows, lie="3 x loss"))
    cells = [[way, *(_lost(windows, way, name) for name in BELIEVERS)] for way in (*WAYS, NORM)]
    parts.append(table(["windows, reward of honest fleets", *BELIEVERS], cells))
    return "\n\n".join(parts)


def _by_way(head: str, rows: Rows, **about: object) -> str:
    cells = [
        [way, *(f"{rows.mean('got', **about, when=way, selector=x):.2f}" for x in BELIEVERS)]
        for way in (*WAYS, NORM)
    ]
    return table([head, *BELIEVERS], cells)


def _lost(windows: Rows, way: str, name: str) -> str:
    """Return the mean difference in reward to believing what is stated, and its standard error."""
    stated, taken = (
        np.array(windows.of(when=when, selector=name, lie=HONEST)[0]["rewards"])
        for when in ("as stated", way)
    )
    if way == "as stated":
        return f"{stated.mean():.2f}"
    by = taken - stated
    return f"{by.mean():+.2f} ± {by.std(ddof=1) / np.sqrt(by.size):.2f}"


def other_losses(rows: Rows) -> str:
    """Return the shares of jobs that lies of loss of other sizes bring."""
    lies = ["loss of 0", "1.5 x loss", "3 x loss", "10 x loss"]
    if set(lies) != {*LOSSES, "3 x loss"}:
        raise ValueError(f"{lies}: expected those of LOSSES, and 3 x loss")
    return shares(rows, lies, BELIEVERS, FEWER)


def evidence(training: Rows, told: Sequence[Row]) -> str:
    """Return how each evidence ranks devices, and what honest fleets need with it."""
    ranks = {row["skew"]: row for row in told}
    cells = []
    for name, column, when in _evidence():
        row = [name, *(f"{ranks[str(skew)][column + BY_RANKS]:+.2f}" for skew in SKEWS)]
        cells.append([*row, *(_needed(training, x, when) for x in BELIEVERS)])
    head = ["selectors are given", *(f"ranks, skew {skew:g}" for skew in SKEWS), *BELIEVERS]
    return table(head, cells)


def _evidence() -> Iterator[tuple[str, str, str]]:
    yield "the stated loss", "stated", "before"
    yield "the norm of the update", "norm", NORM
    for name in EVIDENCE:
        yield f"the {name}", name, name


def _needed(training: Rows, name: str, when: str) -> str:
    """Return how many times the device hours a selector needs that it needs with stated losses."""
    hours = [
        {
            row["seed"]: row["device_hours"]
            for row in training.of(selector=name, lie=HONEST, share=0.3, when=each)
        }
        for each in ("before", when)
    ]
    stated, needed = hours
    if when == "before":
        return f"{np.mean(list(stated.values())):.1f} h"
    found = estimate([float(np.log(needed[seed] / stated[seed])) for seed in stated])
    mean, low, high = np.exp([found.mean, found.low, found.high])
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def scaled(rows: Rows) -> str:
    """Return the shares of jobs of devices that scale their update, without a cap and with it."""
    cells = [
        [f"{share:.0%}", when, *(f"{rows.mean('got', **about, selector=x):.2f}" for x in BELIEVERS)]
        for share in FEWER
        for when in ("after", CLIPPED)
        if (about := {"lie": SCALED, "share": share, "when": when})
    ]
    return table(["scale", "server", *BELIEVERS], cells, words=2)


def audit(rows: Rows) -> str:
    """Return how many honest phones alarm."""
    names = ("seed", "devices", "tested", "alarms", "over", "under", "short")
    cells = [[f"{row[name]:,}" for name in names] for row in rows.rows]
    return table(["seed", "devices tested", "jobs tested", *names[3:]], cells, words=0)


def written() -> dict[Path, str]:
    """Return the pages with their tables as the results say."""
    result, told = read_result(NAME), read_result("update_norms")
    parts = {name: Rows(result["rows"], name) for name in ("alike", "windows", "training", "audit")}
    alike, windows, training = parts["alike"], parts["windows"], parts["training"]
    about = (
        f"`{result['command']}`, commit {result['commit'][:10]}, on {result['hardware']['cores']} "
        f"cores of {result['hardware']['cpu']}."
    )
    return refilled(
        PAGES,
        {
            "command": about,
            "alike": shares(alike),
            "alike-finished": finished(alike),
            "windows": shares(windows),
            "windows-finished": finished(windows),
            "training-hours": hours(training),
            "training-hours-by-share": hours_by_share(training),
            "training": shares(training),
            "training-finished": finished(training),
            "ways": ways(alike, windows),
            "evidence": evidence(training, told["rows"]),
            "other-losses": other_losses(alike),
            "scaled": scaled(alike),
            "audit": audit(parts["audit"]),
        },
    )


if __name__ == "__main__":
    rewrite(written())
