"""Write the tables of docs/results/tuning.md from benchmarks/results/tuning.json.

What stands between the markers is replaced; the words around them are kept.

Run it with: python benchmarks/tuning_page.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pages import refilled, rewrite, table
from results_file import read_result

PAGE = Path(__file__).parents[1] / "docs" / "results" / "tuning.md"
Row = dict[str, Any]


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Return the tables of the page, by name."""
    return {
        "searches": _worded(
            [
                *("app", "draws", "rungs in", "rank correlation"),
                *("regret", "saved", "random search, regret"),
            ],
            [
                [
                    *(row["app"], str(row["n"]), row["rungs in"]),
                    f"{row['rank correlation mean']:.2f}",
                    _interval(row, "regret"),
                    _interval(row, "saved"),
                    _interval(row, "regret of random search"),
                ]
                for row in _of(rows, "searches")
            ],
        ),
        "defaults": _worded(
            ["app", "against", "tuned minus default", "draws", "better", "holds 0", "worse"],
            [
                [
                    *(row["app"], row["against"], _interval(row, "gain"), str(row["repetitions"])),
                    *(str(row[key]) for key in ("better", "interval holds 0", "worse")),
                ]
                for row in _of(rows, "tuned against a default")
            ],
        ),
        "seeds": _worded(
            [
                *("app", "chosen by", "choices", "held out"),
                *("worse than the app's default", "worse than the best default"),
            ],
            [
                [
                    *(row["app"], row["seeds"], str(row["choices"]), f"{row['tuned']:.3f}"),
                    str(row["worse than the app's default"]),
                    str(row["worse than the best default"]),
                ]
                for row in _of(rows, "chosen by")
            ],
        ),
    }


def _of(rows: Sequence[Row], what: str) -> list[Row]:
    return [row for row in rows if row["what"] == what]


def _interval(row: Row, key: str) -> str:
    mean = f"{row[f'{key} mean']:.3f}"
    low, high = row.get(f"{key} low"), row.get(f"{key} high")
    return mean if low is None else f"{mean} [{low:.3f}, {high:.3f}]"


def _worded(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(heads, rows, words=len(heads))


def written() -> dict[Path, str]:
    """Return the page as the result says it."""
    result = read_result("tuning")
    return refilled([PAGE], tables(result["rows"]))


if __name__ == "__main__":
    rewrite(written())
