"""Write the tables of benchmarks/README.md from benchmarks/results/*.json.

What stands between the markers of a result is replaced; the words around them are kept.

Run it with: python benchmarks/tables.py
"""

import json
import re
from pathlib import Path
from typing import Any

from pages import filled

HERE = Path(__file__).parent


def table(result: dict[str, Any]) -> str:
    """Return a result as a Markdown table, with the command and the machine above it."""
    rows = result["rows"]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    machine, versions = result["hardware"], result["versions"].items()
    speed = machine.get("naive_clients_per_s")
    lines = [
        f"`{result['command']}` on {machine['cores']} cores of {machine['cpu']}, "
        f"load {result['load_average'][0]:.1f} at the end, commit {result['commit'][:10]}, "
        + ", ".join(f"{name} {number}" for name, number in versions)
        + (f"; a naive torch loop trains {speed:.0f} clients a second there" if speed else ""),
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "|".join("---" if isinstance(rows[0].get(c), str) else "---:" for c in columns) + "|",
    ]
    lines += ["| " + " | ".join(cell(row.get(c, "")) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: object) -> str:
    """Return a value with thousands separated, and fractions to three digits."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    """Replace every table whose result is there."""
    page = HERE / "README.md"
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"<!-- (\w+): begin -->", text):
        path = HERE / "results" / f"{name}.json"
        if path.is_file():
            inside = table(json.loads(path.read_text(encoding="utf-8")))
            text = filled(text, name, inside)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
