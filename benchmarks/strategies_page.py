"""Write the tables of docs/results/strategies.md: of strategies, adasync and runtime laws.

They come from benchmarks/results.

What stands between the markers of a result is replaced; the words around them are kept.

Run it with: python benchmarks/strategies_page.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "results" / "strategies.md"
Row = dict[str, Any]


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
            # Only rows that were tuned over other rates than the rest say which.
            mark = "*" if "rates" in row else ""
            lines.append(
                f"| {row['strategy']}{mark} | {row['server_rate']:g} "
                f"| {row['hours_to_target']:.2f} "
                f"| {row['reached']} of {n} | {_triple(row['speed_up'], '.2f')} "
                f"| {row['final_accuracy']:.3f} {_between(row['final_accuracy_difference'])} "
                f"| {row['final_slow_accuracy']:.3f} "
                f"{_between(row['final_slow_accuracy_difference'])} |"
            )
        lines.append("")
    return lines[:-1]


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
    "strategies": strategies,
    "adasync": adasync,
    "runtime": runtime,
}


def main() -> None:
    """Replace every table whose result is there."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        path = HERE / "results" / f"{name}.json"
        if path.is_file():
            inside = "\n".join(table(json.loads(path.read_text(encoding="utf-8"))["rows"]))
            start, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
            before, _, rest = text.partition(start)
            _, _, after = rest.partition(end)
            text = f"{before}{start}{inside}\n{end}{after}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
