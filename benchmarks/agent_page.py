"""Write the tables of three pages on the agent from benchmarks/results.

docs/results/agent.md has windows and sizes, docs/results/agent-training.md real training,
docs/results/agent-worlds.md worlds of learning constants. What stands between the markers of a
table is replaced; the words around them are kept.

Run it with: python benchmarks/agent_page.py
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pages import refilled, rewrite
from results_file import read_result
from training_tables import AGENT, lies_cost

HERE = Path(__file__).parent
PAGES = [
    HERE.parent / "docs" / "results" / name
    for name in ("agent.md", "agent-training.md", "agent-worlds.md")
]
Row = dict[str, Any]
BOUNDS = {"exact": "", "at least": "≥ ", "at most": "≤ ", "unknown": "? "}
NOTHING = "-"


def windows(rows: Sequence[Row]) -> list[str]:
    """Return by how much the agent is ahead of each contender in each fleet."""
    rows = [row for row in rows if row.get("liars") == "as in training"]
    by_place = {(row["fleet"], row["contender"]): row for row in rows}
    fleets = list(dict.fromkeys(row["fleet"] for row in rows))
    lines = [f"| contender | {' | '.join(fleets)} |", f"|---|{'---:|' * len(fleets)}"]
    own = [f"{by_place[fleet, AGENT]['reward']:.2f}" for fleet in fleets]
    lines.append(f"| *reward of the agent* | {' | '.join(own)} |")
    for name in dict.fromkeys(row["contender"] for row in rows):
        if name != AGENT:
            cells = [_advantage(by_place[fleet, name]) for fleet in fleets]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def terms(rows: Sequence[Row]) -> list[str]:
    """Return the metrics of all contenders on phones, best reward first."""
    rows = [r for r in rows if r.get("liars") == "as in training" and r["fleet"] == "phones"]
    lines = [
        "| contender | reward | gain | time | waste | valid | wasted s | unique | Gini | low |",
        f"|---|{'---:|' * 9}",
    ]
    lines += [
        f"| {row['contender']} | {row['reward']:.2f} | {row['gain']:.2f} | {row['time']:.2f} "
        f"| {row['waste']:.2f} | {row['valid_ratio']:.3f} | {row['wasted_s']:,.0f} "
        f"| {row['unique']:.3f} | {row['gini']:.3f} | {row['low_share']:.3f} |"
        for row in sorted(rows, key=lambda row: -row["reward"])
    ]
    return lines


def liars(rows: Sequence[Row]) -> list[str]:
    """Return rewards with and without clients that lie."""
    rows = [row for row in rows if row.get("liars", "as in training") != "as in training"]
    kinds = list(dict.fromkeys(row["liars"] for row in rows))
    by_place = {(row["fleet"], row["contender"], row["liars"]): row for row in rows}
    lines = [f"| fleet | contender | {' | '.join(kinds)} |", f"|---|---|{'---:|' * len(kinds)}"]
    for fleet, name in dict.fromkeys((row["fleet"], row["contender"]) for row in rows):
        cells = [f"{by_place[fleet, name, kind]['reward']:.2f}" for kind in kinds]
        lines.append(f"| {fleet} | {name} | {' | '.join(cells)} |")
    return lines


def trainings(rows: Sequence[Row]) -> list[str]:
    """Return what became of each training seed."""
    lines = ["| training seed | best update | validation | faults |", "|---:|---:|---:|---|"]
    lines += [
        f"| {row['training_seed']} | {row['best_update']} | {row['validation']:.2f} "
        f"| {'; '.join(row['faults']) or 'none'} |"
        for row in rows
        if "training_seed" in row
    ]
    return lines


def sizes(rows: Sequence[Row]) -> list[str]:
    """Return the agent's advantage by the number of devices."""
    others = [name for name in dict.fromkeys(row["who"] for row in rows) if name != AGENT]
    lines = [
        f"| devices | windows | agent | over {' | over '.join(others)} |",
        f"|---:|{'---:|' * (2 + len(others))}",
    ]
    for devices in dict.fromkeys(row["devices"] for row in rows):
        here = {row["who"]: row for row in rows if row["devices"] == devices}
        cells = [_advantage(here[name]) for name in others]
        own = here[AGENT]
        lines.append(
            f"| {devices:,} | {own['windows']} | {own['mean']:.2f} | {' | '.join(cells)} |"
        )
    return lines


def _advantage(row: Row) -> str:
    return f"{row['difference']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"


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


def bands(rows: Sequence[Row]) -> list[str]:
    """Return the agent's advantage over each rule in the worlds of each fleet."""
    took = {row["fleet"]: row for row in rows if row["part"] == "seconds"}
    lines = [
        "| fleet | rule | median | 5 % | 95 % | ahead | matters most | rank correlation |",
        "|---|---|---:|---:|---:|---:|---|---:|",
    ]
    lines += [
        f"| {row['fleet']} | {row['rule']} | {row['median']:+.2f} | {row['low']:+.2f} "
        f"| {row['high']:+.2f} | {row['ahead']} of {took[row['fleet']]['worlds']} "
        f"| {row['matters']} | {row['correlation']:+.2f} |"
        for row in rows
        if row["part"] == "rules"
    ]
    lines += ["", "| fleet | to prefer | processor seconds |", "|---|---|---:|"]
    return lines + [
        f"| {fleet} | {row['prefer']} | {row['processor_s']:.0f} |" for fleet, row in took.items()
    ]


def spreads(rows: Sequence[Row]) -> list[str]:
    """Return by how much the constants scatter."""
    found = [row for row in rows if row["part"] == "widths"]
    names = [name for name in found[0] if name not in {"part", "of"}]
    lines = [f"| constant | {' | '.join(row['of'] for row in found)} |"]
    lines.append(f"|---|{'---:|' * len(found)}")
    return lines + [
        f"| {name} | {' | '.join(f'{row[name]:.2f}' for row in found)} |" for name in names
    ]


def held(rows: Sequence[Row]) -> list[str]:
    """Return in how many of the cases the advantage in real training lies in the band."""
    lines = [
        "| app | cases | in the band | below it | above it | median on the same side of 1 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in (row for row in rows if row["part"] == "held"):
        above = row["cases"] - row["inside"] - row["below"]
        lines.append(
            f"| {row['app']} | {row['cases']} | {row['inside']} | {row['below']} | {above} "
            f"| {row['same_sign']} |"
        )
    return lines


def ranked(rows: Sequence[Row]) -> list[str]:
    """Return what schedules reach, best in real training first."""
    found = [row for row in rows if row["part"] == "schedules" and "concurrency" in row]
    lines = [
        "| concurrency | waits for | real progress | proxy's progress |",
        "|---:|---|---:|---:|",
    ]
    return lines + [
        f"| {row['concurrency']} | {row['schedule']} | {row['real_progress']:.2f} "
        f"| {row['proxy_progress']:.2f} |"
        for row in sorted(found, key=lambda row: -row["real_progress"])
    ]


def _ratio(found: Row | None) -> str:
    if found is None:
        return NOTHING
    low, high = (f"{found[name]:.2f}" for name in ("low", "high"))
    return f"{BOUNDS[found['bound']]}{found['mean']:.2f} [{low}, {high}]"


TABLES: dict[str, dict[str, Callable[[Sequence[Row]], list[str]]]] = {
    "agent_windows": {
        "windows": windows,
        "terms": terms,
        "liars": liars,
        "trainings": trainings,
    },
    "agent_training": {"real-overview": overview, "real-apps": by_app, "real-lies": lies},
    "agent_sizes": {"sizes": sizes},
    "agent_worlds": {
        "worlds-bands": bands,
        "worlds-spread": spreads,
        "worlds-held": held,
        "worlds-schedules": ranked,
    },
}
"""By result: the tables of the pages and who writes them."""


def tables_of(result: str, rows: Sequence[Row]) -> dict[str, str]:
    """Return the tables of one result by their names."""
    return {name: "\n".join(["", *table(rows), ""]) for name, table in TABLES[result].items()}


def written() -> dict[Path, str]:
    """Return the pages with all of their tables written from the results."""
    tables: dict[str, str] = {}
    for result in TABLES:
        tables |= tables_of(result, read_result(result)["rows"])
    return refilled(PAGES, tables)


def main() -> None:
    """Write the tables."""
    rewrite(written())


if __name__ == "__main__":
    main()
