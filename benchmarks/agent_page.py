"""Write the tables on real training of docs/results/agent.md, from results/agent_training.json.

What stands between the markers of a table is replaced; the words around them are kept.

Run it with: python benchmarks/agent_page.py
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training_tables import AGENT, lies_cost

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "results" / "agent.md"
RESULT = HERE / "results" / "agent_training.json"
Row = dict[str, Any]
BOUNDS = {"exact": "", "at least": "≥ ", "at most": "≤ ", "unknown": "? "}
NOTHING = "-"


def overview(rows: Sequence[Row]) -> list[str]:
    """Return two tables, of device-hours and of hours: a row a setting, a column a selector."""
    summaries = [row for row in rows if "runs" in row and row["fleet"] != "all"]
    honest = [row for row in summaries if not row["lies"]]
    settings = list(dict.fromkeys((r["app"], r["fleet"], r["schedule"]) for r in honest))
    names = [name for name in dict.fromkeys(r["selector"] for r in honest) if name != AGENT]
    by_place = {(r["app"], r["fleet"], r["schedule"], r["selector"]): r for r in honest}
    lines: list[str] = []
    for title, what in (("Device-hours", "device_hours"), ("Hours", "hours")):
        lines += [
            f"{title} to the target, in proportion to the agent's:",
            "",
            f"| app | fleet | schedule | {' | '.join(names)} |",
            f"|---|---|---|{'---:|' * len(names)}",
        ]
        for setting in settings:
            cells = [
                _ratio(by_place.get((*setting, name), {}).get(f"{what}_ratio")) for name in names
            ]
            lines.append(f"| {' | '.join((*setting, *cells))} |")
        lines.append("")
    return lines[:-1]


def by_app(rows: Sequence[Row]) -> list[str]:
    """Return one table for each app, with means over its fleets, schedules and skews."""
    lines: list[str] = []
    summaries = [row for row in rows if "runs" in row and row["fleet"] == "all"]
    for app in dict.fromkeys(row["app"] for row in summaries):
        lines += [
            f"**{app}**",
            "",
            "| selector | reached | hours | ratio | device-hours | ratio | wasted hours "
            "| wasted share | valid | accuracy | Gini of jobs | ever merged |",
            f"|---|{'---:|' * 11}",
        ]
        own = [row for row in summaries if row["app"] == app]
        for row in sorted(own, key=lambda row: row["device_hours"]):
            lines.append(
                f"| {row['selector']} | {row['reached']} of {row['runs']} "
                f"| {row['hours']:.2f} | {_ratio(row.get('hours_ratio'))} "
                f"| {row['device_hours']:.1f} | {_ratio(row.get('device_hours_ratio'))} "
                f"| {row['wasted_hours']:.1f} | {row['waste_share']:.2f} "
                f"| {row['valid_ratio']:.3f} | {row['accuracy']:.3f} | {row['gini']:.2f} "
                f"| {row['ever_merged']:.2f} |"
            )
        lines.append("")
    return lines[:-1]


def lies(rows: Sequence[Row]) -> list[str]:
    """Return what selectors need among liars, in proportion to what they need without them."""
    lines = [
        "| selector | lie about | reached | hours, ratio | device-hours, ratio | accuracy |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['selector']} | {row['lied_about']} | {row['reached']} of {row['runs']} "
        f"| {_ratio(row['hours_ratio'])} | {_ratio(row['device_hours_ratio'])} "
        f"| {row['accuracy']:.3f} |"
        for row in lies_cost([row for row in rows if "runs" not in row])
    ]
    return lines


def _ratio(found: Row | None) -> str:
    if found is None:
        return NOTHING
    low, high = (f"{found[name]:.2f}" for name in ("low", "high"))
    return f"{BOUNDS[found['bound']]}{found['mean']:.2f} [{low}, {high}]"


TABLES: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "real-overview": overview,
    "real-apps": by_app,
    "real-lies": lies,
}


def replaced(text: str, rows: Sequence[Row]) -> str:
    """Return a page with its tables written anew.

    Raises:
        ValueError: the page lacks the markers of a table.
    """
    for name, table in TABLES.items():
        start, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        if start not in text or end not in text:
            raise ValueError(f"the page lacks {start.strip()} or {end}")
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        inside = "\n".join(table(rows))
        text = f"{before}{start}\n{inside}\n\n{end}{after}"
    return text


def main() -> None:
    """Replace the tables, if the result is there."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
