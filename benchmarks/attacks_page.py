"""Write the tables of docs/results/robustness.md from benchmarks/results/attacks.json.

What stands between the markers is replaced; the words around them are kept.

Run it with: python benchmarks/attacks_page.py
"""

from pathlib import Path
from typing import Any

from pages import refilled, rewrite
from results_file import read_result

PAGE = Path(__file__).parents[1] / "docs" / "results" / "robustness.md"
Row = dict[str, Any]


def tables(result: dict[str, Any]) -> list[str]:
    """Return the command, and for each setting a table of accuracy by rule and attack."""
    rows: list[Row] = result["rows"]
    n = len(rows[0]["accuracy_by_seed"])
    lines = [f"`{result['command']}`, {n} seed{'s' if n > 1 else ''}:", ""]
    for setting in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == setting]
        attacks = list(dict.fromkeys(row["attack"] for row in mine))
        found = {(row["rule"], row["attack"]): row["accuracy"] for row in mine}
        lines += [
            f"**{setting}**",
            "",
            "| rule | " + " | ".join(attacks) + " |",
            "|---|" + "---:|" * len(attacks),
        ]
        for rule in dict.fromkeys(row["rule"] for row in rows):
            cells = [found.get((rule, attack)) for attack in attacks]
            if any(cell is not None for cell in cells):
                words = ["" if cell is None else f"{cell:.3f}" for cell in cells]
                lines.append(f"| {rule} | " + " | ".join(words) + " |")
        lines.append("")
    return lines[:-1]


def written() -> dict[Path, str]:
    """Return the page as the result says it."""
    result = read_result("attacks")
    return refilled([PAGE], {"attacks": "\n".join(tables(result))})


if __name__ == "__main__":
    rewrite(written())
