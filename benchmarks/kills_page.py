"""Write the table of what kills have lost, of results/kills.json, into its page of results.

What stands between the markers is replaced; the words around them are kept.

Run it with: python benchmarks/kills_page.py
"""

from pathlib import Path
from typing import Any

from pages import refilled, rewrite
from results_file import read_result

PAGE = Path(__file__).parents[1] / "docs" / "results" / "robustness.md"

NAMES = {
    "superlink": "SuperLink",
    "proxy": "nginx",
    "superexec": "SuperExec",
    "serverapp": "ServerApp",
    "node": "SuperNode",
    "node-superexec": "a node's SuperExec",
    "clientapp": "ClientApp",
    "network": "network, cut",
    "database-disk": "disk of the database, full",
    "checkpoint-disk": "disk of the checkpoints, full",
    "node-disk": "disk of a node, full",
}
COLUMNS = {
    "part": "",
    "moment": "",
    "kills": "times",
    "versions_asked": "versions asked for",
    "versions": "made",
    "runs": "runs",
    "trainings": "jobs trained",
    "lost": "lost",
    "updates_twice": "counted twice",
    "versions_back": "versions back",
}


def table(result: dict[str, Any]) -> list[str]:
    """Return the command, and a row for each part and moment."""
    heads = [name or key for key, name in COLUMNS.items()]
    lines = [f"`{result['command']}`:", "", f"| {' | '.join(heads)} |"]
    lines.append("|---|---|" + "---:|" * (len(heads) - 2))
    for row in result["rows"]:
        # Each version is one update; a device may train for the next when the last one is made.
        named = row | {"part": NAMES[row["part"]], "lost": row["trainings"] - row["versions"]}
        lines.append(f"| {' | '.join(str(named[key]) for key in COLUMNS)} |")
    return lines


def written() -> dict[Path, str]:
    """Return the page as the result says it."""
    result = read_result("kills")
    return refilled([PAGE], {"kills": "\n".join(table(result))})


if __name__ == "__main__":
    rewrite(written())
