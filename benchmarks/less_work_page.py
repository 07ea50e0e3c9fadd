"""Write the tables of docs/results/less-work.md from benchmarks/results/less_work.json.

What stands between the markers is replaced; the words around them are kept.

Run it with: python benchmarks/less_work_page.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pages import refilled, rewrite, table
from results_file import read_result

PAGE = Path(__file__).parent.parent / "docs" / "results" / "less-work.md"
HEAD = (
    *("a job is", "rate", "h to target", "x 5 epochs", "GB", "x fewer GB"),
    *("accuracy in the end", "digits 7 to 9"),
)
Row = dict[str, Any]


def setting(rows: Sequence[Row]) -> str:
    """Return the table of one setting."""
    return table(HEAD, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    is_whole = row["reached"] == len(row["seeds"])
    return [
        row["strategy"],
        f"{row['server_rate']:g}",
        "> " * (not is_whole) + f"{row['hours_to_target']:.2f}",
        _ratio(row["speed_up"]),
        f"{row['gigabytes_to_target']:.1f}",
        _ratio(row["fewer_gigabytes"]),
        f"{row['final_accuracy']:.3f}",
        f"{row['final_slow_accuracy']:.3f}",
    ]


def _ratio(found: Sequence[float]) -> str:
    mean, low, high = found
    return "1" if low == high else f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def written() -> dict[Path, str]:
    """Return the page with its tables as the result says."""
    result = read_result("less_work")
    titles = dict.fromkeys(row["setting"] for row in result["rows"])
    tables = {
        title: setting([row for row in result["rows"] if row["setting"] == title])
        for title in titles
    }
    about = f"`{result['command']}`, commit {result['commit'][:10]}."
    return refilled([PAGE], {"command": about, **tables})


if __name__ == "__main__":
    rewrite(written())
