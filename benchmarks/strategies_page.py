"""Write the tables of two pages on strategies from benchmarks/results.

docs/results/strategies.md has recorded devices, docs/results/strategies-papers.md the papers' own
settings. What stands between the markers of a result is replaced; the words around them are kept.

Run it with: python benchmarks/strategies_page.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import refilled, rewrite

HERE = Path(__file__).parent
PAGES = [
    HERE.parent / "docs" / "results" / name for name in ("strategies.md", "strategies-papers.md")
]
Row = dict[str, Any]


def staleness(rows: list[Row]) -> list[str]:
    """Return one line for each number of workers."""
    names = list(dict.fromkeys(row["weighting"] for row in rows))
    lines = [f"| workers (updates) | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for n in dict.fromkeys(row["workers"] for row in rows):
        mine = {row["weighting"]: row for row in rows if row["workers"] == n}
        cells = [
            f"{row['accuracy']:.3f} ± {row['half_interval_95']:.3f}"
            for row in (mine[name] for name in names)
        ]
        lines.append(f"| {n} ({mine[names[0]]['updates']:,}) | {' | '.join(cells)} |")
    return lines


def strategy_windows(rows: list[Row]) -> list[str]:
    """Return one line for each window."""
    lines = [
        "| fleet | seed | begins | online, mean | least | most | server steps "
        "| staleness, median | 95% below | most |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        what = f"{row['seed']}, tunes" if row["tuning"] else str(row["seed"])
        lines.append(
            f"| {row['fleet']} | {what} | {row['begins'].replace('T', ' ')[:16]} "
            f"| {row['online_mean']:.0f} | {row['online_least']} | {row['online_most']} "
            f"| {row['versions']:,} | {row['staleness_median']:.0f} | {row['staleness_95']:.0f} "
            f"| {row['staleness_most']} |"
        )
    return lines


def strategies(rows: list[Row]) -> list[str]:
    """Return one table for each setting."""
    lines = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        target = next(row["target"] for row in rows if row["setting"] == setting)
        slow = "lines of the slow" if setting == "shakespeare" else "digits 7 to 9"
        lines += [
            f"**{setting}**",
            "",
            f"| strategy | rate | hours to {target:g} | reached | speed-up | accuracy at the end "
            f"| {slow} at the end |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        mine = [row for row in rows if row["setting"] == setting]
        for row in sorted(mine, key=lambda row: -row["speed_up"][0]):
            n = len(row["hours_to_target_by_seed"])
            lines.append(
                f"| {row['strategy']} | {row['server_rate']:g} "
                f"| {row['hours_to_target']:.2f} "
                f"| {row['reached']} of {n} | {_triple(row['speed_up'], '.2f')} "
                f"| {row['final_accuracy']:.3f} {_between(row['final_accuracy_difference'])} "
                f"| {row['final_slow_accuracy']:.3f} "
                f"{_between(row['final_slow_accuracy_difference'])} |"
            )
        lines += ["", f"In hours to {target:g}, {_differing(mine)}", ""]
    return lines[:-1]


def _differing(rows: list[Row]) -> str:
    """Say what is faster and what is slower than FedBuff by an interval without 1."""
    others = [row for row in rows if row["speed_up"][1] != row["speed_up"][2]]
    faster = [row["strategy"] for row in others if row["speed_up"][1] > 1]
    slower = [row["strategy"] for row in others if row["speed_up"][2] < 1]
    said = [
        f"{name} than FedBuff by an interval without 1: {'; '.join(found) or 'none'}."
        for name, found in (("faster", faster), ("slower", slower))
    ]
    return f"{said[0]} S{said[1][1:]}"


def _triple(values: list[float], form: str) -> str:
    mean, low, high = (format(value, form) for value in values)
    return mean if low == high else f"{mean} ({low} to {high})"


def _between(difference: list[float]) -> str:
    _, low, high = difference
    return "" if low == high else f"({low:+.3f} to {high:+.3f})"


def adasync(rows: list[Row]) -> list[str]:
    """Return one table for both schedules."""
    instants = list(rows[0]["loss_at"])
    lines = [
        f"| schedule | merge size | {' | '.join(f'at {t}' for t in instants)} | mean "
        "| time on or below | worst |",
        f"|---|---|{'---:|' * (len(instants) + 3)}",
    ]
    for row in rows:
        losses = " | ".join(f"{row['loss_at'][t]:.3f}" for t in instants)
        lines.append(
            f"| {row['schedule']} | {row['buffer_size']} | {losses} | {row['mean_loss']:.3f} "
            f"| {row['share_of_time_on_or_below_the_best']:.0%} | {row['worst_ratio']:.2f} |"
        )
    return lines


def runtime(rows: list[Row]) -> list[str]:
    """Return the table of laws."""
    lines = [
        "| schedule | constant part, s | devices | simulated, s | law, s |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        law = "-" if row["law_s"] is None else f"{row['law_s']:.3f}"
        lines.append(
            f"| {row['schedule']} | {row['shift_s']:g} | {row['devices']} "
            f"| {row['simulated_s']:.3f} ± {row['half_interval_95']:.3f} "
            f"| {'at most ' if row['law_is_bound'] else ''}{law} |"
        )
    return lines


TABLES: dict[str, Callable[[list[Row]], list[str]]] = {
    "staleness_scheduled": staleness,
    "staleness": staleness,
    "strategy_windows": strategy_windows,
    "strategies": strategies,
    "adasync": adasync,
    "runtime": runtime,
}


def written() -> dict[Path, str]:
    """Return the pages with every table made anew whose result is there."""
    tables = {}
    for name, table in TABLES.items():
        path = HERE / "results" / f"{name}.json"
        if path.is_file():
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            tables[name] = "\n".join(table(rows))
    return refilled(PAGES, tables)


def main() -> None:
    """Replace the tables."""
    rewrite(written())


if __name__ == "__main__":
    main()
