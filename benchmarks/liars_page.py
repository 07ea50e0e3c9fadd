"""Write the tables of docs/results/liars.md from benchmarks/results/liars.json.

What stands between the markers is replaced; the words around them are kept.

Run it with: python benchmarks/liars_page.py
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from liars import (
    BELIEVERS,
    CLIPPED,
    HONEST,
    LIES,
    NAME,
    NORM,
    SCALED,
    SELECTORS,
    SHARES,
    WAYS,
    WHEN,
)
from pages import refilled, rewrite
from results_file import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "results" / "liars.md"
TRAINED = ("Random", "ExpectedUtility", "Oort", "PowerOfChoice", "agent")
Row = dict[str, Any]


class Rows:
    """The rows of a part of the result."""

    def __init__(self, rows: Sequence[Row], part: str) -> None:
        """Keep those of the part."""
        self.rows = [row for row in rows if row["part"] == part]

    def mean(self, column: str, **about: object) -> float:
        """Return the mean of a column over the runs that are so; NaN without any."""
        found = [row[column] for row in self.rows if all(row[k] == v for k, v in about.items())]
        return float(np.mean(found)) if found else float("nan")

    def change(self, column: str, form: str = ".2f", **about: object) -> str:
        """Return a mean before and after as the text of a cell."""
        before, after = (self.mean(column, **about, when=when) for when in WHEN)
        return f"{before:{form}} → {after:{form}}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a Markdown table whose first columns are words."""
    rule = "|" + "---|" * words + "---:|" * (len(head) - words)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])


def shares(rows: Rows) -> str:
    """Return the shares of jobs that liars get, and those of the same devices if honest."""
    cells = [
        [
            name,
            f"{share:.0%}",
            *(rows.change("got", selector=name, share=share, lie=lie) for lie in (HONEST, *LIES)),
        ]
        for name in SELECTORS
        for share in SHARES
    ]
    return table(["selector", "liars", "honest", *LIES], cells, words=2)


def finished(rows: Rows) -> str:
    """Return the shares of jobs that were finished, with three liars in ten."""
    cells = [
        [name, *(rows.change("finished", selector=name, share=0.3, lie=x) for x in (HONEST, *LIES))]
        for name in SELECTORS
    ]
    return table(["selector", "honest", *LIES], cells)


def training(rows: Rows) -> str:
    """Return device hours to the target and shares of jobs in real training."""
    cells = []
    for name in TRAINED:
        honest = {"selector": name, "lie": HONEST}
        lying = {"selector": name, "lie": "3 x loss"}
        cells.append(
            [
                name,
                rows.change("device_hours", **honest),
                rows.change("accuracy", ".3f", **honest),
                rows.change("got", **honest, share=0.3),
                *(rows.change("got", **lying, share=share) for share in SHARES),
                *(rows.change("device_hours", **lying, share=share) for share in (0.3, 0.5)),
            ]
        )
    head = ["selector", "device hours, honest", "accuracy, honest", "share of 30 %, honest"]
    head += [f"{share:.0%} lie" for share in SHARES]
    return table([*head, "device hours, 30 % lie", "50 % lie"], cells)


def ways(alike: Rows, windows: Rows) -> str:
    """Return what each way to take a stated loss does to shares and to honest fleets."""
    parts = []
    for share in (0.1, 0.3):
        about = {"lie": "3 x loss", "share": share}
        cells = [
            [way, *(f"{alike.mean('got', **about, when=way, selector=x):.2f}" for x in BELIEVERS)]
            for way in (*WAYS, NORM)
        ]
        parts.append(table([f"alike, {share:.0%} lie", *BELIEVERS], cells))
    cells = [
        [
            way,
            *(
                f"{windows.mean('got', lie='3 x loss', when=way, selector=x):.2f}"
                for x in BELIEVERS
            ),
        ]
        for way in (*WAYS, NORM)
    ]
    parts.append(table(["windows, 30% lie", *BELIEVERS], cells))
    cells = [[way, *(_lost(windows, way, name) for name in BELIEVERS)] for way in (*WAYS, NORM)]
    parts.append(table(["windows, reward of honest fleets", *BELIEVERS], cells))
    return "\n\n".join(parts)


def _lost(windows: Rows, way: str, name: str) -> str:
    """Return the mean difference in reward to believing what is stated, and its standard error."""
    found = [
        np.array(row["rewards"])
        for when in ("as stated", way)
        for row in windows.rows
        if (row["when"], row["selector"], row["lie"]) == (when, name, HONEST)
    ]
    by = found[-1] - found[0]
    if way == "as stated":
        return f"{found[0].mean():.2f}"
    return f"{by.mean():+.2f} ± {by.std(ddof=1) / np.sqrt(by.size):.2f}"


def scaled(rows: Rows) -> str:
    """Return the shares of jobs of devices that scale their update, without a cap and with it."""
    cells = [
        [f"{share:.0%}", when, *(f"{rows.mean('got', **about, selector=x):.2f}" for x in BELIEVERS)]
        for share in (0.1, 0.3)
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
    """Return the page with its tables as the result says."""
    result = json.loads((RESULTS / f"{NAME}.json").read_text(encoding="utf-8"))
    parts = {name: Rows(result["rows"], name) for name in ("alike", "windows", "training", "audit")}
    alike, windows = parts["alike"], parts["windows"]
    about = (
        f"`{result['command']}`, commit {result['commit'][:10]}, on {result['hardware']['cores']} "
        f"cores of {result['hardware']['cpu']}."
    )
    return refilled(
        [PAGE],
        {
            "command": about,
            "alike": shares(alike),
            "alike-finished": finished(alike),
            "windows": shares(windows),
            "windows-finished": finished(windows),
            "training": training(parts["training"]),
            "ways": ways(alike, windows),
            "scaled": scaled(alike),
            "audit": audit(parts["audit"]),
        },
    )


if __name__ == "__main__":
    rewrite(written())
